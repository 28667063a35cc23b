"""Caffe2's gradient pass over the operators of a step, made safe for gradients that pass through unchanged.

Some gradients need no operator: for `y = Sum(a, b)` Caffe2 lets `y_grad` stand for the gradients of a and b as well.
In a step net two things can go wrong with that, and here, only where they would, a `Copy` gives the gradient a blob
of its own at the moment it is right:

    y = Sum(o, b), o an output of the step    o's gradient from outside, `o_grad`, would be replaced by `y_grad`
                                              instead of being added to it
    y = Scale(y); y = Sum(y, a)               the gradient of Scale overwrites `y_grad` before a's producer, or a
                                              link, has read it as a's gradient
    z = Sum(y, b); y = Sum(y, a)              `y_grad`, which stands for the gradient of two values of y, would have to
                                              be added up into itself; Caffe2 refuses
"""

import bisect
import itertools
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core, scope

from caffe2_recurrent.problems import Problems, names

GRADIENT_SUFFIX = "_grad"


class StepGradients(NamedTuple):
    """The gradient operators of a step, and the gradient (dense name or `GradientSlice`) of each blob by name."""

    operators: List[caffe2_pb2.OperatorDef]
    of: Dict[str, Any]


def gradient_name(blob: str) -> str:
    return blob + GRADIENT_SUFFIX


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
        self._overwritten: Dict[str, List[int]] = {}
        self._writes: Dict[Tuple[Any, ...], bool] = {}
        self._used: Dict[str, List[int]] = {}
        self._live: Set[int] = set()
        self._read_by: Dict[Tuple[str, int], List[int]] = {}
        self.failures: List[str] = []
        super().__init__(operators)
        self._producers = {
            (blob, version): index
            for index, operator in enumerate(self.ssa)
            for blob, version in operator.out_versions.items()
        }

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
        computed = frozenset(output for gradient_op in gradient_ops for output in gradient_op.output)
        for position, gradient in enumerate(g_input):
            passed_through = isinstance(gradient, str) and gradient not in computed
            if passed_through and self._must_own(fwd_op_idx, operator.input[position], gradient):
                own = gradient_name(operator.input[position])
                if own == gradient:
                    own += "_own"
                # Both lists are the caller's, which goes on with what stands in them.
                gradient_ops.append(copy_operator(gradient, own, operator))
                g_input[position] = own
        super().BuildGradientGenerators(fwd_op_idx, gradient_ops, g_output, g_input)

    def _must_own(self, index: int, blob: str, gradient: str) -> bool:
        """Whether the gradient of `blob`, passed through operator `index` under this name, needs a blob of its own."""
        read_version = self.ssa[index].in_versions[blob]
        if blob in self._outputs and read_version == self.frontier[blob]:
            return True
        source = gradient[: -len(GRADIENT_SUFFIX)]
        readers = self._readers(blob, read_version)
        if source == blob:
            return len(readers) > 1
        # The name must keep its value until it is read: right here if gradients of several readers are added up here,
        # else at the latest by the producer's gradient; that of an external input is read at the very end.
        added_here = index == readers[0] and bool(self.gradient_generators[blob][read_version])
        read_at = index if added_here else self._producers.get((blob, read_version), 0)
        # Only a reader can overwrite; which of them do takes much longer to find out.
        return _any_within(self._usages(source), read_at, index) and _any_within(
            self._overwrites(source), read_at, index
        )

    def _readers(self, blob: str, version: int) -> List[int]:
        # Remembered: a blob that all operators read would be gone through for each of them.
        if (blob, version) not in self._read_by:
            self._live = self._live or self._find_live()
            self._read_by[blob, version] = [index for index in self.input_usages[blob][version] if index in self._live]
        return self._read_by[blob, version]

    def _usages(self, blob: str) -> List[int]:
        """The operators that read `blob`, in forward order, whichever value of it."""
        if blob not in self._used:
            self._used[blob] = sorted(itertools.chain.from_iterable(self.input_usages[blob].values()))
        return self._used[blob]

    def _find_live(self) -> Set[int]:
        """The operators on which an output depends; no gradient reaches the others."""
        live: Set[int] = set()
        needed = {(blob, self.frontier[blob]) for blob in self._outputs}
        for index in reversed(range(len(self.ssa))):
            _, in_versions, out_versions = self.ssa[index]
            if not needed.isdisjoint(out_versions.items()):
                live.add(index)
                needed.update(in_versions.items())
        return live

    def _overwrites(self, blob: str) -> List[int]:
        """The operators, in forward order, at which the backward pass writes `<blob>_grad`."""
        if blob not in self._overwritten:
            found: Set[int] = set()
            for version in list(self.input_usages[blob]):
                readers = self._readers(blob, version)
                found.update(index for index in readers if self._writes_gradient(index, blob))
                if len(readers) > 1:
                    found.add(readers[0])
            self._overwritten[blob] = sorted(found)
        return self._overwritten[blob]

    def _writes_gradient(self, index: int, blob: str) -> bool:
        """Whether the gradient of this reader of `blob` is computed, not passed through."""
        operator = self.ssa[index].op
        positions = tuple(at for at, name in enumerate(operator.input) if name == blob)
        arguments = tuple(argument.SerializeToString() for argument in operator.arg)
        key = (operator.type, arguments, len(operator.input), positions)
        if key not in self._writes:
            try:
                gradients = [gradient_name(output) for output in operator.output]
                derived, _ = core.GradientRegistry.GetGradientForOp(operator, gradients)
            except Exception:
                # It is reported when its turn comes.
                derived = []
            self._writes[key] = any(gradient_name(blob) in gradient.output for gradient in derived)
        return self._writes[key]

    def _GenerateGradientsForForwardOp(  # noqa: N802
        self, forward_op_idx: int, input_to_grad: Dict[str, Any]
    ) -> Tuple[Dict[str, Any], List[Any]]:
        try:
            return super()._GenerateGradientsForForwardOp(forward_op_idx, input_to_grad)
        except Exception as error:
            operator, in_versions, _ = self.ssa[forward_op_idx]
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


def copy_operator(source: str, target: str, beside: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """`target = Copy(source)`, on the device of the operator `beside`."""
    # There may be one for each operator of the step, and `CreateOperator` takes several times as long.
    copy = caffe2_pb2.OperatorDef(name="", type="Copy", input=[source], output=[target])
    device = beside.device_option if beside.HasField("device_option") else scope.CurrentDeviceScope()
    if device is not None:
        copy.device_option.CopyFrom(device)
    return copy


def operator_beside(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], beside: caffe2_pb2.OperatorDef, **arguments: Any
) -> caffe2_pb2.OperatorDef:
    """An operator between blobs of the given (full) names, on the device of the operator `beside`."""
    device = beside.device_option if beside.HasField("device_option") else None
    return core.CreateOperator(
        kind,
        [core.BlobReference(blob) for blob in inputs],
        [core.BlobReference(blob) for blob in outputs],
        device_option=device,
        **arguments,
    )


def _any_within(ordered: Sequence[int], start: int, end: int) -> bool:
    """Whether one of the `ordered` numbers is `start` or more and less than `end`."""
    return bisect.bisect_left(ordered, start) < bisect.bisect_left(ordered, end)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
