"""Whether MKL passes over what the processor can do, because it is not Intel's.

The MKL in the wheel of torch 1.10.2 is that of 2020.0, which goes by who made the processor. On AMD's it multiplies
without AVX2, unless it finds MKL_DEBUG_CPU_TYPE in the environment when it is first used: 5 for AVX2, 7 for AVX-512.
Later ones no longer look for it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

from caffe2_recurrent import processor

VARIABLE = "MKL_DEBUG_CPU_TYPE"
# What a processor has to have for a value.
VALUES = {
    "5": frozenset(["avx2", "fma"]),
    "7": frozenset(["avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"]),
}
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


@dataclasses.dataclass(frozen=True)
class Gain:
    """A product is so many `times` as fast with `value` in the variable as it is now."""

    value: str
    times: float


def gain() -> Gain | None:
    """The value with which products gain most, by a trial of each in processes of their own.

    None where none is meant for the processor but the one that is set already, and where Caffe2 does not run.
    """
    as_it_is = os.environ.get(VARIABLE)
    values = [value for value in _values() if value != as_it_is]
    now = _seconds({}) if values else None
    found = [(seconds, value) for value in values for seconds in [_seconds({VARIABLE: value})] if seconds]
    if not now or not found:
        return None
    least, best = min(found)
    return Gain(best, now / least)


def _values() -> list[str]:
    """What the variable may be for a processor with AVX2 that is not Intel's."""
    if processor.vendor() in ("", "GenuineIntel"):
        return []
    return [value for value, needed in VALUES.items() if needed <= processor.flags()]


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
