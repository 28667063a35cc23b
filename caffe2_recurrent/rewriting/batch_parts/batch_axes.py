"""Which axis of each blob of a step is that of the batch, where its operators take sequences one by one.

Links show rows `[1, N, k]`. From there on operators tell: what they make has a batch where what they read has one, and
what they put together with it has to have it there too. So an outer blob that steps read by its own name, as those of
an encoder `[S, N, E]` or `[N, E, S]`, has its batch where an operator puts it beside that of another blob; or it is the
same for all sequences, as weights are.
"""

from typing import Dict, List, NamedTuple, Optional, Set, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import argument, integer, integers, joining_axis, string
from caffe2_recurrent.operators import LENGTHS_INPUT
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.steps.rows import ALONG_FEATURES, BINARY, ELEMENTWISE, UNITS
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before

# The axis of the batch in `[1, N, k]`, and in what has a number for each sequence.
OF_ROWS, OF_NUMBERS = 1, 0
# The operators that are told about below.
KINDS = ELEMENTWISE | BINARY | ALONG_FEATURES | UNITS | frozenset(["BatchMatMul", "Concat", "ExpandDims"])
KINDS |= {"SequenceMask", "Squeeze", "Transpose"}


class Unknown(Exception):
    """It is not known that what an operator makes of a sequence is of that sequence alone."""


class Place(NamedTuple):
    """A blob as an operator sees it."""

    blob: str
    shape: Optional[Shape]


def of_references(loop: Loop, sizes: Sizes) -> Union[Dict[str, Layout], str]:
    """The layouts of outer blobs that steps read by their own name and that have a batch; or why steps are not known to
    take sequences one by one."""
    step = _Step(loop, sizes)
    for position, operator in enumerate(loop.operators):
        try:
            step.follow(operator, shapes_before(loop, step.sizes, loop.operators, position))
        except Unknown:
            unnamed = step.references.intersection(operator.input).difference(loop.inputs)
            if unnamed:
                return "its steps read '{}', of which its operator says nothing".format(min(unnamed))
            return "its steps have '{}', which is not known to take sequences one by one".format(operator.type)
    mixed = step.shared.intersection(step.layouts)
    if mixed:
        return "its steps read '{}' in two ways: by sequences, and the same for all".format(min(mixed))
    without = [link.inner for link in loop.links if step.axes.get(link.inner) != OF_ROWS]
    if without:
        return "its steps make '{}', which is not known to have a row for each sequence".format(without[0])
    return step.layouts


class _Step:
    """What is known of the batch between two operators of a step.

    `axes` are those of its blobs, `layouts` those of `references`, and `shared` the references that were taken as the
    same for all sequences.
    """

    def __init__(self, loop: Loop, sizes: Sizes) -> None:
        # One sequence is not taken for a blob that has but one row.
        self.sizes = sizes.when_larger()
        self.batch = sizes.batch(loop)
        self.axes = {link.inner: OF_ROWS for link in loop.links}
        self.layouts: Dict[str, Layout] = {}
        self.shared: Set[str] = set()
        self.references = loop.references

    def follow(self, operator: caffe2_pb2.OperatorDef, shapes: Dict[str, Shape]) -> None:
        if operator.type not in KINDS:
            raise Unknown
        places = [Place(blob, shapes.get(blob)) for blob in operator.input]
        axis = self._of_results(operator, places) if any(self._axis(place) is not None for place in places) else None
        if axis is None:
            self._are_shared(places)
        for blob in operator.output:
            self.axes.pop(blob, None)
        # The second output of a Concat holds sizes.
        results = operator.output[:1] if operator.type == "Concat" else operator.output
        self.axes.update(dict.fromkeys(results, axis) if axis is not None else {})

    def _axis(self, place: Place) -> Optional[int]:
        if place.blob in self.layouts:
            return self.layouts[place.blob].batch
        return self.axes.get(place.blob)

    def _known_axis(self, place: Place) -> int:
        axis = self._axis(place)
        if axis is None:
            raise Unknown
        return axis

    def _is_batched(self, place: Place, axis: int) -> None:
        """The operator needs a batch at this axis."""
        if self._axis(place) is None and place.blob in self.references and place.shape is not None:
            if axis < len(place.shape) and place.shape[axis] == self.batch:
                self.layouts[place.blob] = Layout(len(place.shape), axis)
        if self._axis(place) != axis:
            raise Unknown

    def _are_shared(self, places: List[Place]) -> None:
        """The operator needs these to be the same for all sequences."""
        if any(self._axis(place) is not None for place in places):
            raise Unknown
        self.shared.update(place.blob for place in places if place.blob in self.references)

    def _of_results(self, operator: caffe2_pb2.OperatorDef, places: List[Place]) -> int:
        """The axis of the batch in what an operator makes of blobs of which one has a batch."""
        kind = operator.type
        if kind in ELEMENTWISE:
            return self._at_one_axis(places)
        if kind in BINARY:
            return self._repeated(operator, *places)
        if kind in ALONG_FEATURES:
            return self._along_features(operator, places)
        if kind in UNITS:
            return self._unit(operator, places)
        if kind == "BatchMatMul":
            return self._product(places)
        if kind == "Concat":
            return self._put_together(operator, places)
        if kind == "SequenceMask":
            return self._mask(operator, places)
        return _turned(operator, self._known_axis(places[0]), places[0].shape)

    def _at_one_axis(self, places: List[Place]) -> int:
        """Where all have it."""
        axis = next(found for found in map(self._axis, places) if found is not None)
        for place in places:
            self._is_batched(place, axis)
        return axis

    def _repeated(self, operator: caffe2_pb2.OperatorDef, first: Place, second: Place) -> int:
        """Of an operator that repeats what is smaller, seen from the last axis."""
        if first.shape is None or second.shape is None:
            raise Unknown
        one, other = (first, second) if self._axis(first) is not None else (second, first)
        assert one.shape is not None and other.shape is not None
        behind = len(one.shape) - self._known_axis(one)
        axis = len(other.shape) - behind
        if integer(operator, "axis", -1) >= 0:
            # The axis of the first from which on the second lies beside it.
            axis = self._known_axis(first) - integer(operator, "axis", -1)
        if argument(operator, "axis_str") is not None:
            raise Unknown
        if not 0 <= axis < len(other.shape) or other.shape[axis] == 1:
            self._are_shared([other])
        else:
            self._is_batched(other, axis)
        return max(len(one.shape), len(other.shape)) - behind

    def _along_features(self, operator: caffe2_pb2.OperatorDef, places: List[Place]) -> int:
        """Each row of the first input by itself, up to an axis; or, of a Split, all of them, but along an axis."""
        axis, along = self._known_axis(places[0]), joining_axis(operator)
        if not (0 <= along != axis if operator.type == "Split" else axis < along):
            raise Unknown
        self._are_shared(places[1:])
        return axis

    def _product(self, places: List[Place]) -> int:
        """A matrix for each sequence."""
        axis, ranks = self._at_one_axis(places), {len(place.shape or ()) for place in places}
        if len(ranks) > 1 or axis >= min(ranks) - 2:
            raise Unknown
        return axis

    def _put_together(self, operator: caffe2_pb2.OperatorDef, places: List[Place]) -> int:
        axis, along = self._at_one_axis(places), joining_axis(operator)
        # One that counts from the end may be that of the batch.
        if along < 0 or along == axis or integer(operator, "add_axis", 0):
            raise Unknown
        return axis

    def _mask(self, operator: caffe2_pb2.OperatorDef, places: List[Place]) -> int:
        """Of the rows of a matrix each has its length."""
        is_by_rows = integer(operator, "axis", 1) == 1 and string(operator, "mode", "") == "sequence"
        if not is_by_rows or any(argument(operator, name) for name in ("batch", "repeat_from_axis")):
            raise Unknown
        for place in places:
            self._is_batched(place, OF_NUMBERS)
        return OF_NUMBERS

    def _unit(self, operator: caffe2_pb2.OperatorDef, places: List[Place]) -> int:
        lengths = LENGTHS_INPUT[operator.type]
        # The last one is the number of the step.
        for position, place in enumerate(places[:-1]):
            self._is_batched(place, OF_NUMBERS if position == lengths else OF_ROWS)
        self._are_shared(places[-1:])
        return OF_ROWS


def _turned(operator: caffe2_pb2.OperatorDef, axis: int, shape: Optional[Shape]) -> int:
    """Where an axis is behind an operator that changes nothing but what axes there are, and their order."""
    dims = sorted(integers(operator, "dims"))
    if operator.type == "ExpandDims":
        for added in dims:
            axis += added <= axis
        return axis
    if operator.type == "Squeeze":
        if axis in dims:
            raise Unknown
        return axis - sum(removed < axis for removed in dims)
    axes = integers(operator, "axes") or list(range(len(shape or ())))[::-1]
    if axis not in axes:
        raise Unknown
    return axes.index(axis)
