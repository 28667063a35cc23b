"""The sizes of outer blobs, as far as they are known when a net is optimised.

They come from the caller, from blobs that are in the workspace, and from Caffe2's own shape inference over the
operators before the loop.
"""

from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.problems import Problems, given
from caffe2_recurrent.rewriting.loop import Loop

Shape = Tuple[int, ...]


class Sizes:
    """Shapes of outer blobs by name; None where one is not known."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)

    def shape(self, outer: str) -> Optional[Shape]:
        return self._shapes.get(outer)

    def steps(self, loop: Loop) -> Optional[int]:
        """T, if it is known."""
        sequence = self.shape(loop.inputs[0])
        return sequence[0] if sequence else None

    def batch(self, loop: Loop) -> Optional[int]:
        """N, if it is known."""
        sequence = self.shape(loop.inputs[0])
        return sequence[1] if sequence and len(sequence) > 1 else None

    def state_size(self, loop: Loop, inner: str) -> Optional[int]:
        """D of the state that the step-net blob `inner` is linked to, if it is known."""
        link = loop.link(inner)
        initial = next(
            (state.outer_initial for state in loop.states if link and state.outer_states == link.outer), None
        )
        shape = self.shape(initial) if initial is not None else None
        return shape[-1] if shape else None


def find_sizes(net: caffe2_pb2.NetDef, given_shapes: Mapping[str, Shape]) -> Sizes:
    """What is known about the blobs of `net`: what was given, what the workspace holds, and what follows from both."""
    shapes: Dict[str, Shape] = {}
    inputs = list(dict.fromkeys(blob for operator in net.op for blob in operator.input))
    for blob in inputs:
        if blob in given_shapes:
            continue
        if workspace.HasBlob(blob):
            shape = _shape_in_workspace(blob)
            if shape is not None:
                shapes[blob] = shape
    shapes.update(given_shapes)
    return Sizes({**_inferred(net, shapes), **shapes})


def read_shapes(shapes: Any, problems: Problems) -> Dict[str, Shape]:
    """The caller's `shapes`, checked."""
    if shapes is None:
        return {}
    if not isinstance(shapes, Mapping):
        problems.add("shapes must map blobs to their dimensions, like {{'x': (20, 128, 40)}}; got {}", given(shapes))
        return {}
    read: Dict[str, Shape] = {}
    for blob, shape in shapes.items():
        if not isinstance(blob, (str, core.BlobReference)):
            problems.add("shapes maps blobs or their names; got {}", given(blob))
        elif not isinstance(shape, Iterable) or isinstance(shape, (str, bytes)) or not all(map(_is_size, list(shape))):
            problems.add("shapes['{}'] must be whole numbers from 1 on, like (20, 128, 40); got {}", blob, given(shape))
        else:
            read[str(blob)] = tuple(int(size) for size in shape)
    return read


def _is_size(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and int(value) > 0


def _shape_in_workspace(blob: str) -> Optional[Shape]:
    try:
        return tuple(int(size) for size in workspace.FetchBlob(blob).shape)
    except (AttributeError, RuntimeError, TypeError):
        # No tensor, or none that has been filled.
        return None


def _inferred(net: caffe2_pb2.NetDef, shapes: Mapping[str, Shape]) -> Dict[str, Shape]:
    """What Caffe2 infers for the operators in front of each loop; it knows nothing of the loops themselves."""
    prefix = caffe2_pb2.NetDef(name=net.name)
    for operator in net.op:
        if not operator.type.startswith("RecurrentNetwork") and not operator.is_gradient_op:
            prefix.op.add().CopyFrom(operator)
    known = {blob: list(shape) for blob, shape in shapes.items()}
    if not known:
        return {}
    try:
        found, _ = workspace.InferShapesAndTypes([prefix], known, nets_proto=True)
    except (RuntimeError, TypeError):
        return {}
    return {blob: tuple(int(size) for size in shape) for blob, shape in found.items() if shape}
