"""Two products of one blob, to which two parts of a sequence are added, as one; it is tried out."""

import functools
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import argument, integer, set_arguments
from caffe2_recurrent.operators import SUM, as_bytes, copied, new_operator
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.products.onednn import Product
from caffe2_recurrent.rewriting.products.sigmoids import sigmoid_of
from caffe2_recurrent.rewriting.products.step_products import FC, read_product, weights_shape
from caffe2_recurrent.rewriting.products.step_subject import subject_of
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.packed_products import PackedProducts, what_may_be_kept
from caffe2_recurrent.rewriting.steps import columns, dataflow
from caffe2_recurrent.rewriting.steps.addends import is_needed, products_at
from caffe2_recurrent.rewriting.steps.columns import SPLIT
from caffe2_recurrent.rewriting.steps.overlap import has_threads_given, why_executor_pays
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

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
        for gate in site.where:
            weights = loop.operators[gate.multiplying].input[1]
            shape = weights_shape(loop, weights, sizes)
            if shape is None:
                return "the size of the weights '{}' is not known; give shapes".format(weights)
            if len(shape) != 2:
                return "the weights '{}' have {} dimensions".format(weights, len(shape))
        first, second = (product.outer for product in _products(loop, site.where, sizes))
        if first != second and argument(loop.operators[site.where[0].splitting], "split") is None:
            return "parts of one width are added to products that are {} and {} wide".format(first, second)
        moved = _moved(loop, site.where)
        return None if moved is None else "'{}' is used in between".format(moved)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps, batch = sizes.steps(loop), sizes.batch(loop)
        if steps is None or batch is None:
            return "the numbers of steps and sequences are not known; give shapes"
        size = _size(loop, site.where, steps, batch, sizes)
        found: Dict[bool, Seconds] = _tried(size)
        if GAIN * found[True].of_step(steps) > found[False].of_step(steps):
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {1} + {2}] it is not faster".format(size, *size.widths)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        first, second = _products(loop, site.where, sizes)
        _merge(loop, site.where, (first.outer, second.outer))


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
        if splitting is None or not columns.is_split(operators[splitting]) or is_needed(loop, part):
            continue
        squashing = sigmoid_of(loop, operators, adding)
        if squashing is not None and dataflow.readers(operators, part, splitting) == [adding]:
            yield Gate(products[0], adding, squashing, splitting, list(operators[splitting].output).index(part))


def _is_with_references(loop: Loop, product: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is along the last axis, with weights and a bias that are the same in all steps."""
    return integer(product, "axis", 1) == FEATURES and loop.references.issuperset(product.input[1:])


def _alike(loop: Loop, first: Gate, second: Gate) -> bool:
    """Whether both are of one blob, by operators of one kind."""
    one, other = (loop.operators[gate.multiplying] for gate in (first, second))
    kinds = {as_bytes(one), as_bytes(other)}, {as_bytes(loop.operators[gate.squashing]) for gate in (first, second)}
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
        for position in range(sooner + 1, gate.adding):
            operator = loop.operators[position]
            if position not in own and result in [*operator.input, *operator.output]:
                return result
    return None


def _products(loop: Loop, gates: Gates, sizes: Sizes, batch: Optional[int] = None) -> Tuple[Product, Product]:
    first, second = (loop.operators[gate.multiplying] for gate in gates)
    return read_product(loop, first, sizes, batch), read_product(loop, second, sizes, batch)


def _merge(loop: Loop, gates: Gates, widths: Tuple[int, int]) -> None:
    first, second = gates
    operators, written = loop.operators, loop.written
    products = [operators[gate.multiplying] for gate in gates]
    product, squashing = copied(products[0]), copied(operators[first.squashing])
    weights, biases = ([operator.input[index] for operator in products] for index in (1, 2))
    axis = 0 if product.type == FC else 1
    product.input[1:] = [
        loop.add_columns(weights, weights[0] + "_merged", axis),
        loop.add_columns(biases, biases[0] + "_merged"),
    ]
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


def _merged_split(
    loop: Loop, splitting: caffe2_pb2.OperatorDef, part: int, widths: Tuple[int, int]
) -> Tuple[str, Operators]:
    """Both parts in one piece, and what splits now, if there is anything left to split."""
    if len(splitting.output) == 2:
        return splitting.input[0], []
    changed = copied(splitting)
    merged = loop.new_blob(splitting.output[part] + "_merged")
    others = columns.part_widths(splitting, widths[0] * len(splitting.output))
    changed.output[part : part + 2] = [merged]
    set_arguments(changed, {"split": [*others[:part], sum(widths), *others[part + 2 :]]})
    return merged, [changed]


# ---------------------------------------------------------------------------------------------------------- the trial


class Size(NamedTuple):
    """Two products of `rows` rows of `inner` numbers, of the kind of the operator `product`, serialised, to which parts
    of the columns `parts` are added from `part` on; `widths` are theirs. Then comes `sigmoid`. They are made in `steps`
    steps, and oneDNN may have them. `may_keep` as loops have it.
    """

    product: bytes
    rows: int
    inner: int
    widths: Tuple[int, int]
    parts: Tuple[int, ...]
    part: int
    sigmoid: bytes
    steps: int
    may_be_packed: bool
    may_keep: Keeping = Keeping.NOTHING


def _size(loop: Loop, gates: Gates, steps: int, batch: int, sizes: Sizes) -> Size:
    product, sigmoid, splitting = (loop.operators[gates[0][index]] for index in (0, 2, 3))
    first, second = _products(loop, gates, sizes, batch)
    parts = tuple(columns.part_widths(splitting, first.outer * len(splitting.output)))
    widths = (first.outer, second.outer)
    goes_off = not has_threads_given(loop) and why_executor_pays(loop) is None
    may_be_packed = PackedProducts.name in loop.rules and goes_off
    return Size(
        as_bytes(product),
        batch,
        first.inner,
        widths,
        parts,
        gates[0].part,
        as_bytes(sigmoid),
        steps,
        may_be_packed,
        what_may_be_kept(loop, sizes),
    )


@trial.remembered
def _tried(size: Size) -> Dict[bool, Seconds]:
    """Merged, or as it is."""
    candidates = {is_merged: functools.partial(_subject, size, is_merged) for is_merged in (False, True)}
    return trial.in_turn(candidates, size.steps)


def _subject(size: Size, is_merged: bool) -> Subject:
    loop, shapes = _lone_gates(size)
    if is_merged:
        first, second = _gates(loop)
        _merge(loop, (first, second), size.widths)
    if size.may_be_packed:
        # One product may be worth what two are not.
        passes.apply(PackedProducts(), loop, Sizes(shapes, loop.surroundings.fed))
    return subject_of(loop, loop.operators, shapes)


def _lone_gates(size: Size) -> Tuple[Loop, Dict[str, Shape]]:
    """A loop of both gates, and the shapes of what they see."""
    in_rows = caffe2_pb2.OperatorDef.FromString(size.product).type == FC
    # Of the sequence only the numbers of steps and rows matter.
    shapes: Dict[str, Shape] = {"sequence": (size.steps, size.rows, 1)}
    shapes.update(x=(1, size.rows, sum(size.parts)), h=(1, size.rows, size.inner))
    for number, width in enumerate(size.widths):
        shapes["w{}".format(number)] = (width, size.inner) if in_rows else (size.inner, width)
        shapes["b{}".format(number)] = (width,)
    parts = ["part{}".format(number) for number in range(len(size.parts))]
    names = ["{}{}".format(blob, number) for blob in "yg" for number in range(2)]
    kept = ["{}{}".format(blob, number) for blob in "wb" for number in range(2)]
    loop = trial.lone_loop([*shapes, *parts, *names], kept, size.may_keep)
    loop.operators.append(new_operator(SPLIT, ["x"], parts, loop.forward, axis=FEATURES, split=size.parts))
    for number in range(2):
        weights, bias, result, gate = ("{}{}".format(blob, number) for blob in "wbyg")
        product = caffe2_pb2.OperatorDef.FromString(size.product)
        squashing = caffe2_pb2.OperatorDef.FromString(size.sigmoid)
        product.input[:], product.output[:] = ["h", weights, bias], [result]
        squashing.input[:], squashing.output[:] = [result], [gate]
        adding = new_operator(SUM, [result, parts[size.part + number]], [result], loop.forward)
        loop.operators += [product, adding, squashing]
    loop.known.rows.add("h")
    return loop, shapes
