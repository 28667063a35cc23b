"""A factor on a product plus something, both linear in slices of sequences, taken into the vectors of these."""

from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import SUM
from caffe2_recurrent.rewriting.elementwise.scaling import scalings, why_not_by_vectors
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.addends import is_needed
from caffe2_recurrent.rewriting.steps.rows import FEATURES, with_rows

LINEAR = "ElementwiseLinear"


class Form(NamedTuple):
    """The positions of the operators of `Z = shift + scale * (factor * U + addend)`, and the blob U."""

    factor: int
    multiplying: int
    addend: int
    adding: int
    scaling: int
    multiplied: str


class ScaledVectors(Rule):
    """step: F = ElementwiseLinear(X, a, b);  R = ElementwiseLinear(Y, c, d);  Z = shift + scale * Sum(Mul(F, U), R)

    =>  before the loop: vectors scale * a, scale * b, scale * c, and scale * d + shift
        step: F, R likewise, of these;  Z = R + F * U

    Two passes over `[N, M]` less. Nothing else may read F, R, or what becomes of them, so a backward step that needs F
    for the gradient of U keeps it as it is. This is how an MILSTM comes by its gates.
    """

    name = "scaled_vectors"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for scaling in scalings(loop):
            adding = _adding(loop, scaling)
            if adding is not None:
                yield Site("Sum -> '{}'".format(loop.operators[scaling].input[1]), (scaling, adding))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        form = _form(loop, *site.where)
        if form is None:
            return "it adds up something else than products with what {} makes, and what it makes".format(LINEAR)
        vectors = [blob for position in (form.factor, form.addend) for blob in loop.operators[position].input[1:]]
        reason = why_not_by_vectors(loop, form.scaling, sizes, vectors)
        if reason is not None:
            return reason
        needed = _needed_elsewhere(loop, form)
        if needed is not None:
            return "'{}' is needed elsewhere too".format(needed)
        by_then = loop.operators[form.multiplying : form.scaling + 1]
        if any(form.multiplied in operator.output for operator in by_then):
            return "'{}' is overwritten by the time that the sum is scaled".format(form.multiplied)
        rows = with_rows(loop, sizes)
        for position in (form.factor, form.addend):
            blob = loop.operators[position].output[0]
            if blob not in rows:
                return "'{}' is not known to have one row for each sequence".format(blob)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        form = _form(loop, *site.where)
        assert form is not None
        scaling = loop.operators[form.scaling]
        shift, _, scale = scaling.input
        factor = _scaled(loop, loop.operators[form.factor], scale, None)
        addend = _scaled(loop, loop.operators[form.addend], scale, shift)
        scaling.input[:] = [addend, factor, form.multiplied]
        for position in sorted((form.multiplying, form.adding), reverse=True):
            del loop.operators[position]


def _adding(loop: Loop, scaling: int) -> Optional[int]:
    """The position of the `Sum` of two that is scaled, if one of its addends is a `Mul`."""
    adding = dataflow.writer(loop.operators, loop.operators[scaling].input[1], scaling)
    if adding is None or loop.operators[adding].type != SUM or len(loop.operators[adding].input) != 2:
        return None
    made_by = [dataflow.writer(loop.operators, blob, adding) for blob in loop.operators[adding].input]
    # Without arguments it repeats a smaller factor as ATen does.
    products = [loop.operators[position] for position in made_by if position is not None]
    return adding if any(operator.type == "Mul" and not operator.arg for operator in products) else None


def _form(loop: Loop, scaling: int, adding: int) -> Optional[Form]:
    """How the operator at `scaling` comes by its result, if it is linear in slices as the rule says."""
    for product, other in _both_orders(loop.operators[adding].input):
        multiplying = dataflow.writer(loop.operators, product, adding)
        addend = _linear(loop, other, adding)
        if multiplying is None or addend is None or loop.operators[multiplying].type != "Mul":
            continue
        for one, multiplied in _both_orders(loop.operators[multiplying].input):
            factor = _linear(loop, one, multiplying)
            if factor is not None and multiplied != one:
                return Form(factor, multiplying, addend, adding, scaling, multiplied)
    return None


def _both_orders(blobs: Sequence[str]) -> List[Tuple[str, str]]:
    first, second = blobs
    return [(first, second), (second, first)]


def _linear(loop: Loop, blob: str, before: int) -> Optional[int]:
    """The position of the operator that makes `blob`, if it is linear with vectors that are the same in all steps."""
    position = dataflow.writer(loop.operators, blob, before)
    return position if position is not None and _is_linear(loop, loop.operators[position]) else None


def _needed_elsewhere(loop: Loop, form: Form) -> Optional[str]:
    """A blob on the way from the vectors to the result that something else reads too."""
    way = [
        (form.factor, form.multiplying),
        (form.addend, form.adding),
        (form.multiplying, form.adding),
        (form.adding, form.scaling),
    ]
    for making, reading in way:
        blob = loop.operators[making].output[0]
        if dataflow.readers(loop.operators, blob, making) != [reading] or is_needed(loop, blob):
            return blob
    return None


def _is_linear(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    along_features = operator.type == LINEAR and integer(operator, "axis", 1) == FEATURES
    return along_features and loop.references.issuperset(operator.input[1:])


def _scaled(loop: Loop, operator: caffe2_pb2.OperatorDef, scale: str, shift: Optional[str]) -> str:
    """Let `operator` compute `shift + scale` times what it does, in a blob of its own, which is given."""
    _, weights, bias = operator.input
    operator.input[1] = loop.add_before("Mul", [weights, scale], weights + "_scaled")
    if shift is None:
        operator.input[2] = loop.add_before("Mul", [bias, scale], bias + "_scaled")
    else:
        operator.input[2] = loop.add_before(ATEN, [shift, bias, scale], bias + "_scaled", operator="addcmul")
    for outer in operator.input[1:]:
        loop.add_reference(outer)
    operator.output[0] = loop.new_blob(operator.output[0] + "_scaled")
    if loop.gradient is not None:
        loop.shared.append(operator.output[0])
    return operator.output[0]
