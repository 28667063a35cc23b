"""What a step does with the columns of a product until they are split: the part of it that may see them in blocks."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer, integers
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting.emit import ATEN, is_aten
from caffe2_recurrent.rewriting.steps.addends import is_needed
from caffe2_recurrent.rewriting.steps.rows import FEATURES

SPLIT, SPLIT_VIEWS = "Split", "split_with_sizes"
# Each element from the one in its place.
BY_ELEMENT = ("Sigmoid", "Tanh")

Operators = Sequence[caffe2_pb2.OperatorDef]


class Region(NamedTuple):
    """`operators` see the columns of a product `[1, N, M]`, or some of them, in `blobs`; they end in splitting them.

    What comes out are `parts` parts of `width` columns. `widths` says how many columns each blob has, parts too.
    """

    operators: Operators
    blobs: Set[str]
    parts: int
    width: int
    widths: Dict[str, int]


def region_behind(operators: Operators, result: str, columns: int) -> Optional[Region]:
    """The region of the product `result` `[1, N, columns]`; `operators` are those that follow it in the step.

    None if they do not split it, or not into multiples of the narrowest part.
    """
    widths = {result: columns}
    seeing = []
    for operator in operators:
        made = _widths(operator, widths)
        if made:
            seeing.append(operator)
            widths.update(made)
    narrowest = min(widths.values())
    if narrowest == columns or any(width % narrowest for width in widths.values()):
        return None
    blobs = {blob for blob, width in widths.items() if width > narrowest}
    inside = [operator for operator in seeing if operator.input[0] in blobs]
    return Region(inside, blobs, columns // narrowest, narrowest, widths)


def why_not(loop: Loop, region: Region, first: int, last: int) -> Optional[str]:
    """Why the region behind the operators `first` to `last`, which make its product, cannot see blocks; or None."""
    inside = set(map(id, region.operators))
    for position, operator in enumerate(loop.operators):
        used = region.blobs.intersection([*operator.input, *operator.output])
        if used and id(operator) not in inside and not first <= position <= last:
            return "'{}' is used by {} too".format(min(used), operator.type)
    needed = [blob for blob in sorted(region.blobs) if is_needed(loop, blob)]
    return "'{}' is needed elsewhere too".format(needed[0]) if needed else None


def in_blocks(loop: Loop, region: Region, operator: caffe2_pb2.OperatorDef) -> List[caffe2_pb2.OperatorDef]:
    """The operator of the region for a product `[parts, N, width]`; a part is what it was, `[1, N, width]`.

    Parts are views of what may hold something else in the next step, so that one that is needed elsewhere is copied.
    """
    if operator.type != SPLIT:
        return [operator]
    needed = {
        part: loop.new_blob(part + "_view")
        for part in operator.output
        if part not in region.blobs and is_needed(loop, part)
    }
    sections = [region.widths[part] // region.width for part in operator.output]
    views = [needed.get(part, part) for part in operator.output]
    loop.shared += needed.values() if loop.gradient is not None else []
    splitting = new_operator(ATEN, operator.input, views, operator, operator=SPLIT_VIEWS, split_sizes=sections, dim=0)
    return [splitting, *(new_operator("Copy", [view], [part], operator) for part, view in needed.items())]


def is_view(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the results of a step operator lie in the memory of what it reads."""
    return is_aten(operator, SPLIT_VIEWS)


def is_split(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it splits columns, into parts of widths that it says itself."""
    is_one = operator.type == SPLIT and len(operator.input) == 1 and not is_on_onednn(operator)
    return is_one and integer(operator, "axis", 0) == FEATURES


def part_widths(splitting: caffe2_pb2.OperatorDef, columns: int) -> List[int]:
    """Of what so many columns are split into."""
    parts = len(splitting.output)
    return integers(splitting, "split") if argument(splitting, "split") is not None else [columns // parts] * parts


def _widths(operator: caffe2_pb2.OperatorDef, known: Dict[str, int]) -> Dict[str, int]:
    """How many columns the results have; none if it is no operator that a region may have."""
    if not operator.input or operator.input[0] not in known or len(operator.input) > 1 or is_on_onednn(operator):
        return {}
    columns = known[operator.input[0]]
    if operator.type in BY_ELEMENT or any(is_aten(operator, kind.lower()) for kind in BY_ELEMENT):
        return {operator.output[0]: columns}
    if not is_split(operator):
        return {}
    widths = part_widths(operator, columns)
    return dict(zip(operator.output, widths)) if len(widths) == len(operator.output) and sum(widths) == columns else {}
