"""Whether the rows of a step are as wide as those for which its product has memory and filters.

Who writes rows of another width to memory that oneDNN reads makes it another blob's, and oneDNN would go on reading
what was there. So that is found out before a row is written. Where rows are slices, beside each other or changed by
element, it is the sequences and initial states that tell: before the loop, and only if these have other shapes than in
the run before. Of others, that the step computes, it tells itself.

In a backward step rows are as wide as those of the forward pass have made them.
"""

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.steps.rows import BINARY, ELEMENTWISE, FEATURES

BY_ELEMENT = ELEMENTWISE | BINARY
# To Slice, what is behind the last but one dimension, and the end.
LAST, END = -2, -1


class Width(NamedTuple):
    """The last dimension of an outer blob; that of a sequence, which has other numbers of steps, is the third."""

    blob: str
    size: int
    is_of_sequence: bool = False

    @property
    def shape(self) -> Dict[str, List[int]]:
        """The arguments of Shape, so that it tells of no steps."""
        return {"axes": [FEATURES]} if self.is_of_sequence else {}


Widths = Tuple[Width, ...]


def of_rows(loop: Loop, operator: caffe2_pb2.OperatorDef, rows: str, width: int, sizes: Sizes) -> Optional[Widths]:
    """What makes `rows`, which an operator of a step reads, of that `width`; None if that is not known.

    Nothing has to be known in a backward step.
    """
    position = next((index for index, other in enumerate(loop.operators) if other is operator), None)
    if position is None:
        return ()
    found = _in_front_of(loop, position, sizes)(rows)
    return found if found is not None and _total(found) == width else None


def _in_front_of(loop: Loop, position: int, sizes: Sizes) -> Callable[[str], Optional[Widths]]:
    """A function that says it of a blob, as the operators before that one have left it."""
    made_before = sizes.made_by(loop.before)
    computed: Dict[str, Optional[Widths]] = {}

    def of(blob: str) -> Optional[Widths]:
        return computed[blob] if blob in computed else _of_what_is_there(loop, blob, sizes, made_before)

    for operator in loop.operators[:position]:
        first = None
        if operator.type in BY_ELEMENT:
            first = _widest([of(blob) for blob in operator.input])
        elif operator.type == "Concat" and integer(operator, "axis", 1) == FEATURES:
            first = _together([of(blob) for blob in operator.input])
        computed.update(dict.fromkeys(operator.output))
        # A Concat has another output, with sizes.
        computed.update(dict.fromkeys(operator.output[:1], first))
    return of


def _widest(read: Sequence[Optional[Widths]]) -> Optional[Widths]:
    """What else is put together with it by element is as wide, or is repeated, or does not fit."""
    widest = max((found for found in read if found is not None), key=_total, default=None)
    return None if widest is None or _total(widest) == 1 else widest


def _together(read: Sequence[Optional[Widths]]) -> Optional[Widths]:
    """What is put beside each other."""
    return None if None in read else tuple(width for part in read for width in part or ())


def _of_what_is_there(loop: Loop, blob: str, sizes: Sizes, made_before: Mapping[str, Shape]) -> Optional[Widths]:
    """Of a slice, that of what it is one of; of an outer blob that a rule has made, its own."""
    link = loop.link(blob)
    if link is None and not any(blob in operator.output for operator in loop.before):
        return None
    initial = {state.outer_states: state.outer_initial for state in loop.states}
    outer = blob if link is None else initial.get(link.outer, link.outer)
    shape = sizes.shape(outer) or made_before.get(outer)
    return (Width(outer, shape[-1], link is not None and outer == link.outer),) if shape else None


def _total(widths: Widths) -> int:
    return sum(width.size for width in widths)


def add_sizes(loop: Loop, number: str, widths: Widths) -> str:
    """An outer blob that says how many rows there are, which `number` says too, and how wide these blobs are."""
    shapes = [
        loop.add_before("Shape", [width.blob], width.blob.split("/")[-1] + "_shape", **width.shape)
        for width in dict.fromkeys(widths)
    ]
    return loop.add_columns([number, *shapes], "sizes_of_rows") if shapes else number


def check(emitter: Emitter, widths: Widths) -> None:
    """Operators in front of the loop that fail unless blobs have these."""
    for width in dict.fromkeys(widths):
        shape = emitter.new("Shape", [width.blob], "part_shape", **width.shape)
        found = emitter.new("Slice", [shape], "part_width", starts=[LAST], ends=[END])
        wanted = emitter.new("GivenTensorInt64Fill", [], "wanted_width", shape=[1], values=[width.size])
        same = emitter.new("EQ", [found, wanted], "has_width")
        message = "the last dimension of '{0.blob}' is not {0.size}, for which the net has been optimised".format(width)
        emitter.operators.append(new_operator("Assert", [same], [], emitter.beside, error_msg=message))


def check_in_step(emitter: Emitter, rows: str, width: int) -> None:
    """An operator of the step that fails unless the rows, as many as there are, have that width."""
    emitter.reshape_in_place(rows, [0, 0, width])
