"""The sizes of what a loop reads and computes, as far as they are known before it runs."""

from dataclasses import dataclass
from typing import Dict, Iterable, Mapping, Optional, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes, loop_outputs, loop_states
from caffe2_recurrent.operators import OPERATOR, read_before_written
from caffe2_recurrent.viewing.inner_nets import Numbers, infer_counting, infer_if
from caffe2_recurrent.viewing.structure import Structure
from caffe2_recurrent.viewing.tensors import FLOAT, Tensor, infer, kind_in_workspace


@dataclass(frozen=True)
class LoopSizes:
    """What is known of the sizes of a loop: T, N, outer blobs by name, and what a step sees, as it is at its end.

    `missing` are blobs of the net from whose shapes others would follow.
    """

    steps: Optional[int]
    batch: Optional[int]
    outer: Dict[str, Tensor]
    inner: Dict[str, Tensor]
    missing: Tuple[str, ...]


def find_outer_tensors(net: caffe2_pb2.NetDef, sizes: Sizes) -> Dict[str, Tensor]:
    """The blobs of a net: those of known size, and what follows from them."""
    found: Dict[str, Tensor] = {}
    numbers: Numbers = {}
    for operator in net.op:
        for blob in operator.input:
            shape = sizes.shape(blob)
            if shape is not None and blob not in found:
                found[blob] = Tensor(shape, kind_in_workspace(blob))
        inferred = {} if operator.is_gradient_op else _outputs(operator, found, numbers)
        for position, blob in enumerate(operator.output):
            shape, tensor = sizes.shape(blob), inferred.get(position)
            if shape is not None:
                is_inferred = tensor is not None and not workspace.HasBlob(blob)
                tensor = Tensor(shape, tensor.kind if tensor and is_inferred else kind_in_workspace(blob))
            if tensor is not None:
                found[blob] = tensor
            elif blob not in operator.input:
                found.pop(blob, None)
        if operator.type == OPERATOR:
            # By name a later loop may see them, as a backward pass does that is one.
            for blob, tensor in _states(operator, found).items():
                found.setdefault(blob, tensor)
    return found


def _states(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    shapes = loop_states(operator, {blob: tensor.shape for blob, tensor in known.items()})
    return {state: Tensor(shape, FLOAT) for state, shape in shapes.items()}


def _outputs(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor], numbers: Numbers) -> Dict[int, Tensor]:
    if operator.type == "If":
        return infer_if(operator, known, numbers)
    if operator.type != OPERATOR:
        return infer_counting(operator, known, numbers)
    shapes = loop_outputs(operator, {blob: tensor.shape for blob, tensor in known.items()})
    return {position: Tensor(shapes[blob], FLOAT) for position, blob in enumerate(operator.output) if blob in shapes}


def find_loop_sizes(
    net: caffe2_pb2.NetDef,
    loop: Loop,
    structure: Structure,
    outer_tensors: Mapping[str, Tensor],
    given: Mapping[str, Shape],
) -> LoopSizes:
    """`given` are the shapes that the caller knows, of blobs of the step too."""
    outer = {blob: outer_tensors[blob] for blob in _outer_blobs(structure) if blob in outer_tensors}
    sizes = Sizes({blob: tensor.shape for blob, tensor in outer.items()})
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    slices = {blob: tensor.shape[1:] for blob, tensor in outer.items()}
    for outer_states, outer_initial in loop.states:
        initial = sizes.shape(outer_initial)
        if initial and batch is not None:
            slices[outer_states] = (batch, initial[-1])
    inner = {structure.timestep: Tensor((1,), np.dtype(np.int32))}
    # References, and what steps go on with in its place.
    inner.update((blob, outer[blob]) for blob in read_before_written(structure.operators) if blob in outer)
    inner.update((view.outer, outer[view.outer]) for view in structure.shown if view.outer in outer)
    # The engine links float32 only.
    views = [view for view in structure.views if view.outer in slices]
    inner.update((view.inner, Tensor((view.window, *slices[view.outer]), FLOAT)) for view in views)
    _through_step(structure, inner, given)
    return LoopSizes(steps, batch, outer, inner, _missing(net, loop, structure, outer_tensors))


def _missing(net: caffe2_pb2.NetDef, loop: Loop, structure: Structure, known: Mapping[str, Tensor]) -> Tuple[str, ...]:
    """The unknown inputs of the loop, or what they are unknown for."""
    # Some are there for the order alone.
    of_steps = {
        loop.inputs[0],
        *_outer_blobs(structure, of_operator=False),
        *(state.outer_initial for state in loop.states),
    }
    writers = {blob: operator for operator in reversed(net.op) for blob in operator.output}
    seen: Dict[str, bool] = {}
    waiting = [blob for blob in reversed(loop.inputs) if blob in of_steps and blob not in known]
    while waiting:
        blob = waiting.pop()
        read = writers[blob].input if blob in writers else []
        unknown = [before for before in read if before not in known and before != blob]
        waiting.extend(before for before in reversed(unknown) if before not in seen)
        seen[blob] = not unknown
    return tuple(blob for blob, is_first in seen.items() if is_first)


def _outer_blobs(structure: Structure, of_operator: bool = True) -> Iterable[str]:
    if of_operator:
        yield from structure.outer_inputs
        yield from structure.outer_outputs
    yield from (reference.outer for reference in structure.references)
    yield from (view.outer for view in (*structure.views, *structure.shown))


def _through_step(structure: Structure, known: Dict[str, Tensor], given: Mapping[str, Shape]) -> None:
    for operator in structure.operators:
        found = infer(operator, [known.get(blob) for blob in operator.input])
        for position, blob in enumerate(operator.output):
            tensor = found.get(position)
            if blob in given:
                tensor = Tensor(given[blob], FLOAT if tensor is None else tensor.kind)
            if tensor is not None:
                known[blob] = tensor
            elif all(view.inner != blob for view in structure.views):
                known.pop(blob, None)
