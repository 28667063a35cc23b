"""What a step adds to a product of one row, as the bias of the product.

    step: Y = FC(h, W, b);  Z = Sum(Y, x_t)       =>   Z = FC(h, W, row),  where `row` is one of x + b
    backward step: dh = BatchMatMul(dz, W)        =>   dh = FCTransposed(dz, W, row),  where `row` is one of what comes
    before the next one: dh = Sum(dh, slice)           from outside

A bias is `[M]` where a link shows `[1, N, M]`. So this is for steps that are written out, and for one sequence.
"""

from typing import Dict, List, Mapping, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import RowBiases
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.backward_pass import state_gradients
from caffe2_recurrent.rewriting.products import step_products, sums
from caffe2_recurrent.rewriting.steps import dataflow, step_shapes
from caffe2_recurrent.rewriting.steps.addends import is_in_backward_step
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES, has_rows

Operators = List[caffe2_pb2.OperatorDef]


def found(loop: Loop, sizes: Sizes) -> RowBiases:
    """All such biases, if the batch is one sequence."""
    if sizes.batch(loop) != 1:
        return RowBiases({}, {})
    return RowBiases(_added(loop, sizes), _outgoing(loop, sizes) if loop.gradient is not None else {})


def of_sequences(loop: Loop) -> Dict[str, Optional[str]]:
    """The sequences whose rows are biases, by their outer blobs, with what is added to all rows first, if anything."""
    assert loop.unrolled is not None
    return {
        _sequence(loop, _addend(loop, *positions)): _bias(loop.operators[positions[0]])
        for positions in loop.unrolled.biases.added.items()
    }


def operators(loop: Loop) -> Operators:
    """Those of a step that is written out."""
    assert loop.unrolled is not None
    made = dict(enumerate(loop.operators))
    for multiplying, adding in loop.unrolled.biases.added.items():
        slice_, total = _addend(loop, multiplying, adding), made.pop(adding)
        made[multiplying] = _with_bias(loop.operators[multiplying], slice_, total.output[0])
    return list(made.values())


def gradient_operators(loop: Loop, from_outside: Mapping[str, str]) -> Operators:
    """Those of a backward step that another one follows; with what is added to the gradients of states, by these."""
    assert loop.gradient is not None and loop.unrolled is not None
    made = list(loop.gradient.operators)
    for outer, position in loop.unrolled.biases.outgoing.items():
        made[position] = _with_bias(made[position], from_outside[outer], made[position].output[0])
    return made


def _added(loop: Loop, sizes: Sizes) -> Dict[int, int]:
    made = {}
    for position, product in enumerate(loop.operators):
        if not _is_product(loop, product, sizes) or not has_rows(loop, product.input[0], sizes):
            continue
        adding = sums.sum_of(loop, loop.operators, position)
        if adding is not None and _shows_a_row(loop, _addend(loop, position, adding)):
            made[position] = adding
    return made


def _outgoing(loop: Loop, sizes: Sizes) -> Dict[str, int]:
    assert loop.gradient is not None
    made, operators = {}, loop.gradient.operators
    for of in state_gradients(loop).values():
        position = dataflow.writer(operators, of.outgoing)
        if of.of_all is None or position is None or dataflow.readers(operators, of.outgoing, position):
            continue
        product = operators[position]
        shape = step_shapes.shapes_before(loop, sizes, operators, position).get(product.input[0], ())
        if len(shape) == DIMENSIONS and _bias(product) is None and _is_product(loop, product, sizes):
            made[of.outer] = position
    return made


def _addend(loop: Loop, multiplying: int, adding: int) -> str:
    """What the Sum adds to the product."""
    (result,) = loop.operators[multiplying].output
    (addend,) = (blob for blob in loop.operators[adding].input if blob != result)
    return addend


def _bias(product: caffe2_pb2.OperatorDef) -> Optional[str]:
    return product.input[2] if len(product.input) > 2 else None


def _is_product(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> bool:
    """Whether it is a product with one matrix, the same in all steps, and a bias, if it has one, is so too."""
    if not step_products.is_with_weights(loop, operator) or not step_products.is_plain(operator):
        return False
    shape = step_products.weights_shape(loop, operator.input[1], sizes)
    return shape is not None and len(shape) == 2 and loop.references.issuperset(operator.input[1:])


def _shows_a_row(loop: Loop, blob: str) -> bool:
    """Whether it is a slice of a sequence of which steps see nothing else, and only the Sum in the step sees that."""
    link = loop.link(blob)
    if link is None or link.outer in {state.outer_states for state in loop.states}:
        return False
    # The backward step has the links of the step again, unless rules have taken them away.
    is_seen_once = {other.inner for other in loop.all_links if other.outer == link.outer} == {blob}
    is_read_once = len(dataflow.readers(loop.operators, blob)) == 1 and not is_in_backward_step(loop, blob)
    return is_seen_once and is_read_once and blob not in loop.written


def _sequence(loop: Loop, slice_: str) -> str:
    link = loop.link(slice_)
    assert link is not None
    return link.outer


def _with_bias(product: caffe2_pb2.OperatorDef, bias: str, result: str) -> caffe2_pb2.OperatorDef:
    kind = step_products.FC if step_products.has_weights_in_rows(product) else step_products.TRANSPOSED
    return new_operator(kind, [*product.input[:2], bias], [result], product, axis=FEATURES)
