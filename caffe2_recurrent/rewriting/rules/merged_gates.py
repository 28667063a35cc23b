"""Two products of one blob, to which two parts of a sequence are added, as one; it is tried out."""

import functools
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer, integers, set_arguments
from caffe2_recurrent.operators import copied, is_on_onednn, new_operator
from caffe2_recurrent.rewriting import dataflow, trial
from caffe2_recurrent.rewriting.addends import is_needed, products_at
from caffe2_recurrent.rewriting.emit import is_aten
from caffe2_recurrent.rewriting.rows import FEATURES
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.step_products import FC, weights_shape
from caffe2_recurrent.rewriting.subjects import Seconds, Subject
from caffe2_recurrent.rewriting.vectorised import SIGMOID, aten_name
from caffe2_recurrent.sizes import Shape, Sizes

SUM, SPLIT = "Sum", "Split"
# It must be faster by this factor, in the step and in what is done before the loop.
GAIN = 1.1

Operators = List[caffe2_pb2.OperatorDef]


class Gate(NamedTuple):
    """The positions of the operators of a gate: its product, the sum with the part `part` of what is split at
    `splitting`, and the sigmoid of that.
    """

    multiplying: int
    adding: int
    squashing: int
    splitting: int
    part: int


Gates = Tuple[Gate, Gate]


class MergedGates(Rule):
    """step: x_r, x_u, .. = Split(x_t);  r = sigmoid(FC(h, W, b) + x_r);  u = sigmoid(FC(h, V, c) + x_u)

    =>  before the loop: [W, V], [b, c]
        step: x_ru, .. = Split(x_t);  r, u = Split(sigmoid(FC(h, [W, V], [b, c]) + x_ru))

    As the gates of a GRU. The parts of x_t must be next to each other, and nothing else may see them or the sums.
    FCTransposed likewise.
    """

    name = "merged_gates"

    def sites(self, loop: Loop) -> Iterable[Site]:
        gates = list(_gates(loop))
        for first in gates:
            for second in gates:
                if (second.splitting, second.part) == (first.splitting, first.part + 1) and _alike(loop, first, second):
                    names = [loop.operators[gate.adding].output[0] for gate in (first, second)]
                    yield Site("Sum -> '{}', '{}'".format(*names), (first, second))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        widths = []
        for gate in site.where:
            weights = loop.operators[gate.multiplying].input[1]
            shape = weights_shape(loop, weights, sizes)
            if shape is None:
                return "the size of the weights '{}' is not known; give shapes".format(weights)
            if len(shape) != 2:
                return "the weights '{}' have {} dimensions".format(weights, len(shape))
            widths.append(_width(loop.operators[gate.multiplying], shape))
        splitting = loop.operators[site.where[0].splitting]
        if argument(splitting, "split") is None and widths[0] != widths[1]:
            return "parts of one width are added to products that are {} and {} wide".format(*widths)
        moved = _moved(loop, site.where)
        return None if moved is None else "'{}' is used in between".format(moved)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps, batch = sizes.steps(loop), sizes.batch(loop)
        if steps is None or batch is None:
            return "the numbers of steps and sequences are not known; give shapes"
        size = _size(loop, site.where, batch, sizes)
        found: Dict[bool, Seconds] = _tried(size)
        if GAIN * found[True].of_step(steps) > found[False].of_step(steps):
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {1} + {2}] it is not faster".format(size, *size.widths)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        _merge(loop, site.where, _widths(loop, site.where, sizes))


def _gates(loop: Loop) -> Iterator[Gate]:
    operators = loop.operators
    for adding, operator in enumerate(operators):
        if operator.type != SUM or len(operator.input) != 2:
            continue
        products = products_at(loop, adding)
        if len(products) != 1 or not _is_with_references(loop, operators[products[0]]):
            continue
        (part,) = [blob for blob in operator.input if blob != operators[products[0]].output[0]]
        splitting = dataflow.writer(operators, part, adding)
        if splitting is None or not _is_split(operators[splitting]) or is_needed(loop, part):
            continue
        squashing = _squashing(loop, adding)
        if squashing is not None and dataflow.readers(operators, part, splitting) == [adding]:
            yield Gate(products[0], adding, squashing, splitting, list(operators[splitting].output).index(part))


def _is_with_references(loop: Loop, product: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is along the last axis, with weights and a bias that are the same in all steps."""
    return integer(product, "axis", 1) == FEATURES and loop.references.issuperset(product.input[1:])


def _is_split(operator: caffe2_pb2.OperatorDef) -> bool:
    if operator.type != SPLIT or len(operator.input) != 1 or is_on_onednn(operator):
        return False
    return integer(operator, "axis", 0) == FEATURES


def _squashing(loop: Loop, adding: int) -> Optional[int]:
    """The position of the sigmoid that is all that sees the sum."""
    total = loop.operators[adding].output[0]
    readers = dataflow.readers(loop.operators, total, adding)
    if len(readers) != 1 or is_needed(loop, total):
        return None
    squashing = loop.operators[readers[0]]
    is_sigmoid = squashing.type == SIGMOID or is_aten(squashing, aten_name(SIGMOID))
    return readers[0] if is_sigmoid and not is_on_onednn(squashing) and total not in squashing.output else None


def _alike(loop: Loop, first: Gate, second: Gate) -> bool:
    """Whether both are of one blob, by operators of one kind."""
    one, other = (loop.operators[gate.multiplying] for gate in (first, second))
    kinds = {_kind(one), _kind(other)}, {_kind(loop.operators[gate.squashing]) for gate in (first, second)}
    writers = {dataflow.writer(loop.operators, one.input[0], gate.multiplying) for gate in (first, second)}
    return one.input[0] == other.input[0] and all(len(found) == 1 for found in (*kinds, writers))


def _moved(loop: Loop, gates: Gates) -> Optional[str]:
    """A blob that would not be what it is now: a result that is there sooner, while something else uses its name, or
    what is split, if it changes before it is added.
    """
    sooner, splitting = min(gate.adding for gate in gates), gates[0].splitting
    (source,) = loop.operators[splitting].input
    if dataflow.writer(loop.operators, source, sooner) != dataflow.writer(loop.operators, source, splitting):
        return source
    own = {position for gate in gates for position in gate[:3]}
    for gate in gates:
        (result,) = loop.operators[gate.squashing].output
        for position in range(sooner + 1, gate.squashing):
            operator = loop.operators[position]
            if position not in own and result in [*operator.input, *operator.output]:
                return result
    return None


def _width(product: caffe2_pb2.OperatorDef, weights: Shape) -> int:
    return weights[0] if product.type == FC else weights[1]


def _widths(loop: Loop, gates: Gates, sizes: Sizes) -> Tuple[int, int]:
    products = [loop.operators[gate.multiplying] for gate in gates]
    shapes = [weights_shape(loop, product.input[1], sizes) or (0, 0) for product in products]
    return _width(products[0], shapes[0]), _width(products[1], shapes[1])


def _merge(loop: Loop, gates: Gates, widths: Tuple[int, int]) -> None:
    first, second = gates
    operators, written = loop.operators, loop.written
    products = [operators[gate.multiplying] for gate in gates]
    product, squashing = copied(products[0]), copied(operators[first.squashing])
    weights, biases = ([operator.input[index] for operator in products] for index in (1, 2))
    product.input[1:] = [_side_by_side(loop, product, weights), loop.add_columns(biases, biases[0] + "_merged")]
    for outer in product.input[1:]:
        loop.add_reference(outer)
    results = [operators[gate.squashing].output[0] for gate in gates]
    total, opened = (loop.new_blob(name + "_merged") for name in (product.output[0], results[0]))
    parts, split = _merged_split(loop, operators[first.splitting], first.part, widths)
    product.output[:] = [total]
    squashing.input[:], squashing.output[:] = [total], [opened]
    replaced: Dict[int, Operators] = {position: [] for gate in gates for position in gate[:3]}
    replaced[min(first.multiplying, second.multiplying)] = [product]
    replaced[min(first.adding, second.adding)] = [
        new_operator(SUM, [total, parts], [total], product),
        squashing,
        new_operator(SPLIT, [opened], results, product, axis=FEATURES, split=widths),
    ]
    replaced[first.splitting] = split
    operators[:] = [made for position, operator in enumerate(operators) for made in replaced.get(position, [operator])]
    if loop.gradient is not None:
        # What was split before is not of this rule's making, and the backward step may read it.
        loop.shared += [total, opened, *([parts] if split else [])]
    gone = written - loop.written
    loop.shared[:] = [blob for blob in loop.shared if blob not in gone]


def _side_by_side(loop: Loop, product: caffe2_pb2.OperatorDef, weights: List[str]) -> str:
    merged, widths = loop.new_blob(weights[0] + "_merged"), loop.new_blob(weights[0] + "_merged_sizes")
    axis = 0 if product.type == FC else 1
    loop.before.append(new_operator("Concat", weights, [merged, widths], loop.forward, axis=axis))
    return merged


def _merged_split(
    loop: Loop, splitting: caffe2_pb2.OperatorDef, part: int, widths: Tuple[int, int]
) -> Tuple[str, Operators]:
    """Both parts in one piece, and what splits now, if there is anything left to split."""
    if len(splitting.output) == 2:
        return splitting.input[0], []
    changed = copied(splitting)
    merged = loop.new_blob(splitting.output[part] + "_merged")
    others = _widths_of_parts(splitting, widths)
    changed.output[part : part + 2] = [merged]
    set_arguments(changed, {"split": [*others[:part], sum(widths), *others[part + 2 :]]})
    return merged, [changed]


# ---------------------------------------------------------------------------------------------------------- the trial


class Size(NamedTuple):
    """Two products of `rows` rows of `inner` numbers, of the kind of the operator `product`, serialised, to which parts
    of the columns `parts` are added from `part` on; `widths` are theirs. Then comes `sigmoid`.
    """

    product: bytes
    rows: int
    inner: int
    widths: Tuple[int, int]
    parts: Tuple[int, ...]
    part: int
    sigmoid: bytes


def _size(loop: Loop, gates: Gates, batch: int, sizes: Sizes) -> Size:
    product, splitting = loop.operators[gates[0].multiplying], loop.operators[gates[0].splitting]
    shape = weights_shape(loop, product.input[1], sizes)
    assert shape is not None
    widths, sigmoid = _widths(loop, gates, sizes), loop.operators[gates[0].squashing]
    inner, parts = shape[1 if product.type == FC else 0], _widths_of_parts(splitting, widths)
    return Size(_kind(product), batch, inner, widths, parts, gates[0].part, _kind(sigmoid))


def _widths_of_parts(splitting: caffe2_pb2.OperatorDef, widths: Tuple[int, int]) -> Tuple[int, ...]:
    is_given = argument(splitting, "split") is not None
    return tuple(integers(splitting, "split") if is_given else [widths[0]] * len(splitting.output))


def _kind(operator: caffe2_pb2.OperatorDef) -> bytes:
    """The operator without its blobs."""
    kind = copied(operator)
    for blobs in (kind.input, kind.output):
        del blobs[:]
    kind.ClearField("name")
    return bytes(kind.SerializeToString())


@trial.remembered
def _tried(size: Size) -> Dict[bool, Seconds]:
    """Merged, or as it is."""
    return trial.in_turn({is_merged: functools.partial(_subject, size, is_merged) for is_merged in (False, True)})


def _subject(size: Size, is_merged: bool) -> Subject:
    loop, shapes = _lone_gates(size)
    if is_merged:
        first, second = _gates(loop)
        _merge(loop, (first, second), size.widths)
    return Subject(loop.operators, shapes, loop.before)


def _lone_gates(size: Size) -> Tuple[Loop, Dict[str, Shape]]:
    """A loop of both gates, and the shapes of what they see."""
    in_rows = caffe2_pb2.OperatorDef.FromString(size.product).type == FC
    shapes: Dict[str, Shape] = {"x": (1, size.rows, sum(size.parts)), "h": (1, size.rows, size.inner)}
    for number, width in enumerate(size.widths):
        shapes["w{}".format(number)] = (width, size.inner) if in_rows else (size.inner, width)
        shapes["b{}".format(number)] = (width,)
    parts = ["part{}".format(number) for number in range(len(size.parts))]
    names = ["{}{}".format(blob, number) for blob in "yg" for number in range(2)]
    loop = trial.lone_loop([*shapes, *parts, *names])
    loop.operators.append(new_operator(SPLIT, ["x"], parts, loop.forward, axis=FEATURES, split=size.parts))
    for number in range(2):
        weights, bias, result, gate = ("{}{}".format(blob, number) for blob in "wbyg")
        product = caffe2_pb2.OperatorDef.FromString(size.product)
        squashing = caffe2_pb2.OperatorDef.FromString(size.sigmoid)
        product.input[:], product.output[:] = ["h", weights, bias], [result]
        squashing.input[:], squashing.output[:] = [result], [gate]
        adding = new_operator(SUM, [result, parts[size.part + number]], [result], loop.forward)
        loop.operators += [product, adding, squashing]
    return loop, shapes
