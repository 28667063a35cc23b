"""Which step operators run again at the head of the backward step, so that their outputs need not be kept.

A recomputed blob is shared by all steps: the operators that write it run again, in forward order, before the
gradient operators read it.
"""

from collections import Counter
from typing import Dict, Iterable, List, NamedTuple, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import SHOWING, is_written_next
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.step_net import StepNet

# They draw anew each time they run, so a second run yields other values than the forward pass used.
RANDOM_OPERATORS = frozenset(
    [
        "Dropout",
        "GaussianFill",
        "MSRAFill",
        "Float16UniformFill",
        "FloatToFusedRandRowwiseQuantized",
        "SortAndShuffle",
        "SparseDropoutWithReplacement",
        "SparseItemwiseDropoutWithReplacement",
        "UniformFill",
        "UniformIntFill",
        "UniqueUniformFill",
        "WeightedMultiSampling",
        "WeightedSample",
        "XavierFill",
    ]
)


class Recompute(NamedTuple):
    """The operators to run again, and the blobs that the steps may then share.

    An operator that runs again writes a blob that is not shared once more, with the same values. `unread_too`: also
    those run whose results nothing reads, as in Caffe2.
    """

    operators: List[caffe2_pb2.OperatorDef]
    shared_blobs: List[str]
    unread_too: bool

    def before(self, gradients: Iterable[caffe2_pb2.OperatorDef]) -> List[caffe2_pb2.OperatorDef]:
        """The operators that run again before these gradient operators.

        None overwrites what another one has made before that is read: the RNN executor might change their order.
        """
        read = {blob for operator in gradients for blob in operator.input}
        needed: List[caffe2_pb2.OperatorDef] = []
        for operator in reversed(self.operators):
            if all(is_written_next(needed, blob) for blob in operator.output):
                continue
            if self.unread_too or not read.isdisjoint(operator.output):
                needed.insert(0, operator)
                read.update(operator.input)
        return needed


def plan_recompute(step_net: StepNet, blobs: Sequence[str], unread_too: bool, problems: Problems) -> Recompute:
    """The operators that write `blobs`; notes in `problems` what cannot be recomputed."""
    if not blobs:
        return Recompute([], [], unread_too)
    # Who names a blob means all that it was.
    blobs = [*blobs, *(step_net.earlier[blob] for blob in blobs if blob in step_net.earlier)]
    wanted = frozenset(blobs)
    declared = frozenset(step_net.proto.external_input)
    unknown = [blob for blob in blobs if blob not in step_net.writes or blob in declared]
    if unknown:
        problems.add(
            "recompute_blobs_on_backward names {}, which the step does not compute; it computes {}",
            names(unknown),
            names(blob for blob in step_net.writes if blob not in declared),
        )
    operators = []
    for index, operator in enumerate(step_net.proto.op):
        if wanted.isdisjoint(operator.output):
            continue
        operators.append(operator)
        others = [blob for blob in operator.output if blob not in wanted]
        if others:
            problems.add(
                "recompute_blobs_on_backward names {} but not {}, written by the same step operator {} ({}); add them",
                names(blob for blob in operator.output if blob in wanted),
                names(others),
                index,
                operator.type,
            )
        if operator.type in RANDOM_OPERATORS and not integer(operator, "is_test", 0):
            problems.add(
                "recompute_blobs_on_backward would run step operator {} ({}) again, which draws other numbers; keep {}",
                index,
                operator.type,
                names(operator.output),
            )
    _check_unchanged(step_net, wanted, problems)
    _check_unshown(step_net, wanted, problems)
    own = _own_to_each_step(step_net, operators)
    return Recompute(operators, [blob for blob in blobs if blob not in own], unread_too)


def _own_to_each_step(step_net: StepNet, operators: Sequence[caffe2_pb2.OperatorDef]) -> Set[str]:
    """Recomputed blobs that the steps cannot share."""
    # A state output is linked to its own slice in every step.
    own = {state.inner_output for state in step_net.states}
    # The RNN executor runs steps side by side and holds a step's operator back until the step before has read what it
    # overwrites. One whose inputs are there from the start and whose output nothing reads is not held back by anything.
    from_outside = frozenset(step_net.references).union([step_net.timestep])
    read = {blob for operator in step_net.proto.op for blob in operator.input}
    for operator in operators:
        if from_outside.issuperset(operator.input) and read.isdisjoint(operator.output):
            own.update(operator.output)
    return own


def _check_unshown(step_net: StepNet, wanted: frozenset, problems: Problems) -> None:
    """The RNN executor goes by names: it does not hold back what overwrites memory that is read by another one."""
    for index, operator in enumerate(step_net.proto.op):
        if operator.type in SHOWING and not wanted.isdisjoint(operator.input):
            problems.add(
                "recompute_blobs_on_backward names {}, which step operator {} ({}) shows as {}: another step might "
                "overwrite it before that is read; use Copy there",
                names(operator.input[:1]),
                index,
                operator.type,
                names(operator.output),
            )


def _check_unchanged(step_net: StepNet, wanted: frozenset, problems: Problems) -> None:
    """An operator that runs again must find its inputs as they were; in-place operators may have changed them."""
    version: Dict[str, int] = Counter()
    for index, operator in enumerate(step_net.proto.op):
        if not wanted.isdisjoint(operator.output):
            changed = [blob for blob in operator.input if blob not in wanted and version[blob] != step_net.writes[blob]]
            if changed:
                problems.add(
                    "recomputing {} needs {} as step operator {} ({}) read it, but a later operator overwrites it; "
                    "recompute it as well, or write to another blob",
                    names(blob for blob in operator.output if blob in wanted),
                    names(changed),
                    index,
                    operator.type,
                )
        version.update(operator.output)
