"""Caffe2's gradient pass over the operators of a step, made safe for gradients that pass through unchanged.

Where such a gradient needs a blob of its own (passed_through.py), a `Copy` gives it one at the moment it is right; what
has no gradient is collected instead of ending the pass. Beside that:

- An output of a Split or LSTMUnit of which nothing is made has a gradient of zeros. Caffe2 leaves out that of a part,
  so that the other parts alone are the gradient of the whole, which is shorter then and read past its end; an LSTMUnit
  has none at all there.
- A gradient that an operator's gradient changes in its place, as Sqr's does, is changed in a blob of its own, as it
  may have been passed through to somebody else as well.

Sources: GetSplitGradient in caffe2/operators/concat_split_op.cc, GetLSTMUnitGradient in
caffe2/operators/lstm_unit_op.cc, GetSqrGradient in caffe2/operators/sqr_op.cc.
"""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.operators import copy_operator, gradient_name, operator_beside
from caffe2_recurrent.passed_through import PassedThrough
from caffe2_recurrent.problems import Problems, names

# Their gradients are made of those of all outputs.
OF_ALL_OUTPUTS = frozenset(["LSTMUnit", "Split"])


class StepGradients(NamedTuple):
    """The gradient operators of a step, and the gradient (dense name or `GradientSlice`) of each blob by name."""

    operators: List[caffe2_pb2.OperatorDef]
    of: Dict[str, Any]


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
            problems.add("Caffe2's gradient pass over the step fails: {}", _first_line(error))
        derived, of = [], {}
    for text in representation.failures:
        problems.add("{}", text)
    return StepGradients(derived, {str(blob): gradient for blob, gradient in of.items()})


class _Representation(core.IR):
    """Caffe2's own bookkeeping of a gradient pass, asked to keep gradients apart and to collect failures.

    The three methods overridden here are where Caffe2 takes up one forward operator's gradients (source:
    caffe2/python/core.py, `IR`); their names and arguments are the same in every Caffe2 from torch 1.4 to 1.10.
    """

    def __init__(self, operators: Sequence[caffe2_pb2.OperatorDef], outputs: frozenset) -> None:
        self._outputs = outputs
        self.failures: List[str] = []
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
        _keep(g_output, gradient_ops, g_input)
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
        # They come of no operator further down.
        arrived = [None if (blob, gradient) in without else gradient for blob, gradient in outputs]
        super().BuildGradientGenerators(fwd_op_idx, gradient_ops, arrived, g_input)

    def _GenerateGradientsForForwardOp(  # noqa: N802
        self, forward_op_idx: int, input_to_grad: Dict[str, Any]
    ) -> Tuple[Dict[str, Any], List[Any]]:
        operator, in_versions, _ = self.ssa[forward_op_idx]
        try:
            return super()._GenerateGradientsForForwardOp(forward_op_idx, _with_zeros(operator, input_to_grad))
        except Exception as error:
            self.failures.append(self._explain(forward_op_idx, input_to_grad, error))
            # Go on as if there were a gradient, so that operators further up are looked at as well.
            assumed = {blob: gradient_name(blob) for blob in operator.input}
            self.gradient_frontier.update(in_versions)
            return assumed, []

    def DoGradientAccumulation(self, fwd_op_idx: int) -> Tuple[List[Any], Dict[str, Any]]:  # noqa: N802
        try:
            return super().DoGradientAccumulation(fwd_op_idx)
        except RuntimeError as error:
            operator = self.ssa[fwd_op_idx].op
            self.failures.append(
                "the gradients that reach {}, read by step operator {} ({}) and others, cannot be added: {}".format(
                    names(operator.input), fwd_op_idx, operator.type, _first_line(error)
                )
            )
            return [], {}

    def _explain(self, index: int, input_to_grad: Dict[str, Any], error: Exception) -> str:
        operator = self.ssa[index].op
        which = "step operator {} ({}, writing {})".format(index, operator.type, names(operator.output))
        try:
            core.GradientRegistry.GetGradientForOp(operator, [input_to_grad.get(blob) for blob in operator.output])
        except Exception as refusal:
            if isinstance(refusal, ValueError):
                return "the gradient of {} cannot be derived: {}".format(which, _first_line(refusal))
            if "schema" in str(refusal):
                return "{} cannot read {}: that does not fit the operator's schema".format(which, names(operator.input))
            return "{} has no gradient; pass forward_only=True if none is needed, or put StopGradient after it".format(
                which
            )
        return "the gradient of {} cannot be derived: {}".format(which, _first_line(error))


def _keep(arrived: Sequence[Any], operators: Sequence[caffe2_pb2.OperatorDef], results: Sequence[Any]) -> None:
    """Have the operators change no gradient that they get on the way to their results.

    Where a result takes its place, the forward operator works in place; see `passed_through.py`.
    """
    changed: Dict[str, str] = {}
    for operator in operators:
        operator.input[:] = [changed.get(blob, blob) for blob in operator.input]
        on_the_way = [blob for blob in operator.output if blob in arrived and blob not in results]
        changed.update({blob: blob + "_changed" for blob in on_the_way})
        operator.output[:] = [changed.get(blob, blob) for blob in operator.output]


def _with_zeros(operator: caffe2_pb2.OperatorDef, gradients: Dict[str, Any]) -> Dict[str, Any]:
    """The gradients with one for each output of a Split or LSTMUnit, if there is one for any."""
    without = [output for output in operator.output if gradients.get(output) is None]
    if operator.type not in OF_ALL_OUTPUTS or len(without) == len(operator.output):
        return gradients
    return {**gradients, **{output: _zeros_of(output) for output in without}}


def _zeros_of(blob: str) -> str:
    return gradient_name(blob) + "_zeros"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
