"""LSTM and MILSTM: cells with input, forget and output gate, over Caffe2's LSTMUnit operator."""

from typing import Any, List, Optional, Sequence, Tuple, Type, Union

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer

from caffe2_recurrent.arguments import Blob, OutputsWithGrads
from caffe2_recurrent.layer import Blobs, Cell, Outside, StepInputs, StepOutputs, fc, pair, unused_blob
from caffe2_recurrent.parameters import ParameterSpec, fc_specs
from caffe2_recurrent.sequence_layer import Kind, add_sequence_layer

GATES = 4


class LSTMCell(Cell):
    """gates_t = U hidden_{t-1} + b_h + x_t, where x_t `[1, N, 4 D]` comes from outside; then the LSTM unit."""

    caller = "LSTM"
    # The fully connected layer over the previous hidden state.
    recurrent = "gates_t"

    def __init__(self, dim_in: int, dim: int, forget_bias: float, drop_states: bool, memory_optimization: bool) -> None:
        self.dim_in, self.dim = dim_in, dim
        self.states = {"hidden_t": dim, "cell_t": dim}
        self._forget_bias, self._drop_states = forget_bias, drop_states
        self._memory_optimization = memory_optimization

    def parameters(self) -> List[ParameterSpec]:
        return fc_specs("i2h", self.dim_in, GATES * self.dim) + fc_specs(self.recurrent, self.dim, GATES * self.dim)

    def outside(self, net: core.Net, parameters: Blobs, sequence: core.BlobReference) -> Outside:
        return Outside(fc(net, sequence, parameters, "i2h", unused_blob(net, "i2h")))

    def step(self, net: core.Net, parameters: Blobs, inputs: StepInputs, shared: Any) -> StepOutputs:
        gates, recompute = self.gates(net, parameters, inputs.input_t, inputs.previous[0])
        states = self.unit(net, gates, inputs)
        return StepOutputs(states, recompute if self._memory_optimization else [])

    def gates(
        self, net: core.Net, parameters: Blobs, input_t: core.BlobReference, hidden: core.BlobReference
    ) -> Tuple[core.BlobReference, List[core.BlobReference]]:
        """The gates `[1, N, 4 D]` before their nonlinearities, and what is worth recomputing."""
        of_state = fc(net, hidden, parameters, self.recurrent, "gates_t")
        if self._memory_optimization:
            # Nothing reads x_t again, so its memory can keep the gates. The product then has no reader behind the
            # step: its memory can be shared, and it need not run again.
            net.Sum([input_t, of_state], [input_t])
            return input_t, [of_state]
        net.Sum([of_state, input_t], [of_state])
        return of_state, []

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
    """gates_t = alpha * x_t * u_t + beta1 * u_t + beta2 * x_t + b, u_t = U hidden_{t-1} + b_u (arXiv 1606.06630)."""

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
        # Not `gates_t`: the gradient of an LSTM's is linked, and outlives its net in the workspaces of that scope.
        gates = net.Mul([factor, of_state], "mi_gates_t")
        net.Sum([gates, rest], [gates])
        return gates, [of_state, factor, rest, gates]


def _kind(cell: Type[LSTMCell]) -> Kind:
    parts = {"input": "i2h", "recurrent": cell.recurrent}
    return Kind(
        cell.caller,
        ("hidden", "cell"),
        lambda dim_in, dim, options: cell(
            dim_in, dim, options.forget_bias, options.drop_states, options.memory_optimization
        ),
        lambda parameters: {part: pair(parameters, name) for part, name in parts.items()},
    )


LSTM_KIND, MILSTM_KIND = _kind(LSTMCell), _kind(MILSTMCell)


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

        gates_t = W x_t + b_x + U hidden_{t-1} + b_h
        i, f, o, g = split(gates_t)              (this order along the 4 * D axis)
        cell_t = sigmoid(f + forget_bias) * cell_{t-1} + sigmoid(i) * tanh(g)
        hidden_t = sigmoid(o) * tanh(cell_t)

    Shapes: T steps, N sequences in the batch, D = `dim_out`. `W x + b_x` is computed for all steps at once.

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
        memory_optimization: write the gates over `W x + b_x`, which saves `[N, 4 D]` floats a step; after a run
            `<scope>/i2h` holds the gates, and not `W x + b_x`.
        forget_bias: added to the forget gate.
        forward_only: derive no backward step.
        drop_states: states past the end of a sequence are 0 instead.
        bidirectional: a second loop in each layer reads every sequence from its end; blobs are under `fw/` and `bw/`.
        dropout_ratio: share of each layer's hidden states that is dropped before the next layer reads them. With one
            layer it does nothing, and a `UserWarning` says so.
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
    return add_sequence_layer(LSTM_KIND, locals())


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

        x = W x_t + b_x,  u = U hidden_{t-1} + b_u
        gates_t = alpha * x * u + beta1 * u + beta2 * x + b

    and then as in `LSTM`, with the same gate order, shapes, arguments and errors. With `memory_optimization` the gates,
    and what they are made of, are computed again in the backward pass.

    Parameters under `<scope>/`: `i2h_w [4 D, dim_in]`, `i2h_b [4 D]`, `prev_t_w [4 D, D]`, `prev_t_b [4 D]`, and
    `alpha`, `beta1`, `beta2` (start at 1) and `b` (starts at 0), each `[4 D]`.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]`, cell_all, cell_last of the last layer, both directions joined
        along the last axis (2 D). There is no `return_params`.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: arXiv 1606.06630.
    """
    return add_sequence_layer(MILSTM_KIND, locals())
