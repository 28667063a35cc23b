"""A RecurrentNetwork operator, and the gradient operator that belongs to it, as a value that rules can change.

    operators -> Loop -> (rules) -> operators

`reading.read_loops` finds the loops of a net. A loop is a copy: the net stays as it is until
`Loop.around_forward` and `Loop.around_gradient` are put in the places of the two operators.

`inner_X` is a name in the step nets, `outer_X` one in the net around them.
"""

import re
import zlib
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.gradient_maker import POSITIONS, PYTHON_POSITIONS, SEQUENCE_GRADIENTS
from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.loops.parts import Keeping, Known, Original, Parameter, State, Surroundings, Turned, Unrolled
from caffe2_recurrent.operator_arguments import (
    BACKWARD_STEP_NET,
    INITIAL,
    PARAMETER_GRADIENTS,
    PARAMETERS,
    RECOMPUTED,
    RENAMED,
    STATES,
    STEP_NET,
    net_to_read,
    remove_arguments,
    set_arguments,
)
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import OPERATOR, copied, gradient_name, new_operator, read_before_written
from caffe2_recurrent.wiring import Alias, Link, alias_arguments, link_arguments, own_prefix

# Of links; without them each shows one slice.
WINDOWS = ("link_window", "backward_link_window")
# The net of an `If` whose results stay from run to run, see `kept_results.py`.
WHEN_CHANGED = "weights_changed"
# The net of an `If` that runs parts of the batch, see `batch_parts/side_by_side.py`.
IN_PARTS = "batch_in_parts"
# What ends the name of a step net that has been changed.
CONTENT = re.compile("_[0-9a-f]{8}$")
BACKWARD = (BACKWARD_STEP_NET, POSITIONS, PYTHON_POSITIONS, SEQUENCE_GRADIENTS)


@dataclass
class Gradient:
    """The RecurrentNetworkGradient operator of a loop.

    `incoming` are the gradients of the loop's outputs, `links` what the backward step sees of the forward pass,
    `backward_links` what it writes; names that the operator renames are the new ones. `parameters` and `initial` are
    the outer gradients in the order of the operator's outputs. `like` is an outer blob of the shape of `sequence`, that
    is of the first sequence as it was when the gradient was derived. With `turned` it is to become a loop of its own.
    """

    operator: caffe2_pb2.OperatorDef
    net: caffe2_pb2.NetDef
    operators: List[caffe2_pb2.OperatorDef]
    incoming: List[str]
    like: str
    sequence: str
    parameters: List[Parameter]
    initial: List[str]
    others: List[str]
    links: List[Link]
    backward_links: List[Link]
    turned: Optional[Turned] = None

    @property
    def of_parameters(self) -> Set[str]:
        """The blobs that the engine adds up; in the step it calls them otherwise, and links to them lead nowhere."""
        return {parameter.inner_gradient for parameter in self.parameters}

    def let_be_like(self, blob: str) -> None:
        """Let the sequence's gradient get the shape of another blob."""
        # By the name of that blob the engine finds the gradient's.
        remove_arguments(self.operator, [_renaming(self.like)])
        set_arguments(self.operator, {_renaming(blob): self.sequence})
        self.like = blob


@dataclass
class Loop:
    """One loop of a net.

    `operators` are those of the step, `gradient.operators` those of the backward step. `shared` are the blobs that
    steps share. `before` and `after_gradient` are operators of the outer net that run once, around the two; `made` are
    blobs that rules have had made, by what they are. `buffers` are states that no step reads: they hold a blob of all
    steps, for operators after the loop. With `weights`, and how each is compared, what depends on these alone is to be
    made when they have changed; `may_keep` says what could be. With `unrolled` its steps are to be written out.
    `chained` are, by the net of a step that is to be a chain, or was read as one, outer blobs that are true, see
    `chained.py` and `rewriting/chains.py`.
    `rules` are the names of those that are to be applied to it. With `turns` its backward pass is to become a loop of
    its own, however few operators there are.
    """

    name: str
    forward: caffe2_pb2.OperatorDef
    net: caffe2_pb2.NetDef
    operators: List[caffe2_pb2.OperatorDef]
    inputs: List[str]
    outputs: List[str]
    states: List[State]
    links: List[Link]
    aliases: List[Alias]
    timestep: str
    shared: List[str]
    gradient: Optional[Gradient]
    names: Names
    before: List[caffe2_pb2.OperatorDef] = field(default_factory=list)
    after_gradient: List[caffe2_pb2.OperatorDef] = field(default_factory=list)
    made: Dict[Any, str] = field(default_factory=dict)
    buffers: Set[str] = field(default_factory=set)
    surroundings: Surroundings = field(default_factory=Surroundings)
    known: Known = field(default_factory=Known)
    original: Original = Original()
    weights: Mapping[str, str] = field(default_factory=dict)
    unrolled: Optional[Unrolled] = None
    chained: Dict[str, str] = field(default_factory=dict)
    rules: FrozenSet[str] = frozenset()
    turns: bool = False
    may_keep: Keeping = Keeping.NOTHING

    @property
    def steps(self) -> List[List[caffe2_pb2.OperatorDef]]:
        """The operators of the step and, if there is one, of the backward step."""
        return [self.operators] + ([self.gradient.operators] if self.gradient is not None else [])

    @property
    def outer_operators(self) -> List[caffe2_pb2.OperatorDef]:
        """The forward operator and, if there is one, the gradient operator."""
        return [self.forward] + ([self.gradient.operator] if self.gradient is not None else [])

    @property
    def has_backward_step(self) -> bool:
        """Whether the engine keeps what each step computes: the forward operator has a backward step for it."""
        return has_backward_step(self.forward)

    @property
    def workspaces(self) -> str:
        """The blob that holds the step workspaces; it belongs to this loop alone."""
        return self.outputs[-1]

    @property
    def all_links(self) -> List[Link]:
        """The links of both steps."""
        gradient = self.gradient
        return self.links + (gradient.links + gradient.backward_links if gradient is not None else [])

    @property
    def written(self) -> Set[str]:
        """The blobs that the step computes."""
        return {blob for operator in self.operators for blob in operator.output}

    @property
    def written_links(self) -> List[Link]:
        """Those of its links by which the step passes on what it computes."""
        written = self.written
        return [link for link in self.links if link.inner in written]

    @property
    def references(self) -> Set[str]:
        """Outer blobs that the two steps read by their own name; every step sees the same."""
        operators = [operator for step in self.steps for operator in step]
        read = {blob for operator in operators for blob in operator.input}
        written = {blob for operator in operators for blob in operator.output}
        return read - written - {link.inner for link in self.all_links} - {self.timestep}

    def is_reference(self, blob: str) -> bool:
        """Whether it is among the references, without finding all of them."""
        if blob == self.timestep or any(blob == link.inner for link in self.all_links):
            return False
        is_read = False
        for step in self.steps:
            for operator in step:
                if blob in operator.output:
                    return False
                is_read = is_read or blob in operator.input
        return is_read

    def link(self, inner: str) -> Optional[Link]:
        return next((link for link in self.links if link.inner == inner), None)

    def new_blob(self, name: str) -> str:
        """An unused name for a blob of this loop, outer or inner."""
        return self.names.new(self._own(name))

    def new_blobs(self, name: str, endings: Sequence[str]) -> List[str]:
        """Unused names that begin alike: in each net where one is the same, all are."""
        return self.names.new_with(self._own(name), endings)

    def _own(self, name: str) -> str:
        prefix = own_prefix(self.forward)
        return name if name.startswith(prefix) else prefix + name.split("/")[-1]

    def add_before(self, kind: str, inputs: Sequence[str], name: str, **arguments: Any) -> str:
        """An outer blob computed once before the loop by one operator; the same one if it is asked for again."""
        key = (kind, tuple(inputs), tuple(sorted((name, str(value)) for name, value in arguments.items())))
        if key not in self.made:
            self.made[key] = self.new_blob(name)
            self.before.append(new_operator(kind, inputs, [self.made[key]], self.forward, **arguments))
        return self.made[key]

    def drop_before(self, operator: caffe2_pb2.OperatorDef) -> None:
        """Take out an operator of `before` whose results nothing reads any more."""
        self.before[:] = [other for other in self.before if other is not operator]
        self.inputs[:] = [blob for blob in self.inputs if blob not in operator.output]
        for key in [key for key, blob in self.made.items() if blob in operator.output]:
            del self.made[key]

    def drop_unread(self, blob: str) -> None:
        """Take out the operator of `before` that makes `blob` if nothing reads it, and then those of what that reads.

        Who knows of an outer blob otherwise than as an input of operators must not ask for it.
        """
        making = next((operator for operator in self.before if blob in operator.output), None)
        reading = [*self.before, *self.after_gradient, *sum(self.steps, [])]
        seen = {self.inputs[0], *(link.outer for link in self.all_links)}
        seen.update(state.outer_initial for state in self.states)
        if making is None or seen.intersection(making.output):
            return
        if not any(output in operator.input for operator in reading for output in making.output):
            self.drop_before(making)
            for read in making.input:
                self.drop_unread(read)

    def add_columns(self, parts: Sequence[str], name: str, axis: int = 0) -> str:
        """The outer blobs `parts` one behind the other along `axis`, in a blob computed once before the loop."""
        key = ("columns", tuple(parts), axis)
        if key not in self.made:
            self.made[key] = self.new_blob(name)
            sizes = self.new_blob(name + "_sizes")
            self.before.append(new_operator("Concat", parts, [self.made[key], sizes], self.forward, axis=axis))
        return self.made[key]

    def add_reference(self, outer: str) -> None:
        """Let the operators depend on an outer blob that the steps read."""
        if outer not in self.inputs:
            self.inputs.append(outer)

    def add_output(self, outer: str) -> None:
        """Let the net know that an outer blob is made here."""
        if outer not in self.outputs:
            self.outputs.insert(len(self.outputs) - 1, outer)

    def add_zeros(self, size: int) -> str:
        """An outer blob `[size]` for a state to start from."""
        zeros = self.add_before("ConstantFill", [], "zeros", shape=[size], value=0.0)
        self.add_reference(zeros)
        return zeros

    def add_shape_of_rows(self, size: int) -> str:
        """An outer blob that says `[1, N, size]`."""
        one = self.add_before("GivenTensorInt64Fill", [], "one", shape=[1], values=[1])
        width = self.add_before("GivenTensorInt64Fill", [], "columns", shape=[1], values=[size])
        return self.add_columns([one, self.add_number_of_rows(), width], "shape_of_rows")

    def add_number_of_rows(self) -> str:
        """An outer blob `[1]` that says N."""
        number = self.add_before("Shape", self.inputs[:1], "number_of_rows", axes=[1])
        self.known.of_shape.add(number)
        return number

    def replace_first_sequence(
        self, new: str, inner: str, source: Optional[caffe2_pb2.OperatorDef] = None, like: Optional[str] = None
    ) -> None:
        """Have the step see a slice of another first sequence, in `inner`.

        No operator may see the old one any more, unless for its numbers of steps and rows. `source`, if there is one,
        makes the new one before the loop. The gradient stays what it was: that of the old sequence. `like` is a blob of
        the old one's shape, if the new one has another.
        """
        old = self.inputs[0]
        sooner: List[caffe2_pb2.OperatorDef] = []
        later: List[caffe2_pb2.OperatorDef] = []
        made_of_it = {old}
        for operator in self.before:
            if made_of_it.isdisjoint(operator.input):
                sooner.append(operator)
            else:
                later.append(operator)
                made_of_it.update(operator.output)
        self.before[:] = [*sooner, *([source] if source is not None else []), *later]
        for operator in [*later, *self.after_gradient]:
            operator.input[:] = [new if blob == old else blob for blob in operator.input]
        self.inputs[0] = new
        self.links[:] = [link for link in self.links if link.outer != old] + [Link(inner, new, 0)]
        if self.gradient is not None:
            self.gradient.links[:] = [link for link in self.gradient.links if link.outer != old]
            self.gradient.let_be_like(like or new)

    def add_buffer(self, inner: str, outer_initial: str) -> Link:
        """Have the forward operator make room for the values of `inner` in all steps; gives the link to it.

        `outer_initial` is `[size]`: the engine makes a state of `[T + 1, N, size]`, of which slices 1..T are used, and
        an alias shows these.
        """
        outer = self.new_blob(inner + "_buffer")
        self.add_reference(outer_initial)
        self.states.append(State(outer, outer_initial))
        self.buffers.add(outer)
        shown = self.new_blob(inner + "_over_steps")
        self.add_output(shown)
        self.aliases.append(Alias(outer, shown, 1))
        return Link(inner, outer, 1)

    def around_forward(self) -> List[caffe2_pb2.OperatorDef]:
        """The operators that take the place of the forward operator."""
        changed = copied(self.forward)
        remove_arguments(changed, WINDOWS)
        changed.input[:] = self.inputs
        changed.output[:] = self.outputs
        position = {blob: index for index, blob in reversed(list(enumerate(self.inputs)))}
        set_arguments(changed, link_arguments("link", self.links))
        set_arguments(changed, alias_arguments(self.aliases))
        set_arguments(
            changed,
            {
                STATES: [state.outer_states for state in self.states],
                INITIAL: [position[state.outer_initial] for state in self.states],
                RECOMPUTED: self.shared,
            },
        )
        _set_step(changed, STEP_NET, self.net, self.operators)
        if self.gradient is not None and self.gradient.turned is None:
            _set_step(changed, BACKWARD_STEP_NET, self.gradient.net, self.gradient.operators)
        else:
            # It would fit the step as it was. Without it the engine makes no gradient, rather than a wrong one.
            remove_arguments(changed, BACKWARD)
        return [*self.before, changed]

    def around_gradient(self) -> List[caffe2_pb2.OperatorDef]:
        """The operators that take the place of the gradient operator."""
        gradient = self.gradient
        assert gradient is not None
        changed = copied(gradient.operator)
        remove_arguments(changed, WINDOWS)
        # The engine finds inputs by position up to the outputs of the forward operator, and of these only the last.
        seen = [blob for blob in self.outputs if blob not in gradient.others]
        changed.input[:] = [*gradient.incoming, gradient.like, *self.inputs[1:], *seen]
        changed.output[:] = [
            gradient.sequence,
            *(parameter.outer_gradient for parameter in gradient.parameters),
            *gradient.initial,
            *gradient.others,
        ]
        set_arguments(changed, link_arguments("link", gradient.links))
        set_arguments(changed, link_arguments("backward_link", gradient.backward_links))
        set_arguments(
            changed,
            {
                # The first input is a sequence, even if it is a parameter too.
                PARAMETERS: [self.inputs.index(parameter.outer, 1) for parameter in gradient.parameters],
                PARAMETER_GRADIENTS: [parameter.inner_gradient for parameter in gradient.parameters],
            },
        )
        _set_step(changed, STEP_NET, self.net, self.operators)
        _set_step(changed, BACKWARD_STEP_NET, gradient.net, gradient.operators)
        return [changed, *self.after_gradient]


def has_backward_step(forward: caffe2_pb2.OperatorDef) -> bool:
    """Whether a RecurrentNetwork operator has a backward step."""
    # One that Caffe2 has cut out of a training net has the argument, emptied.
    return any(given.name == BACKWARD_STEP_NET and (given.HasField("n") or given.s) for given in forward.arg)


def stands_for_loop(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is an `If` with a loop for other numbers of steps than those that are written out in it, or for fewer
    sequences than there are parts of the batch."""
    others = net_to_read(operator, "else_net").op if operator.type == "If" else ()
    return any(other.type == OPERATOR for other in others) or is_in_parts(operator)


def is_in_parts(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is an `If` that runs parts of the batch side by side."""
    return operator.type == "If" and net_to_read(operator, "then_net").name == IN_PARTS


def laid_out_when_changed(operator: caffe2_pb2.OperatorDef) -> Sequence[caffe2_pb2.OperatorDef]:
    """The operators of an `If` that runs them when what they read has changed; none of another operator."""
    net = net_to_read(operator, "then_net") if operator.type == "If" else caffe2_pb2.NetDef()
    return net.op if net.name == WHEN_CHANGED else []


def is_optimised(forward: caffe2_pb2.OperatorDef) -> bool:
    """Whether it stands for a loop that rules may have changed: the step net's name tells its content."""
    net = net_to_read(forward, STEP_NET)
    return bool(net.name == _name_by_content(net))


def name_steps_by_content(forward: caffe2_pb2.OperatorDef) -> None:
    """Step workspaces keep the nets that they have run, and know them by name."""
    for name in (STEP_NET, BACKWARD_STEP_NET):
        changed = net_argument(forward, name)
        if changed.op:
            changed.name = _name_by_content(changed)
            set_arguments(forward, {name: changed})


def _set_step(
    operator: caffe2_pb2.OperatorDef, name: str, net: caffe2_pb2.NetDef, operators: Sequence[caffe2_pb2.OperatorDef]
) -> None:
    changed = caffe2_pb2.NetDef()
    changed.CopyFrom(net)
    del changed.op[:]
    changed.op.extend(operators)
    declared = set(changed.external_input)
    changed.external_input.extend(blob for blob in read_before_written(operators) if blob not in declared)
    changed.name = _name_by_content(changed)
    set_arguments(operator, {name: changed})


def _name_by_content(step_net: caffe2_pb2.NetDef) -> str:
    # Without the RNN executor, step workspaces keep the nets that they have run, and know them by name.
    operators = caffe2_pb2.NetDef(op=step_net.op).SerializeToString()
    return "{}_{:08x}".format(CONTENT.sub("", step_net.name), zlib.crc32(operators))


def _renaming(blob: str) -> str:
    """The argument that says how a gradient operator calls the gradient of `blob`."""
    return gradient_name(blob) + RENAMED
