"""Steps of small loops one behind the other, without links."""

import copy
from typing import Dict, FrozenSet, Iterable, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Unrolled
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import STATES, strings
from caffe2_recurrent.operators import SHOWING, is_on_onednn
from caffe2_recurrent.rewriting import loop_trial, passes, unrolled
from caffe2_recurrent.rewriting.backward_pass import state_gradients
from caffe2_recurrent.rewriting.products import kept_filters, row_biases
from caffe2_recurrent.rewriting.products.nnpack import is_by_nnpack
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.chained_steps import ChainedSteps
from caffe2_recurrent.rewriting.steps import overlap, step_counts, step_shapes
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS
from caffe2_recurrent.rewriting.trials import trial

# A trial must be faster by this factor.
GAIN = 1.05
AS_IT_IS, UNROLLED = "loop", "unrolled"
# What may apply to either, if it was chosen too.
THEN = (ChainedSteps(),)


class UnrolledSteps(Rule):
    """RecurrentNetwork of T steps    RecurrentNetworkGradient

    =>  If there are T steps: their operators one behind the other;  or else what was there

    The engine makes each link anew in each step: with one sequence of 100 numbers these and the run of the step's net
    were a quarter of an LSTM's forward pass. Written out, steps hand their states on by name; sequences are split into
    rows once, and states put together once. What that copies is more than what is saved, if states are not small: a
    trial decides. With one sequence in the batch, products take rows that are added to them for their biases, where
    `row_biases.py` finds some; then the condition is that there is one.
    """

    name = "unrolled_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.unrolled is None:
            yield Site("steps", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps = sizes.steps(loop)
        if steps is None:
            return "the number of steps is not known; give shapes"
        if steps == 1:
            return "there is one step"
        count = step_counts.operators(loop, sizes)
        if count is not None and count > step_counts.few(loop, sizes):
            return "{} operators and links of all steps are many".format(count)
        return (
            overlap.why_executor_stays(loop)
            or overlap.why_executor_pays(loop)
            or _why_not_in_company(loop)
            or _why_not_backward(loop)
            or _why_not_forward(loop)
            or _why_not_states(loop, sizes)
            or _why_not_rows(loop, sizes)
        )

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if any(is_on_onednn(operator) for operators in loop.steps for operator in operators):
            return "its products are large enough for oneDNN, and links take little of the time"
        if not trial.are_wanted():
            return "only a trial could tell that it is faster"
        as_it_is, written_out = copy.deepcopy(loop), copy.deepcopy(loop)
        self.rewrite(written_out, site, sizes)
        for candidate in (as_it_is, written_out):
            passes.apply_chosen(THEN, candidate, sizes)
        found = loop_trial.seconds(loop, {AS_IT_IS: as_it_is, UNROLLED: written_out}, sizes)
        if isinstance(found, str):
            return found
        if GAIN * found[UNROLLED].step > found[AS_IT_IS].step:
            return "for {} steps it is not faster".format(sizes.steps(loop))
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        steps = sizes.steps(loop)
        assert steps is not None
        condition = _is_as_large(loop, loop.inputs[0], 0, steps, "is_unrolled")
        for sequence in unrolled.sequences(loop):
            if sequence != loop.inputs[0]:
                # The engine goes by the first one. Another may be longer.
                is_as_long = _is_as_large(loop, sequence, 0, steps, sequence + "_is_unrolled")
                condition = loop.add_before("And", [condition, is_as_long], "are_unrolled")
        shapes = {state.outer_states: sizes.shape(state.outer_initial) for state in unrolled.states(loop)}
        biases = row_biases.found(loop, sizes)
        if biases.added or biases.outgoing:
            is_one = _is_as_large(loop, loop.inputs[0], 1, 1, "is_one_sequence")
            condition = loop.add_before("And", [condition, is_one], "is_unrolled_for_one")
        else:
            condition = _with_rows(loop, condition, shapes)
        columns = {outer: (shape or (0,))[-1] for outer, shape in shapes.items()}
        loop.unrolled = Unrolled(steps, condition, columns, _shapeless(loop, sizes), biases, {})


def _is_as_large(loop: Loop, blob: str, axis: int, size: int, name: str) -> str:
    """An outer blob that says whether `blob` is of that size along an axis."""
    found = loop.add_before("Shape", [blob], "{}_size_{}".format(blob, axis), axes=[axis])
    return loop.add_before("IsMemberOf", [found], name, value=[size], dtype=caffe2_pb2.TensorProto.INT64)


def _with_rows(loop: Loop, condition: str, shapes: Dict[str, Optional[Shape]]) -> str:
    """`condition`, and that initial states have a row for each sequence: a loop takes one row for all of them as well,
    and refuses other numbers of rows.
    """
    batch = loop.add_before("Shape", loop.inputs[:1], loop.inputs[0] + "_size_1", axes=[1])
    for state in unrolled.states(loop):
        shape = shapes[state.outer_states]
        if state.outer_states in unrolled.states_read(loop) and shape is not None:
            columns = loop.add_before("GivenTensorInt64Fill", [], "columns", shape=[1], values=[shape[-1]])
            wanted = loop.add_before("Mul", [batch, columns], "elements_of_rows")
            elements = loop.add_before("Size", [state.outer_initial], state.outer_initial + "_elements")
            has_rows = loop.add_before("EQ", [elements, wanted], state.outer_initial + "_has_rows")
            condition = loop.add_before("And", [condition, has_rows], "is_unrolled_with_rows")
    return condition


def _why_not_in_company(loop: Loop) -> Optional[str]:
    """Whoever makes a convolution makes anew the lock that it finds, and a convolution under way loses it."""
    by_nnpack = any(is_by_nnpack(operator) for operators in loop.steps for operator in operators)
    if loop.surroundings.has_company and by_nnpack:
        return (
            "another loop may run at the same time, and products by NNPACK have no memory of their own outside a loop"
        )
    return None


def _why_not_forward(loop: Loop) -> Optional[str]:
    if any(map(kept_filters.are_in, loop.steps)):
        # Nothing could make them anew where the net itself runs them.
        return "operators of its steps keep what they have made of weights"
    states = {state.outer_states for state in unrolled.states(loop)}
    kept = unrolled.memory(loop)
    for link in loop.links:
        if link.offset not in ((0, 1) if link.outer in states else (0,)):
            return "'{}' is linked to another slice of '{}' than that of the step".format(link.inner, link.outer)
    given = {link.inner for link in loop.links if link.outer != kept and (link.outer not in states or link.offset == 0)}
    changed = given & loop.written
    if changed:
        return "the step writes over '{}'".format(min(changed))
    for outer in states - set(unrolled.backward_buffers(loop)):
        new = [link.inner for link in loop.links if link.outer == outer and link.offset == 1]
        if len(new) != 1 or new[0] not in loop.written:
            return "a step does not write one new value of '{}'".format(outer)
    if any(operator.type in SHOWING for operators in loop.steps for operator in operators):
        return "a step shows a blob under another name"
    if loop.surroundings.written_outside:
        # Written out, all values and the last one are no longer the same memory.
        return "an operator writes to '{}' in its place".format(min(loop.surroundings.written_outside))
    for alias in loop.aliases:
        if alias.offset not in (1, -1):
            return "'{}' is another part of '{}' than all values or the last one".format(
                alias.outer_output, alias.outer_states
            )
    return None


def _why_not_states(loop: Loop, sizes: Sizes) -> Optional[str]:
    read = unrolled.states_read(loop)
    for state in unrolled.states(loop):
        shape = sizes.shape(state.outer_initial)
        is_one_value = shape is not None and len(shape) in (DIMENSIONS - 1, DIMENSIONS)
        if state.outer_states in read and not is_one_value:
            return "the initial state '{}' is not known to have a row for each sequence; give shapes".format(
                state.outer_initial
            )
    return None


def _why_not_rows(loop: Loop, sizes: Sizes) -> Optional[str]:
    if loop.gradient is None:
        return None
    shapeless = _shapeless(loop, sizes)
    for link in unrolled.sequence_links(loop):
        if link.inner in shapeless and link.outer in loop.gradient.others:
            return "'{}' is not known to be a row for each sequence".format(link.inner)
    return None


def _shapeless(loop: Loop, sizes: Sizes) -> FrozenSet[str]:
    """To the engine the shape of what is written to a slice does not matter; to the next step it does."""
    links = loop.written_links
    if loop.gradient is not None:
        links += loop.gradient.backward_links
    shapes, batch = step_shapes.shapes_written(loop, sizes), sizes.batch(loop)
    return frozenset(link.inner for link in links if shapes.get(link.inner, ())[:-1] != (1, batch))


def _why_not_backward(loop: Loop) -> Optional[str]:
    gradient = loop.gradient
    if gradient is None:
        return None
    if gradient.turned is not None:
        return "its backward pass is a loop of its own"
    if gradient.parameters:
        return "steps add up the gradient of '{}'".format(gradient.parameters[0].outer)
    found = state_gradients(loop)
    missing = [outer for outer in strings(gradient.operator, STATES) if outer not in found]
    if missing:
        return "the backward step does not pass on the gradient of '{}'".format(missing[0])
    written = {blob for operator in gradient.operators for blob in operator.output}
    shown, buffers = unrolled.sequence_links(loop), unrolled.backward_buffers(loop)
    for link in shown:
        if (
            link.offset != int(link.outer in buffers)
            or link.inner not in written
            or [other.outer for other in shown].count(link.outer) > 1
        ):
            return "'{}' is not what a step writes to its slice of '{}'".format(link.inner, link.outer)
    made = {buffers.get(link.outer, link.outer) for link in shown} | _made_after(loop)
    unknown = {gradient.sequence, *gradient.others} - made
    if unknown:
        return "no step writes to its slice of '{}', which the gradient operator makes".format(min(unknown))
    own = {link.inner for link in gradient.backward_links}
    again = {link.inner for link in [*loop.links, *gradient.links]} & written - own
    if again:
        return "the backward step writes to '{}'".format(min(again))
    return None


def _made_after(loop: Loop) -> Set[str]:
    """The blobs that operators behind the backward pass make anew."""
    read: Set[str] = set()
    made: Set[str] = set()
    for operator in loop.after_gradient:
        read.update(operator.input)
        made.update(blob for blob in operator.output if blob not in read)
    return made
