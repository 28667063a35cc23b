"""How many threads OpenMP has for the parts of a batch: in the thread that calls a net, and in the net's own.

The caller's number is what `GlobalInit` has set there. A thread of a net's own has that of the environment until ATen
sets it to MKL's (`thread_numbers.py`). Where these differ, what oneDNN has laid out in one of the threads is not for
the other, and what one of them runs takes the other's core.

Source: init_omp.cc in caffe2/core, ParallelOpenMP.cpp in ATen.
"""

import functools
from typing import Any, List, Optional

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.batch_parts import side_by_side
from caffe2_recurrent.rewriting.products import thread_numbers
from caffe2_recurrent.rewriting.trials import threads
from caffe2_recurrent.scratch_workspace import scratch_workspace

WORKSPACE = "caffe2_recurrent_workers"

_found: List[Optional[int]] = []


def why_not() -> Optional[str]:
    """Why parts of a batch cannot run side by side in this process; None if they can."""
    if not calling_thread.runs_chains():
        return (
            "all parts would wait for threads of the net's own; before it is optimised and created, pass {} to "
            "workspace.GlobalInit".format(calling_thread.FLAG)
        )
    callers, workers = threads.of_openmp(), _of_workers()
    if callers is None or workers is None:
        return "how many threads OpenMP has is not known"
    if callers != workers:
        return (
            "the number of OpenMP's threads is {} where the net is called and {} in threads of its own; pass "
            "--caffe2_omp_num_threads=1 and --caffe2_mkl_num_threads=1 to workspace.GlobalInit".format(callers, workers)
        )
    return None


def _of_workers() -> Optional[int]:
    """The number in a thread of a net's own, once it has been set."""
    del _found[:]
    callers = [caffe2_pb2.OperatorDef(type="Copy", input=["always"], output=["copy"])]
    with scratch_workspace(WORKSPACE):
        workspace.FeedBlob("always", np.array([True]))
        parts = [callers, [*thread_numbers.setting("number"), _asking()]]
        workspace.RunNetOnce(side_by_side.net_of("always", parts, Names([])))
    return _found[0] if _found else None


@functools.lru_cache(maxsize=None)
def _asking() -> caffe2_pb2.OperatorDef:
    return core.CreatePythonOperator(_answer, [], [])


def _answer(inputs: Any, outputs: Any) -> None:
    _found.append(threads.of_openmp())
