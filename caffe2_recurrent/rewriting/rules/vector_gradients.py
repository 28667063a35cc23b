"""Gradients of vectors over all steps, by operators that are faster at it; it is tried out."""

import functools
from typing import Dict, Iterable, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products.gradients_apart import sums_of_columns
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps.gradient_parts import ELEMENTWISE_LINEAR_GRADIENT
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# In parts it must be faster by this factor.
GAIN = 1.02
# Elements in a trial.
ENOUGH = 1e7


class Size(NamedTuple):
    """`rows` rows of `columns` elements; `is_read`: whether something reads the gradient of the rows."""

    rows: int
    columns: int
    is_read: bool


class VectorGradients(Rule):
    """after the loop: dX, dw, db = ElementwiseLinearGradient(dY, X, w)

    =>  dw = MatMul(1', Mul(dY, X));  db = MatMul(1', dY);  and dX = Mul(dY, w) where something reads it

    It is about operators that `parameter_gradients` has moved out of the loop. They take one element after the other,
    in one thread, and always make dX.

    Source: caffe2/operators/elementwise_linear_op.cc.
    """

    name = "vector_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.after_gradient):
            if operator.type == ELEMENTWISE_LINEAR_GRADIENT:
                what = ", ".join("'{}'".format(blob) for blob in operator.output[1:])
                yield Site("{} -> {}".format(operator.type, what), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operator = loop.after_gradient[site.where]
        steps, batch, weights = sizes.steps(loop), sizes.batch(loop), sizes.shape(operator.input[2])
        if steps is None or batch is None or weights is None:
            return "the numbers of steps and sequences are not known; give shapes"
        rows = trial.rows_to_try(steps * batch, 1, weights[0], ENOUGH)
        found = _tried(Size(rows, weights[0], _is_read(loop, operator)))
        if GAIN * found[True].step > found[False].step:
            return "for {} rows of {} elements it is not faster".format(steps * batch, weights[0])
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.after_gradient[site.where]
        emitter = Emitter(loop, operator, operator.output[1])
        _emit(emitter, operator, _is_read(loop, operator))
        loop.after_gradient[site.where : site.where + 1] = emitter.operators


def _is_read(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the gradient of its rows is; the net knows it by a name if it is that of the sequence."""
    assert loop.gradient is not None
    of_rows = operator.output[0]
    return of_rows == loop.gradient.sequence or any(of_rows in other.input for other in loop.after_gradient)


def _emit(emitter: Emitter, operator: caffe2_pb2.OperatorDef, is_read: bool) -> None:
    of_result, rows, weights = operator.input
    of_rows, of_weights, of_bias = operator.output
    axis = integer(operator, "axis", 1)
    product = emitter.new("Mul", [of_result, rows], "product")
    sums_of_columns(emitter, product, axis, of_weights)
    sums_of_columns(emitter, of_result, axis, of_bias)
    if is_read:
        emitter.add("Mul", [of_result, weights], of_rows, broadcast=1)


# ---------------------------------------------------------------------------------------------------------- the trial


@trial.remembered
def _tried(size: Size) -> Dict[bool, Seconds]:
    """By whether it is in parts."""
    return trial.in_turn({apart: functools.partial(_subject, size, apart) for apart in (False, True)})


def _subject(size: Size, apart: bool) -> Subject:
    shapes = {"dy": (1, size.rows, size.columns), "x": (1, size.rows, size.columns), "w": (size.columns,)}
    operator = caffe2_pb2.OperatorDef(
        type=ELEMENTWISE_LINEAR_GRADIENT, input=["dy", "x", "w"], output=["dx", "dw", "db"]
    )
    operator.arg.add(name="axis", i=FEATURES)
    operators: List[caffe2_pb2.OperatorDef] = [operator]
    if apart:
        emitter = Emitter(trial.lone_loop([*operator.input, *operator.output]), operator, "dw")
        _emit(emitter, operator, size.is_read)
        operators = emitter.operators
    return Subject(operators, shapes)
