"""What a measurement was taken on: nothing that names the machine, all that its times depend on."""

import datetime
import os
import platform
import re
import time
from typing import Dict, Optional

import numpy as np
import torch

from caffe2_recurrent import mkl_dispatch


def description() -> Dict[str, str]:
    """In the order in which it is printed."""
    load = _load()
    found = {
        "processor": processor(),
        "cores": "{} to use".format(cores()),
        "memory": memory(),
        "vector instructions": vector_instructions(),
        "system": "{} on {}".format(platform.system(), platform.machine()),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "matrix library": matrix_library(),
        mkl_dispatch.VARIABLE: os.environ.get(mkl_dispatch.VARIABLE, ""),
        "date": datetime.date.today().isoformat(),
        "load at the start": load,
    }
    return {name: value for name, value in found.items() if value}


def processor() -> str:
    return _field("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or "unknown"


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> str:
    kilobytes = _field("/proc/meminfo", r"MemTotal:\s*(\d+) kB")
    return "{:.0f} GiB".format(int(kilobytes) / 1024**2) if kilobytes else ""


def vector_instructions() -> str:
    """The widest of those that matter to a product of matrices."""
    flags = (_field("/proc/cpuinfo", r"flags\s*:\s*(.+)") or "").split()
    for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX")):
        if flag in flags:
            return name
    return ""


def matrix_library() -> str:
    found = re.search(r"- (.*Math Kernel Library Version [\d.]+)", torch.__config__.show())
    return found.group(1) if found else ""


class Bystanders:
    """How many cores other programs kept busy between its making and `cores`: they slow who waits for two threads."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), _busy(), _own()

    def cores(self) -> Optional[float]:
        """None where the system does not tell. Of our own processes, only those that have ended count as ours."""
        wall, busy, own = self._start
        busy_now = _busy()
        if busy is None or busy_now is None:
            return None
        elapsed = max(time.perf_counter() - wall, 1e-9)
        return max(0.0, (busy_now - busy - (_own() - own)) / elapsed)


def _busy() -> Optional[float]:
    """Seconds that all cores together have worked."""
    numbers = _field("/proc/stat", r"cpu\s+(.+)")
    if numbers is None:
        return None
    # user nice system idle iowait irq softirq steal; guests are counted under user.
    user, nice, system, _, _, irq, softirq, steal = (int(number) for number in numbers.split()[:8])
    return (user + nice + system + irq + softirq + steal) / float(os.sysconf("SC_CLK_TCK"))


def _own() -> float:
    return sum(os.times()[:4])


def _load() -> str:
    try:
        return "{:.1f}".format(os.getloadavg()[0])
    except (AttributeError, OSError):
        return ""


def _field(path: str, pattern: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = re.search("^" + pattern, file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None
