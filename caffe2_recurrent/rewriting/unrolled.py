"""A loop's steps written out one behind the other, for the number of steps that they are written for.

    RecurrentNetwork            =>    If there are T steps: rows of the sequences, the operators of the steps, and the
                                      states of their rows;  or else the RecurrentNetwork
    RecurrentNetworkGradient    =>    likewise

A row is what a link shows: `[1, N, k]`, a blob of its own here, so that states need no links. What the steps share is
one blob for all of them, and what the backward steps compute, too, unless it is a row. What steps keep in the memory of
the sequence's gradient stays there: its rows are shown by links, by one name to the forward step and by another to the
backward step, as operators that take over memory need not work in place. A row that is the bias of a product is a
vector, see `row_biases.py`.

Source: RecurrentNetworkOp and RecurrentNetworkGradientOp in caffe2/operators/rnn/recurrent_network_op.h, if_op.h.
"""

from typing import Dict, Iterable, List, Optional, Sequence, Set, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import VIEW
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import State
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator, read_before_written, renamed
from caffe2_recurrent.rewriting import chains, gradient_memory, row_memory
from caffe2_recurrent.rewriting.backward_pass import StateGradient, of_initial_value, state_gradients
from caffe2_recurrent.rewriting.calling_thread import make_chain
from caffe2_recurrent.rewriting.products import row_biases
from caffe2_recurrent.rewriting.sequences import state_slices
from caffe2_recurrent.rewriting.steps.rows import UNITS_AND_GRADIENTS
from caffe2_recurrent.wiring import Link

NET, OTHERWISE = "unrolled", "of_other_lengths"

Operators = List[caffe2_pb2.OperatorDef]


def around_forward(loop: Loop) -> Operators:
    """What takes the place of the forward operator."""
    *before, otherwise = loop.around_forward()
    return [*before, _chosen(loop, _forward(loop), otherwise)]


def around_gradient(loop: Loop) -> Operators:
    """What takes the place of the gradient operator."""
    otherwise, *after = loop.around_gradient()
    made = _chosen(loop, _backward(loop), otherwise)
    made.is_gradient_op = True
    return [made, *after]


def sequences(loop: Loop) -> List[str]:
    """The outer blobs of which a step sees a row and that are no states."""
    states = {state.outer_states for state in loop.states}
    return list(dict.fromkeys(link.outer for link in loop.links if link.outer not in states))


def states(loop: Loop) -> List[State]:
    """But for the one that has its values in the memory of the sequence's gradient, and hands nothing on."""
    return [state for state in loop.states if state.outer_states != memory(loop)]


def memory(loop: Loop) -> Optional[str]:
    """The gradient of the sequence, if steps keep something in its slices until it is there."""
    if loop.gradient is None or not gradient_memory.is_taken(loop):
        return None
    return loop.gradient.sequence


def states_read(loop: Loop) -> List[str]:
    """The outer blobs of the states of which a step reads the value before it, or of which the net reads all."""
    before = {link.outer for link in loop.links if link.offset == 0}
    return [state.outer_states for state in states(loop) if state.outer_states in before | whole(loop)]


def whole(loop: Loop) -> Set[str]:
    """The states that something reads from their initial values on."""
    read = {blob for operator in loop.after_gradient for blob in operator.input}
    return {state.outer_states for state in loop.states} & {*loop.outputs, *loop.surroundings.read_outside, *read}


def needs_step_number(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether an operator that is given the step number looks at it, as units and their gradients do for lengths."""
    return operator.type not in UNITS_AND_GRADIENTS or bool(integer(operator, "sequence_lengths", 1))


def _chosen(loop: Loop, operators: Operators, otherwise: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    assert loop.unrolled is not None
    read = read_before_written(operators)
    written = dict.fromkeys(blob for operator in operators for blob in operator.output)
    # The backward steps read what the forward steps have left, whatever that is.
    results = list(dict.fromkeys([*otherwise.output, *written]))
    inputs = dict.fromkeys([loop.unrolled.condition, *read, *otherwise.input])
    chosen = new_operator("If", list(inputs), results, otherwise)
    # As arguments of `new_operator` the nets of all steps would be copied twice more.
    _fill(chosen.arg.add(name="else_net").n, OTHERWISE, [otherwise], otherwise.input, otherwise.output)
    steps = chosen.arg.add(name="then_net").n
    _fill(steps, NET, operators, read, written)
    if loop.unrolled.is_chain:
        make_chain(steps)
    return chosen


def _fill(net: caffe2_pb2.NetDef, name: str, operators: Operators, read: Iterable[str], written: Iterable[str]) -> None:
    net.name, net.type = name, "simple"
    net.op.extend(operators)
    net.external_input.extend(read)
    net.external_output.extend(written)


def _forward(loop: Loop) -> Operators:
    assert loop.unrolled is not None
    steps = range(loop.unrolled.steps)
    made: Operators = []
    vectors = row_biases.of_sequences(loop)
    for outer in sequences(loop):
        rows = [row_of(loop, outer, step) for step in steps]
        if outer in loop.unrolled.memory:
            if not loop.unrolled.memory[outer].is_full:
                made.append(row_memory.filled(loop, loop.unrolled.memory[outer], outer, vectors[outer]))
        elif outer in vectors:
            made += _vectors(loop, outer, vectors[outer], rows)
        else:
            made.append(_split(loop, outer, rows))
    kept = memory(loop)
    if kept is not None:
        assert loop.gradient is not None
        made.append(new_operator("ConstantFill", [loop.gradient.like], [kept], loop.forward, value=0.0))
        made += _shown(loop, kept, [row_of(loop, kept, step) for step in steps])
    for state in states(loop):
        if state.outer_states in states_read(loop):
            # Written out for one sequence, steps would take other numbers of rows, which the engine refuses.
            shape = [1, 1 if loop.unrolled.is_for_one else -1, loop.unrolled.columns[state.outer_states]]
            made.append(_reshaped(loop, state.outer_initial, row_of(loop, state.outer_states, 0), shape))
    made += _step_numbers(loop)
    operators = row_biases.operators(loop)
    for step in steps:
        names = _forward_names(loop, step)
        made += [renamed(operator, names) for operator in operators]
        made += _shaped(loop, loop.written_links, step)
    for state in states(loop):
        if state.outer_states not in backward_buffers(loop):
            made += _states(loop, state.outer_states)
    return made


def _states(loop: Loop, outer: str) -> Operators:
    """All values of a state, and what is shown of them."""
    assert loop.unrolled is not None
    rows = [row_of(loop, outer, row) for row in range(loop.unrolled.steps + 1)]
    is_whole = outer in whole(loop)
    made: Operators = []
    if is_whole:
        made.append(_joined(loop, rows, outer))
    for alias in loop.aliases:
        if alias.outer_states != outer:
            continue
        if alias.offset == -1:
            # The loop leaves a view of the states, which are another tensor by now, or are written to right here.
            made.append(new_operator("Alias", rows[-1:], [alias.outer_output], loop.forward))
        elif is_whole:
            made.append(state_slices.operator(loop, outer, alias.outer_output, alias.offset))
        elif outer in loop.unrolled.memory:
            made.append(row_memory.shown(loop, loop.unrolled.memory[outer], alias.outer_output))
        else:
            made += _joined_apart(loop, rows[1:], alias.outer_output)
    return made


def _backward(loop: Loop) -> Operators:
    assert loop.gradient is not None and loop.unrolled is not None
    gradient, steps, outgoing = loop.gradient, loop.unrolled.steps, loop.unrolled.biases.outgoing
    of_states = state_gradients(loop)
    made: Operators = []
    from_outside = {}
    for outer, of in of_states.items():
        from_outside[of.outer] = [loop.new_blob("{}_of_{}".format(of.outer, step)) for step in range(steps)]
        made += _last(loop, outer, of, from_outside[of.outer])
    kept = memory(loop)
    if kept is not None:
        made += _shown(loop, kept, [_row_of_gradient(loop, kept, step) for step in range(steps)])
    for step in reversed(range(steps)):
        for of in of_states.values():
            if of.of_all is not None and step < steps - 1 and of.outer not in outgoing:
                row = row_of(loop, of.outer, step + 1)
                made.append(new_operator("Sum", [row, from_outside[of.outer][step]], [row], loop.forward))
        names = _backward_names(loop, step)
        operators = gradient.operators
        if step:
            operators = row_biases.gradient_operators(loop, {of: from_outside[of][step - 1] for of in outgoing})
        made += [renamed(operator, names) for operator in operators]
        made += _shaped(loop, gradient.backward_links, step)
    initial = {state.outer_states: state.outer_initial for state in loop.states}
    for outer, of in of_states.items():
        made += of_initial_value(loop, of, row_of(loop, of.outer, 0), initial[outer])
    buffers = backward_buffers(loop)
    for link in {link.outer: link for link in sequence_links(loop) if link.outer != kept}.values():
        rows = [row_of(loop, link.outer, step + link.offset) for step in range(steps)]
        if link.outer in buffers:
            made += _joined_apart(loop, rows, buffers[link.outer])
        else:
            made.append(_joined(loop, rows, link.outer))
        if link.outer == gradient.sequence and link.inner in loop.unrolled.shapeless:
            shape, old = loop.new_blob("unrolled_shape"), loop.new_blob("unrolled_old_shape")
            made.append(new_operator("Shape", [gradient.like], [shape], loop.forward))
            made.append(new_operator("Reshape", [link.outer, shape], [link.outer, old], loop.forward))
    return made


def _shaped(loop: Loop, links: Sequence[Link], step: int) -> Operators:
    """What gives rows of states that a step has written the shape in which the next one sees them."""
    assert loop.unrolled is not None
    columns = dict(loop.unrolled.columns)
    if loop.gradient is not None:
        columns.update((of.outer, columns[outer]) for outer, of in state_gradients(loop).items())
    made: Operators = []
    for link in dict.fromkeys(links):
        if link.outer in columns and link.inner in loop.unrolled.shapeless:
            row = row_of(loop, link.outer, step + link.offset)
            made.append(_reshaped(loop, row, row, [1, -1, columns[link.outer]]))
    return made


def backward_buffers(loop: Loop) -> Dict[str, str]:
    """Buffers of the loop to which the backward step writes, and what shows the values of all steps."""
    linked = {link.outer for link in loop.gradient.backward_links} if loop.gradient is not None else set()
    return {
        alias.outer_states: alias.outer_output for alias in loop.aliases if alias.outer_states in linked & loop.buffers
    }


def sequence_links(loop: Loop) -> List[Link]:
    """What the backward step writes, but for the gradients of states."""
    assert loop.gradient is not None
    of_states = {of.outer for of in state_gradients(loop).values()}
    return [link for link in loop.gradient.backward_links if link.outer not in of_states]


def _last(loop: Loop, outer: str, of: StateGradient, from_outside: List[str]) -> Operators:
    """The gradient of a state's last value, and the rows of that of all values, if there is one."""
    assert loop.unrolled is not None
    row, size = row_of(loop, of.outer, loop.unrolled.steps), loop.unrolled.columns[outer]
    made: Operators = []
    if of.of_all is not None:
        # To the engine's operator only its number of elements matters.
        if of.outer in loop.unrolled.biases.outgoing:
            made += _vectors(loop, of.of_all, None, from_outside)
            made.append(_reshaped(loop, from_outside[-1], from_outside[-1], [1, -1, size]))
        else:
            rows = loop.new_blob(of.outer + "_rows")
            made.append(_reshaped(loop, of.of_all, rows, [loop.unrolled.steps, -1, size]))
            made.append(_split(loop, rows, from_outside))
    if of.of_last is not None:
        made.append(_reshaped(loop, of.of_last, row, [1, -1, size]))
    if of.of_all is not None:
        inputs = ([row] if of.of_last is not None else []) + from_outside[-1:]
        made.append(new_operator("Sum", inputs, [row], loop.forward))
    if not made:
        like = row_of(loop, outer, loop.unrolled.steps)
        made.append(new_operator("ConstantFill", [like], [row], loop.forward, value=0.0))
    return made


# -------------------------------------------------------------------------------------------------------------- names


def _forward_names(loop: Loop, step: int) -> Dict[str, str]:
    names = {blob: _own(loop, blob, step) for blob in loop.written}
    names.update({link.inner: row_of(loop, link.outer, step + link.offset) for link in loop.links})
    names[loop.timestep] = _step_number(loop, step)
    return names


def _backward_names(loop: Loop, step: int) -> Dict[str, str]:
    gradient = loop.gradient
    assert gradient is not None
    names = _forward_names(loop, step)
    seen = set(gradient.links) | set(gradient.backward_links)
    seen_rows = {link.inner: row_of(loop, link.outer, step + link.offset) for link in seen}
    own = {link.inner: link.outer for link in gradient.backward_links if link.outer == memory(loop)}
    seen_rows.update((inner, _row_of_gradient(loop, outer, step)) for inner, outer in own.items())
    changed = set(changed_in_place(loop))
    for operator in gradient.operators:
        for blob in operator.output:
            if blob not in changed:
                names[blob] = _made(loop, blob, "backward", blob)
    return {**names, **seen_rows}


def changed_in_place(loop: Loop) -> List[str]:
    """What the forward step has left and the backward step reads before it writes to it."""
    assert loop.gradient is not None
    found = {*read_before_written(loop.gradient.operators)} & loop.written
    written = dict.fromkeys(blob for operator in loop.gradient.operators for blob in operator.output)
    return [blob for blob in written if blob in found]


def row_of(loop: Loop, outer: str, row: int) -> str:
    """A row of an outer blob that links show."""
    # Another net may write to a row of its own, which must not be where this one's has been: see `memory_names.py`.
    ending = VIEW if outer == memory(loop) else ""
    return _made(loop, "{}{}_{}".format(outer, ending, row), "row", outer, row)


def _row_of_gradient(loop: Loop, outer: str, row: int) -> str:
    """The same row of the sequence's gradient by its name in the backward step, if steps keep something there."""
    return _made(loop, "{}_gradient{}_{}".format(outer, VIEW, row), "row of gradient", outer, row)


def _own(loop: Loop, blob: str, step: int) -> str:
    """A blob that a forward step computes and no link shows."""
    if blob in loop.shared:
        return _made(loop, blob, "shared", blob)
    return _made(loop, "{}_{}".format(blob, step), "forward", blob, step)


def _step_number(loop: Loop, step: int) -> str:
    if any(map(needs_step_number, _counting(loop))):
        return _made(loop, "{}_{}".format(loop.timestep, step), "step", step)
    return _made(loop, loop.timestep, "step")


def _made(loop: Loop, name: str, *key: Union[str, int]) -> str:
    """The blob of that key, the same one each time; its name is like `name`."""
    if (NET, *key) not in loop.made:
        # Not like those of the loop, which is there as well.
        loop.made[(NET, *key)] = loop.new_blob("{}_{}".format(NET, name.split("/")[-1]))
    return loop.made[(NET, *key)]


# ---------------------------------------------------------------------------------------------------------- operators


def _counting(loop: Loop) -> Operators:
    """The operators that are given the step number."""
    return [operator for operators in loop.steps for operator in operators if loop.timestep in operator.input]


def _step_numbers(loop: Loop) -> Operators:
    assert loop.unrolled is not None
    steps, kind = loop.unrolled.steps, caffe2_pb2.TensorProto.INT32
    if not _counting(loop):
        return []
    if not any(map(needs_step_number, _counting(loop))):
        return [new_operator("ConstantFill", [], [_step_number(loop, 0)], loop.forward, shape=[1], value=0, dtype=kind)]
    all_steps = loop.new_blob("unrolled_step_numbers")
    numbers = {"shape": [steps], "values": list(range(steps))}
    return [
        new_operator("GivenTensorIntFill", [], [all_steps], loop.forward, **numbers),
        _split(loop, all_steps, [_step_number(loop, step) for step in range(steps)]),
    ]


def _split(loop: Loop, blob: str, rows: Sequence[str]) -> caffe2_pb2.OperatorDef:
    return new_operator("Split", [blob], rows, loop.forward, axis=0)


def _vectors(loop: Loop, blob: str, bias: Optional[str], rows: Sequence[str]) -> Operators:
    """The rows of a blob that has one for each step, `[T, 1, K]`, as vectors, with a bias added to all."""
    flat = loop.new_blob("{}_flat".format(NET))
    made = []
    if bias is not None:
        made.append(new_operator("Add", [blob, bias], [flat], loop.forward, broadcast=1))
    made.append(_reshaped(loop, blob if bias is None else flat, flat, [-1]))
    return [*made, _split(loop, flat, rows)]


def _shown(loop: Loop, blob: str, rows: Sequence[str]) -> Operators:
    """The rows of a blob without copies of them."""
    kind = caffe2_pb2.TensorProto.INT32
    first = loop.new_blob("unrolled_first")
    filling = new_operator("ConstantFill", [], [first], loop.forward, shape=[1], value=0, dtype=kind)
    return [filling, *chains.linking((Link(row, blob, position) for position, row in enumerate(rows)), first, loop)]


def _joined(loop: Loop, rows: Sequence[str], blob: str) -> caffe2_pb2.OperatorDef:
    return new_operator("Concat", rows, [blob, loop.new_blob("unrolled_sizes")], loop.forward, axis=0)


def _joined_apart(loop: Loop, rows: Sequence[str], blob: str) -> Operators:
    """Likewise, where a loop leaves a view of states in `blob`, that may be gone when the next run finds it there."""
    own = loop.new_blob("unrolled_" + blob.split("/")[-1])
    return [_joined(loop, rows, own), new_operator("Alias", [own], [blob], loop.forward)]


def _reshaped(loop: Loop, blob: str, result: str, shape: Sequence[int]) -> caffe2_pb2.OperatorDef:
    old = loop.new_blob("unrolled_old_shape")
    return new_operator("Reshape", [blob], [result, old], loop.forward, shape=shape)
