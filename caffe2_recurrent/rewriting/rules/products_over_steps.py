"""Products over all steps, outside of the loop, by oneDNN, where that is faster than MKL's; it is tried out."""

import functools
from typing import Dict, Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting import onednn, trial
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.onednn import in_a_net
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.step_products import GAIN, weights_shape
from caffe2_recurrent.sizes import Shape, Sizes

PRODUCT, GRADIENT = "FC", "FCGradient"
# Multiplications in a trial; with more rows, time is in proportion to them.
ENOUGH = 5e8

Operators = List[caffe2_pb2.OperatorDef]


class ProductsOverSteps(Rule):
    """before or after the loop: Y = FC(X, W, b),    dW, db, dX = FCGradient(X, W, dY)

    =>  the inputs copied to oneDNN's memory, the product there, the outputs copied back

    It is about products that another rule has moved out of the loop, and those of the net whose result is a sequence of
    the loop. What they are copied to is one blob for each width, as they never are there at the same time.
    """

    name = "products_over_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in (loop.before, loop.after_gradient, *loop.around.values()):
            for position, operator in enumerate(operators):
                on_cpu = operator.device_option.device_type == caffe2_pb2.CPU
                if operator.type in (PRODUCT, GRADIENT) and on_cpu:
                    blobs = ", ".join("'{}'".format(blob) for blob in operator.output)
                    yield Site("{} -> {}".format(operator.type, blobs), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if onednn.is_missing():
            return "this Caffe2 has no oneDNN"
        operators, position = site.where
        operator = operators[position]
        weights = operator.input[1]
        shape = weights_shape(loop, weights, sizes)
        if shape is None:
            return "the size of its weights '{}' is not known; give shapes".format(weights)
        if len(shape) != 2 or integer(operator, "axis_w", 1) != 1:
            return "its weights '{}' are laid out in another way".format(weights)
        axis = integer(operator, "axis", 1)
        return None if axis > 0 else "its axis {} is not counted from the first dimension on, from 1".format(axis)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps, batch = sizes.steps(loop), sizes.batch(loop)
        if steps is None or batch is None:
            return "the numbers of steps and sequences are not known; give shapes"
        operators, position = site.where
        operator = operators[position]
        outer, inner = _shape(loop, operator, sizes)
        tried = min(steps * batch, max(batch, int(ENOUGH / (outer * inner))))
        results = len(operator.output)
        if GAIN * _seconds(operator.type, tried, inner, outer, results, True) > _seconds(
            operator.type, tried, inner, outer, results, False
        ):
            return "for [{0}, {1}] x [{1}, {2}] oneDNN is not faster".format(steps * batch, inner, outer)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        outer, inner = _shape(loop, operators[position], sizes)
        operators[position : position + 1] = in_a_net(_by_onednn(loop, operators[position], inner, outer), loop)


def _shape(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> List[int]:
    shape = weights_shape(loop, operator.input[1], sizes)
    assert shape is not None
    return list(shape)


def _by_onednn(loop: Loop, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> Operators:
    emitter = Emitter(loop, operator, operator.output[0])
    (_emit_product if operator.type == PRODUCT else _emit_gradient)(emitter, operator, inner, outer)
    return emitter.operators


def _emit_product(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> None:
    rows, weights, bias = operator.input
    # The shape of the result is what is in front of the features in that of the rows, and the number of outputs.
    leading = emitter.new("Shape", [rows], "leading", axes=list(range(integer(operator, "axis", 1))))
    last = emitter.new("GivenTensorInt64Fill", [], "last", shape=[1], values=[outer])
    shape = emitter.concat([leading, last], "shape", 0)
    inputs = [
        _copy_there(emitter, rows, _scratch(emitter, "rows", inner), inner),
        _copy_there(emitter, weights, emitter.blob("weights")),
        _copy_there(emitter, bias, emitter.blob("bias")),
    ]
    multiplied = onednn.add(emitter, "FC", inputs, [_scratch(emitter, "result", outer)], training_mode=1)
    _copy_back(emitter, multiplied, operator.output[0], shape)


def _emit_gradient(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> None:
    rows, weights, of_result = operator.input
    inputs = [
        _copy_there(emitter, rows, _scratch(emitter, "rows", inner), inner),
        _copy_there(emitter, weights, emitter.blob("weights")),
        _copy_there(emitter, of_result, _scratch(emitter, "result", outer), outer),
    ]
    shares = [emitter.blob("of_weights"), emitter.blob("of_bias")]
    of_rows = [_scratch(emitter, "gradient", inner) for _ in operator.output[2:]]
    onednn.add(emitter, "FCGradient", inputs, shares + of_rows)
    for source, blob in zip(shares, operator.output):
        _copy_back(emitter, source, blob)
    for source, blob in zip(of_rows, operator.output[2:]):
        _copy_back(emitter, source, blob, emitter.new("Shape", [rows], "shape_of_rows"))


def _scratch(emitter: Emitter, role: str, width: int) -> str:
    """The blob of oneDNN for what has this role, `[T * N, width]`; the loop has one of each."""
    made, key = emitter.loop.made, ("onednn", role, width)
    if key not in made:
        made[key] = emitter.loop.new_blob("onednn_{}_of_{}".format(role, width))
    return made[key]


def _copy_there(emitter: Emitter, blob: str, target: str, width: Optional[int] = None) -> str:
    """`blob` in oneDNN's memory, as rows of `width` elements."""
    onednn.add(emitter, onednn.TO, [blob], [target])
    if width is not None:
        onednn.add(emitter, "Reshape", [target], [target, emitter.blob("old_shape")], shape=[-1, width])
    return target


def _copy_back(emitter: Emitter, source: str, blob: str, shape: Optional[str] = None) -> None:
    """`blob` from oneDNN's memory, in the shape that the blob `shape` says."""
    onednn.add(emitter, onednn.FROM, [source], [blob])
    if shape is not None:
        outputs = [blob, emitter.blob("old_shape")]
        emitter.operators.append(new_operator("Reshape", [blob, shape], outputs, emitter.beside))


def _seconds(kind: str, rows: int, inner: int, outer: int, results: int, by_onednn: bool) -> float:
    """The time of such a product by itself."""
    found: Dict[bool, trial.Seconds] = _tried(kind, rows, inner, outer, results)
    return found[by_onednn].step


@trial.remembered
def _tried(kind: str, rows: int, inner: int, outer: int, results: int) -> Dict[bool, trial.Seconds]:
    time = functools.partial(_time, kind, rows, inner, outer, results)
    return trial.in_turn({by_onednn: functools.partial(time, by_onednn) for by_onednn in (False, True)})


def _time(kind: str, rows: int, inner: int, outer: int, results: int, by_onednn: bool) -> trial.Seconds:
    third: Dict[str, Shape] = {"b": (outer,)} if kind == PRODUCT else {"dy": (rows, outer)}
    shapes: Dict[str, Shape] = {"x": (rows, inner), "w": (outer, inner), **third}
    outputs = ["y"] if kind == PRODUCT else ["dw", "db", "dx"][:results]
    operator = caffe2_pb2.OperatorDef(type=kind, input=list(shapes), output=outputs)
    if not by_onednn:
        return trial.seconds([operator], shapes)
    loop = trial.lone_loop([*shapes, *outputs])
    return trial.seconds(in_a_net(_by_onednn(loop, operator, inner, outer), loop), shapes)
