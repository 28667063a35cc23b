"""Whether MKL passes over what the processor can do, because it is not Intel's.

The MKL in the wheel of torch 1.10.2 is that of 2020.0, which goes by who made the processor. On AMD's it multiplies
without AVX2, unless it finds MKL_DEBUG_CPU_TYPE=5 in the environment when it is first used. Later ones no longer look
for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

VARIABLE, AVX2 = "MKL_DEBUG_CPU_TYPE", "5"
CPUINFO = "/proc/cpuinfo"
SECONDS_TO_WAIT = 60

PRODUCT = """
import time
import numpy as np
from caffe2.python import core, workspace

for blob in ("a", "b"):
    workspace.FeedBlob(blob, np.ones((384, 384), np.float32))
net = core.Net("product")
net.MatMul(["a", "b"], "c")
workspace.CreateNet(net)
found = []
for _ in range(20):
    start = time.perf_counter()
    workspace.RunNet(net)
    found.append(time.perf_counter() - start)
print(min(found))
"""


def gain() -> float | None:
    """How many times as fast a product is with the variable, by a trial in two processes of their own.

    None where the variable is set already or is not meant for the processor, and where Caffe2 does not run.
    """
    if VARIABLE in os.environ or not _is_passed_over():
        return None
    without, with_avx2 = _seconds({}), _seconds({VARIABLE: AVX2})
    return without / with_avx2 if without and with_avx2 else None


def _is_passed_over() -> bool:
    """Whether this is a processor with AVX2 that is not Intel's; only Linux tells."""
    try:
        with open(CPUINFO, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return False
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)", text, re.MULTILINE)
    return bool(vendor and flags and vendor.group(1) != "GenuineIntel" and "avx2" in flags.group(1).split())


def _seconds(more: dict[str, str]) -> float | None:
    """The best time of a product on one thread, with `more` in the environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **more}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PRODUCT],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_WAIT,
        )
        return float(done.stdout.split()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
