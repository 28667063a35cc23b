"""The sequences of a loop, the initial values of its states and its lengths, held beside each other."""

from typing import Mapping, NamedTuple, Optional

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.input_check.fed import Fed
from caffe2_recurrent.input_check.steps import Batch, Rows, Size, read_steps
from caffe2_recurrent.loops.lengths import lengths_of
from caffe2_recurrent.loops.loop import WINDOWS, Loop
from caffe2_recurrent.loops.shape_checks import show
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.operators import BACKWARD_PASS_OF, TURNING
from caffe2_recurrent.problems import Problems

Shapes = Mapping[str, Shape]
# What is said of an input that seems to be batch first.
TURN = "is it [N, T, ...]? Then feed it as np.swapaxes(value, 0, 1)"


class Run(NamedTuple):
    """How many steps a loop runs over how many sequences, and the blob that says so, as an error shows it."""

    steps: int
    sequences: int
    shown: str


def check_loop(net: caffe2_pb2.NetDef, loop: Loop, sizes: Sizes, fed: Mapping[str, Fed], values: Problems) -> None:
    """Note what does not fit; `sizes` are those of the net's blobs, as far as they are known."""
    if any(argument(loop.forward, name) is not None for name in (BACKWARD_PASS_OF, *WINDOWS)):
        # Nothing is fed for a backward pass; a step that sees several slices begins with several values.
        return
    shapes = {blob: sizes.shape(blob) for blob in [*loop.inputs, *loop.references]}
    known = {blob: shape for blob, shape in shapes.items() if shape is not None}
    run = _run(net, loop, known, sizes)
    counted = _counted(loop, known)
    agreed = run is not None and set(counted.values()) <= {run.sequences}
    steps = read_steps(loop, known, Batch(sizes.batch(loop), agreed), values)
    if run is None:
        _check_states(loop, known, steps.sizes, None, values)
    elif run.sequences == 0:
        values.add("{} has no sequences; the engine takes one or more", run.shown)
    elif _is_batch_first(counted, known, run, values):
        # What is for the sequences as they were meant is right.
        _check_states(loop, known, steps.sizes, None, values)
    else:
        _check_other_sequences(loop, known, run, values)
        _check_states(loop, known, steps.sizes, run, values)
        _check_lengths(net, loop, fed, run, steps.rows, values)


def _run(net: caffe2_pb2.NetDef, loop: Loop, known: Shapes, sizes: Sizes) -> Optional[Run]:
    """By the first sequence, or rather what that is made of, as long as it has the same steps and sequences."""
    blob = loop.inputs[0]
    both = known.get(blob, ())[:2]
    if len(both) < 2:
        return None
    made_by = {output: operator for operator in reversed(net.op) for output in operator.output}
    while blob in made_by:
        alike = [other for other in made_by.pop(blob).input if (sizes.shape(other) or ())[:2] == both]
        if not alike:
            break
        blob = alike[0]
    return Run(both[0], both[1], show(blob, sizes.known(blob)))


def _counted(loop: Loop, known: Shapes) -> Mapping[str, int]:
    """For how many sequences there are initial values and lengths, by blob; the same value for all says nothing."""
    counted = {state.outer_initial: known.get(state.outer_initial, ())[-3:-1][-1:] for state in loop.states}
    counted.update((blob, known.get(blob, ())[:1]) for blob, of_steps in lengths_of(loop).items() if of_steps)
    return {blob: count[0] for blob, count in counted.items() if count}


def _is_batch_first(counted: Mapping[str, int], known: Shapes, run: Run, values: Problems) -> bool:
    """Whether all that is there for each sequence is for as many as there are steps; it is noted then."""
    if set(counted.values()) != {run.steps} or run.steps == run.sequences:
        return False
    text = "{} is taken for {} steps of {} sequences, but there are {} by {}; {}"
    others = ", ".join(show(blob, known[blob]) for blob in counted)
    values.add(text, run.shown, run.steps, run.sequences, run.steps, others, TURN)
    return True


def _check_other_sequences(loop: Loop, known: Shapes, run: Run, values: Problems) -> None:
    """Of a sequence but the first one a step takes its slice, whatever is in it."""
    for link in loop.links:
        shape = known.get(link.outer)
        if link.outer in loop.inputs and shape is not None and shape[:1] < (run.steps,):
            is_turned = shape[:2] == (run.sequences, run.steps)
            hint = "; " + TURN if is_turned else ""
            text = "'{}' must have {} steps or more, as {} has; got {}{}"
            values.add(text, link.outer, run.steps, run.shown, shape, hint)


def _check_states(loop: Loop, known: Shapes, states: Mapping[str, Size], run: Optional[Run], values: Problems) -> None:
    for outer_states, blob in loop.states:
        if blob not in known:
            continue
        shape, reasons, hint = known[blob], [], ""
        elements = shape[-1] if shape else "D"
        if outer_states in states and shape and shape[-1] != states[outer_states].elements:
            elements = states[outer_states].elements
            reasons.append(states[outer_states].reason)
        sequences = run.sequences if run is not None else shape[-2] if len(shape) > 1 else "N"
        if run is not None and len(shape) > 1 and shape[-2] != run.sequences:
            reasons.append("as {} is of {} sequences".format(run.shown, run.sequences))
        if len(shape) == 3 and shape[0] != 1:
            reasons.append("as steps read the first of several slices alone")
            hint = "; give each layer a blob of its own"
        if reasons or not 1 <= len(shape) <= 3:
            forms = "[{1}], [{0}, {1}] or [1, {0}, {1}]".format(sequences, elements)
            because = ", " + ", ".join(reasons) if reasons else ""
            values.add("'{}' must be {}{}; got {}{}", blob, forms, because, shape, hint)


def _check_lengths(
    net: caffe2_pb2.NetDef,
    loop: Loop,
    fed: Mapping[str, Fed],
    run: Run,
    rows: Mapping[str, Rows],
    values: Problems,
) -> None:
    each = Rows(run.sequences, "sequence of {}".format(run.shown))
    for blob, of_steps in lengths_of(loop).items():
        if blob not in fed:
            continue
        found, hint = fed[blob], ""
        got = found.text
        of = rows.get(blob)
        if of_steps or (of is not None and of.number == each.number):
            of = each
        if found.kind != np.int32:
            hint = "; feed it as value.astype(np.int32)"
        elif of is None or _are_enough(net, blob, found.shape, of.number, of_steps):
            got = ", ".join(map(str, _unlikely(blob, run.steps))) if of_steps else ""
        if got:
            most = " from 0 to {}".format(run.steps) if of_steps else ""
            wanted = " [{}], a length{} for each {}".format(of.number, most, of.shown) if of is not None else ""
            values.add("'{}' must be int32{}; got {}{}", blob, wanted, got, hint)


def _are_enough(net: caffe2_pb2.NetDef, lengths: str, shape: Shape, count: int, of_steps: bool) -> bool:
    """A mask passes over those that are too many; what turns sequences round wants them in one row."""
    if not of_steps:
        return int(np.prod(shape)) >= count
    is_row = len(shape) == 1 or not any(operator.type == TURNING and lengths in operator.input for operator in net.op)
    return is_row and int(np.prod(shape)) == count


def _unlikely(lengths: str, steps: int) -> np.ndarray:
    numbers = workspace.FetchBlob(lengths)
    return numbers[(numbers < 0) | (numbers > steps)]
