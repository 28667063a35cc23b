"""Finding an LSTM in a net: its layers and directions, and what its operators say of them.

    loops named as under <scope>/  ->  each read by itself  ->  layers, checked to read one another

What stands in the net counts, not what it was built with, so that nets from files are read as well.
"""

import re
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.exchange.lstm_loop import LSTMLoop, Outputs, read_lstm_loop
from caffe2_recurrent.loops.loop import Loop, stands_for_loop
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.selection import note_no_loops
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import TURNING
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.stack import BACKWARD, FORWARD, full_lengths

# The names of a loop's blobs under the scope of its LSTM; a single layer has no number, a single direction no name.
IN_SCOPE = r"(layer_(?P<layer>\d+)/)?((?P<direction>{}|{})/)?[^/]+".format(FORWARD, BACKWARD)
# Layer and direction.
Place = Tuple[Optional[int], Optional[str]]
Producers = Mapping[str, caffe2_pb2.OperatorDef]


class LSTMInNet(NamedTuple):
    """The loops of each layer, forward before backward, and what comes out of the last layer."""

    layers: List[List[LSTMLoop]]
    outputs: Outputs

    @property
    def loops(self) -> List[LSTMLoop]:
        return [loop for layer in self.layers for loop in layer]

    @property
    def directions(self) -> int:
        return len(self.layers[0])


def find_shared(net: caffe2_pb2.NetDef, scope: str, problems: Problems) -> LSTMInNet:
    """The LSTM under `scope` (a full name), or any of several that have all parameters in common.

    Raises `ValueError` if there is none, or none that can be read.
    """
    first, *others = _find(net, scope, problems)
    for other in others:
        for one, same in zip(first.loops, other.loops):
            if (one.parameters, one.forget_bias) != (same.parameters, same.forget_bias):
                last = names([one.outputs.hidden_all, same.outputs.hidden_all])
                problems.add("the loops that make {} differ in their parameters or in forget_bias", last)
    problems.raise_if_any()
    return first


def find_one(net: caffe2_pb2.NetDef, scope: str, problems: Problems) -> LSTMInNet:
    """The only LSTM under `scope` (a full name). Raises `ValueError` if there is none, or more than one."""
    found = _find(net, scope, problems)
    if len(found) > 1:
        problems.add(
            "'{}' has {} LSTMs; build the one that is wanted in a model of its own, with the same scope and "
            "init_params=False",
            scope,
            len(found),
        )
    problems.raise_if_any()
    return found[0]


def _find(net: caffe2_pb2.NetDef, scope: str, problems: Problems) -> List[LSTMInNet]:
    """An LSTM for each time that one was built under `scope`."""
    producers = _producers(net)
    loops = list(read_loops(net).values())
    places = _places(loops, scope)
    if not loops:
        note_no_loops("net '{}'".format(net.name), net, problems, "it must be read before `optimize` rewrites it")
    elif not places:
        scopes = dict.fromkeys(re.sub("/{}$".format(IN_SCOPE), "", loop.name) for loop in loops)
        problems.add("net '{}' has no LSTM under '{}'; it has loops under {}", net.name, scope, names(scopes))
        if any(map(stands_for_loop, net.op)):
            text = "`optimize` has written out steps of net '{}', or parted its batch, and must be called behind this"
            problems.add(text, net.name)
    elif not _is_stack(places):
        made = [loop.name for found in places.values() for loop in found]
        problems.add("the loops that make {} are not the layers and directions of one LSTM", names(made))
    problems.raise_if_any()
    read = {place: _read(places[place], producers, problems) for place in sorted(places, key=_in_order)}
    problems.raise_if_any()
    lstms = []
    # Building once more adds one loop to each place.
    for call in zip(*read.values()):
        by_layer: Dict[Optional[int], List[LSTMLoop]] = {}
        for (layer, _), loop in zip(read, call):
            by_layer.setdefault(layer, []).append(loop)
        layers = list(by_layer.values())
        _check_layers(layers, producers, problems)
        lstms.append(LSTMInNet(layers, _outputs(layers[-1], layers[0][0], producers)))
    problems.raise_if_any()
    return lstms


def _producers(net: caffe2_pb2.NetDef) -> Producers:
    """The operator that makes each blob; none for what is read before it is written, as an optimizer does it."""
    producers: Dict[str, caffe2_pb2.OperatorDef] = {}
    from_outside: Set[str] = set()
    for operator in net.op:
        from_outside.update(blob for blob in operator.input if blob not in producers)
        for blob in operator.output:
            if blob not in from_outside:
                producers.setdefault(blob, operator)
    return producers


def _places(loops: Iterable[Loop], scope: str) -> Dict[Place, List[Loop]]:
    """The loops in each place of the LSTM under `scope`: one for each time that one was built there."""
    places: Dict[Place, List[Loop]] = {}
    for loop in loops:
        match = re.fullmatch(re.escape(scope) + "/" + IN_SCOPE, loop.name)
        if match is not None:
            layer = match.group("layer")
            places.setdefault((None if layer is None else int(layer), match.group("direction")), []).append(loop)
    return places


def _in_order(place: Place) -> Tuple[int, bool]:
    layer, direction = place
    return layer or 0, direction == BACKWARD


def _is_stack(places: Mapping[Place, Sequence[Loop]]) -> bool:
    """Whether every layer and direction is there, all of them equally often."""
    layers, directions = {layer for layer, _ in places}, {direction for _, direction in places}
    return (
        layers in ({None}, set(range(len(layers))))
        and directions in ({None}, {FORWARD, BACKWARD})
        and len(places) == len(layers) * len(directions)
        and len(set(map(len, places.values()))) == 1
    )


def _read(loops: Sequence[Loop], producers: Producers, problems: Problems) -> List[LSTMLoop]:
    """The loops as those of an LSTM; notes why others are none."""
    found = []
    for loop in loops:
        read = read_lstm_loop(loop, producers)
        if isinstance(read, str):
            problems.add("the loop that makes '{}' cannot be read as that of an LSTM: {}", loop.name, read)
        else:
            found.append(read)
    return found


def _check_layers(layers: Sequence[Sequence[LSTMLoop]], producers: Producers, problems: Problems) -> None:
    """Every layer reads the one below, a backward direction what the forward one reads, turned round; all end alike."""
    first = layers[0][0]
    for index, layer in enumerate(layers):
        forward, made = layer[0], [loop.outputs.hidden_all for loop in layer]
        if index and not _reads(forward.sequence, layers[index - 1], first, producers):
            below = names(loop.outputs.hidden_all for loop in layers[index - 1])
            problems.add(
                "the loop that makes '{}' reads '{}', which is not made of {}", made[0], forward.sequence, below
            )
        for loop, blob in zip(layer[1:], made[1:]):
            turning = producers.get(loop.sequence)
            if not _turns(turning, forward.sequence, first, producers):
                turned = "'{}' turned round within its lengths".format(forward.sequence)
                if turning is not None and turning.type == TURNING and first.lengths is None:
                    turned += ": it has none, and '{}' is turned within '{}'".format(*turning.input)
                problems.add("the loop that makes '{}' reads '{}', which is not {}", blob, loop.sequence, turned)
        for loop, blob in zip(layer, made):
            if (loop.lengths, loop.drop_states) != (first.lengths, first.drop_states):
                text = "the loop that makes '{}' has lengths {} and drop_states={}; the first loop has {} and {}"
                problems.add(text, blob, loop.lengths, loop.drop_states, first.lengths, first.drop_states)


def _reads(sequence: str, below: Sequence[LSTMLoop], first: LSTMLoop, producers: Producers) -> bool:
    """Whether a layer over `sequence` reads the hidden states of the layer `below`, whole or with dropout."""
    producer = producers.get(sequence)
    if producer is not None and producer.type == "Dropout":
        sequence = producer.input[0]
    if len(below) == 1:
        return sequence == below[0].outputs.hidden_all
    return _joins(producers.get(sequence), below, "hidden_all", first, producers)


def _turns(
    operator: Optional[caffe2_pb2.OperatorDef], sequence: Optional[str], first: LSTMLoop, producers: Producers
) -> bool:
    """Whether `operator` turns each sequence round within the lengths of the `first` loop, or else whole."""
    if operator is None or operator.type != TURNING or operator.input[0] != sequence:
        return False
    if first.lengths is not None:
        return bool(operator.input[1] == first.lengths)
    return _are_full(operator.input[1], first.sequence, producers)


def _are_full(lengths: str, sequence: str, producers: Producers) -> bool:
    """Whether `lengths` are T for each sequence, from the shape of `sequence` or of what that is made of."""
    net = core.Net("full_lengths")
    wanted = str(full_lengths(net, core.BlobReference(sequence)))
    wanted_producers = _producers(net.Proto())
    as_long = _made_of(sequence, producers)

    def are_alike(blob: str, other: str) -> bool:
        if other not in wanted_producers or blob not in producers:
            return other == sequence and blob in as_long
        by, by_other = producers[blob], wanted_producers[other]
        same = (by.type, list(by.arg), len(by.input)) == (by_other.type, list(by_other.arg), len(by_other.input))
        return same and all(map(are_alike, by.input, by_other.input))

    return are_alike(lengths, wanted)


def _made_of(blob: str, producers: Producers) -> Set[str]:
    """The blob and all that it is made of."""
    found, new = {blob}, [blob]
    while new:
        producer = producers.get(new.pop())
        read = [] if producer is None else [other for other in producer.input if other not in found]
        found.update(read)
        new.extend(read)
    return found


def _joins(
    operator: Optional[caffe2_pb2.OperatorDef],
    layer: Sequence[LSTMLoop],
    end: str,
    first: LSTMLoop,
    producers: Producers,
) -> bool:
    """Whether `operator` joins an output of both directions of a layer, that of the backward one turned back."""
    if operator is None or operator.type != "Concat" or integer(operator, "axis", 1) != 2 or len(operator.input) != 2:
        return False
    forward, backward = (getattr(loop.outputs, end) for loop in layer)
    if end.endswith("_all"):
        turned = _turns(producers.get(operator.input[1]), backward, first, producers)
    else:
        turned = operator.input[1] == backward
    return turned and bool(operator.input[0] == forward)


def _outputs(layer: Sequence[LSTMLoop], first: LSTMLoop, producers: Producers) -> Outputs:
    """What comes out of a layer; with two directions what joins theirs, as far as the net still has it."""
    if len(layer) == 1:
        return layer[0].outputs
    joined = {
        end: next((blob for blob, other in producers.items() if _joins(other, layer, end, first, producers)), None)
        for end in Outputs._fields
    }
    return Outputs(**joined)
