"""A loop in several forms, timed as a whole: forwards and, if it trains, backwards."""

import contextlib
import functools
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.gradient_maker import POSITIONS
from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.loops.lengths import lengths_of
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.shape_inference import Inference
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer, integers
from caffe2_recurrent.operators import new_operator, read_before_written
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.numbering import Numbering, operators_of
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

Operators = List[caffe2_pb2.OperatorDef]


def seconds(loop: Loop, candidates: Mapping[str, Loop], sizes: Sizes) -> Union[Mapping[str, Seconds], str]:
    """The times of `candidates`, copies of the loop that have been rewritten further; or why they cannot be had.

    Those of a loop and its gradient are timed one behind the other, and what makes the sequence in front of them. What
    else rules have put before the loop so far is not timed, nor is what comes after its gradient.
    """
    known = sizes.behind(loop.before)
    in_front = _making_the_sequence(loop, known.shapes)
    made = {name: [*in_front, *_operators(candidate, len(loop.before))] for name, candidate in candidates.items()}
    return _seconds(loop, made, known, sizes, _wake_threads(candidates))


def seconds_with_surroundings(
    loop: Loop, candidates: Mapping[str, Loop], sizes: Sizes
) -> Union[Mapping[str, Seconds], str]:
    """The same with all that rules have put around the loop, for a loop that none has changed; products of the net in
    front of it and behind are among that.
    """
    made = {name: _with_surroundings(loop, candidate) for name, candidate in candidates.items()}
    return _seconds(loop, made, _behind_nothing(loop, sizes), sizes, _wake_threads(candidates))


def seconds_of(loop: Loop, made: Mapping[str, Operators], sizes: Sizes) -> Union[Mapping[str, Seconds], str]:
    """Those of operators that may stand for a loop that none has changed, its gradient and its surroundings. What
    counts is what they usually take, as some of them may wait for other threads.
    """
    return _seconds(loop, made, _behind_nothing(loop, sizes), sizes, wakes_threads=True)


def _behind_nothing(loop: Loop, sizes: Sizes) -> Inference:
    known = sizes.behind([])
    known.shapes.update({blob: shape for blob, shape in _gradients(loop, known.shapes) if blob not in known.shapes})
    return known


def _seconds(
    loop: Loop,
    made: Mapping[str, Operators],
    known: Inference,
    sizes: Sizes,
    wakes_threads: bool,
) -> Union[Mapping[str, Seconds], str]:
    read = list(dict.fromkeys(blob for found in made.values() for blob in read_before_written(found)))
    shapes = _shapes(loop, read, known.shapes)
    if shapes is None:
        return "the shapes of what its steps read are not all known; give shapes"
    lengths = [blob for blob in lengths_of(loop) if blob in shapes]
    fills = [_steps_of_each(blob, shapes[blob], sizes.steps(loop) or 1) for blob in lengths]
    fills += [_sizes(blob, known.contents[blob]) for blob in read if blob in known.contents]
    made_before = {blob for fill in fills for blob in fill.output}
    numbering = Numbering()
    numbered = tuple((name, numbering.operators(operators)) for name, operators in made.items())
    floats = tuple((numbering.blob(blob), shape) for blob, shape in shapes.items() if blob not in made_before)
    return _time(numbered, floats, numbering.operators(fills), wakes_threads)


def _wake_threads(candidates: Mapping[str, Loop]) -> bool:
    """Whether the RNN executor runs some of them."""
    return any(integer(candidate.forward, ENABLE, 0) for candidate in candidates.values())


def _making_the_sequence(loop: Loop, known: Mapping[str, Shape]) -> List[caffe2_pb2.OperatorDef]:
    """The product that does, if its sizes are known.

    Behind it OpenMP's threads are awake, so that the executor's thread gets its work as soon as it does in the net. Of
    loops that follow each other at once some take half as long again, as the system places their threads.
    """
    around = (operator for operators in loop.surroundings.products.values() for operator in operators)
    return [
        operator
        for operator in [*loop.before, *around]
        if operator.type == "FC" and loop.inputs[0] in operator.output and all(map(known.__contains__, operator.input))
    ]


def _operators(loop: Loop, before: int) -> List[caffe2_pb2.OperatorDef]:
    """What stands for a loop and its gradient, but for the first operators `before` it."""
    made = passes.around_forward(loop)[before:]
    if loop.gradient is not None:
        around = passes.around_gradient(loop)
        made += around[: len(around) - len(loop.after_gradient)]
    return made


def _with_surroundings(loop: Loop, candidate: Loop) -> Operators:
    in_front: Operators = []
    behind: Operators = []
    for position, operators in sorted(candidate.surroundings.products.items()):
        (was,) = loop.surroundings.products[position]
        (in_front if was.type == "FC" else behind).extend(operators)
    return [*in_front, *_operators(candidate, 0), *candidate.after_gradient, *behind]


def _gradients(loop: Loop, known: Mapping[str, Shape]) -> Iterator[Tuple[str, Shape]]:
    """The gradients that products behind the loop continue from, which may be there by another name than it has."""
    for (operator,) in loop.surroundings.products.values():
        if operator.type == "FCGradient" and all(map(known.__contains__, operator.input[:2])):
            x, weights, gradient = operator.input
            yield gradient, (*known[x][:FEATURES], known[weights][0])


def _shapes(loop: Loop, blobs: Iterable[str], known: Mapping[str, Shape]) -> Optional[Dict[str, Shape]]:
    """The shapes of what the operators read; None if one is not known."""
    found = dict(known)
    if loop.gradient is not None:
        initial = {state.outer_states: known.get(state.outer_initial) for state in loop.states}
        steps, batch, *_ = known.get(loop.inputs[0], (0, 0))
        positions = integers(loop.gradient.operator, POSITIONS)
        for blob, alias in zip(loop.gradient.incoming, (loop.aliases[position] for position in positions)):
            shape = initial[alias.outer_states]
            if shape:
                found[blob] = (steps if alias.offset == 1 else 1, batch, shape[-1])
    return {blob: found[blob] for blob in blobs} if all(map(found.__contains__, blobs)) else None


def _steps_of_each(lengths: str, shape: Shape, steps: int) -> caffe2_pb2.OperatorDef:
    """Sequences that have ended take a step less time; here none has. A mask takes as long for all lengths."""
    kind = caffe2_pb2.TensorProto.INT32
    beside = caffe2_pb2.OperatorDef()
    return new_operator("ConstantFill", [], [lengths], beside, shape=list(shape), value=steps, dtype=kind)


def _sizes(blob: str, content: Sequence[int]) -> caffe2_pb2.OperatorDef:
    beside = caffe2_pb2.OperatorDef()
    return new_operator("GivenTensorInt64Fill", [], [blob], beside, shape=[len(content)], values=list(content))


@trial.remembered
def _time(
    candidates: Tuple[Tuple[str, bytes], ...],
    floats: Tuple[Tuple[str, Shape], ...],
    fills: bytes,
    wakes_threads: bool,
) -> Union[Mapping[str, Seconds], str]:
    """Those of numbered operators, which read `floats` and what `fills` make."""

    def subject(operators: bytes) -> Subject:
        return Subject(operators_of(operators), dict(floats), operators_of(fills), wakes_threads)

    subjects = {name: functools.partial(subject, operators) for name, operators in candidates}
    # The executor's race fails one run in a million or so, for which the steps are not to blame.
    for _ in range(2 if wakes_threads else 1):
        with contextlib.suppress(RuntimeError):
            return trial.in_turn(subjects, one_by_one=wakes_threads)
    return "its steps cannot be tried with arbitrary numbers"
