"""A net in which regions have an operator for each part of the batch, in front of the rules.

bounds;  x_k = Slice(x, ...) for each k;  y_k = loop(x_k, W);  y = Concat(y_0, y_1, ...)
dy_k = Slice(dy, ...);  dx_k, dW_k = gradient(dy_k, ...);  dx = Concat(dx_0, ...);  dW = Sum(dW_0, ...)
"""

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names, all_names
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operators import SUM, new_operator, outputs_of
from caffe2_recurrent.rewriting.batch_parts.bounds import Bounds, Layout
from caffe2_recurrent.rewriting.batch_parts.initial_states import rows_of, shape_of_rows
from caffe2_recurrent.rewriting.batch_parts.names import new_prefixes, prefixed
from caffe2_recurrent.rewriting.batch_parts.regions import SEQUENCES, Region

Operators = List[caffe2_pb2.OperatorDef]

# In the place of the number of a part: what puts together what the parts have made.
JOINING = -1


class Place(NamedTuple):
    """Where an operator comes from: its position in the net as it was, and of what is parted the number of the part.

    The operators of one pass of a region all come from the position of its loop's, or of its gradient operator.
    """

    position: int
    part: Optional[int] = None


class Parted(NamedTuple):
    """`places` are those of the operators of `net`, `shapes` what is known of the blobs that have been sliced, and
    `enough` the blobs, by the places of passes, that say whether there is a sequence for each part."""

    net: caffe2_pb2.NetDef
    places: List[Place]
    shapes: Dict[str, Shape]
    enough: Dict[int, str]


class Pass(NamedTuple):
    """The operators of one pass of a region: `in_front` of all parts, of each of them, and what puts them together."""

    in_front: Operators
    parts: List[Operators]
    joining: Operators


def part(net: caffe2_pb2.NetDef, regions: Sequence[Region], parts: int, sizes: Sizes) -> Parted:
    """`net`, which stays as it is, with `regions` in so many parts."""
    parted = Parted(caffe2_pb2.NetDef(), [], {}, {})
    parted.net.CopyFrom(net)
    del parted.net.op[:]
    used = all_names(net)
    names = Names(used)
    passes: Dict[int, Pass] = {}
    taken = {position for region in regions for position in region.positions}
    for region in regions:
        own = new_prefixes(parts, used)
        used += own
        bounds = Bounds(_sequence(net, region), [*region.sliced.values(), *region.gradients.values()], parts, names)
        rows = rows_of(sorted(region.initial), sizes, bounds)
        slices = {blob: (rows.get(blob, blob), layout) for blob, layout in region.sliced.items()}
        passes[region.place] = _pass(net, region, region.forward, slices, bounds, own, names)
        passes[region.place].in_front.extend(bounds.operators)
        parted.enough[region.place] = bounds.enough
        if region.backward:
            place = region.backward[0]
            slices = {blob: (blob, layout) for blob, layout in region.gradients.items()}
            passes[place] = _pass(net, region, region.backward, slices, bounds, own, names)
            parted.enough[place] = bounds.enough
        for k, prefix in enumerate(own):
            parted.shapes.update(_sliced_shapes(prefix, region, sizes, k, parts))
    for position, operator in enumerate(net.op):
        if position in passes:
            found = passes[position]
            _append(parted, found.in_front, Place(position))
            for k, operators in enumerate(found.parts):
                _append(parted, operators, Place(position, k))
            _append(parted, found.joining, Place(position, JOINING))
        elif position not in taken:
            _append(parted, [operator], Place(position))
    return parted


def _pass(
    net: caffe2_pb2.NetDef,
    region: Region,
    positions: Sequence[int],
    slices: Mapping[str, Tuple[str, Layout]],
    bounds: Bounds,
    prefixes: Sequence[str],
    names: Names,
) -> Pass:
    """The operators at these positions, which read `slices`: each of a blob, by the name that it has in the net."""
    operators = [net.op[position] for position in positions]
    of_parts = [
        [
            *(bounds.slicing(of, prefix + blob, layout, k) for blob, (of, layout) in slices.items()),
            *(prefixed(operator, prefix, region.whole) for operator in operators),
        ]
        for k, prefix in enumerate(prefixes)
    ]
    written = outputs_of(operators)
    return Pass([], of_parts, _put_together(written, region, prefixes, names))


def _append(parted: Parted, operators: Operators, place: Place) -> None:
    parted.net.op.extend(operators)
    parted.places.extend([place] * len(operators))


def _sequence(net: caffe2_pb2.NetDef, region: Region) -> str:
    """A sequence `[T, N, I]` that is there before the loop."""
    sequences = [blob for blob, layout in region.sliced.items() if layout == SEQUENCES and blob not in region.initial]
    return next(blob for blob in sequences if blob in _read(net, region))


def _read(net: caffe2_pb2.NetDef, region: Region) -> List[str]:
    return [blob for position in region.forward for blob in net.op[position].input]


def _put_together(written: Sequence[str], region: Region, prefixes: Sequence[str], names: Names) -> Operators:
    found: Operators = []
    plain = caffe2_pb2.OperatorDef()
    for blob in written:
        of_parts = [prefix + blob for prefix in prefixes]
        if blob not in region.joined and blob not in region.summed:
            continue
        # A loop of the same name leaves a view there, of memory that may be gone when it is written to.
        own = names.new(blob + "_of_parts")
        if blob in region.joined:
            outputs = [own, names.new(blob + "_sizes")]
            found.append(new_operator("Concat", of_parts, outputs, plain, axis=region.joined[blob]))
            if blob in region.shaped:
                shaped = names.new(blob + "_in_shape")
                found.append(new_operator("SumReduceLike", [own, region.shaped[blob]], [shaped], plain))
                own = shaped
        else:
            found.append(new_operator(SUM, of_parts, [own], plain))
        found.append(new_operator("Alias", [own], [blob], plain))
    return found


def _sliced_shapes(prefix: str, region: Region, sizes: Sizes, part_number: int, parts: int) -> Dict[str, Shape]:
    found: Dict[str, Shape] = {}
    for blob, layout in region.sliced.items():
        shape = sizes.known(blob)
        batch = sizes.known(region.loop.inputs[0])[SEQUENCES.batch]
        of_part = batch * (part_number + 1) // parts - batch * part_number // parts
        if blob in region.initial:
            shape = shape_of_rows(shape, batch)
        found[prefix + blob] = (*shape[: layout.batch], of_part, *shape[layout.batch + 1 :])
    return found
