"""Parameter gradients moved out of the loop."""

from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Gradient, Loop, Parameter
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import copied, new_operator
from caffe2_recurrent.rewriting import dataflow
from caffe2_recurrent.rewriting.over_steps import OverSteps, of_forward, of_gradient
from caffe2_recurrent.rewriting.rows import FEATURES, with_rows
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

FC_GRADIENT, ELEMENTWISE_LINEAR_GRADIENT = "FCGradient", "ElementwiseLinearGradient"


class Parts(NamedTuple):
    """The blobs of a gradient operator by their role: Y = operator(X, W, b).

    `of_weights` and `of_bias` are the gradients of the two parameters, `of_input` that of X, if it is wanted.
    """

    input: str
    weights: str
    of_output: str
    of_weights: str
    of_bias: str
    of_input: Optional[str]


class ParameterGradients(Rule):
    """backward step: dW, db, dX = FCGradient(X, W, dY), and the engine adds up dW and db over the steps

    =>  backward step: dX = BatchMatMul(dY, W)
        after the loop: dW, db = FCGradient(X of all steps, W, dY of all steps)

    The same for ElementwiseLinearGradient, where dX = Mul(dY, W). X and dY must have a row for each sequence. Where
    several such operators share a parameter, all of them move, and the sum of their shares too.
    """

    name = "parameter_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for positions in _groups(loop):
            assert loop.gradient is not None
            operators = [loop.gradient.operators[position] for position in positions]
            blobs = ", ".join("'{}'".format(blob) for operator in operators for blob in _shares(operator))
            yield Site("{} -> {}".format(operators[0].type, blobs), positions)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        rows = with_rows(loop, sizes)
        for position in site.where:
            reason = _refusal(loop, loop.gradient.operators[position], position, rows)
            if reason is not None:
                return reason
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None
        shares: Dict[Parameter, List[str]] = {}
        spent: List[int] = []
        for position in site.where:
            operator = gradient.operators[position]
            outer_shares = _move(loop, operator, position)
            for share, outer_share in zip(_shares(operator), outer_shares):
                destination = _destination(gradient, share)
                assert destination is not None
                parameter, addition = destination
                shares.setdefault(parameter, []).append(outer_share)
                spent += [] if addition is None else [addition]
        for parameter, outer_shares in shares.items():
            _finish(loop, outer_shares, parameter)
            gradient.parameters.remove(parameter)
        inside = {position: _inside(gradient.operators[position]) for position in site.where}
        # Those of blobs that have rows.
        loop.known_rows.update(_parts(gradient.operators[position]).of_output for position in site.where)
        kept: List[caffe2_pb2.OperatorDef] = []
        for position, operator in enumerate(gradient.operators):
            if position in inside:
                kept += inside[position]
            elif position not in spent:
                kept.append(operator)
        gradient.operators[:] = kept


def _groups(loop: Loop) -> List[Tuple[int, ...]]:
    """The gradient operators that can be about parameters; those whose shares meet in one sum together."""
    gradient = loop.gradient
    if gradient is None:
        return []
    groups: List[List[int]] = []
    destinations: List[set] = []
    for position, operator in enumerate(gradient.operators):
        if operator.type not in (FC_GRADIENT, ELEMENTWISE_LINEAR_GRADIENT):
            continue
        own = [_destination(gradient, share) for share in _shares(operator)]
        own_parameters = {destination[0] for destination in own if destination is not None}
        meeting = [index for index, other in enumerate(destinations) if own_parameters & other]
        joined = sorted([position, *(member for index in meeting for member in groups[index])])
        parameters = own_parameters.union(*(destinations[index] for index in meeting))
        groups = [group for index, group in enumerate(groups) if index not in meeting] + [joined]
        destinations = [other for index, other in enumerate(destinations) if index not in meeting] + [parameters]
    return [tuple(group) for group in groups]


def _parts(operator: caffe2_pb2.OperatorDef) -> Parts:
    inputs, outputs = list(operator.input), list(operator.output)
    if operator.type == FC_GRADIENT:
        return Parts(inputs[0], inputs[1], inputs[2], outputs[0], outputs[1], outputs[2] if len(outputs) > 2 else None)
    return Parts(inputs[1], inputs[2], inputs[0], outputs[1], outputs[2], outputs[0])


def _shares(operator: caffe2_pb2.OperatorDef) -> Tuple[str, str]:
    parts = _parts(operator)
    return parts.of_weights, parts.of_bias


def _destination(gradient: Gradient, share: str) -> Optional[Tuple[Parameter, Optional[int]]]:
    """The parameter whose gradient `share` is or is added to; in the second case, the position of the Sum."""
    reading = [position for position, operator in enumerate(gradient.operators) if share in operator.input]
    for parameter in gradient.parameters:
        if parameter.inner_gradient == share and not reading:
            return parameter, None
        if len(reading) == 1:
            addition = gradient.operators[reading[0]]
            if addition.type == "Sum" and list(addition.output) == [parameter.inner_gradient]:
                return parameter, reading[0]
    return None


def _refusal(loop: Loop, operator: caffe2_pb2.OperatorDef, position: int, rows: set) -> Optional[str]:
    parts = _parts(operator)
    gradient = loop.gradient
    assert gradient is not None
    if integer(operator, "axis", 1) != FEATURES or integer(operator, "axis_w", 1) != 1:
        return "it works along another axis than the last of [1, N, K]"
    if parts.weights not in loop.references:
        return "'{}' is not the same in all steps".format(parts.weights)
    if parts.input not in rows:
        return "'{}' is not known to have one row for each sequence".format(parts.input)
    for share in (parts.of_weights, parts.of_bias):
        destination = _destination(gradient, share)
        if destination is None:
            return "'{}' is used for something else than the gradient of a parameter".format(share)
        parameter, addition = destination
        if addition is not None:
            movable = {
                output
                for other in gradient.operators
                if other.type in (FC_GRADIENT, ELEMENTWISE_LINEAR_GRADIENT)
                for output in _shares(other)
            }
            if not movable.issuperset(gradient.operators[addition].input):
                return "the gradient of '{}' is also made of something that stays in the loop".format(parameter.outer)
    for found in _values(loop, parts, position):
        if isinstance(found, str):
            return found
    return None


def _values(loop: Loop, parts: Parts, position: int) -> Tuple[Union[OverSteps, str], Union[OverSteps, str]]:
    return of_forward(loop, parts.input), of_gradient(loop, parts.of_output, position)


def _move(loop: Loop, operator: caffe2_pb2.OperatorDef, position: int) -> List[str]:
    """Add the gradient operator over all steps, after the loop; gives the outer blobs of its two shares."""
    parts = _parts(operator)
    inputs, outputs = _values(loop, parts, position)
    assert isinstance(inputs, OverSteps) and isinstance(outputs, OverSteps)
    outer_input = inputs.take(lambda: _row_of(loop, parts.weights, operator))
    outer_output = outputs.take(lambda: _column_of(loop, parts.weights, operator))
    shares = [loop.new_blob(parts.weights + "_grad_over_steps"), loop.new_blob(parts.weights + "_bias_grad_over_steps")]
    moved = copied(operator)
    if operator.type == FC_GRADIENT:
        moved.input[:] = [outer_input, parts.weights, outer_output]
        moved.output[:] = shares
    else:
        moved.input[:] = [outer_output, outer_input, parts.weights]
        moved.output[:] = [loop.new_blob(parts.input + "_grad_over_steps"), *shares]
    if loop.forward.HasField("device_option"):
        # A step net need not say where its operators run.
        moved.device_option.CopyFrom(loop.forward.device_option)
    loop.after_gradient.append(moved)
    return shares


def _finish(loop: Loop, outer_shares: List[str], parameter: Parameter) -> None:
    """Give the gradient its name; what is the only share of it is written there at once."""
    if len(outer_shares) > 1:
        loop.after_gradient.append(new_operator("Sum", outer_shares, [parameter.outer_gradient], loop.forward))
        return
    for moved in loop.after_gradient:
        dataflow.rename(moved, outer_shares[0], parameter.outer_gradient)


def _inside(operator: caffe2_pb2.OperatorDef) -> List[caffe2_pb2.OperatorDef]:
    """What is left of a gradient operator in the step: the gradient of its input."""
    parts = _parts(operator)
    if parts.of_input is None:
        return []
    if operator.type == FC_GRADIENT:
        inputs = [parts.of_output, parts.weights]
        return [new_operator("BatchMatMul", inputs, [parts.of_input], operator, broadcast=1)]
    return [new_operator("Mul", [parts.of_output, parts.weights], [parts.of_input], operator)]


def _row_of(loop: Loop, weights: str, operator: caffe2_pb2.OperatorDef) -> str:
    """An outer blob `[K]` for weights `[M, K]`, or for weights `[K]` these themselves."""
    if operator.type != FC_GRADIENT:
        return weights
    row = loop.add_before("Slice", [weights], weights + "_first_row", starts=[0, 0], ends=[1, -1])
    return loop.add_before("Squeeze", [row], weights + "_row", dims=[0])


def _column_of(loop: Loop, weights: str, operator: caffe2_pb2.OperatorDef) -> str:
    """An outer blob `[M]` for weights `[M, K]`, or for weights `[M]` these themselves."""
    if operator.type != FC_GRADIENT:
        return weights
    column = loop.add_before("Slice", [weights], weights + "_first_column", starts=[0, 0], ends=[-1, 1])
    return loop.add_before("Squeeze", [column], weights + "_column", dims=[1])
