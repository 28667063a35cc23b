"""What belongs to a loop when its batch is parted: its gradient operator, and the products in front of it and behind.

    x -> FC -> loop -> outputs        gradients of outputs -> gradient operator -> FCGradient -> gradient of x

What is made of encoded sequences for its steps to read belongs to it as well (`encoded.py`).

Each blob is one of these: it has a row for each sequence and is sliced for the parts (`sliced`), made by each part for
itself (`own`), made by each part and put together again (`joined`), the same for all parts, as weights are (`whole`),
or a sum over all sequences, which parts make for theirs (`summed`). An initial state may be `[D]`, `[N, D]` or
`[1, N, D]`, another one in each run: it is sliced as a sequence of one step, which `initial_states.py` makes of it.
"""

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.gradient_maker import POSITIONS
from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.loops.loop import Loop, is_optimised
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.loops.surroundings import ONE_BY_ONE, gradient_operator_position
from caffe2_recurrent.loops.tensor_names import changed_by, names_of_tensors
from caffe2_recurrent.operator_arguments import integers
from caffe2_recurrent.rewriting.batch_parts import batch_axes, initial_states
from caffe2_recurrent.rewriting.batch_parts import encoded as encoded_sequences
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.batch_parts.encoded import Encoded, Gradients

# A batch of sequences [T, N, k].
SEQUENCES = Layout(3, 1)
# Operators of backward steps: where those of the step take sequences one by one, their gradients are of one sequence
# each, or sums over all.
BACKWARD = batch_axes.KINDS | frozenset(kind + "Gradient" for kind in batch_axes.KINDS)

Operators = List[caffe2_pb2.OperatorDef]


@dataclass
class Region:
    """The operators of one loop that are parted, by their positions in the net, in the order in which they run.

    `forward` ends with the loop's operator, and takes its place; `backward` begins with the gradient operator.
    `references` are blobs with a batch that steps read by their own names, some of them made by what is `encoded`;
    `of_encoded` are the layouts of what goes on from the gradients of these, by position. `initial` are the sliced
    blobs that are but initial states, and `shaped` gradients that are put together, by the blobs whose shapes they get.
    """

    loop: Loop
    forward: List[int]
    backward: List[int]
    references: Dict[str, Layout]
    encoded: List[Encoded]
    of_encoded: Gradients
    sliced: Dict[str, Layout] = field(default_factory=dict)
    gradients: Dict[str, Layout] = field(default_factory=dict)
    initial: Set[str] = field(default_factory=set)
    joined: Dict[str, int] = field(default_factory=dict)
    shaped: Dict[str, str] = field(default_factory=dict)
    summed: Set[str] = field(default_factory=set)
    own: Set[str] = field(default_factory=set)
    whole: Set[str] = field(default_factory=set)

    @property
    def positions(self) -> List[int]:
        return [*self.forward, *self.backward]

    @property
    def place(self) -> int:
        """The position at which its forward pass runs."""
        return self.forward[-1]


def find(net: caffe2_pb2.NetDef, position: int, loop: Loop, parts: int, sizes: Sizes) -> Union[Region, str]:
    """The region of the loop at `position`; or why the loop's batch cannot be in so many parts."""
    reason = _unfit(net, loop, parts, sizes)
    if reason is not None:
        return reason
    references = batch_axes.of_references(loop, sizes)
    if isinstance(references, str):
        return references
    encoded = encoded_sequences.find(net, position, loop, references, sizes)
    in_front = {*loop.surroundings.sources.values(), *(each.position for each in encoded)}
    of_encoded = Gradients(net, loop, encoded)
    backward = _backward(net, loop, of_encoded)
    region = Region(loop, [*sorted(in_front), position], backward, references, encoded, of_encoded)
    return _forward_blobs(net, region, sizes) or _backward_blobs(net, region) or _disturbed(net, region) or region


def _unfit(net: caffe2_pb2.NetDef, loop: Loop, parts: int, sizes: Sizes) -> Optional[str]:
    """What is not one sequence's alone, or not known to be."""
    if net.type not in ONE_BY_ONE or loop.surroundings.net_frees:
        return "a net of type '{}' runs operators in an order of its own, or lets go of blobs".format(net.type)
    batch = sizes.batch(loop)
    if batch is None or sizes.steps(loop) is None:
        return "the sizes of its sequence are not known; give shapes"
    if batch < parts:
        return "there are {} parts for {} sequence{}".format(parts, batch, "" if batch == 1 else "s")
    if is_optimised(loop.forward):
        return "it has been optimised before; batches are parted in the first call"
    for operator in loop.gradient.operators if loop.gradient is not None else []:
        if operator.type not in BACKWARD:
            return "its backward steps have '{}', which is not known to take sequences one by one".format(operator.type)
    operators = [*loop.outer_operators, *(operator for step in loop.steps for operator in step)]
    if any(operator.control_input for operator in operators):
        return "its operators wait for others (control_input)"
    return None


def _backward(net: caffe2_pb2.NetDef, loop: Loop, of_encoded: Gradients) -> List[int]:
    """The gradient operator, what shows its gradient of the sequence by another name, gradients of the products in
    front, and what goes on from gradients `of_encoded`, that may as well run right after it."""
    if loop.gradient is None:
        return []
    position = gradient_operator_position(net, loop)
    products = [list(net.op[source].input[:2]) for source in loop.surroundings.sources.values()]
    # What a product reads has parts only where it is made in parts itself.
    sinks = {sink for sink in loop.surroundings.sinks if list(net.op[sink].input[:2]) in products}
    sinks &= loop.surroundings.ready
    taken, shown, tensors = [position], {loop.gradient.sequence}, names_of_tensors(net)
    for place in range(position + 1, len(net.op)):
        operator = net.op[place]
        shows = operator.type == "Alias" and operator.input[0] in shown and not operator.control_input
        continues = of_encoded.continues(place)
        if not shows and not continues and not (place in sinks and operator.input[2] in shown):
            continue
        others = [net.op[other] for other in range(position + 1, place) if other not in taken]
        touched = {blob for other in others for blob in names_of(other)}
        written = changed_by(others, tensors)
        if touched.isdisjoint(operator.output) and written.isdisjoint(operator.input):
            taken.append(place)
            shown.update(operator.output if shows else ())
            if continues:
                of_encoded.add(place)
    return taken


def _forward_blobs(net: caffe2_pb2.NetDef, region: Region, sizes: Sizes) -> Optional[str]:
    """Note what the blobs of the forward pass are; the reason why one of them is nothing that can be parted."""
    loop, in_front = region.loop, region.forward[:-1]
    read = {blob for position in region.forward for blob in net.op[position].input}
    made = {net.op[position].output[0] for position in in_front}
    states = {state.outer_states for state in loop.states}
    sequences = {net.op[source].input[0] for source in loop.surroundings.sources.values()} | {
        link.outer for link in loop.links if link.outer not in states
    }
    sliced = dict.fromkeys(sequences - made, SEQUENCES)
    # Weights of products beside the loop.
    products = [net.op[position] for position in region.positions]
    shared = {product.input[1] for product in products if product.type in ("FC", "FCGradient")}
    references = [*region.references.items(), *((each.rows, each.layout) for each in region.encoded)]
    initial = {state.outer_initial for state in loop.states}
    for blob in sorted(initial):
        if not initial_states.has_rows(sizes.shape(blob), sizes.batch(loop)):
            return "'{}' is not known to have a row for each sequence, or one for all".format(blob)
    # What else is read has its own axes in the parts.
    region.initial = initial - {blob for blob, _ in references} - sequences
    sliced.update(dict.fromkeys(sorted(region.initial), SEQUENCES))
    for blob, layout in references:
        if blob in made:
            continue
        is_other_state = blob in initial and layout.batch != layout.axes + initial_states.BATCH
        if sliced.setdefault(blob, layout) != layout or blob in shared or is_other_state:
            return "its steps and what is around them read '{}' in two ways".format(blob)
    if not read.issuperset(sliced):
        return "its steps read '{}', of which its operator says nothing".format(min(sliced.keys() - read))
    for blob, layout in sliced.items():
        shape = sizes.shape(blob)
        if blob in region.initial:
            continue
        if shape is None or len(shape) != layout.axes or shape[layout.batch] != sizes.batch(loop):
            return "'{}' is not known to have a place for each sequence".format(blob)
    shown = {alias.outer_output for alias in loop.aliases}
    if not shown.issuperset(loop.outputs[:-1]):
        return "its output '{}' is none of its states".format(min({*loop.outputs[:-1]} - shown))
    region.sliced, region.whole = sliced, read - set(sliced) - made
    region.own = made | states | {loop.workspaces}
    region.joined = dict.fromkeys(loop.outputs[:-1], SEQUENCES.batch)
    return None


def _backward_blobs(net: caffe2_pb2.NetDef, region: Region) -> Optional[str]:
    """Likewise, of the backward pass."""
    gradient, loop = region.loop.gradient, region.loop
    if gradient is None:
        return None
    if gradient.others:
        return "its gradient operator makes '{}' too".format(gradient.others[0])
    if any(parameter.outer not in {*region.whole, *region.references} for parameter in gradient.parameters):
        return "it has gradients of what there is for each sequence"
    positions = integers(gradient.operator, POSITIONS)
    region.gradients = dict.fromkeys((blob for blob, _ in zip(gradient.incoming, positions)), SEQUENCES)
    behind = [net.op[position] for position in region.backward[1:] if position not in region.of_encoded.layouts]
    sinks = [operator for operator in behind if operator.type == "FCGradient"]
    read_elsewhere = {
        blob
        for position, operator in enumerate(net.op)
        if position not in region.positions
        for blob in names_of(operator)
    }
    shown = [gradient.sequence, *(blob for operator in behind if operator not in sinks for blob in operator.output)]
    for blob in filter(None, shown):
        if sinks and blob not in read_elsewhere and blob not in net.external_output:
            region.own.add(blob)
        else:
            region.joined[blob] = SEQUENCES.batch
    for parameter in gradient.parameters:
        if parameter.outer in region.references:
            region.joined[parameter.outer_gradient] = region.references[parameter.outer].batch
        else:
            region.summed.add(parameter.outer_gradient)
    _blobs_of_encoded(net, region, {*read_elsewhere, *net.external_output})
    for blob, state in zip(gradient.initial, loop.states):
        region.joined[blob] = region.sliced[state.outer_initial].batch
        if state.outer_initial in region.initial:
            region.shaped[blob] = state.outer_initial
    # What has no gradient has no name.
    region.joined.pop("", None)
    region.summed.discard("")
    for sink in sinks:
        region.summed.update(sink.output[:2])
        region.joined.update((blob, SEQUENCES.batch) for blob in sink.output[2:])
    return None


def _blobs_of_encoded(net: caffe2_pb2.NetDef, region: Region, read_elsewhere: Set[str]) -> None:
    for position, layout in region.of_encoded.layouts.items():
        operator = net.op[position]
        of_rows = list(operator.output)
        if operator.type == "FCGradient":
            region.summed.update(of_rows[:2])
            del of_rows[:2]
        region.joined.update(dict.fromkeys(of_rows, layout.batch))
    for blob in region.of_encoded.hidden(read_elsewhere):
        region.joined.pop(blob, None)
        region.own.add(blob)


def _disturbed(net: caffe2_pb2.NetDef, region: Region) -> Optional[str]:
    """What else in the net has to do with blobs that the parts keep for themselves, or writes to what they read."""
    hidden = region.own - {region.loop.workspaces}
    last, tensors = max(region.positions), names_of_tensors(net)
    for position, operator in enumerate(net.op):
        if position in region.positions:
            continue
        known = hidden.intersection(names_of(operator))
        if known or region.loop.workspaces in operator.input:
            return "'{}' is seen by '{}' outside of it".format(min(known or {region.loop.workspaces}), operator.type)
        changed = (region.whole | set(region.sliced)).intersection(changed_by([operator], tensors))
        if changed and region.place < position < last:
            return "'{}' is written between its passes".format(min(changed))
    seen = hidden.intersection(net.external_output)
    return "'{}' is an output of the net".format(min(seen)) if seen else None
