"""The gradient of scores that a vector makes of tanh, by which attention weighs the outputs of an encoder."""

import functools
from typing import Dict, Iterable, List, NamedTuple, Optional

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Parameter
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import argument, integer, set_arguments
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting.emit import ATEN, Emitter, aten_is_missing
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES
from caffe2_recurrent.rewriting.steps.step_shapes import MAY_BE_LARGER, shapes_before
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject, result

SCORE, SQUASH, ADD = "FCGradient", "TanhGradient", "AddGradient"
# Ways to sum over 100 positions for 16 sequences of 128: 9 and 23 us with one thread, 169 and 14 with two.
CAFFE2S, ATENS = "ReduceSum", "ATen sum"
AS_IT_IS = "as it is"
TANH_BACKWARD = "tanh_backward"
# It must be faster by this factor.
GAIN = 1.1


class Chain(NamedTuple):
    """The positions of three operators of the backward step, and the parameter that the last one is for: its first
    result or its second, by its `position`.
    """

    scoring: int
    squashing: int
    adding: int
    parameter: Parameter
    position: int


class Blobs(NamedTuple):
    """What they read and write: S positions, N sequences, E numbers.

    `tanh` `[S, N, E]`, `vector` `[1, E]`, `of_scores` `[S, N, 1]`, `keys` `[S, N, E]`, `query` `[1, N, E]` or `[N, E]`.
    """

    tanh: str
    vector: str
    of_scores: str
    keys: str
    query: str
    of_keys: str
    of_query: str


class ScoreGradients(Rule):
    """backward step: dv, db, dH = FCGradient(H, v, ds);  dH = TanhGradient(H, dH);  dA, dq = AddGradient(dH, A, q)
    the engine adds up dA over the steps

    =>  backward step: dv, db = FCGradient(H, v, ds);  R = ATen tanh_backward(ds, H);  dq = v * ReduceSum(R)
        the engine adds up R over the steps; after the loop: dA = v * the sum of R

    Of scores v H with H = tanh(A + q), A `[S, N, E]`, q `[1, N, E]` or `[N, E]`. The vector v `[1, E]` is the same at
    all positions and in all steps, so that it need not be in what is made for each of them. ATen may sum over the
    positions too.

    Source: Bahdanau, Cho, Bengio, Neural Machine Translation by Jointly Learning to Align and Translate, 2015.
    """

    name = "score_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.gradient is None:
            return
        operators = loop.gradient.operators
        parameters = {parameter.inner_gradient: parameter for parameter in loop.gradient.parameters}
        for position, operator in enumerate(operators):
            if operator.type != SCORE or is_on_onednn(operator) or len(operator.output) != 3:
                continue
            squashing = _first_reader(operators, operator.output[2], position, SQUASH)
            if squashing is None:
                continue
            adding = _first_reader(operators, operators[squashing].output[0], squashing, ADD)
            if adding is None:
                continue
            for index, blob in enumerate(operators[adding].output):
                if blob in parameters:
                    what = "{} -> '{}'".format(operator.type, operator.output[2])
                    yield Site(what, Chain(position, squashing, adding, parameters[blob], index))
                    break

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        chain = site.where
        return _why_not_chained(loop, chain) or _why_not_shaped(loop, chain, sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps = sizes.steps(loop)
        if steps is None:
            return "the number of steps is not known; give shapes"
        shape = _shapes(loop, site.where, sizes)[_blobs(loop, site.where).tanh]
        found = _tried(shape)
        if GAIN * found[_fastest(found)].of_step(steps) > found[AS_IT_IS].of_step(steps):
            return "for {} positions, {} sequences and {} numbers it is not faster".format(*shape)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient, chain = loop.gradient, site.where
        assert gradient is not None
        blobs, operators = _blobs(loop, chain), gradient.operators
        shapes = _shapes(loop, chain, sizes)
        emitter = Emitter(loop, operators[chain.scoring], blobs.of_query)
        _emit(emitter, _fastest(_tried(shapes[blobs.tanh])), blobs, keep=len(shapes[blobs.query]) == DIMENSIONS)
        del operators[chain.scoring].output[2:]
        replaced = {chain.squashing: emitter.operators[:-2], chain.adding: emitter.operators[-2:]}
        operators[:] = [
            made for position, operator in enumerate(operators) for made in replaced.get(position, [operator])
        ]
        without_vector = loop.new_blob(chain.parameter.outer_gradient + "_without_vector")
        gradient.parameters[gradient.parameters.index(chain.parameter)] = chain.parameter._replace(
            outer_gradient=without_vector
        )
        loop.after_gradient.append(
            new_operator("Mul", [without_vector, blobs.vector], [chain.parameter.outer_gradient], loop.forward)
        )


@functools.lru_cache(maxsize=None)
def aten_repeats() -> bool:
    """Whether ATen's tanh_backward takes one number for each row; that of torch 1.4 does not."""
    operator = caffe2_pb2.OperatorDef(type=ATEN, input=["of_rows", "tanh"], output=["made"])
    set_arguments(operator, {"operator": TANH_BACKWARD})
    values = {"of_rows": np.ones((2, 1), dtype=np.float32), "tanh": np.zeros((2, 3), dtype=np.float32)}
    try:
        return bool((result([operator], values, "made") == 1).all())
    except RuntimeError:
        return False


def _first_reader(operators: List[caffe2_pb2.OperatorDef], blob: str, after: int, kind: str) -> Optional[int]:
    """The position of what reads the blob first behind `after`, if it is of that kind."""
    found = next(iter(dataflow.readers(operators, blob, after)), None)
    return found if found is not None and operators[found].type == kind else None


def _blobs(loop: Loop, chain: Chain) -> Blobs:
    assert loop.gradient is not None
    scoring, adding = (loop.gradient.operators[position] for position in (chain.scoring, chain.adding))
    of_keys, of_query = chain.position, 1 - chain.position
    tanh, vector, of_scores = scoring.input
    inputs, outputs = adding.input[1:], adding.output
    return Blobs(tanh, vector, of_scores, inputs[of_keys], inputs[of_query], outputs[of_keys], outputs[of_query])


def _why_not_chained(loop: Loop, chain: Chain) -> Optional[str]:
    """Why the operators are not such ones, or their results are used for something else."""
    gradient, blobs = loop.gradient, _blobs(loop, chain)
    assert gradient is not None
    operators = gradient.operators
    scoring, squashing, adding = (operators[position] for position in chain[:3])
    if integer(scoring, "axis", 1) != FEATURES or integer(scoring, "axis_w", 1) != 1:
        return "'{}' is not multiplied with rows along its last axis".format(blobs.tanh)
    # That smaller blobs are repeated says nothing that their shapes do not say.
    if any(argument(adding, name) is not None for name in ("axis", "axis_str")):
        return "'{}' and '{}' are added along axes of their own".format(blobs.keys, blobs.query)
    if squashing.input[0] != blobs.tanh:
        return "'{}' is not the gradient of '{}'".format(squashing.input[1], squashing.input[0])
    missing = [blob for blob in (blobs.vector, blobs.keys) if not loop.is_reference(blob)]
    if missing:
        return "'{}' is not the same in all steps".format(missing[0])
    between = {blob for operator in operators[chain.scoring + 1 : chain.adding] for blob in operator.output}
    changed = between.intersection([blobs.tanh, blobs.of_scores])
    if changed:
        return "'{}' is written anew in between".format(min(changed))
    shown = {link.inner for link in loop.all_links}.union(gradient.of_parameters)
    for blob, made, read in (
        (scoring.output[2], chain.scoring, chain.squashing),
        (squashing.output[0], chain.squashing, chain.adding),
    ):
        if dataflow.readers(operators, blob, made) != [read] or blob in shown:
            return "'{}' is used for something else too".format(blob)
    of_keys = blobs.of_keys
    if dataflow.reads(operators, of_keys) or dataflow.writers(operators, of_keys) != [chain.adding]:
        return "'{}' is used for something else too".format(of_keys)
    return None


def _why_not_shaped(loop: Loop, chain: Chain, sizes: Sizes) -> Optional[str]:
    blobs, shapes = _blobs(loop, chain), _shapes(loop, chain, sizes)
    seen = (blobs.tanh, blobs.vector, blobs.of_scores, blobs.keys, blobs.query)
    unknown = [blob for blob in seen if blob not in shapes]
    if unknown:
        return "the shape of '{}' is not known; give shapes".format(unknown[0])
    positions, batch, size = shapes[blobs.tanh] if len(shapes[blobs.tanh]) == DIMENSIONS else (0, 0, 0)
    for blob, shape in zip(seen, _shapes_of(positions, batch, size)):
        if shapes[blob] != shape and (blob != blobs.query or shapes[blob] != shape[1:]):
            return "'{}' is shaped otherwise than scores of tanh need it: {}".format(blob, shapes[blob])
    if batch == 1:
        return "with one sequence nothing tells what has one for each from what all sequences share"
    larger = _shapes(loop, chain, sizes.when_larger())
    for blob, axis in ((blobs.vector, 0), (blobs.of_scores, -1), (blobs.query, -DIMENSIONS)):
        if blob not in larger or len(larger[blob]) >= -axis and larger[blob][axis] != 1:
            return MAY_BE_LARGER.format(blob, shapes[blob])
    return None


def _shapes(loop: Loop, chain: Chain, sizes: Sizes) -> Dict[str, Shape]:
    assert loop.gradient is not None
    return shapes_before(loop, sizes, loop.gradient.operators, chain.scoring)


def _shapes_of(positions: int, batch: int, size: int) -> List[Shape]:
    """Of the first five `Blobs`."""
    both = (positions, batch, size)
    return [both, (1, size), (positions, batch, 1), both, (1, batch, size)]


def _emit(emitter: Emitter, summing: str, blobs: Blobs, keep: bool) -> None:
    """What takes the place of TanhGradient, and then that of AddGradient. The sum over positions is `[1, N, E]` if that
    dimension is to be kept, or `[N, E]`.
    """
    if aten_repeats():
        emitter.add(ATEN, [blobs.of_scores, blobs.tanh], blobs.of_keys, operator=TANH_BACKWARD)
    else:
        part = emitter.aten("mul", [blobs.of_scores, blobs.tanh], "part")
        emitter.add(ATEN, [blobs.of_scores, part, blobs.tanh], blobs.of_keys, operator="addcmul", value=-1.0)
    if summing == ATENS:
        total = emitter.aten("sum", [blobs.of_keys], "total", dim=[0], keepdim=int(keep))
    else:
        total = emitter.new("ReduceSum", [blobs.of_keys], "total", axes=[0], keepdims=int(keep))
    emitter.add("Mul", [total, blobs.vector], blobs.of_query)


# ---------------------------------------------------------------------------------------------------------- the trial


def _fastest(found: Dict[str, Seconds]) -> str:
    return min((CAFFE2S, ATENS), key=lambda summing: found[summing].step)


@trial.remembered
def _tried(shape: Shape) -> Dict[str, Seconds]:
    """As it is, and with either sum."""
    return trial.in_turn({way: functools.partial(_subject, shape, way) for way in (AS_IT_IS, CAFFE2S, ATENS)})


def _subject(shape: Shape, way: str) -> Subject:
    blobs = Blobs("tanh", "vector", "of_scores", "keys", "query", "of_keys", "of_query")
    shapes = dict(zip(blobs, _shapes_of(*shape)))
    loop = trial.lone_loop(blobs)
    emitter = Emitter(loop, loop.forward, "scores")
    of_vector = [emitter.blob("of_vector"), emitter.blob("of_bias")]
    of_tanh = [] if way != AS_IT_IS else [emitter.blob("of_tanh")]
    scoring = new_operator(SCORE, blobs[:3], of_vector + of_tanh, loop.forward, axis=FEATURES)
    if way != AS_IT_IS:
        _emit(emitter, way, blobs, keep=True)
        # Once for all steps; the sum over these is shaped like A.
        loop.add_before("Mul", [blobs.keys, blobs.vector], "scaled")
        return Subject([scoring, *emitter.operators], shapes, loop.before)
    squashing = new_operator(SQUASH, [blobs.tanh, *of_tanh], of_tanh, loop.forward)
    adding = new_operator(ADD, [*of_tanh, blobs.keys, blobs.query], blobs[-2:], loop.forward)
    return Subject([scoring, squashing, adding], shapes)
