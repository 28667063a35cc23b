"""Nets of one chain of operators, which the thread that calls them runs without lines of log.

A net of type `simple` puts together a line for each operator, whether anybody wants it or not. One of type `dag` does
not, but has threads of its own; with `FLAG` what waits for nothing runs in the thread that calls the net, and with it
the chain of operators that it begins. A net goes by what the flag was when it was created, and waits for its operators
either way.

Source: AsyncSchedulingNet::RunAsync in caffe2/core/net_async_scheduling.cc, AsyncNetBase and ExecutionOptions in
net_async_base.cc, computeChains in net_dag_utils.cc, SimpleNet::Run in net_simple.cc.
"""

import functools
import threading
from typing import Any, List

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.scratch_workspace import scratch_workspace

# For `GlobalInit`, which takes it at any time.
FLAG = "--caffe2_net_async_run_root_tasks_inline=1"
CHAIN = "dag"
WORKSPACE = "caffe2_recurrent_calling_thread"

_found: List[int] = []


def runs_chains() -> bool:
    """Whether it runs the nets of one chain that are created now. Asked by way of a net, as Caffe2 tells of no flag."""
    if not core.IsOperator("Python"):
        return False
    del _found[:]
    with scratch_workspace(WORKSPACE):
        workspace.RunNetOnce(caffe2_pb2.NetDef(name="whose_thread", type=CHAIN, num_workers=1, op=[_asking()]))
    return _found == [threading.get_ident()]


def make_chain(net: caffe2_pb2.NetDef) -> None:
    """Have each operator wait for the one before it, all of which have outputs and are the CPU's."""
    net.type = CHAIN
    # Without the flag there is nothing to do for more threads than one.
    net.num_workers = 1
    for before, operator in zip(net.op, net.op[1:]):
        operator.control_input.append(before.output[0])


@functools.lru_cache(maxsize=None)
def _asking() -> caffe2_pb2.OperatorDef:
    """Caffe2 keeps a function for good once it is in an operator."""
    return core.CreatePythonOperator(_answer, [], [])


def _answer(inputs: Any, outputs: Any) -> None:
    _found.append(threading.get_ident())
