"""The operators of a step in a net of their own, one behind the other, see `calling_thread.py`.

    links;  operators of a step, some of them oneDNN's  =>  If(always): a chain of operators that make the links, and
                                                            of the CPU's operators, with
                                                            If(always): operators of oneDNN's

The engine puts operators for links in front of the one that runs the chain, each with its line of log.
Where the net of a step itself is of such a type, the engine does not notice what fails in it. An operator that runs the
net fails with it. A chain is of one device, and an `If` is the CPU's.

Source: RecurrentNetworkOp and RNNApplyLinkOp in caffe2/operators/rnn/recurrent_network_op.h, AddApplyLinkOps in
recurrent_network_op.cc, if_op.h, computeChains in net_dag_utils.cc.
"""

import itertools
from typing import Iterable, List, Optional, Sequence

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.chained import CHAINED
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import LINK, is_on_onednn, net_running, new_operator
from caffe2_recurrent.rewriting.calling_thread import make_chain
from caffe2_recurrent.wiring import Link

# In a net of its own an operator takes 0.4 us less; one that runs a net takes 1 to 2.
FEWEST, FEWEST_FOR_ONEDNN = 4, 3

Operators = List[caffe2_pb2.OperatorDef]


def why_not(operators: Iterable[caffe2_pb2.OperatorDef], may_be_onednns: bool = True) -> Optional[str]:
    """Why operators cannot be a chain; None if they can."""
    for operator in operators:
        if operator.device_option.device_type != caffe2_pb2.CPU and not (may_be_onednns and is_on_onednn(operator)):
            return "'{}' is not the CPU's, and its thread would be another one".format(operator.type)
        if not operator.output:
            return "the operator behind '{}' could not wait for it, as it has no outputs".format(operator.type)
    return None


def pays(operators: Sequence[caffe2_pb2.OperatorDef], more: int) -> bool:
    """Whether these, and so many more of the CPU's, are enough operators for the nets that a chain of them takes."""
    runs = [there for there, _ in itertools.groupby(operators, is_on_onednn)]
    of_cpu = more + sum(not is_on_onednn(operator) for operator in operators)
    return of_cpu >= FEWEST + FEWEST_FOR_ONEDNN * runs.count(True)


def chained(loop: Loop, name: str, operators: Operators) -> Operators:
    """The operators of the step `name`, as one if it is among those of `loop` that are to be chains."""
    always = loop.chained.get(name)
    if always is None:
        return operators
    members: Operators = []
    for there, grouped in itertools.groupby(operators, is_on_onednn):
        run = list(grouped)
        members += [_running(run, always, loop)] if there else run
    made = _running(members, always, loop)
    (given,) = made.arg
    make_chain(given.n)
    return [made]


def linking(links: Iterable[Link], timestep: str, loop: Loop) -> Operators:
    """Operators that make links of step `timestep`."""
    return [
        new_operator(LINK, [timestep, link.outer], [link.inner, link.outer], loop.forward, offset=link.offset, window=1)
        for link in links
    ]


def add_always(loop: Loop) -> str:
    """An outer blob that is true."""
    always = loop.add_before("ConstantFill", [], "always", shape=[1], value=True, dtype=core.DataType.BOOL)
    loop.add_reference(always)
    return always


def _running(operators: Operators, always: str, loop: Loop) -> caffe2_pb2.OperatorDef:
    net = net_running(CHAINED, operators)
    inputs = list(dict.fromkeys([always, *net.external_input]))
    return new_operator("If", inputs, list(net.external_output), loop.forward, then_net=net)
