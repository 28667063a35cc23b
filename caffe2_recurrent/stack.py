"""Several layers of a cell, one on the other, in one direction or in both.

    layer 0 -> dropout -> layer 1 -> ... -> last layer, whose outputs are those of the stack

Each layer runs over all steps before the next one starts, so that what it computes from its input is one product for
all steps; Caffe2's MultiRNNCell puts all layers into one step and multiplies step by step. Both directions of a layer
read the same input; the backward one reads every sequence from its end, and its outputs are turned round again.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.arguments import OutputsWithGrads
from caffe2_recurrent.layer import Cell, Layer, add_layer, unused_blob
from caffe2_recurrent.transaction import all_or_nothing

FORWARD, BACKWARD = "fw", "bw"


class Shape(NamedTuple):
    """The sizes of a stack: input, the states of each layer; and what is between and beside the layers."""

    dim_in: int
    dims: Tuple[int, ...]
    bidirectional: bool
    dropout_ratio: float
    is_test: bool

    @property
    def directions(self) -> Tuple[str, ...]:
        return (FORWARD, BACKWARD) if self.bidirectional else (FORWARD,)

    @property
    def loops(self) -> int:
        return len(self.dims) * len(self.directions)


class Stack(NamedTuple):
    """What was added: the outputs of the last layer, and every loop from the input on, forward before backward."""

    outputs: Tuple[core.BlobReference, ...]
    loops: List[Layer]


def add_stack(
    model: ModelHelper,
    make_cell: Callable[[int, int], Cell],
    shape: Shape,
    sequence: str,
    lengths: Optional[str],
    initial: Optional[Sequence[str]],
    scope: str,
    outputs_with_grads: OutputsWithGrads,
    forward_only: bool,
) -> Stack:
    """Add the layers to `model`, which is as it was if that fails.

    `initial` has the states of each loop in turn. Blobs are under `<scope>/`, with several layers under
    `<scope>/layer_<i>/`, with two directions under `fw/` and `bw/` in there. Outputs of both directions are joined
    along the last axis, forward first.
    """
    loops: List[Layer] = []
    outputs: Tuple[core.BlobReference, ...] = ()
    with all_or_nothing(model):
        turn = _Turn(model.net, scope, sequence, lengths) if shape.bidirectional else None
        for index, dim in enumerate(shape.dims):
            last = index == len(shape.dims) - 1
            layer_scope = scope if len(shape.dims) == 1 else "{}/layer_{}".format(scope, index)
            made = []
            for direction in shape.directions:
                cell = make_cell(shape.dim_in if index == 0 else shape.dims[index - 1] * len(shape.directions), dim)
                count = len(cell.states)
                states = None if initial is None else initial[len(loops) * count : (len(loops) + 1) * count]
                backward = turn is not None and direction == BACKWARD
                layer = add_layer(
                    model,
                    cell,
                    turn.round(sequence, layer_scope) if turn is not None and backward else sequence,
                    lengths,
                    states,
                    "{}/{}".format(layer_scope, direction) if turn is not None else layer_scope,
                    outputs_with_grads if last else (0,),
                    forward_only,
                )
                loops.append(layer)
                made.append(turn.back(layer.outputs, layer_scope) if turn is not None and backward else layer.outputs)
            outputs = made[0] if len(made) == 1 else _joined(model.net, layer_scope, *made)
            if not last:
                sequence = str(_dropped(model.net, layer_scope, outputs[0], shape))
    return Stack(outputs, loops)


def _dropped(net: core.Net, scope: str, blob: core.BlobReference, shape: Shape) -> core.BlobReference:
    if shape.dropout_ratio == 0:
        return blob
    with core.NameScope(scope):
        names = [unused_blob(net, "dropped"), unused_blob(net, "dropout_mask")]
        dropped, _ = net.Dropout([blob], names, ratio=shape.dropout_ratio, is_test=int(shape.is_test))
    return dropped


def _joined(
    net: core.Net, scope: str, forward: Sequence[core.BlobReference], backward: Sequence[core.BlobReference]
) -> Tuple[core.BlobReference, ...]:
    joined = []
    with core.NameScope(scope):
        for one, other in zip(forward, backward):
            # Not the name that one direction alone has: where there was one before, that blob is a view of its states.
            name = unused_blob(net, "joined_" + one.GetUnscopedName())
            output, _ = net.Concat([one, other], [name, name + "_sizes"], axis=2)
            joined.append(output)
    return tuple(joined)


class _Turn:
    """Turns sequences `[T, N, ...]` round, each within its length."""

    def __init__(self, net: core.Net, scope: str, sequence: str, lengths: Optional[str]) -> None:
        self._net = net
        if lengths is None:
            with core.NameScope(scope):
                self._lengths = full_lengths(net, core.BlobReference(sequence))
        else:
            self._lengths = core.BlobReference(lengths)

    def round(self, sequence: str, scope: str) -> str:
        with core.NameScope(scope):
            name = unused_blob(self._net, "reversed_input")
            return str(self._net.ReversePackedSegs([core.BlobReference(sequence), self._lengths], name))

    def back(self, outputs: Sequence[core.BlobReference], scope: str) -> Tuple[core.BlobReference, ...]:
        """All steps in the order of the input again; last steps are what they are."""
        with core.NameScope(scope):
            turned: List[Any] = list(outputs)
            for position in range(0, len(outputs), 2):
                name = unused_blob(self._net, "turned_" + outputs[position].GetUnscopedName())
                turned[position] = self._net.ReversePackedSegs([outputs[position], self._lengths], name)
        return tuple(turned)


def full_lengths(net: core.Net, sequence: core.BlobReference) -> core.BlobReference:
    """T for each of the N sequences of `[T, N, ...]`, int32."""
    shape = net.Shape([sequence], unused_blob(net, "input_shape"))
    steps = net.Slice([shape], unused_blob(net, "input_steps"), starts=[0], ends=[1])
    batch = net.Slice([shape], unused_blob(net, "input_batch"), starts=[1], ends=[2])
    ones = net.ConstantFill([batch], unused_blob(net, "ones"), value=1, dtype=core.DataType.INT32, input_as_shape=1)
    count = net.Cast([steps], unused_blob(net, "input_steps_int32"), to=core.DataType.INT32)
    return net.Mul([ones, count], unused_blob(net, "full_lengths"))
