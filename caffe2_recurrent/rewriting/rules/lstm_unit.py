"""LSTMUnit and its gradient in vectorised operators, see `lstm_steps.py`; which ones, is tried out."""

import functools
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Type

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer, number
from caffe2_recurrent.operators import SUM, copied
from caffe2_recurrent.rewriting import gradient_memory, passes
from caffe2_recurrent.rewriting.elementwise.lstm_forms import (
    FORMS,
    GATES,
    ONLY_SPLIT,
    ByKind,
    BySigmoid,
    ByTanh,
    Form,
    Opened,
    WithoutCandidate,
    make_form,
)
from caffe2_recurrent.rewriting.elementwise.lstm_steps import (
    Unit,
    UnitGradient,
    emit_backward,
    emit_factors,
    emit_gates,
    emit_step,
)
from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing
from caffe2_recurrent.rewriting.products import step_products
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.gates_first import GatesFirst
from caffe2_recurrent.rewriting.rules.joined_sequence import RESULT, JoinedSequence, lone_product, subject_of_product
from caffe2_recurrent.rewriting.rules.packed_products import PackedProducts, what_may_be_kept
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.rewriting.sequences import own_sequence
from caffe2_recurrent.rewriting.sequences.masks import step_mask, why_no_mask
from caffe2_recurrent.rewriting.sequences.padding import cut_if_possible
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.addends import products_at
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

UNIT, UNIT_GRADIENT = "LSTMUnit", "LSTMUnitGradient"
# What is read and written in a trial.
UNIT_OF_TRIAL = Unit("hidden_prev", "cell_prev", "gates", None, "timestep", "hidden", "cell")
GRADIENT_OF_TRIAL = UnitGradient("of_hidden", "of_cell", "of_hidden_prev", "of_cell_prev", "of_gates")
# With fewer elements in a state, `ByKind` is not worth a trial: operators take as long as what they do.
FEWEST_BY_KIND = 4096
# It must be faster by this factor.
GAIN = 1.02
# Below this many elements of a state, `LSTMUnit` is faster than a dozen operators.
FEWEST_ELEMENTS = 600
# With lengths there are the operators that mix old and new states: an MILSTM went forward 9 to 16% slower for 640, 3 to
# 7% for 800, from 6% faster to 4% slower for 1024, and for 1280, with `scaled_vectors`, 2 to 5% faster.
FEWEST_WITH_LENGTHS = 1100


class LSTMUnits(Rule):
    """step: h, c = LSTMUnit(h_prev, c_prev, gates, (lengths), t)

    =>  step: vectorised operators that compute h, c and, if there is a backward step, its factors
        backward step: LSTMUnitGradient  =>  products with the factors (see `lstm_steps.py`)

    Past the end of a sequence a state stays what it was, or is 0 with `drop_states`: the new states are mixed with the
    old ones by a mask that is computed once for all steps.
    """

    name = "lstm_unit"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if operator.type == UNIT:
                yield Site("LSTMUnit -> '{}'".format(operator.output[0]), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        operator = loop.operators[site.where]
        unit = read_unit(operator)
        if loop.gradient is not None and dataflow.writers(loop.gradient.operators, unit.cell):
            return "the backward step computes '{}' again".format(unit.cell)
        if sizes.state_size(loop, unit.cell_prev) is None:
            return "the size of the state '{}' is not known; give shapes".format(unit.cell_prev)
        return why_no_mask(loop, unit.lengths, unit.timestep, sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        has_lengths = read_unit(loop.operators[site.where]).lengths is not None
        return why_too_few(loop, site.where, sizes, FEWEST_WITH_LENGTHS if has_lengths else FEWEST_ELEMENTS)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.operators[site.where]
        lengths = read_unit(operator).lengths
        if lengths is not None:
            cut_if_possible(loop, lengths, sizes)
        # Now, as the gates may be the slice itself, which has another name if it has been cut.
        unit = read_unit(operator)
        size = sizes.state_size(loop, unit.cell_prev)
        assert size is not None
        mask = None if unit.lengths is None else step_mask(loop, unit.lengths)
        drop = bool(integer(operator, "drop_states", 0))
        backward = unit_gradient_position(loop, unit)
        # Where the gates take no memory of their own, the factors are not to take any either.
        keep_factors = backward is not None and unit.gates not in loop.shared and loop.link(unit.gates) is None
        batch = sizes.batch(loop)
        # Whatever else sees the gates wants them side by side.
        is_alone = mask is None and keep_factors == (loop.gradient is not None)
        product = _product_of(loop, unit, sizes) if is_alone else None
        taken = _form(size, batch, keep_factors, product)
        made = functools.partial(make_form, taken, loop, size, batch and batch * size)

        emitter = Emitter(loop, operator, unit.cell)
        form = made(number(operator, "forget_bias", 0.0), keep_factors)
        opened = emit_gates(emitter, unit, form)
        kept, again = None, []
        if backward is not None and not keep_factors and _has_room(loop, backward, sizes):
            kept = form.kept(emitter, opened)
            again = [emitter.operators[index] for index in dataflow.leading_to(emitter.operators, [kept])]
        factors = emit_step(emitter, unit, form, opened, mask, drop, keep_factors)
        loop.operators[site.where : site.where + 1] = emitter.operators
        # What the backward step does not read is not kept in each step, and stays in the cache from step to step.
        loop.shared += [blob for blob in emitter.made if factors is None or blob not in factors]
        if backward is None:
            return
        assert loop.gradient is not None
        original = loop.gradient.operators[backward]
        emitter = Emitter(loop, original, unit.cell + "_grad")
        gradient = read_unit_gradient(original)
        if factors is None:
            form = made(number(operator, "forget_bias", 0.0), True)
            opened = emit_gates(emitter, unit, form) if kept is None else form.opened_again(emitter, kept)
            bounded = form.bounded(emitter, unit.cell)
            factors = emit_factors(emitter, unit, form, opened, bounded)
            loop.known.overwritten[kept or unit.gates] = gradient.of_gates
        else:
            loop.known.overwritten[factors.gates] = gradient.of_gates
            loop.known.columns.update({factors.gates: len(GATES) * size, factors.cell: size, factors.forget: size})
        emit_backward(emitter, gradient, form, factors, mask, drop)
        loop.gradient.operators[backward : backward + 1] = [*map(copied, again), *emitter.operators]


def why_too_few(loop: Loop, position: int, sizes: Sizes, fewest: int) -> Optional[str]:
    """Why the state of the unit at `position` of the step, whose size is known, may have fewer elements than that."""
    size, batch = sizes.state_size(loop, read_unit(loop.operators[position]).cell_prev), sizes.batch(loop)
    assert size is not None
    if size < fewest and batch is None:
        return "the batch size is not known, and LSTMUnit is faster for a small one; give shapes"
    if size * (batch or 1) < fewest:
        return "with {} elements in a state LSTMUnit is faster".format(size * (batch or 1))
    return None


def _has_room(loop: Loop, backward: int, sizes: Sizes) -> bool:
    """Whether what is kept can lie where the gradient of the gates will be."""
    assert loop.gradient is not None
    of_gates = read_unit_gradient(loop.gradient.operators[backward]).of_gates
    is_there = gradient_memory.why_not_of_sequence(loop, of_gates) is None
    return is_there and gradient_memory.why_no_room(loop, sizes) is None


def read_unit(operator: caffe2_pb2.OperatorDef) -> Unit:
    hidden_prev, cell_prev, gates, *lengths, timestep = operator.input[:]
    has_lengths = bool(integer(operator, "sequence_lengths", 1)) and bool(lengths)
    return Unit(hidden_prev, cell_prev, gates, lengths[0] if has_lengths else None, timestep, *operator.output)


def unit_gradient_position(loop: Loop, unit: Unit) -> Optional[int]:
    for position, operator in enumerate(loop.gradient.operators if loop.gradient is not None else []):
        if operator.type == UNIT_GRADIENT and operator.input[-4:-2] == [unit.hidden, unit.cell]:
            return position
    return None


def read_unit_gradient(operator: caffe2_pb2.OperatorDef) -> UnitGradient:
    return UnitGradient(*operator.input[-2:], *operator.output)


# ---------------------------------------------------------------------------------------------------------- the trial


class Behind(NamedTuple):
    """What makes the gates: a product of a state with `inner` columns, and one over all steps of a sequence with
    `of_sequence`. `may_keep` as loops have it.
    """

    steps: int
    rows: int
    inner: int
    of_sequence: int
    layout: str
    may_keep: Keeping = Keeping.NOTHING


def _product_of(loop: Loop, unit: Unit, sizes: Sizes) -> Optional[Behind]:
    """None where it is not known, or something else makes the gates."""
    adding = dataflow.writer(loop.operators, unit.gates)
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    if adding is None or steps is None or batch is None or loop.operators[adding].type != SUM:
        return None
    products = [loop.operators[position] for position in products_at(loop, adding)]
    links = [loop.link(blob) for blob in loop.operators[adding].input]
    sources = list(filter(None, (own_sequence.source_of(loop, link.outer) for link in links if link)))
    if not len(products) == len(sources) == 1 or len(links) != 2:
        return None
    x = sizes.shape(sources[0].input[0])
    if x is None or step_products.weights_shape(loop, products[0].input[1], sizes) is None:
        return None
    product = step_products.read_product(loop, products[0], sizes, batch)
    layout = step_products.layout(loop, products[0])
    return Behind(steps, batch, product.inner, x[-1], layout, what_may_be_kept(loop, sizes))


def _form(size: int, batch: Optional[int], trains: bool, product: Optional[Behind]) -> Type[Form]:
    """The fastest form; that by tanh if the number of sequences is not known."""
    if batch is None:
        return ByTanh
    found: Dict[Type[Form], Seconds] = _tried(size, batch, trains)
    fastest = min(found, key=lambda form: found[form].step)
    others = [form for form in _of_use(ONLY_SPLIT, trains) if form is not ByKind or batch * size >= FEWEST_BY_KIND]
    if product is not None and product.may_keep & (Keeping.FILTERS | Keeping.WEIGHTS):
        # A sigmoid may be taken where a product has been made.
        others.append(BySigmoid if trains else WithoutCandidate)
    if product is None or {fastest}.issuperset(others):
        return fastest
    forms = tuple(dict.fromkeys([fastest, *others]))
    behind: Dict[Type[Form], Seconds] = _tried_behind(product, size, forms, trains)
    costs = {form: seconds.of_step(product.steps) for form, seconds in behind.items()}
    best = min(costs, key=lambda form: costs[form])
    return best if GAIN * costs[best] <= costs[fastest] else fastest


def _of_use(forms: Iterable[Type[Form]], trains: bool) -> List[Type[Form]]:
    """Without those in whose place there is another one where it trains."""
    return [form for form in forms if form.of_training is None or not trains]


@trial.remembered
def _tried(size: int, batch: int, trains: bool) -> Dict[Type[Form], Seconds]:
    candidates = {form: functools.partial(_subject, form, size, batch, trains) for form in _of_use(FORMS, trains)}
    return trial.in_turn(candidates)


def _subject(form: Type[Form], size: int, batch: int, trains: bool) -> Subject:
    """A step, and the backward step, by themselves."""
    state: Shape = (1, batch, size)
    shapes: Dict[str, Shape] = {UNIT_OF_TRIAL.cell_prev: state, UNIT_OF_TRIAL.gates: (1, batch, len(GATES) * size)}
    loop = trial.lone_loop([*filter(None, UNIT_OF_TRIAL), *GRADIENT_OF_TRIAL])
    # What is made for so many sequences is made before.
    shapes[loop.inputs[0]] = state
    emitter = Emitter(loop, loop.forward, UNIT_OF_TRIAL.cell)
    made = make_form(form, loop, size, batch * size, 0.0, trains)
    _emit_both_steps(emitter, UNIT_OF_TRIAL, made, emit_gates(emitter, UNIT_OF_TRIAL, made), trains)
    shapes.update(dict.fromkeys(GRADIENT_OF_TRIAL[:2], state))
    return Subject(emitter.operators, shapes, loop.before)


def _emit_both_steps(emitter: Emitter, unit: Unit, form: Form, opened: Opened, trains: bool) -> None:
    """A step and, if it is one that is trained, its backward step."""
    factors = emit_step(emitter, unit, form, opened, None, False, trains)
    if factors is not None:
        emit_backward(emitter, GRADIENT_OF_TRIAL, form, factors, None, False)


@trial.remembered
def _tried_behind(product: Behind, size: int, forms: Tuple[Type[Form], ...], trains: bool) -> Dict[Type[Form], Seconds]:
    """Forms with the product in front of them."""
    candidates = {form: functools.partial(_subject_behind, product, form, size, trains) for form in forms}
    return trial.in_turn(candidates, product.steps)


def _subject_behind(product: Behind, form: Type[Form], size: int, trains: bool) -> Subject:
    """A step with its product, as fast as other rules get them, and what is done before the loop."""
    loop, shapes = lone_product(
        product.steps,
        product.rows,
        product.inner,
        product.of_sequence,
        len(GATES) * size,
        product.layout,
        form is not ByKind,
        product.may_keep,
    )
    unit = UNIT_OF_TRIAL._replace(gates=RESULT)
    shapes.update(dict.fromkeys([unit.cell_prev, *GRADIENT_OF_TRIAL[:2]], (1, product.rows, size)))
    emitter = Emitter(loop, loop.forward, unit.cell)
    # What scales the gates is in the weights by then.
    made = make_form(form, loop, size, product.rows * size, 0.0, trains)
    _emit_both_steps(emitter, unit, made, made.opened(emitter, RESULT), trains)
    loop.operators += emitter.operators
    sizes = Sizes(shapes, loop.surroundings.fed)
    for rule in (GatesFirst(), JoinedSequence(), PackedProducts(), ProductsOverSteps()):
        passes.apply(rule, loop, sizes)
    return subject_of_product(loop, shapes)
