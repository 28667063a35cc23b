"""Parameter gradients moved out of the loop."""

from typing import Dict, Iterable, List, Optional, Set, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Gradient, Loop
from caffe2_recurrent.loops.parts import Parameter
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.operators import SUM, new_operator
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.sequences.over_steps import OverSteps, of_forward, of_gradient, vector_along
from caffe2_recurrent.rewriting.steps import dataflow, gradient_parts
from caffe2_recurrent.rewriting.steps.gradient_parts import FC_GRADIENT, Parts
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES, repeats, with_rows
from caffe2_recurrent.rewriting.steps.step_shapes import MAY_BE_LARGER, other_shapes, shapes_before


class ParameterGradients(Rule):
    """backward step: dW, db, dX = FCGradient(X, W, dY), and the engine adds up dW and db over the steps

    =>  backward step: dX = BatchMatMul(dY, W)
        after the loop: dW, db = FCGradient(X of all steps, W, dY of all steps)

    The same for ElementwiseLinearGradient, where dX = Mul(dY, W), and for the gradients of Add, Sub and Mul with a
    parameter that they repeat, see `gradient_parts.py`. X and dY must have a row for each sequence. Where several such
    operators share a parameter, all of them move, and the sum of their shares too.
    """

    name = "parameter_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for group in _groups(loop):
            first, *_ = group.values()
            blobs = ", ".join("'{}'".format(share) for parts in group.values() for share in parts.shares)
            yield Site("{} -> {}".format(first.operator.type, blobs), group)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        rows = with_rows(loop, sizes)
        for position, parts in site.where.items():
            reason = _refusal(loop, sizes, parts, position, rows)
            if reason is not None:
                return reason
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None
        group: Dict[int, Parts] = site.where
        shares: Dict[Parameter, List[str]] = {}
        spent: List[int] = []
        for position, parts in group.items():
            outer_shares = _move(loop, sizes, parts, position)
            for share, outer_share in zip(parts.shares, outer_shares):
                destination = _destination(gradient, share)
                assert destination is not None
                parameter, addition = destination
                shares.setdefault(parameter, []).append(outer_share)
                spent += [] if addition is None else [addition]
        for parameter, outer_shares in shares.items():
            _finish(loop, outer_shares, parameter)
            gradient.parameters.remove(parameter)
        # Those of blobs that have rows.
        loop.known.rows.update(parts.of_output for parts in group.values())
        kept: List[caffe2_pb2.OperatorDef] = []
        for position, operator in enumerate(gradient.operators):
            if position in group:
                kept += gradient_parts.of_input(group[position])
            elif position not in spent:
                kept.append(operator)
        gradient.operators[:] = kept


def _groups(loop: Loop) -> List[Dict[int, Parts]]:
    """The gradient operators that can be about parameters, by position; those whose shares meet in one sum together."""
    gradient = loop.gradient
    if gradient is None:
        return []
    groups: List[List[int]] = []
    destinations: List[set] = []
    every = _all_parts(loop)
    for position, parts in every.items():
        own = [_destination(gradient, share) for share in parts.shares]
        own_parameters = {destination[0] for destination in own if destination is not None}
        meeting = [index for index, other in enumerate(destinations) if own_parameters & other]
        joined = sorted([position, *(member for index in meeting for member in groups[index])])
        parameters = own_parameters.union(*(destinations[index] for index in meeting))
        groups = [group for index, group in enumerate(groups) if index not in meeting] + [joined]
        destinations = [other for index, other in enumerate(destinations) if index not in meeting] + [parameters]
    return [{position: every[position] for position in group} for group in groups]


def _all_parts(loop: Loop) -> Dict[int, Parts]:
    """Those of the gradient operators that are about parameters, by their positions."""
    assert loop.gradient is not None
    fixed = loop.references
    found = {position: gradient_parts.read(made, fixed) for position, made in enumerate(loop.gradient.operators)}
    return {position: parts for position, parts in found.items() if parts is not None}


def _destination(gradient: Gradient, share: str) -> Optional[Tuple[Parameter, Optional[int]]]:
    """The parameter whose gradient `share` is or is added to; in the second case, the position of the Sum."""
    reading = [position for position, operator in enumerate(gradient.operators) if share in operator.input]
    for parameter in gradient.parameters:
        if parameter.inner_gradient == share and not reading:
            return parameter, None
        if len(reading) == 1:
            addition = gradient.operators[reading[0]]
            if addition.type == SUM and list(addition.output) == [parameter.inner_gradient]:
                return parameter, reading[0]
    return None


def _refusal(loop: Loop, sizes: Sizes, parts: Parts, position: int, rows: Set[str]) -> Optional[str]:
    gradient = loop.gradient
    assert gradient is not None
    operator = parts.operator
    along_features = integer(operator, "axis", 1) == FEATURES and integer(operator, "axis_w", 1) == 1
    if not (parts.is_by_element or along_features):
        return "it works along another axis than the last of [1, N, K]"
    if not loop.is_reference(parts.weights):
        return "'{}' is not the same in all steps".format(parts.weights)
    if operator.type == FC_GRADIENT:
        shape = weights_shape(loop, parts.weights, sizes)
        if shape is not None and len(shape) != 2:
            return "'{}' has {} dimensions".format(parts.weights, len(shape))
    if parts.input not in rows:
        return "'{}' is not known to have one row for each sequence".format(parts.input)
    reason = _why_no_rows_of_gradient(loop, sizes, parts, position)
    if reason is not None:
        return reason
    if parts.is_by_element:
        reason = _refusal_by_element(loop, sizes, parts, position)
        if reason is not None:
            return reason
    for share in parts.shares:
        destination = _destination(gradient, share)
        if destination is None:
            return "'{}' is used for something else than the gradient of a parameter".format(share)
        parameter, addition = destination
        if addition is not None:
            movable = {share for other in _all_parts(loop).values() for share in other.shares}
            if not movable.issuperset(gradient.operators[addition].input):
                return "the gradient of '{}' is also made of something that stays in the loop".format(parameter.outer)
    for found in _values(loop, parts, position):
        if isinstance(found, str):
            return found
    return None


def _why_no_rows_of_gradient(loop: Loop, sizes: Sizes, parts: Parts, position: int) -> Optional[str]:
    """dY is shaped like Y, but where it comes of a slice that steps write in another shape than the engine shows."""
    assert loop.gradient is not None
    others = other_shapes(loop, sizes)
    if not others:
        return None
    shape = shapes_before(loop, sizes, loop.gradient.operators, position).get(parts.of_output)
    if shape is None:
        text = "the shape of '{}' is not known, and steps write '{}' in another shape than its slice has"
        return text.format(parts.of_output, min(others))
    if len(shape) == DIMENSIONS and shape[:-1] == (1, sizes.batch(loop)):
        return None
    text = "'{}' {} has not one row for each sequence: steps write '{}' in another shape than its slice has"
    return text.format(parts.of_output, shape, min(others))


def _refusal_by_element(loop: Loop, sizes: Sizes, parts: Parts, position: int) -> Optional[str]:
    assert loop.gradient is not None
    shapes = shapes_before(loop, sizes, loop.gradient.operators, position)
    for blob in (parts.input, parts.weights):
        if blob not in shapes:
            return "the shape of '{}' is not known; give shapes".format(blob)
    rows, weights = shapes[parts.input], shapes[parts.weights]
    if not repeats(weights, rows):
        return "'{}' is not as wide as the rows of '{}', or is not repeated: {} and {}".format(
            parts.weights, parts.input, weights, rows
        )
    last = len(rows) - len(weights)
    if integer(parts.operator, "axis", last) != last or argument(parts.operator, "axis_str") is not None:
        return "'{}' is not repeated along the last axis of '{}'".format(parts.weights, parts.input)
    larger = shapes_before(loop, sizes.when_larger(), loop.gradient.operators, position)
    if not (parts.weights in larger and parts.input in larger and repeats(larger[parts.weights], larger[parts.input])):
        return MAY_BE_LARGER.format(parts.weights, weights)
    if parts.of_input == parts.of_output and gradient_parts.of_input(parts):
        return "it writes over '{}'".format(parts.of_output)
    return None


def _values(loop: Loop, parts: Parts, position: int) -> Tuple[Union[OverSteps, str], Union[OverSteps, str]]:
    of_output = of_gradient(loop, parts.of_output, position)
    return of_forward(loop, parts.input) if parts.reads_input else of_output, of_output


def _move(loop: Loop, sizes: Sizes, parts: Parts, position: int) -> List[str]:
    """Add the gradient operator over all steps, after the loop; gives the outer blobs of its shares."""
    inputs, outputs = _values(loop, parts, position)
    assert isinstance(inputs, OverSteps) and isinstance(outputs, OverSteps)
    outer_output = outputs.take(lambda: _sized(loop, sizes, parts, 0))
    outer_input = inputs.take(lambda: _sized(loop, sizes, parts, 1)) if parts.reads_input else outer_output
    stems = ["_grad_over_steps", "_bias_grad_over_steps"][: len(parts.shares)]
    shares = [loop.new_blob(parts.weights + stem) for stem in stems]
    is_vector = len(weights_shape(loop, parts.weights, sizes) or ()) == 1
    moved = gradient_parts.of_shares(
        parts, outer_input, outer_output, shares, lambda: loop.new_blob(parts.input + "_grad_over_steps"), is_vector
    )
    if loop.forward.HasField("device_option"):
        # A step net need not say where its operators run.
        moved.device_option.CopyFrom(loop.forward.device_option)
    loop.after_gradient.append(moved)
    return shares


def _finish(loop: Loop, outer_shares: List[str], parameter: Parameter) -> None:
    """Give the gradient its name; what is the only share of it is written there at once."""
    if len(outer_shares) > 1:
        loop.after_gradient.append(new_operator(SUM, outer_shares, [parameter.outer_gradient], loop.forward))
        return
    for moved in loop.after_gradient:
        dataflow.rename(moved, outer_shares[0], parameter.outer_gradient)


def _sized(loop: Loop, sizes: Sizes, parts: Parts, axis: int) -> str:
    """An outer blob as long as weights `[M, K]` along an axis; for operators by element, as these are wide."""
    if parts.operator.type == FC_GRADIENT:
        return vector_along(loop, parts.weights, axis, 2)
    dimensions = len(weights_shape(loop, parts.weights, sizes) or (1,))
    return vector_along(loop, parts.weights, dimensions - 1, dimensions)
