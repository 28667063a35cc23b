"""The shapes of a step's blobs as its operators see them, as far as they are known."""

import functools
from typing import Dict, Iterable, Mapping, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import State
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operators import copied, gradient_name, outputs_of
from caffe2_recurrent.rewriting.steps.rows import (
    ALONG_FEATURES,
    BINARY,
    DIMENSIONS,
    ELEMENTWISE,
    UNITS,
    with_rows,
)
from caffe2_recurrent.wiring import Link

Shapes = Dict[str, Shape]
# What ends the name of a blob after an operator, beside that of the one before.
NEW = " after"
# Of floats: the first output, or all. Others may have masks or sizes beside them.
GIVING_SEVERAL = UNITS | {"Split"}
GIVING_FLOATS = frozenset(
    ["Abs", "BatchMatMul", "Clip", "Concat", "Cos", "Dropout", "Elu", "Exp", "ExpandDims", "LeakyRelu", "Log", "MatMul"]
    + ["Max", "Min", "Pow", "Reshape", "SigmoidGradient", "Sin", "Softplus", "Softsign", "Sqr", "Sqrt", "Squeeze"]
    + ["Swish", "TanhGradient", "Transpose", "WeightedSum"]
).union(ELEMENTWISE, BINARY, ALONG_FEATURES, UNITS)
# Of a blob and its shape, where a rule depends on a 1 in it that is one by chance; see `Sizes.when_larger`.
MAY_BE_LARGER = "'{}' {} may be larger in another run, as nothing says that it is a parameter"


def shapes_before(loop: Loop, sizes: Sizes, operators: Sequence[caffe2_pb2.OperatorDef], position: int) -> Shapes:
    """Those that blobs have in front of the operator at `position` of the step or, as `operators` says, backward step.

    They change on the way: operators may work in place, and what is written to a slice need not be shaped like it.
    """
    outer = sizes.made_by(loop.before)
    rows = _rows(loop, sizes.batch(loop))
    slices = {**_slices(loop, sizes.batch(loop), outer, loop.links), **rows}
    found: Shapes = {**outer, **slices}
    old: Shapes = {}
    if operators is loop.operators:
        return _after(operators[:position], found, slices, old)
    assert loop.gradient is not None
    found = _after(loop.operators, found, slices, old)
    slices = {**_slices_of_gradient(loop, sizes.batch(loop), outer), **rows}
    return _after(operators[:position], {**found, **slices}, slices, old)


def shapes_written(loop: Loop, sizes: Sizes) -> Shapes:
    """Those of what both steps have written in the end, slices among it as its last operator has left them."""
    outer = sizes.made_by(loop.before)
    batch = sizes.batch(loop)
    rows = _rows(loop, batch)
    old: Shapes = {}
    found = _after(loop.operators, {**outer, **rows, **_slices(loop, batch, outer, loop.links)}, rows, old)
    if loop.gradient is None:
        return found
    # The engine shows the backward step slices as they are, in whatever shape the step has written them.
    made = _after(loop.gradient.operators, {**found, **_slices_of_gradient(loop, batch, outer)}, rows, old)
    of_forward = {*outputs_of(loop.operators)}.difference(outputs_of(loop.gradient.operators))
    in_the_end = {blob: shape for blob, shape in made.items() if blob not in of_forward}
    return {**in_the_end, **{blob: found[blob] for blob in of_forward if blob in found}}


def other_shapes(loop: Loop, sizes: Sizes) -> Set[str]:
    """The slices that a step is known to write in another shape than they have."""
    outer, batch = sizes.made_by(loop.before), sizes.batch(loop)
    slices = _slices(loop, batch, outer, loop.links)
    found = _after(loop.operators, {**outer, **_rows(loop, batch), **slices}, {}, {})
    linked = {link.inner for link in loop.written_links}
    return {blob for blob in linked if blob in found and blob in slices and found[blob] != slices[blob]}


def columns(loop: Loop, sizes: Sizes) -> Dict[str, int]:
    """k of the blobs that a step computes and that are known to be floats `[1, N, k]` in the end.

    Where N is 1, or k is N, numbers do not tell: these may be other axes, and others in a run of another N.
    """
    batch = sizes.batch(loop)
    if batch is None:
        return {}
    found = shapes_before(loop, sizes, loop.operators, len(loop.operators))
    shaped = {blob: found[blob] for blob in _floats(loop).intersection(found) if len(found[blob]) == DIMENSIONS}
    candidates = {blob: shape[-1] for blob, shape in shaped.items() if shape[:-1] == (1, batch)}
    rows = loop.known.rows | with_rows(loop, sizes)
    return {blob: k for blob, k in candidates.items() if blob in rows or 1 != batch != k}


def _floats(loop: Loop) -> Set[str]:
    """The blobs that a step computes of slices, which are floats, by operators that give no others then."""
    slices = {link.inner for link in loop.links}
    found: Set[str] = set()
    for operator in loop.operators:
        # What is put together with floats has to be of floats too.
        gives = operator.type in GIVING_FLOATS and not (slices | found).isdisjoint(operator.input)
        outputs = operator.output if operator.type in GIVING_SEVERAL else operator.output[:1]
        found.difference_update(operator.output)
        found.update(outputs if gives else ())
    return found


def _slices(loop: Loop, batch: Optional[int], outer: Mapping[str, Shape], links: Iterable[Link]) -> Shapes:
    """`[1, N, k]` of states, `[1, ...]` of other blobs `[T, ...]` that are linked."""
    initial = {outer: state.outer_initial for state in loop.states for outer in _names_of(state)}
    found: Shapes = {}
    for link in links:
        shape = outer.get(initial.get(link.outer, link.outer))
        if batch is not None and shape:
            found[link.inner] = (1, batch, shape[-1]) if link.outer in initial else (1, *shape[1:])
    return found


def _slices_of_gradient(loop: Loop, batch: Optional[int], outer: Mapping[str, Shape]) -> Shapes:
    """Those that the backward step sees of both passes."""
    assert loop.gradient is not None
    return _slices(loop, batch, outer, [*loop.gradient.links, *loop.gradient.backward_links])


def _rows(loop: Loop, batch: Optional[int]) -> Shapes:
    return {} if batch is None else {blob: (1, batch, k) for blob, k in loop.known.always_rows.items()}


def _names_of(state: State) -> Sequence[str]:
    # The engine calls the gradient of a state so.
    return state.outer_states, gradient_name(state.outer_states)


def _after(
    operators: Sequence[caffe2_pb2.OperatorDef], known: Mapping[str, Shape], slices: Shapes, old: Shapes
) -> Shapes:
    """Behind `operators`; what these write to `slices` in a way that is not known leaves their shape.

    `old` are, by the second output of a Reshape, the shapes of what it was given, which its gradient goes back to.
    """
    found = dict(known)
    for operator in operators:
        # Rules ask for the same again and again.
        inputs = tuple((blob, found[blob]) for blob in operator.input if blob in found)
        made = _made(operator.SerializeToString(), inputs)
        if operator.type == "Reshape":
            made = {**made, **_reshaped(operator, found, old)}
        for blob in operator.output:
            if blob in made:
                found[blob] = made[blob]
            elif blob not in slices:
                found.pop(blob, None)
    return found


def _reshaped(operator: caffe2_pb2.OperatorDef, known: Shapes, old: Shapes) -> Shapes:
    """What it goes back to, if it does; and note what its own result can go back to."""
    back = old.get(operator.input[1]) if len(operator.input) > 1 else None
    for blob in operator.output[1:]:
        old.pop(blob, None)
        if operator.input[0] in known:
            old[blob] = known[operator.input[0]]
    return {} if back is None else {operator.output[0]: back}


@functools.lru_cache(maxsize=4096)
def _made(serialized: bytes, shapes: Tuple[Tuple[str, Shape], ...]) -> Mapping[str, Shape]:
    """The shapes of the outputs, as far as they are known."""
    operator, inputs = caffe2_pb2.OperatorDef.FromString(serialized), dict(shapes)
    is_in_place = not set(operator.output).isdisjoint(operator.input)
    named = _with_new_outputs(operator) if is_in_place else operator
    found = Sizes(inputs).made_by([named])
    return {blob: found[new] for blob, new in zip(operator.output, named.output) if new in found}


def _with_new_outputs(operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """So that what is not known of an operator that works in place is not taken from its input."""
    changed = copied(operator)
    changed.output[:] = [blob + NEW for blob in operator.output]
    return changed
