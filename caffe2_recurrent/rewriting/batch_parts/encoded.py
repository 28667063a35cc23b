"""What a net makes of encoded sequences for one loop alone, and of the gradients of that, to be parted with the loop.

    y = FC(x, w, b) or Transpose(x), which steps read by its own name
    dw, db, dx = FCGradient(x, w, dy) or dx = Transpose(dy);  dx, the sum of several

Rows of an FC lie along its leading axes, of which the batch is one; a Transpose says where it puts them.
"""

from typing import Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.reading import workspaces_of
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.loops.tensor_names import changed_by, names_of_tensors
from caffe2_recurrent.operator_arguments import integer, integers
from caffe2_recurrent.operators import LOOPS, SUM
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, PRODUCT

TRANSPOSE = "Transpose"


class Encoded(NamedTuple):
    """At `position` an operator makes `result` of `rows`, which have that layout."""

    position: int
    rows: str
    result: str
    layout: Layout


def find(
    net: caffe2_pb2.NetDef, place: int, loop: Loop, references: Mapping[str, Layout], sizes: Sizes
) -> List[Encoded]:
    """What may as well be made right in front of the loop at `place`, and of which nothing else knows."""
    otherwise = {link.outer for link in loop.all_links} | {state.outer_initial for state in loop.states}
    found, tensors = [], names_of_tensors(net)
    for position, operator in enumerate(net.op[:place]):
        layout = _layout_of_rows(operator, references, sizes)
        if layout is None or operator.control_input or otherwise.intersection(operator.output):
            continue
        (result,) = operator.output
        others = (other for index, other in enumerate(net.op) if index != position and not _is_of(loop, other))
        is_known = result in net.external_output or any(result in names_of(other) for other in others)
        changed = changed_by(net.op[position + 1 : place], tensors)
        if not is_known and changed.isdisjoint(operator.input):
            found.append(Encoded(position, operator.input[0], result, layout))
    return found


def _is_of(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is the operator of the loop, or its gradient operator."""
    return operator.type in LOOPS and workspaces_of(operator) == loop.workspaces


def _layout_of_rows(
    operator: caffe2_pb2.OperatorDef, references: Mapping[str, Layout], sizes: Sizes
) -> Optional[Layout]:
    """That of what the operator makes one of `references` of; None if it does not, or not sequence by sequence."""
    if operator.type not in (PRODUCT, TRANSPOSE) or operator.output[0] not in references:
        return None
    shape, result = sizes.shape(operator.input[0]), references[operator.output[0]]
    if shape is None:
        return None
    if operator.type == TRANSPOSE:
        axes = integers(operator, "axes") or list(range(len(shape)))[::-1]
        return Layout(len(shape), axes[result.batch])
    return Layout(len(shape), result.batch) if result.batch < integer(operator, "axis", 1) else None


class Gradients:
    """The operators that continue from the gradients of what is encoded, as they are met behind the loop's.

    `layouts` are those of the gradients that they make of rows, by their positions.
    """

    def __init__(self, net: caffe2_pb2.NetDef, loop: Loop, encoded: Iterable[Encoded]) -> None:
        parameters = loop.gradient.parameters if loop.gradient is not None else []
        names = {parameter.outer: parameter.outer_gradient for parameter in parameters}
        self._made_by = {names[each.result]: each for each in encoded if names.get(each.result)}
        self._net = net
        self._of_rows: Dict[str, Layout] = {}
        self.layouts: Dict[int, Layout] = {}

    def continues(self, position: int) -> bool:
        """Whether the operator there is one of them."""
        return self._layout(self._net.op[position]) is not None

    def add(self, position: int) -> None:
        operator = self._net.op[position]
        layout = self._layout(operator)
        assert layout is not None
        self.layouts[position] = layout
        of_rows = operator.output[2:] if operator.type == GRADIENT else operator.output
        self._of_rows.update(dict.fromkeys(of_rows, layout))

    def _layout(self, operator: caffe2_pb2.OperatorDef) -> Optional[Layout]:
        if operator.control_input:
            return None
        if operator.type == SUM:
            layouts = {self._of_rows.get(blob) for blob in operator.input}
            return layouts.pop() if len(layouts) == 1 else None
        if operator.type == GRADIENT:
            found = self._made_by.get(operator.input[2])
            return found.layout if found and operator.input[:2] == self._net.op[found.position].input[:2] else None
        found = self._made_by.get(operator.input[0]) if operator.type == TRANSPOSE else None
        return found.layout if found and self._net.op[found.position].type == TRANSPOSE else None

    def hidden(self, read_elsewhere: Collection[str]) -> Set[str]:
        """Gradients that none but these operators read, the last time that one has to do with them."""
        last = {}
        for position in self.layouts:
            operator = self._net.op[position]
            last.update(dict.fromkeys(operator.input, False))
            last.update(dict.fromkeys(operator.output, True))
        candidates = {*self._made_by, *self._of_rows}
        return {blob for blob in candidates if last.get(blob) is False and blob not in read_elsewhere}
