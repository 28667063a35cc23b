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

Source: AsyncSchedulingNet::schedule in caffe2/core/net_async_scheduling.cc, computeChains in net_dag_utils.cc.
"""

from typing import Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.loops.loop import IN_PARTS
from caffe2_recurrent.operators import new_operator, read_before_written
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
    waking = [names.new("batch_waking") for _ in range(2)]
    first, *others = ([*thread_numbers.setting(names.new("batch_number")), *part] for part in parts)
    operators = [
        _if([enough], first),
        *(new_operator("ConstantFill", [], [blob], _PLAIN, shape=[1], value=0.0) for blob in waking),
        *(_if([enough, *waking], part) for part in others),
    ]
    side_by_side = _if([enough], operators)
    (given,) = side_by_side.arg
    # More than the nets of one chain have: these may be run in a part, and share threads with nets of as many.
    given.n.name, given.n.type, given.n.num_workers = NET, TYPE, len(parts)
    made = _if([enough], [side_by_side, *joining], otherwise)
    next(given.n for given in made.arg if given.name == "then_net").name = IN_PARTS
    made.is_gradient_op = is_gradient
    return made


def _if(inputs: Sequence[str], operators: Operators, otherwise: Operators = ()) -> caffe2_pb2.OperatorDef:
    nets = {"then_net": _net(operators), **({"else_net": _net(otherwise)} if otherwise else {})}
    read = [*inputs, *read_before_written(operators), *read_before_written(otherwise)]
    written = [blob for operator in (*operators, *otherwise) for blob in operator.output]
    return new_operator("If", list(dict.fromkeys(read)), list(dict.fromkeys(written)), _PLAIN, **nets)


def _net(operators: Operators) -> caffe2_pb2.NetDef:
    read = read_before_written(operators)
    written = list(dict.fromkeys(blob for operator in operators for blob in operator.output))
    return caffe2_pb2.NetDef(name=PART, type="simple", op=operators, external_input=read, external_output=written)


_PLAIN = caffe2_pb2.OperatorDef()
