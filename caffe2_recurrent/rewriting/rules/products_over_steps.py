"""Products over all steps, outside of the loop, by oneDNN, where that is faster than MKL's; it is tried out."""

import functools
from typing import Dict, Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting import onednn, trial
from caffe2_recurrent.rewriting.onednn import in_a_net, on_onednn
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
                if operator.type in (PRODUCT, GRADIENT) and not is_on_onednn(operator):
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


class _Emitter:
    """Operators one behind the other, beside `beside`; new blobs get names of the loop."""

    def __init__(self, loop: Loop, beside: caffe2_pb2.OperatorDef) -> None:
        self.operators: Operators = []
        self._loop, self._beside = loop, beside

    def scratch(self, role: str, width: int) -> str:
        """The blob of oneDNN for what has this role, `[T * N, width]`."""
        key = ("onednn", role, width)
        if key not in self._loop.made:
            self._loop.made[key] = self._loop.new_blob("onednn_{}_of_{}".format(role, width))
        return self._loop.made[key]

    def blob(self, name: str) -> str:
        return self._loop.new_blob(name)

    def add(self, kind: str, inputs: List[str], outputs: List[str], **arguments: object) -> None:
        self.operators.append(new_operator(kind, inputs, outputs, self._beside, **arguments))

    def add_on_onednn(self, kind: str, inputs: List[str], outputs: List[str], **arguments: object) -> None:
        self.operators.append(on_onednn(new_operator(kind, inputs, outputs, self._beside, **arguments)))

    def copy_there(self, blob: str, target: str, width: Optional[int] = None) -> str:
        """`blob` in oneDNN's memory, as rows of `width` elements."""
        self.add_on_onednn(onednn.TO, [blob], [target])
        if width is not None:
            self.add_on_onednn("Reshape", [target], [target, self.blob(target + "_old_shape")], shape=[-1, width])
        return target

    def copy_back(self, source: str, blob: str, shape: Optional[str] = None) -> None:
        """`blob` from oneDNN's memory, in the shape that the blob `shape` says."""
        self.add_on_onednn(onednn.FROM, [source], [blob])
        if shape is not None:
            self.add("Reshape", [blob, shape], [blob, self.blob(blob + "_old_shape")])


def _by_onednn(loop: Loop, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> Operators:
    emitter = _Emitter(loop, operator)
    if operator.type == PRODUCT:
        _emit_product(emitter, operator, inner, outer)
    else:
        _emit_gradient(emitter, operator, inner, outer)
    return emitter.operators


def _emit_product(emitter: _Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> None:
    rows, weights, bias = operator.input
    (result,) = operator.output
    # That of the result is what is in front of the features in the shape of the rows, and the number of outputs.
    leading, last, shape = (emitter.blob(result + ending) for ending in ("_leading", "_last", "_shape"))
    emitter.add("Shape", [rows], [leading], axes=list(range(integer(operator, "axis", 1))))
    emitter.add("GivenTensorInt64Fill", [], [last], shape=[1], values=[outer])
    emitter.add("Concat", [leading, last], [shape, emitter.blob(shape + "_sizes")], axis=0)
    inputs = [
        emitter.copy_there(rows, emitter.scratch("rows", inner), inner),
        emitter.copy_there(weights, emitter.blob(weights + "_for_onednn")),
        emitter.copy_there(bias, emitter.blob(bias + "_for_onednn")),
    ]
    multiplied = emitter.scratch("result", outer)
    emitter.add_on_onednn("FC", inputs, [multiplied], training_mode=1)
    emitter.copy_back(multiplied, result, shape)


def _emit_gradient(emitter: _Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> None:
    rows, weights, of_result = operator.input
    inputs = [
        emitter.copy_there(rows, emitter.scratch("rows", inner), inner),
        emitter.copy_there(weights, emitter.blob(weights + "_for_onednn")),
        emitter.copy_there(of_result, emitter.scratch("result", outer), outer),
    ]
    scratch = [emitter.blob(blob + "_by_onednn") for blob in operator.output[:2]]
    scratch += [emitter.scratch("gradient", inner) for _ in operator.output[2:]]
    emitter.add_on_onednn("FCGradient", inputs, scratch)
    for source, blob in zip(scratch[:2], operator.output):
        emitter.copy_back(source, blob)
    for source, blob in zip(scratch[2:], operator.output[2:]):
        shape = emitter.blob(rows + "_shape")
        emitter.add("Shape", [rows], [shape])
        emitter.copy_back(source, blob, shape)


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
