"""LSTMWithAttention: an LSTM decoder that looks at the outputs of an encoder in each step (see `attention`)."""

from typing import Any, Dict, List, Optional, Tuple

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.arguments import Blob, OutputsWithGrads, is_blob, is_integer
from caffe2_recurrent.attention import ATTENTION_TYPES, AttentionType, Encoder, attend, attention_specs, create_zeros
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.layer import Blobs, Outside, StepInputs, StepOutputs, add_layer, fc, unused_blob
from caffe2_recurrent.lstm import GATES, LSTMCell
from caffe2_recurrent.parameters import ParameterSpec, fc_specs


class AttentionCell(LSTMCell):
    """An LSTM whose gates see the context before, and whose new hidden state asks for the next context."""

    caller = "LSTMWithAttention"

    def __init__(
        self,
        lstm: Dict[str, Any],
        encoder_dim: int,
        encoder_outputs: str,
        weighted_encoder_outputs: Optional[str],
        encoder_lengths: Optional[str],
        recurrent: bool,
        recompute_attention: bool,
        model: ModelHelper,
    ) -> None:
        super().__init__(**lstm)
        self.states = {**self.states, "attention_weighted_encoder_context_t": encoder_dim}
        self._encoder_dim, self._recurrent = encoder_dim, recurrent
        self._encoder_outputs, self._weighted = encoder_outputs, weighted_encoder_outputs
        self._lengths, self._recompute_attention, self._model = encoder_lengths, recompute_attention, model

    def parameters(self) -> List[ParameterSpec]:
        specs = fc_specs("i2h", self.dim_in, GATES * self.dim)
        specs += fc_specs(self.recurrent, self.dim + self._encoder_dim, GATES * self.dim)
        if self._weighted is None:
            specs += fc_specs("weighted_encoder_outputs", self._encoder_dim, self._encoder_dim)
        return specs + attention_specs(self._encoder_dim, self.dim, self._recurrent)

    def outside(self, net: core.Net, parameters: Blobs, sequence: core.BlobReference) -> Outside:
        outputs = core.BlobReference(self._encoder_outputs)
        transposed = net.Transpose(outputs, unused_blob(net, "encoder_outputs_transposed"), axes=[1, 2, 0])
        if self._weighted is None:
            name = "weighted_encoder_outputs"
            weighted = fc(net, outputs, parameters, name, unused_blob(net, name))
        else:
            weighted = core.BlobReference(self._weighted)
        lengths = None if self._lengths is None else core.BlobReference(self._lengths)
        encoder = Encoder(transposed, weighted, lengths)
        return super().outside(net, parameters, sequence)._replace(shared=(encoder, create_zeros(self._model)))

    def step(self, net: core.Net, parameters: Blobs, inputs: StepInputs, shared: Any) -> StepOutputs:
        encoder, zeros = shared
        hidden_prev, _, context_prev = inputs.previous
        joined, joined_sizes = net.Concat(
            [hidden_prev, context_prev], ["gates_concatenated_input_t", "gates_concatenated_input_t_sizes"], axis=2
        )
        gates, recompute = self.gates(net, parameters, inputs.input_t, joined)
        hidden, cell = self.unit(net, gates, inputs)
        attended = attend(net, parameters, zeros, encoder, hidden, context_prev if self._recurrent else None)
        recomputed = [joined, joined_sizes, *recompute] if self._memory_optimization else []
        recomputed += attended.recompute if self._recompute_attention else []
        return StepOutputs((hidden, cell, attended.context), recomputed)


def LSTMWithAttention(  # noqa: N802
    model: ModelHelper,
    decoder_inputs: Blob,
    decoder_input_lengths: Optional[Blob],
    initial_decoder_hidden_state: Blob,
    initial_decoder_cell_state: Blob,
    initial_attention_weighted_encoder_context: Blob,
    encoder_output_dim: int,
    encoder_outputs: Blob,
    decoder_input_dim: int,
    decoder_state_dim: int,
    scope: str,
    attention_type: int = AttentionType.Regular,
    outputs_with_grads: OutputsWithGrads = (0, 4),
    weighted_encoder_outputs: Optional[Blob] = None,
    lstm_memory_optimization: bool = False,
    attention_memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    encoder_lengths: Optional[Blob] = None,
) -> Tuple[core.BlobReference, ...]:
    """Add an LSTM decoder with attention over an encoder's outputs to a model.

        gates_t = W x_t + b_x + U [hidden_{t-1}, context_{t-1}] + b_h, and of these hidden_t as in `LSTM`
        context_t = attention of hidden_t, see `caffe2_recurrent.attention`

    Shapes: T steps of the decoder, S of the encoder, N sequences, D = `decoder_state_dim`, E = `encoder_output_dim`.

    Args:
        model: `ModelHelper` or `CNNModelHelper`.
        decoder_inputs: `[T, N, decoder_input_dim]`.
        decoder_input_lengths: int32 `[N]`; None if every decoder sequence is T long. Past its end a sequence's hidden
            and cell state stay what they were. The context is computed on, from that hidden state: with `Regular` it
            stays the same, with `Recurrent` it changes with the context before it. With length 0 that hidden state is
            the initial one, and the context is made of it all the same.
        initial_decoder_hidden_state, initial_decoder_cell_state: `[D]`, `[N, D]` or `[1, N, D]`.
        initial_attention_weighted_encoder_context: `[E]`, `[N, E]` or `[1, N, E]`.
        encoder_output_dim: E.
        encoder_outputs: `[S, N, E]`.
        decoder_input_dim: size of an element of `decoder_inputs`.
        decoder_state_dim: D.
        scope: prefix of all blobs, under the current `NameScope`.
        attention_type: `AttentionType.Regular` or `AttentionType.Recurrent`.
        outputs_with_grads: which of the six outputs receive a gradient, or 'auto'; 0 and 4 are hidden_all and
            context_all.
        weighted_encoder_outputs: `[S, N, E]` to use instead of a linear map of `encoder_outputs`, which has the
            parameters `weighted_encoder_outputs_w` and `_b`.
        lstm_memory_optimization: write the gates over `W x + b_x`, as in `LSTM`.
        attention_memory_optimization: compute the attention again in the backward pass; with both a step keeps nothing
            but its number.
        forget_bias: added to the forget gate.
        forward_only: derive no backward step.
        encoder_lengths: int32 `[N]`; positions past the end of an encoder sequence get weight 0. None: all S count.

    Parameters under `<scope>/`: `i2h_w`, `i2h_b`, `gates_t_w [4 D, D + E]`, `gates_t_b`,
    `weighted_encoder_outputs_w [E, E]`, `_b`, `weighted_decoder_hidden_state_w [E, D]`, `_b`, `attention_v [1, E]`; if
    recurrent `weighted_prev_attention_context_w [E, E]`, `_b`; and the constant `attention_zeros`.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]`, cell_all, cell_last, context_all `[T, N, E]`, context_last.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: arXiv 1409.0473, in the order of 1508.04025.
    """
    checks = Checks("LSTMWithAttention")
    checks.model(model)
    sequence = checks.blob("decoder_inputs", decoder_inputs)
    lengths = checks.lengths("decoder_input_lengths", decoder_input_lengths)
    initial = [
        checks.blob("initial_decoder_hidden_state", initial_decoder_hidden_state),
        checks.blob("initial_decoder_cell_state", initial_decoder_cell_state),
        checks.blob("initial_attention_weighted_encoder_context", initial_attention_weighted_encoder_context),
    ]
    encoder_dim = checks.size("encoder_output_dim", encoder_output_dim)
    outputs_name = checks.blob("encoder_outputs", encoder_outputs)
    lstm: Dict[str, Any] = {
        "dim_in": checks.size("decoder_input_dim", decoder_input_dim),
        "dim": checks.size("decoder_state_dim", decoder_state_dim),
    }
    if is_integer(scope) and (decoder_input_dim is None or is_blob(decoder_input_dim)):
        text = "encoder_lengths, in ninth place in Caffe2 1.10, is the last argument here; pass it as a keyword"
        checks.types.add(text)
    scope = checks.scope(scope)
    checks.choice("attention_type", attention_type, ATTENTION_TYPES)
    outputs_with_grads = checks.positions(
        outputs_with_grads,
        ["hidden_all", "hidden_last", "cell_all", "cell_last", "context_all", "context_last"],
    )
    weighted = checks.optional_blob("weighted_encoder_outputs", weighted_encoder_outputs)
    save_memory = checks.flag("lstm_memory_optimization", lstm_memory_optimization)
    recompute_attention = checks.flag("attention_memory_optimization", attention_memory_optimization)
    lstm.update(forget_bias=checks.number("forget_bias", forget_bias), drop_states=False)
    forward_only = checks.flag("forward_only", forward_only)
    if forward_only:
        # There is no backward step to keep anything for.
        save_memory = recompute_attention = False
    lstm["memory_optimization"] = save_memory
    encoder_lengths = checks.lengths("encoder_lengths", encoder_lengths)
    checks.done()
    cell = AttentionCell(
        lstm,
        encoder_dim,
        outputs_name,
        weighted,
        encoder_lengths,
        attention_type == AttentionType.Recurrent,
        recompute_attention,
        model,
    )
    return add_layer(model, cell, sequence, lengths, initial, scope, outputs_with_grads, forward_only).outputs
