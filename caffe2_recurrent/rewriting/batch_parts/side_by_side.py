"""Operators of several parts as one operator, which runs the parts side by side.

    operators of part 0, 1, ...  =>  If(enough):  net of type `async_scheduling`:  If(enough): operators of part 0
                                                                                   first, second
                                                                                   If(enough; first, second): of part 1
                                                  what puts together what they have made
                                     else:        operators of the loop for the whole batch

Part 0 runs in the thread that calls the net, with `calling_thread.FLAG`: there operators that wait for nothing run one
behind the other, the last ones of the net first. Two of these, so that what waits for both is no part of the chain of
one of them, let a thread of the net's own begin with each other part; then part 0 begins. A thread that is woken while
the caller goes on gets another core; if the caller went to sleep, both might get the same. Without the flag all parts
run in such threads, so that each part has its number of OpenMP's threads set.

A gradient operator makes blobs in the workspace of the net as it first runs, for gradients of states. Two that did so
at once left the workspace in disorder: a blob was not found, or the process ended. What an operator writes is made
together with the operator. So operators that would write these blobs are where there are too few sequences.

Source: AsyncSchedulingNet::schedule in caffe2/core/net_async_scheduling.cc, computeChains in net_dag_utils.cc,
Workspace::CreateBlob in workspace.cc; RecurrentNetworkGradientOp in caffe2/operators/rnn/recurrent_network_op.h.
"""

from typing import Iterable, List, Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.loops.loop import IN_PARTS
from caffe2_recurrent.loops.reading import made_in_a_run
from caffe2_recurrent.operators import net_running, new_operator, opened
from caffe2_recurrent.rewriting.products import thread_numbers

NET, PART = "parts_of_the_batch", "part_of_the_batch"
TYPE = "async_scheduling"

Operators = Sequence[caffe2_pb2.OperatorDef]


def run(
    enough: str, parts: Sequence[Operators], joining: Operators, otherwise: Operators, names: Names, is_gradient: bool
) -> caffe2_pb2.OperatorDef:
    """What runs `parts`, which neither read nor write what others of them write, and `joining` behind them; or else,
    where the blob `enough` does not say that it may, the operators `otherwise`.
    """
    inside = (operator for part in parts for operator in opened(part, with_steps=False))
    otherwise = [*otherwise, *_filled(blob for operator in inside for blob in made_in_a_run(operator))]
    with_numbers = [[*thread_numbers.setting(names.new("batch_number")), *part] for part in parts]
    side_by_side = _if([enough], net_of(enough, with_numbers, names))
    made = _if(
        [enough], net_running(IN_PARTS, [side_by_side, *joining]), net_running(PART, otherwise) if otherwise else None
    )
    made.is_gradient_op = is_gradient
    return made


def net_of(condition: str, parts: Sequence[Operators], names: Names) -> caffe2_pb2.NetDef:
    """The net that runs `parts` side by side, where the blob `condition` says so."""
    waking = [names.new("batch_waking") for _ in range(2)]
    first, *others = parts
    net = net_running(
        NET,
        [
            _if([condition], net_running(PART, first)),
            *_filled(waking),
            *(_if([condition, *waking], net_running(PART, part)) for part in others),
        ],
    )
    # More than the nets of one chain have: these may be run in a part, and share threads with nets of as many.
    net.type, net.num_workers = TYPE, len(parts)
    return net


def _filled(blobs: Iterable[str]) -> List[caffe2_pb2.OperatorDef]:
    return [new_operator("ConstantFill", [], [blob], _PLAIN, shape=[1], value=0.0) for blob in blobs]


def _if(
    inputs: Sequence[str], net: caffe2_pb2.NetDef, otherwise: Optional[caffe2_pb2.NetDef] = None
) -> caffe2_pb2.OperatorDef:
    nets = {"then_net": net} if otherwise is None else {"then_net": net, "else_net": otherwise}
    read = dict.fromkeys([*inputs, *(blob for each in nets.values() for blob in each.external_input)])
    written = dict.fromkeys(blob for each in nets.values() for blob in each.external_output)
    return new_operator("If", list(read), list(written), _PLAIN, **nets)


_PLAIN = caffe2_pb2.OperatorDef()
