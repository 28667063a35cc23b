"""The threads that trials run with in this process, as far as the libraries that Caffe2 uses tell it.

`torch.set_num_threads` sets all that is asked for here, and `GlobalInit` the two numbers.
"""

import ctypes
import functools
import sys
from typing import Optional, Tuple

# Caffe2 for Python, as it was built with and without GPUs.
EXTENSIONS = ["caffe2.python.caffe2_pybind11_state" + ending for ending in ("", "_gpu", "_hip")]
# OpenMP's number in this thread,
OPENMP = "omp_get_max_threads"
# that of MKL, and whether MKL may take fewer where there is little to do.
ASKED = (OPENMP, "MKL_Get_Max_Threads", "mkl_serv_get_dynamic")


def settings() -> Tuple[Optional[int], ...]:
    """What they say, None for what cannot be asked: trials with others say nothing about these."""
    return tuple(map(_answer, ASKED))


def of_openmp() -> Optional[int]:
    """The number of OpenMP's threads in this thread; None where that cannot be asked."""
    return _answer(OPENMP)


def _answer(asked: str) -> Optional[int]:
    function = getattr(library(), asked, None)
    return None if function is None else int(function())


@functools.lru_cache(maxsize=None)
def library() -> Optional[ctypes.CDLL]:
    """Caffe2's own, in which those are found that it uses; None where it cannot be opened."""
    loaded = next((sys.modules[name] for name in EXTENSIONS if name in sys.modules), None)
    try:
        return ctypes.CDLL(str(loaded.__file__)) if loaded is not None else None
    except OSError:
        return None
