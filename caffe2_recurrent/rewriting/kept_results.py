"""Results that stay in their blobs from run to run, until what they are made of changes.

    operators  =>  is this the first run of the net, or is a blob not equal to its copy?
                   if so: operators; copies of the blobs

Each net makes them anew in its first run, which an operator that counts its own runs tells; or only then, where what
they are made of is said to stay:

    operators  =>  is this the first run of the net?  if so: they are missing
                   are they missing?                  if so: operators; they are not

Source: caffe2/operators/histogram_op.cc.
"""

from typing import List, Mapping, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.loop import WHEN_CHANGED, Loop
from caffe2_recurrent.rewriting import same_weights
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.same_weights import ONE_OF, net_of, operator_of

# A histogram of one bin over all its runs: of one number, `[0, n, 0]` behind the n-th.
COUNTING = "AccumulateHistogram"
BIN = {"lower_bound": 0.0, "upper_bound": 1.0, "num_buckets": 1}
IN_BIN = 0.5

Operators = List[caffe2_pb2.OperatorDef]


def missing(*others: str) -> List[str]:
    """The operators that this takes, and `others`, which this Caffe2 does not have."""
    return [kind for kind in (ATEN, COUNTING, ONE_OF, *others) if not core.IsOperator(kind)]


def tells_runs_apart(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether what the operator makes is another thing in each run, whatever it is made of."""
    return bool(operator.type == COUNTING)


def when_changed(
    loop: Loop,
    ways: Mapping[str, str],
    copies: Mapping[str, str],
    made: Operators,
    results: Sequence[str],
    kind: int = core.DataType.FLOAT,
) -> Operators:
    """`made`, to be run when blobs are not equal to their `copies`, blobs that are to stay as `results` are.

    `ways` are how the blobs are compared (`same_weights.py`), whose numbers are of that `kind`.
    """
    emptying = [operator_of(loop, "ConstantFill", [], [copy], shape=[0], dtype=kind) for copy in copies.values()]
    # If one of the operators fails, the next run finds nothing that is equal.
    operators = [
        *emptying,
        *made,
        *(operator_of(loop, "Copy", [blob], [copy]) for blob, copy in copies.items()),
    ]
    is_changed = loop.new_blob("kept_is_old")
    kept = [*results, *copies.values()]
    return [
        *_comparing(loop, ways, copies, emptying, is_changed),
        operator_of(loop, "If", [is_changed, *ways], kept, then_net=net_of(WHEN_CHANGED, operators)),
    ]


def when_missing(loop: Loop, inputs: Sequence[str], made: Operators, results: Sequence[str], missing: str) -> Operators:
    """`made`, to be run in the first run of a net, and again if it fails there; `missing` stays as `results` do."""
    is_first, counting = _in_first_run(loop)

    def saying(value: bool) -> caffe2_pb2.OperatorDef:
        return operator_of(loop, "ConstantFill", [], [missing], shape=[1], value=value, dtype=core.DataType.BOOL)

    making = net_of(WHEN_CHANGED, [*made, saying(False)])
    return [
        *counting,
        operator_of(loop, "If", [is_first], [missing], then_net=net_of("first_run", [saying(True)])),
        operator_of(loop, "If", [missing, *inputs], [*results, missing], then_net=making),
    ]


def _comparing(
    loop: Loop, ways: Mapping[str, str], copies: Mapping[str, str], emptying: Operators, is_changed: str
) -> Operators:
    """Operators that say in `is_changed` whether the net runs for the first time, or blobs differ from the copies."""
    is_first, counting = _in_first_run(loop)
    true = {"value": True, "dtype": core.DataType.BOOL}
    always = [operator_of(loop, "ConstantFill", [], [is_changed], shape=[1], **true), *emptying]
    return [
        *counting,
        # Outputs of it, the copies are there when the operators that compare them are made.
        operator_of(
            loop,
            "If",
            [is_first, *copies],
            [is_changed, *copies.values()],
            then_net=net_of("first_run", always),
            else_net=net_of("later_run", same_weights.compare(loop, ways, copies, is_changed)),
        ),
    ]


def _in_first_run(loop: Loop) -> Tuple[str, Operators]:
    """A bool, and the operators that say in it whether the net runs for the first time."""
    names = ("run", "bins", "runs", "are_first", "is_first")
    run, bins, runs, are_first, is_first = (loop.new_blob("kept_" + name) for name in names)
    return is_first, [
        operator_of(loop, "ConstantFill", [], [run], shape=[1], value=IN_BIN),
        operator_of(loop, COUNTING, [run], [bins, runs], **BIN),
        same_weights.is_one_of(loop, runs, 1, are_first),
        operator_of(loop, "Slice", [are_first], [is_first], starts=[1], ends=[2]),
    ]
