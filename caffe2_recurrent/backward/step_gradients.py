"""Caffe2's gradient pass over the operators of a step, made safe for gradients that pass through unchanged.

Where such a gradient needs a blob of its own (pass_through.py), a `Copy` gives it one at the moment it is right; what
has no gradient is collected instead of ending the pass. Beside that:

- An output of a Split or LSTMUnit of which nothing is made has a gradient of zeros. Caffe2 leaves out that of a part,
  so that the other parts alone are the gradient of the whole, which is shorter then and read past its end; an LSTMUnit
  has none at all there.
- A gradient that an operator's gradient changes in its place, as Sqr's does, is changed in a blob of its own, as it
  may have been passed through to somebody else as well.
- The gradient of Mul, Sqr, Pow and Log needs what they have read, also where they write to the same blob, which Caffe2
  does not mind: there a step is to keep a copy, and the gradient that arrives is copied too, as it has the same name as
  the one that is to be made of it.
- A sparse gradient is made flat where it arises (sparse_gradients.py), when its blobs hold what is meant, and so that
  those of several operators can be joined.
- A gradient that several operators make in turn, as that of Sqrt and Pow, has another name until the last one: where
  gradients are added up Caffe2 takes each time that one is written for an addend. It is right where the operators do
  not read it, as for a product of a blob with itself.

Sources: GetSplitGradient in caffe2/operators/concat_split_op.cc, GetLSTMUnitGradient in
caffe2/operators/lstm_unit_op.cc, GetSqrGradient in caffe2/operators/sqr_op.cc, GetPowGradient in
caffe2/operators/pow_op.cc, GetSqrtGradient in caffe2/operators/sqrt_op.cc, GetMulGradient in
caffe2/operators/elementwise_mul_op.cc, GetLogGradient in caffe2/operators/log_op.cc.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.backward.pass_through import PassedThrough
from caffe2_recurrent.backward.sparse_gradients import flat
from caffe2_recurrent.operators import (
    GRADIENT_OPERATOR,
    SHOWING,
    copied,
    copy_operator,
    gradient_name,
    operator_beside,
)
from caffe2_recurrent.problems import Problems, first_line, names

# Their gradients are made of those of all outputs.
OF_ALL_OUTPUTS = frozenset(["LSTMUnit", "Split"])
# Their gradients are made of their inputs, which they may overwrite.
OF_INPUTS = frozenset(["Log", "Mul", "Pow", "Sqr"])


class Overwritten(NamedTuple):
    """What the step operator at `position` overwrites, and the name under which its gradient reads a copy."""

    position: int
    blob: str
    copy: str


class StepGradients(NamedTuple):
    """The gradient operators of a step, and the gradient (dense name or `GradientSlice`) of each blob by name.

    They read copies of what is `overwritten`, which the step has to make. `of_last_values` says how many of them, from
    the first on, belong to operators that come after the last one that writes an output of the step.
    """

    operators: List[caffe2_pb2.OperatorDef]
    of: Dict[str, Any]
    overwritten: List[Overwritten]
    of_last_values: Dict[str, int]


def derive(
    operators: Sequence[caffe2_pb2.OperatorDef], output_gradients: Dict[str, str], problems: Problems
) -> StepGradients:
    """The gradient pass for `output_gradients` (step output -> its gradient); what has no gradient is a problem."""
    representation = _Representation(operators, frozenset(output_gradients))
    try:
        derived, of = representation.GetBackwardPass(dict(output_gradients))
    except Exception as error:
        # After a failure the pass went on with assumed gradients, which may lead it astray.
        if not representation.failures:
            problems.add("Caffe2's gradient pass over the step fails: {}", first_line(error))
        derived, of = [], {}
    for text in representation.failures:
        problems.add("{}", text)
    # What the pass puts in front, if anything, belongs to no operator of the step.
    before = len(derived) - representation.made
    derived = _copied_out_of_loops(derived)
    of_last_values = {output: before + count for output, count in representation.of_last_values.items()}
    by_name = {str(blob): gradient for blob, gradient in of.items()}
    return StepGradients(derived, by_name, representation.overwritten, of_last_values)


def _copied_out_of_loops(operators: Sequence[caffe2_pb2.OperatorDef]) -> List[caffe2_pb2.OperatorDef]:
    """With copies in the place of views of what the gradient operators of loops within the step make.

    Operators of several steps run at the same time, and the RNN executor goes by names: it would let such a gradient
    be made again, a step further on, while the view is still read.

    Source: add_race_conflict_dependencies in caffe2/operators/rnn/recurrent_network_executor.h.
    """
    made = {blob for operator in operators if operator.type == GRADIENT_OPERATOR for blob in operator.output}
    return [
        copy_operator(operator.input[0], operator.output[0], operator)
        if operator.type in SHOWING and operator.input[0] in made
        else operator
        for operator in operators
    ]


class _Representation(core.IR):
    """Caffe2's own bookkeeping of a gradient pass, asked to keep gradients apart and to collect failures.

    The four methods overridden here are where Caffe2 takes up one forward operator's gradients (source:
    caffe2/python/core.py, `IR`); their names and arguments are the same in every Caffe2 from torch 1.4 to 1.10.
    """

    def __init__(self, operators: Sequence[caffe2_pb2.OperatorDef], outputs: frozenset) -> None:
        self._outputs = outputs
        self.failures: List[str] = []
        # How many gradient operators there are so far, and how many there were at the last writer of each output.
        self.made = 0
        self.of_last_values: Dict[str, int] = {}
        self.overwritten: List[Overwritten] = []
        # The gradient that an operator has which overwrites what it needs.
        self._arrived = ""
        # What an operator's gradient may read though it has been written again since.
        self._unchanged: Set[str] = set()
        super().__init__(operators)
        self._passed_through = PassedThrough(self, outputs)

    def SanityCheck(self, operators: Sequence[caffe2_pb2.OperatorDef]) -> None:  # noqa: N802
        # Caffe2 does not count being an output of the net, here of the step, as a use.
        for index, operator in enumerate(operators):
            output = operator.output[0] if operator.type == "StopGradient" else None
            if output is not None and output not in self.input_usages and output not in self._outputs:
                self.failures.append(
                    "step operator {} (StopGradient) writes '{}', which nothing reads; "
                    "read it, or stop the gradient in place".format(index, output)
                )

    def BuildGradientGenerators(  # noqa: N802
        self, fwd_op_idx: int, gradient_ops: List[Any], g_output: List[Any], g_input: List[Any]
    ) -> None:
        operator = self.ssa[fwd_op_idx].op
        overwritten = _overwritten(operator)
        if overwritten is not None:
            gradient_ops[:], g_input[:] = _gradients_as_if_apart(operator, g_output)
        _keep(g_output, gradient_ops, g_input)
        for position, gradient in enumerate(g_input):
            if isinstance(gradient, core.GradientSlice):
                blob = operator.input[position]
                prefix = "{}_{}".format(gradient_name(blob), fwd_op_idx)
                made, g_input[position] = flat(gradient, blob, prefix, operator)
                gradient_ops += made
        computed = frozenset(output for gradient_op in gradient_ops for output in gradient_op.output)
        for position, gradient in enumerate(g_input):
            if not isinstance(gradient, str) or gradient in computed:
                continue
            if self._passed_through.needs_own_blob(fwd_op_idx, operator.input[position], gradient):
                own = gradient_name(operator.input[position])
                if own == gradient:
                    own += "_own"
                # Both lists are the caller's, which goes on with what stands in them.
                gradient_ops.append(copy_operator(gradient, own, operator))
                g_input[position] = own
        outputs = list(zip(operator.output, g_output))
        without = [(blob, _zeros_of(blob)) for blob, gradient in outputs if gradient == _zeros_of(blob)]
        gradient_ops[:0] = [
            operator_beside("ConstantFill", [blob], [zeros], operator, value=0.0) for blob, zeros in without
        ]
        self._unchanged = {blob for blob, _ in without if self._keeps_its_value(blob, fwd_op_idx)}
        # They come of no operator further down.
        arrived = [None if (blob, gradient) in without else gradient for blob, gradient in outputs]
        if overwritten is not None:
            self._read_copy(fwd_op_idx, overwritten, gradient_ops)
            gradient_ops.insert(0, copy_operator(self._arrived, str(g_output[0]), operator))
            arrived = [self._arrived]
        super().BuildGradientGenerators(fwd_op_idx, gradient_ops, arrived, g_input)

    def CheckGradientOperatorInput(self, grad_op_input: str, *rest: Any) -> None:  # noqa: N802
        # Nobody overwrites a copy.
        if grad_op_input not in self._unchanged and all(grad_op_input != copy for _, _, copy in self.overwritten):
            super().CheckGradientOperatorInput(grad_op_input, *rest)

    def _keeps_its_value(self, blob: str, index: int) -> bool:
        """Whether what comes after the operator `index` stops the gradient of its output at most, also in place."""
        later = [operator for operator, _, _ in self.ssa[index + 1 :] if blob in operator.output]
        return all(operator.type == "StopGradient" for operator in later)

    def _read_copy(self, index: int, blob: str, gradient_ops: Sequence[caffe2_pb2.OperatorDef]) -> None:
        copy = blob + "_before"
        while copy in self.frontier or any(copy == other for _, _, other in self.overwritten):
            copy += "_before"
        self.overwritten.append(Overwritten(index, blob, copy))
        for operator in gradient_ops:
            operator.input[:] = [copy if read == blob else read for read in operator.input]

    def _GenerateGradientsForForwardOp(  # noqa: N802
        self, forward_op_idx: int, input_to_grad: Dict[str, Any]
    ) -> Tuple[Dict[str, Any], List[Any]]:
        operator, in_versions, _ = self.ssa[forward_op_idx]
        for blob in self._outputs.intersection(operator.output):
            self.of_last_values.setdefault(blob, self.made)
        told = _with_zeros(operator, dict(input_to_grad))
        overwritten = _overwritten(operator)
        # A sparse one is refused, as by any such operator.
        if overwritten is not None and not isinstance(input_to_grad.get(overwritten), (type(None), core.GradientSlice)):
            self._arrived = str(told[overwritten])
            told = {**told, overwritten: gradient_name(overwritten) + "_arrived"}
        # Where an operator makes a value without the one before, Caffe2 takes its gradient for that of both.
        for blob in set(operator.output).difference(operator.input):
            input_to_grad.pop(blob, None)
        try:
            gradients, operators = super()._GenerateGradientsForForwardOp(forward_op_idx, told)
            self.made += len(operators)
            return gradients, operators
        except Exception as error:
            self.failures.append(self._explain(forward_op_idx, told, error))
            # Go on as if there were a gradient, so that operators further up are looked at as well.
            assumed = {blob: gradient_name(blob) for blob in operator.input}
            self.gradient_frontier.update(in_versions)
            return assumed, []

    def DoGradientAccumulation(self, fwd_op_idx: int) -> Tuple[List[Any], Dict[str, Any]]:  # noqa: N802
        try:
            operators, gradients = super().DoGradientAccumulation(fwd_op_idx)
            self.made += len(operators)
            return operators, gradients
        except RuntimeError as error:
            operator = self.ssa[fwd_op_idx].op
            self.failures.append(
                "the gradients that reach {}, read by step operator {} ({}) and others, cannot be added: {}".format(
                    names(operator.input), fwd_op_idx, operator.type, first_line(error)
                )
            )
            return [], {}

    def _explain(self, index: int, input_to_grad: Dict[str, Any], error: Exception) -> str:
        operator = self.ssa[index].op
        which = "step operator {} ({}, writing {})".format(index, operator.type, names(operator.output))
        sparse = [blob for blob in operator.output if isinstance(input_to_grad.get(blob), core.GradientSlice)]
        if sparse:
            return (
                "{} passes no sparse gradient back, and that of {} is one, as it is read row by row; "
                "read rows of a blob that the step does not compute".format(which, names(sparse))
            )
        try:
            core.GradientRegistry.GetGradientForOp(operator, [input_to_grad.get(blob) for blob in operator.output])
        except Exception as refusal:
            if isinstance(refusal, ValueError):
                return "the gradient of {} cannot be derived: {}".format(which, first_line(refusal))
            if "schema" in str(refusal):
                return "{} cannot read {}: that does not fit the operator's schema".format(which, names(operator.input))
            return "{} has no gradient; pass forward_only=True if none is needed, or put StopGradient after it".format(
                which
            )
        return "the gradient of {} cannot be derived: {}".format(which, first_line(error))


def _keep(arrived: Sequence[Any], operators: Sequence[caffe2_pb2.OperatorDef], results: Sequence[Any]) -> None:
    """Have the operators change no gradient that they get, and write no result to which they are still to come back.

    What is written and not read again before it is written anew is an addend of the result, as where an operator reads
    a blob twice. Where a result takes the place of a gradient, the forward operator works in place; see
    `pass_through.py`.
    """
    changed: Dict[str, str] = {}
    for position, operator in enumerate(operators):
        operator.input[:] = [changed.get(blob, blob) for blob in operator.input]
        for blob in operator.output:
            if blob in results:
                again = _is_read_next(operators[position + 1 :], blob)
                changed[blob] = "{}_part_{}".format(blob, position) if again else blob
            elif blob in arrived:
                changed[blob] = blob + "_changed"
        operator.output[:] = [changed.get(blob, blob) for blob in operator.output]


def _is_read_next(operators: Sequence[caffe2_pb2.OperatorDef], blob: str) -> bool:
    """Whether the first of the operators that has to do with `blob` reads it."""
    reads = (blob in operator.input for operator in operators if blob in [*operator.input, *operator.output])
    return next(reads, False)


def _overwritten(operator: caffe2_pb2.OperatorDef) -> Optional[str]:
    """The blob that an operator reads and overwrites, where its gradient needs it as it was."""
    (output,) = operator.output[:1] or [""]
    return output if operator.type in OF_INPUTS and output in operator.input else None


def _gradients_as_if_apart(operator: caffe2_pb2.OperatorDef, arrived: Sequence[Any]) -> Tuple[List[Any], List[Any]]:
    """The gradient operators of an operator as if it did not work in place, and the gradients of its inputs."""
    apart = copied(operator)
    apart.output[0] += "_after"
    operators, results = core.GradientRegistry.GetGradientForOp(apart, arrived)
    return list(operators), list(results)


def _with_zeros(operator: caffe2_pb2.OperatorDef, gradients: Dict[str, Any]) -> Dict[str, Any]:
    """The gradients with one for each output of a Split or LSTMUnit, if there is one for any."""
    without = [output for output in operator.output if gradients.get(output) is None]
    if operator.type not in OF_ALL_OUTPUTS or len(without) == len(operator.output):
        return gradients
    return {**gradients, **{output: _zeros_of(output) for output in without}}


def _zeros_of(blob: str) -> str:
    return gradient_name(blob) + "_zeros"
