"""The backward pass as a loop of its own, so that steps take turns in two workspaces."""

from typing import Dict, Iterable, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import State, Turned
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import STATES, strings
from caffe2_recurrent.operators import SHOWING, new_operator
from caffe2_recurrent.rewriting import gradient_memory
from caffe2_recurrent.rewriting.backward_pass import links, state_gradients
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow, overlap, step_counts
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS
from caffe2_recurrent.rewriting.steps.step_shapes import columns
from caffe2_recurrent.wiring import Alias, Link


class BackwardLoop(Rule):
    """a workspace for each step, with operators of its own and what it keeps    RecurrentNetworkGradient in these

    =>  two workspaces, what is kept in outer blobs `[T + 1, N, k]`    RecurrentNetwork from the last step to the first

    A net that trains has T times the operators of a step, and each of them has left the cache when it is run again. Two
    workspaces are enough for a loop without a backward step; and a backward pass is one, see `backward_pass.py`. With
    few operators that is for `turning.py` to say, as other rules go by it.
    """

    name = "backward_loop"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.gradient is not None and loop.gradient.turned is None:
            yield Site("gradient '{}'".format(loop.gradient.sequence), None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        gradient = loop.gradient
        assert gradient is not None
        if gradient.parameters:
            return "steps add up the gradient of '{}'".format(gradient.parameters[0].outer)
        return (
            overlap.why_executor_stays(loop)
            or overlap.why_executor_pays(loop)
            or _why_not_states(loop, sizes)
            or _why_not_sequence(loop, sizes)
            or _why_not_kept(loop, sizes)
        )

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        count = step_counts.operators(loop, sizes)
        if count is None:
            return "the number of steps is not known; give shapes"
        if count < step_counts.few(loop, sizes) and not loop.turns:
            return "{} operators and links of all steps are few, and a trial has not found that it pays".format(count)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None
        overlap.take_executor_off(loop)
        for blob, size in _kept(loop, sizes).items():
            assert size is not None
            _link_to_buffer(loop, blob, size)
        memory = _memory_of_sequence(loop, sizes)
        states = {state.outer_states for state in loop.states}
        for link in links(loop):
            if link.outer in states:
                # The net has to know where it is from.
                loop.add_output(link.outer)
        of_states = state_gradients(loop)
        initial = {state.outer_states: sizes.shape(state.outer_initial) or () for state in loop.states}
        zeros = {outer: loop.add_zeros(initial[outer][-1]) for outer, of in of_states.items() if not of.of_last}
        # The engine does not size the sequence's gradient any more.
        loop.drop_unread(gradient.like)
        gradient.turned = Turned(_last_step(loop), zeros, memory, {})


def _why_not_states(loop: Loop, sizes: Sizes) -> Optional[str]:
    gradient = loop.gradient
    assert gradient is not None
    found = state_gradients(loop)
    missing = [outer for outer in strings(gradient.operator, STATES) if outer not in found]
    if missing:
        return "the backward step does not pass on the gradient of '{}'".format(missing[0])
    needed = [of.outer for of in found.values() if of.outer in gradient.others]
    if needed:
        return "other operators read '{}', in the order of the steps".format(needed[0])
    for state in loop.states:
        shape = sizes.shape(state.outer_initial)
        if state.outer_states in found and (shape is None or len(shape) == DIMENSIONS and shape[0] != 1):
            return "the initial state '{}' is not known to be one value; give shapes".format(state.outer_initial)
    return None


def _why_not_sequence(loop: Loop, sizes: Sizes) -> Optional[str]:
    gradient = loop.gradient
    assert gradient is not None
    shape = sizes.shape(gradient.like)
    if not gradient_memory.is_taken(loop) and (shape is None or len(shape) != DIMENSIONS):
        return "the shape of the sequence '{}' is not known; give shapes".format(gradient.like)
    return None


def _why_not_kept(loop: Loop, sizes: Sizes) -> Optional[str]:
    gradient = loop.gradient
    assert gradient is not None
    shown = {link.inner for link in [*gradient.links, *gradient.backward_links]}
    forward = {link.inner for link in loop.links} - shown
    again = [blob for operator in gradient.operators for blob in operator.output if blob in forward]
    if again:
        return "the backward step writes to '{}'".format(again[0])
    writing = dataflow.writing(loop.operators)
    for blob, size in _kept(loop, sizes).items():
        first, *others = writing[blob]
        if first.type in SHOWING or any(other.type == ATEN or blob not in other.input for other in others):
            return "'{}' is written anew, or shows another blob".format(blob)
        if size is None:
            return "each step keeps '{}', which is not known to be a row of floats for each sequence".format(blob)
    return None


def _kept(loop: Loop, sizes: Sizes) -> Dict[str, Optional[int]]:
    """The blobs that the backward step reads and only the workspace of their step has, with their columns if known."""
    gradient = loop.gradient
    assert gradient is not None
    kept = loop.written - {link.inner for link in loop.all_links}
    known = {**loop.known.columns, **columns(loop, sizes)}
    written: Set[str] = set()
    found: Dict[str, Optional[int]] = {}
    for operator in gradient.operators:
        for blob in operator.input:
            if blob in kept and blob not in written:
                found[blob] = known.get(blob)
        written.update(operator.output)
    return found


def _link_to_buffer(loop: Loop, blob: str, size: int) -> None:
    writing, *_ = dataflow.writers(loop.operators, blob)
    operator = loop.operators[writing]
    if operator.type == ATEN:
        # It makes a tensor of its own, which cannot be a slice.
        made = loop.new_blob(blob + "_made")
        dataflow.rename(operator, blob, made)
        loop.operators.insert(writing + 1, new_operator("Copy", [made], [blob], operator))
    loop.links.append(loop.add_buffer(blob, loop.add_zeros(size)))


def _last_step(loop: Loop) -> str:
    """T - 1, in an outer blob of one number like that of the step."""
    steps = loop.add_before("Shape", loop.inputs[:1], "steps", axes=[0])
    number = loop.add_before("Cast", [steps], "number_of_steps", to=caffe2_pb2.TensorProto.INT32)
    one = loop.add_before("ConstantFill", [], "one_step", shape=[1], value=1, dtype=caffe2_pb2.TensorProto.INT32)
    return loop.add_before("Sub", [number, one], "last_step")


def _memory_of_sequence(loop: Loop, sizes: Sizes) -> Optional[State]:
    """A state of the backward pass to hold the sequence's gradient, whose slices from 1 on that is; None if the forward
    operator has one.
    """
    gradient = loop.gradient
    assert gradient is not None
    memory = loop.new_blob(gradient.sequence + "_memory")
    for found in (loop.links, gradient.links, gradient.backward_links):
        found[:] = [
            Link(link.inner, memory, link.offset + 1) if link.outer == gradient.sequence else link for link in found
        ]
    if not gradient_memory.is_taken(loop):
        shape = sizes.shape(gradient.like)
        assert shape is not None
        return State(memory, loop.add_zeros(shape[-1]))
    loop.states[:] = [
        State(memory, state.outer_initial) if state.outer_states == gradient.sequence else state
        for state in loop.states
    ]
    loop.aliases.append(Alias(memory, gradient.sequence, 1))
    loop.add_output(gradient.sequence)
    return None
