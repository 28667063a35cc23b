"""LSTM and MILSTM: cells with input, forget and output gate, over Caffe2's LSTMUnit operator."""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer

from caffe2_recurrent.arguments import Blob, OutputsWithGrads
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.layer import Blobs, Cell, StepInputs, StepOutputs, fc, pair, unused_blob
from caffe2_recurrent.parameters import ParameterSpec, fc_specs
from caffe2_recurrent.stack import add_stack

GATES = 4


class LSTMCell(Cell):
    """gates_t = U h_{t-1} + c + x_t, where x_t `[1, N, 4 D]` comes from outside; then the LSTM unit."""

    caller = "LSTM"
    # The fully connected layer over the previous hidden state.
    recurrent = "gates_t"

    def __init__(self, dim_in: int, dim: int, forget_bias: float, drop_states: bool, recompute: bool) -> None:
        self.dim_in, self.dim = dim_in, dim
        self.states = {"hidden_t": dim, "cell_t": dim}
        self._forget_bias, self._drop_states, self._recompute = forget_bias, drop_states, recompute

    def parameters(self) -> List[ParameterSpec]:
        return fc_specs("i2h", self.dim_in, GATES * self.dim) + fc_specs(self.recurrent, self.dim, GATES * self.dim)

    def outside(self, net: core.Net, parameters: Blobs, sequence: core.BlobReference) -> core.BlobReference:
        return fc(net, sequence, parameters, "i2h", unused_blob(net, "i2h"))

    def step(self, net: core.Net, parameters: Blobs, inputs: StepInputs) -> StepOutputs:
        gates, recompute = self.gates(net, parameters, inputs.input_t, inputs.previous[0])
        states = self.unit(net, gates, inputs)
        return StepOutputs(states, recompute if self._recompute else [])

    def gates(
        self, net: core.Net, parameters: Blobs, input_t: core.BlobReference, hidden: core.BlobReference
    ) -> Tuple[core.BlobReference, List[core.BlobReference]]:
        """The gates `[1, N, 4 D]` before their nonlinearities, and what is worth recomputing."""
        gates = fc(net, hidden, parameters, self.recurrent, "gates_t")
        net.Sum([gates, input_t], [gates])
        return gates, [gates]

    def unit(
        self, net: core.Net, gates: core.BlobReference, inputs: StepInputs
    ) -> Tuple[core.BlobReference, core.BlobReference]:
        lengths = [] if inputs.lengths is None else [inputs.lengths]
        hidden, cell = net.LSTMUnit(
            [*inputs.previous[:2], gates, *lengths, inputs.timestep],
            ["hidden_t", "cell_t"],
            forget_bias=self._forget_bias,
            drop_states=self._drop_states,
            sequence_lengths=bool(lengths),
        )
        return hidden, cell


class MILSTMCell(LSTMCell):
    """gates_t = alpha * x_t * u_t + beta1 * u_t + beta2 * x_t + b, where u_t = U h_{t-1} + c (arXiv 1606.06630)."""

    caller = "MILSTM"
    recurrent = "prev_t"

    def parameters(self) -> List[ParameterSpec]:
        starts = {"alpha": 1.0, "beta1": 1.0, "beta2": 1.0, "b": 0.0}
        vectors = [
            ParameterSpec(name, [GATES * self.dim], Initializer("ConstantFill", value=start))
            for name, start in starts.items()
        ]
        return super().parameters() + vectors

    def gates(
        self, net: core.Net, parameters: Blobs, input_t: core.BlobReference, hidden: core.BlobReference
    ) -> Tuple[core.BlobReference, List[core.BlobReference]]:
        of_state = fc(net, hidden, parameters, self.recurrent)
        # (alpha * x + beta1) * u + (beta2 * x + b): two operators less than term by term.
        factor = net.ElementwiseLinear([input_t, parameters["alpha"], parameters["beta1"]], "mi_factor_t", axis=2)
        rest = net.ElementwiseLinear([input_t, parameters["beta2"], parameters["b"]], "mi_rest_t", axis=2)
        gates = net.Mul([factor, of_state], "gates_t")
        net.Sum([gates, rest], [gates])
        return gates, [of_state, factor, rest, gates]


def LSTM(  # noqa: N802
    model: ModelHelper,
    input_blob: Blob,
    seq_lengths: Optional[Blob],
    initial_states: Optional[Sequence[Blob]],
    dim_in: int,
    dim_out: Union[int, Sequence[int]],
    scope: str,
    outputs_with_grads: OutputsWithGrads = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    *,
    bidirectional: bool = False,
    dropout_ratio: float = 0.0,
    is_test: bool = False,
) -> Tuple[Any, ...]:
    """Add an LSTM layer to a model.

        gates_t = W x_t + b + U h_{t-1} + c
        i, f, o, g = split(gates_t)              (this order along the 4 * D axis)
        cell_t = sigmoid(f + forget_bias) * cell_{t-1} + sigmoid(i) * tanh(g)
        hidden_t = sigmoid(o) * tanh(cell_t)

    Shapes: T steps, N sequences in the batch, D = `dim_out`. `W x + b` is computed for all steps at once.

    Args:
        model: `ModelHelper` or `CNNModelHelper`; gets the operators and the parameters `i2h_w [4 D, dim_in]`,
            `i2h_b [4 D]`, `gates_t_w [4 D, D]`, `gates_t_b [4 D]` under `<scope>/`. A second call with the same
            scope uses the same parameters.
        input_blob: `[T, N, dim_in]`.
        seq_lengths: int32 `[N]`; None if every sequence is T long. Past its end a sequence's states stay what they
            were.
        initial_states: (hidden, cell), each `[D]`, `[N, D]` or `[1, N, D]`. None: they are parameters
            `initial_hidden_state`, `initial_cell_state` `[D]` that start at 0.
        dim_in: size of an input element.
        dim_out: size D of the states; a list has the sizes of several layers, one on the other, as in Caffe2's
            `rnn_cell.LSTM`. Blobs are then under `<scope>/layer_<i>/`.
        scope: prefix of all blobs, under the current `NameScope`.
        outputs_with_grads: which of the four outputs receive a gradient, or 'auto'; see `recurrent_net`.
        return_params: return a dict of parameter blobs as well.
        memory_optimization: compute the gates again in the backward pass instead of keeping `[N, 4 D]` per step.
        forget_bias: added to the forget gate.
        forward_only: derive no backward step.
        drop_states: states past the end of a sequence are 0 instead.
        bidirectional: a second loop in each layer reads every sequence from its end; blobs are under `fw/` and `bw/`.
        dropout_ratio: share of each layer's hidden states that is dropped before the next layer reads them.
        is_test: drop nothing, as when a trained model is used.

    With several layers or directions, `initial_states` has (hidden, cell) of each loop in turn: layer by layer, forward
    before backward. These options are keywords that Caffe2's `LSTM` does not have, so that its positions stay.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]`, cell_all, cell_last of the last layer, both directions joined
        along the last axis (2 D); and, with `return_params`, `{'input': {'weights', 'biases'}, 'recurrent':
        {'weights', 'biases'}}`, with several loops a list of these.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: caffe2/operators/lstm_unit_op.h.
    """
    return _add(
        LSTMCell,
        model,
        input_blob,
        seq_lengths,
        initial_states,
        dim_in,
        dim_out,
        scope,
        outputs_with_grads,
        return_params,
        memory_optimization,
        forget_bias,
        forward_only,
        drop_states,
        {"bidirectional": bidirectional, "dropout_ratio": dropout_ratio, "is_test": is_test},
    )


def MILSTM(  # noqa: N802
    model: ModelHelper,
    input_blob: Blob,
    seq_lengths: Optional[Blob],
    initial_states: Optional[Sequence[Blob]],
    dim_in: int,
    dim_out: Union[int, Sequence[int]],
    scope: str,
    outputs_with_grads: OutputsWithGrads = (0,),
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    *,
    bidirectional: bool = False,
    dropout_ratio: float = 0.0,
    is_test: bool = False,
) -> Tuple[Any, ...]:
    """Add an LSTM layer with multiplicative integration to a model.

        x = W x_t + b_x,  u = U h_{t-1} + b_u
        gates_t = alpha * x * u + beta1 * u + beta2 * x + b

    and then as in `LSTM`, with the same gate order, shapes, arguments and errors.

    Parameters under `<scope>/`: `i2h_w [4 D, dim_in]`, `i2h_b [4 D]`, `prev_t_w [4 D, D]`, `prev_t_b [4 D]`, and
    `alpha`, `beta1`, `beta2` (start at 1) and `b` (starts at 0), each `[4 D]`.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]`, cell_all, cell_last.

    Source: arXiv 1606.06630.
    """
    return _add(
        MILSTMCell,
        model,
        input_blob,
        seq_lengths,
        initial_states,
        dim_in,
        dim_out,
        scope,
        outputs_with_grads,
        False,
        memory_optimization,
        forget_bias,
        forward_only,
        drop_states,
        {"bidirectional": bidirectional, "dropout_ratio": dropout_ratio, "is_test": is_test},
    )


def _add(
    kind: Any,
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Any,
    dim_in: Any,
    dim_out: Any,
    scope: Any,
    outputs_with_grads: Any,
    return_params: Any,
    memory_optimization: Any,
    forget_bias: Any,
    forward_only: Any,
    drop_states: Any,
    stacking: Dict[str, Any],
) -> Tuple[Any, ...]:
    checks = Checks(kind.caller)
    checks.model(model)
    sequence = checks.blob("input_blob", input_blob)
    lengths = checks.lengths("seq_lengths", seq_lengths)
    shape = checks.stack(dim_in, dim_out, **stacking)
    initial = checks.states(initial_states, ("hidden", "cell"), shape.loops)
    scope = checks.scope(scope)
    checks.positions(outputs_with_grads, ["hidden_all", "hidden_last", "cell_all", "cell_last"])
    with_parameters = checks.flag("return_params", return_params)
    recompute = checks.flag("memory_optimization", memory_optimization)
    bias = checks.number("forget_bias", forget_bias)
    forward_only = checks.flag("forward_only", forward_only)
    drop = checks.flag("drop_states", drop_states)
    checks.done()
    stack = add_stack(
        model,
        lambda dim_in, dim: kind(dim_in, dim, bias, drop, recompute),
        shape,
        sequence,
        lengths,
        initial,
        scope,
        outputs_with_grads,
        forward_only,
    )
    if not with_parameters:
        return stack.outputs
    parts = {"input": "i2h", "recurrent": kind.recurrent}
    pairs = [{part: pair(loop.parameters, name) for part, name in parts.items()} for loop in stack.loops]
    return (*stack.outputs, pairs[0] if len(pairs) == 1 else pairs)
