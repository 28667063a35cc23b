"""A step net with its roles named and checked: sequences, states, references, timestep."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Counter as CounterType
from typing import Dict, FrozenSet, List, Mapping, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import DEFAULT_TIMESTEP, Request
from caffe2_recurrent.blob_names import all_names
from caffe2_recurrent.operator_arguments import TIMESTEP, has_nets, string
from caffe2_recurrent.operators import OPERATOR, SHOWING, copy_operator, is_written_next
from caffe2_recurrent.problems import Problems, names

# Their output becomes another tensor's memory, whatever it was linked to.
REPLACING = frozenset(["ATen", OPERATOR]) | SHOWING


@dataclass(frozen=True)
class Sequence:
    """A step-net input and the outer blob `[T, N, ...]` of which it sees one slice a step."""

    inner: str
    outer: str


@dataclass(frozen=True)
class State:
    """A recurrent state: step-net input, the step-net output that follows it, and its outer initial value."""

    inner_input: str
    inner_output: str
    outer_initial: str


@dataclass(frozen=True)
class StepNet:
    """One step of a recurrent network. `proto` is a copy of the caller's net; nobody changes it.

    `writes` counts how often the step writes each blob, in the order of the first time. `earlier` are state outputs by
    whose name there was something before, with the names that those values have instead.
    """

    proto: caffe2_pb2.NetDef
    writes: CounterType[str]
    sequences: Tuple[Sequence, ...]
    states: Tuple[State, ...]
    references: Tuple[str, ...]
    timestep: str
    earlier: Mapping[str, str]

    @property
    def linked(self) -> List[str]:
        """The step-net blobs that become views into outer blobs."""
        pairs = [(state.inner_input, state.inner_output) for state in self.states]
        return [blob for pair in pairs for blob in pair] + [sequence.inner for sequence in self.sequences]

    @property
    def outer_sequences(self) -> Dict[str, List[str]]:
        """The step-net blobs that see slices of each outer sequence."""
        found: Dict[str, List[str]] = {}
        for sequence in self.sequences:
            found.setdefault(sequence.outer, []).append(sequence.inner)
        return found

    @property
    def outer_sources(self) -> List[str]:
        """What the caller names of the outer net: sequences, initial values."""
        return [*self.outer_sequences, *(state.outer_initial for state in self.states)]

    @property
    def outer_inputs(self) -> List[str]:
        """The inputs of the operator in the engine's order: sequences, initial values, references."""
        return [*self.outer_sources, *self.references]

    def with_copies(self, copies: Mapping[int, Tuple[str, str]]) -> "StepNet":
        """One that copies, in front of the operators at these positions, a blob to another."""
        proto = caffe2_pb2.NetDef()
        proto.CopyFrom(self.proto)
        del proto.op[:]
        for index, operator in enumerate(self.proto.op):
            if index in copies:
                proto.op.add().CopyFrom(copy_operator(*copies[index], operator))
            proto.op.add().CopyFrom(operator)
        writes = Counter(output for operator in proto.op for output in operator.output)
        return replace(self, proto=proto, writes=writes)


def read_step_net(request: Request, problems: Problems) -> StepNet:
    """Name the roles of the step net's blobs; notes in `problems` whatever does not fit together.

    What is returned can be used only if nothing was noted.
    """
    proto = caffe2_pb2.NetDef()
    proto.CopyFrom(request.cell_net.Proto())
    # The operator runs the step net itself; any other net type would be a net within it.
    proto.type = "simple"
    earlier = _set_earlier_values_apart(proto, frozenset(request.links.values()))
    _set_unread_apart(proto)
    sequences = tuple(Sequence(inner, outer) for inner, outer in request.sequences)
    states = tuple(
        State(inner, request.links.get(inner, ""), outer_initial) for inner, outer_initial in request.initial_states
    )
    timestep = request.timestep or DEFAULT_TIMESTEP
    roles = [sequence.inner for sequence in sequences] + [state.inner_input for state in states] + [timestep]
    taken = frozenset(roles)
    references = tuple(dict.fromkeys(blob for blob in proto.external_input if blob not in taken))
    writes = Counter(output for operator in proto.op for output in operator.output)
    step_net = StepNet(proto, writes, sequences, states, references, timestep, earlier)

    _check_nets(request, problems)
    _check_inputs(step_net, request, problems)
    _check_links(step_net, request, problems)
    return step_net


def _set_earlier_values_apart(proto: caffe2_pb2.NetDef, outputs: FrozenSet[str]) -> Dict[str, str]:
    """Give what a step calls like a state output, before it makes that, a name of its own; returns the names.

    The blob of the output is a view of a slice, which a value of another size would take its memory from.
    """
    used = set(all_names(proto))
    earlier: Dict[str, str] = {}
    for blob in sorted(outputs):
        fresh = [at for at, operator in enumerate(proto.op) if blob in operator.output and blob not in operator.input]
        before = proto.op[: fresh[-1]] if fresh else []
        if len(fresh) < 2 or any(map(has_nets, before)):
            continue
        name = blob
        while name in used:
            name += "_earlier"
        used.add(name)
        earlier[blob] = name
        for operator in before:
            operator.input[:] = [name if read == blob else read for read in operator.input]
            operator.output[:] = [name if written == blob else written for written in operator.output]
    return earlier


def _set_unread_apart(proto: caffe2_pb2.NetDef) -> None:
    """Give what is written, and not read before it is written anew, a name of its own.

    The RNN executor keeps who writes in order with who reads, but not with who writes next.
    """
    used = set(all_names(proto))
    writes = Counter(blob for operator in proto.op for blob in operator.output)
    for index, operator in enumerate(proto.op):
        for position, blob in enumerate(operator.output):
            # Some operators have to work in place.
            may_be_apart = writes[blob] > 1 and blob not in operator.input
            if may_be_apart and is_written_next(proto.op[index + 1 :], blob):
                # Not numbered: the copies that `retrieve_step_blobs` makes end in the number of the step.
                while blob in used:
                    blob += "_unread"
                used.add(blob)
                operator.output[position] = blob


def _check_nets(request: Request, problems: Problems) -> None:
    if request.net is request.cell_net:
        problems.add("net and cell_net are the same net '{}'; build the step in a net of its own", request.net.Name())


def _check_inputs(step_net: StepNet, request: Request, problems: Problems) -> None:
    if not step_net.sequences:
        problems.add("inputs is empty; the number of steps comes from a sequence, so at least one is needed")
    if not step_net.states:
        problems.add("initial_cell_inputs is empty; the outputs are those of the states, so at least one is needed")
    for blob in step_net.outer_sources:
        if not blob:
            problems.add("inputs or initial_cell_inputs has an outer blob with an empty name")
    declared = frozenset(step_net.proto.external_input)
    roles: Dict[str, str] = {}
    named = [("sequence", sequence.inner) for sequence in step_net.sequences]
    named += [("state", state.inner_input) for state in step_net.states]
    if request.timestep is not None:
        named.append(("timestep", request.timestep))
    behind = dict(request.sequences + request.initial_states)
    for role, blob in named:
        if blob not in declared and behind.get(blob) in declared:
            problems.add(
                "{} '{}' is no external input of the step net, but '{}' is; pairs are (step-net blob, outer blob), and "
                "these look swapped",
                role,
                blob,
                behind[blob],
            )
        elif blob not in declared:
            problems.add(
                "{} '{}' is no external input of the step net, which has {}; declare it with AddExternalInput",
                role,
                blob,
                names(step_net.proto.external_input),
            )
        if blob in roles and roles[blob] == role:
            problems.add("{} '{}' is given twice", role, blob)
        elif blob in roles:
            problems.add("'{}' is given as {} and as {}; it can be one of them", blob, roles[blob], role)
        roles.setdefault(blob, role)
    _check_overwrites(step_net, problems)
    _check_loops_within(step_net, problems)


def _check_loops_within(step_net: StepNet, problems: Problems) -> None:
    """A loop within the step would count its steps in the blob that the step's own number is read from."""
    reads_its_number = any(step_net.timestep in operator.input for operator in step_net.proto.op)
    for index, operator in enumerate(step_net.proto.op):
        if operator.type == OPERATOR and string(operator, TIMESTEP, "") == step_net.timestep:
            if reads_its_number:
                problems.add(
                    "step operator {} (RecurrentNetwork) counts its steps in '{}', which the step reads as its own "
                    "number; pass another timestep to one of the two",
                    index,
                    step_net.timestep,
                )


def _check_overwrites(step_net: StepNet, problems: Problems) -> None:
    """What the step receives for more than one step must not be changed by one of them."""
    kept = dict.fromkeys((step_net.timestep, *(state.inner_input for state in step_net.states), *step_net.references))
    overwritten = [blob for blob in kept if blob in step_net.writes]
    for blob in overwritten:
        index, writer = next((at, op) for at, op in enumerate(step_net.proto.op) if blob in op.output)
        if blob == step_net.timestep:
            problems.add(
                "step operator {} ({}) writes the timestep '{}', which the engine sets", index, writer.type, blob
            )
        else:
            problems.add(
                "step operator {} ({}) overwrites '{}', which other steps and the backward pass read as it was; "
                "write to another blob",
                index,
                writer.type,
                blob,
            )


def _check_links(step_net: StepNet, request: Request, problems: Problems) -> None:
    state_inputs = frozenset(state.inner_input for state in step_net.states)
    for inner_input in request.links:
        if inner_input not in state_inputs:
            problems.add(
                "links names '{}', which has no initial value; initial_cell_inputs has {}",
                inner_input,
                names(state.inner_input for state in step_net.states),
            )
    for state in step_net.states:
        if state.inner_input not in request.links:
            problems.add("state '{}' has no link to the step output that becomes its next value", state.inner_input)
        elif not state.inner_output:
            problems.add(
                "state '{}' is linked to an empty name; name the step output that becomes its next value",
                state.inner_input,
            )
    linked = {state.inner_input: state.inner_output for state in step_net.states if state.inner_output}
    _check_new_values(step_net, linked, problems)
    for inner_output, count in Counter(linked.values()).items():
        if count > 1:
            sharing = [state for state, output in linked.items() if output == inner_output]
            problems.add(
                "states {} are linked to the same output '{}'; each needs its own", names(sharing), inner_output
            )


def _check_new_values(step_net: StepNet, linked: Mapping[str, str], problems: Problems) -> None:
    """What the step writes for the states; `linked` has it by their previous values."""
    declared = frozenset(step_net.proto.external_input)
    for inner_input, inner_output in linked.items():
        if inner_input == inner_output:
            problems.add("state '{}' is linked to itself; write its next value to a blob of its own", inner_input)
        elif inner_output not in step_net.writes:
            problems.add(
                "state '{}' is linked to '{}', which no step operator writes; the step writes {}",
                inner_input,
                inner_output,
                names(step_net.writes),
            )
        elif inner_output in declared:
            problems.add(
                "state '{}' is linked to '{}', which is an external input of the step; write to a blob of its own",
                inner_input,
                inner_output,
            )
    outputs = frozenset(linked.values())
    for index, operator in enumerate(step_net.proto.op):
        moved = [blob for blob in operator.output if blob in outputs]
        if moved and operator.type in REPLACING:
            problems.add(
                "step operator {} ({}) writes state output {} to memory of its own, where the engine does not look; "
                "write to another blob, and link a Copy of that",
                index,
                operator.type,
                names(moved),
            )


def check_reads(step_net: StepNet, problems: Problems) -> bool:
    """The engine runs a step operator by operator, so each blob must be there when it is read; whether it is."""
    readable = True
    known = set(step_net.proto.external_input) | {step_net.timestep}
    for index, operator in enumerate(step_net.proto.op):
        if not known.issuperset(operator.input):
            unknown = [blob for blob in dict.fromkeys(operator.input) if blob not in known]
            problems.add(
                "step operator {} ({}) reads {}, neither written before it nor an external input of the step net",
                index,
                operator.type,
                names(unknown),
            )
            known.update(unknown)
            readable = False
        known.update(operator.output)
    missing = [blob for blob in step_net.proto.external_output if blob not in known]
    if missing:
        problems.add(
            "the step net declares external outputs that no operator writes: {}; write or remove them", names(missing)
        )
    return readable
