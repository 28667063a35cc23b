"""Attention over the outputs of an encoder, and an LSTM decoder that uses it.

    energy(j) = v . tanh(W_e s_j + b_e + W_d h_t + b_d)                         Regular, arXiv 1409.0473
    energy(j) = v . tanh(W_e s_j + b_e + W_d h_t + b_d + W_c c_{t-1} + b_c)     Recurrent, arXiv 1601.03317 section 4.1
    c_t = sum over j of softmax(energy)(j) s_j

`s_j` is output j of S of the encoder, `h_t` the decoder's new hidden state, `c_t` the context. What depends on the
encoder alone, `W_e s_j + b_e` and the transpose of its outputs, is computed once, outside of the loop.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer
from caffe2.python.modeling.parameter_info import ParameterTags

from caffe2_recurrent import parameters as model_parameters
from caffe2_recurrent.arguments import Blob, OutputsWithGrads
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.layer import Blobs, Outside, StepInputs, StepOutputs, add_layer, fc, unused_blob
from caffe2_recurrent.lstm import GATES, LSTMCell
from caffe2_recurrent.parameters import ParameterSpec, fc_specs

# Added to no energy of a real position: its exponential is 0 in float32 beside any of those.
FAR_BELOW = -1e9


class AttentionType:
    """How the energies are computed; see the module."""

    Regular, Recurrent = 0, 1


ATTENTION_TYPES = {"Regular": AttentionType.Regular, "Recurrent": AttentionType.Recurrent}


class Attended(NamedTuple):
    """What attention gives: context `[1, N, E]`, weights `[N, S, 1]`, and the blobs worth recomputing."""

    context: core.BlobReference
    weights: core.BlobReference
    recompute: List[core.BlobReference]


class Encoder(NamedTuple):
    """The encoder side: outputs transposed `[N, E, S]`, their linear map `[S, N, E]`, lengths int32 `[N]` or None."""

    transposed: core.BlobReference
    weighted: core.BlobReference
    lengths: Optional[core.BlobReference]


def attention_specs(encoder_dim: int, decoder_dim: int, recurrent: bool) -> List[ParameterSpec]:
    specs = fc_specs("weighted_decoder_hidden_state", decoder_dim, encoder_dim)
    if recurrent:
        specs += fc_specs("weighted_prev_attention_context", encoder_dim, encoder_dim)
    return specs + [ParameterSpec("attention_v", [1, encoder_dim], Initializer("XavierFill"), ParameterTags.WEIGHT)]


def create_zeros(model: ModelHelper) -> core.BlobReference:
    """The constant `attention_zeros` `[1]`, under the scope of the parameters: what FC wants for a bias.

    A computed parameter, as Caffe2 calls what a net needs and no optimizer changes: `GetAllParams` lists it.
    """
    name = model_parameters.scoped_name("attention_zeros")
    if not model.param_init_net.BlobIsDefined(name):
        if model.init_params:
            model.param_init_net.ConstantFill([], [name], shape=[1], value=0.0)
        else:
            model.param_init_net.AddExternalInput(name)
        model.AddParameter(name, ParameterTags.COMPUTED_PARAM)
    return name


def attend(
    net: core.Net,
    parameters: Blobs,
    zeros: core.BlobReference,
    encoder: Encoder,
    hidden: core.BlobReference,
    previous_context: Optional[core.BlobReference] = None,
) -> Attended:
    """The attention of one step, from `hidden` `[1, N, D]` and, if it is recurrent, the context before."""
    query = fc(net, hidden, parameters, "weighted_decoder_hidden_state")
    recompute = [query]
    if previous_context is not None:
        of_context = fc(net, previous_context, parameters, "weighted_prev_attention_context")
        net.Sum([query, of_context], [query])
        recompute.append(of_context)
    hidden_layer = net.Add([encoder.weighted, query], "attention_hidden_t")
    net.Tanh(hidden_layer, hidden_layer)
    by_position = net.FC([hidden_layer, parameters["attention_v"], zeros], "attention_logits_by_position", axis=2)
    logits = net.Transpose(by_position, "attention_logits", axes=[1, 0, 2])
    recompute += [hidden_layer, by_position, logits]
    if encoder.lengths is None:
        weights = net.Softmax(logits, "attention_weights", axis=1)
    else:
        inside = net.SequenceMask(
            [logits, encoder.lengths], "attention_logits_inside", mode="sequence", axis=1, fill_val=FAR_BELOW
        )
        soft = net.Softmax(inside, "attention_weights_unmasked", axis=1)
        # An encoder sequence of length 0 has no position to give weight to.
        weights = net.SequenceMask([soft, encoder.lengths], "attention_weights", mode="sequence", axis=1, fill_val=0.0)
        recompute += [inside, soft]
    context = net.BatchMatMul([encoder.transposed, weights], "attention_weighted_encoder_context")
    # [N, E, 1] -> [1, N, E] in place: Reshape would leave a blob with the old shape in each step.
    net.Squeeze(context, context, dims=[2])
    net.ExpandDims(context, context, dims=[0])
    return Attended(context, weights, recompute + [weights])


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

        gates_t = W x_t + b + U [h_{t-1}, c_{t-1}] + d, and from them h_t as in `LSTM`
        c_t = context of h_t (see the module)

    Shapes: T steps of the decoder, S of the encoder, N sequences, D = `decoder_state_dim`, E = `encoder_output_dim`.

    Args:
        model: `ModelHelper` or `CNNModelHelper`.
        decoder_inputs: `[T, N, decoder_input_dim]`.
        decoder_input_lengths: int32 `[N]`; None if every decoder sequence is T long.
        initial_decoder_hidden_state, initial_decoder_cell_state: `[D]`, `[N, D]` or `[1, N, D]`.
        initial_attention_weighted_encoder_context: `[E]`, `[N, E]` or `[1, N, E]`.
        encoder_output_dim: E.
        encoder_outputs: `[S, N, E]`.
        decoder_input_dim: size of an element of `decoder_inputs`.
        decoder_state_dim: D.
        scope: prefix of all blobs, under the current `NameScope`.
        attention_type: `AttentionType.Regular` or `AttentionType.Recurrent`.
        outputs_with_grads: which of the six outputs receive a gradient, or 'auto'.
        weighted_encoder_outputs: `[S, N, E]` to use instead of a linear map of `encoder_outputs`, which has the
            parameters `weighted_encoder_outputs_w` and `_b`.
        lstm_memory_optimization: keep the gates in the memory of `W x + b`, as in `LSTM`.
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
    scope = checks.scope(scope)
    checks.choice("attention_type", attention_type, ATTENTION_TYPES)
    checks.positions(
        outputs_with_grads,
        ["hidden_all", "hidden_last", "cell_all", "cell_last", "context_all", "context_last"],
    )
    weighted = checks.optional_blob("weighted_encoder_outputs", weighted_encoder_outputs)
    save_memory = checks.flag("lstm_memory_optimization", lstm_memory_optimization)
    recompute_attention = checks.flag("attention_memory_optimization", attention_memory_optimization)
    lstm.update(forget_bias=checks.number("forget_bias", forget_bias), drop_states=False)
    forward_only = checks.flag("forward_only", forward_only)
    # Without a backward step there is nothing to keep.
    lstm["memory_optimization"] = save_memory and not forward_only
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


def apply_regular_attention(
    model: ModelHelper,
    encoder_output_dim: int,
    encoder_outputs_transposed: Blob,
    weighted_encoder_outputs: Blob,
    decoder_hidden_state_t: Blob,
    decoder_hidden_state_dim: int,
    scope: str,
    encoder_lengths: Optional[Blob] = None,
) -> Attended:
    """Add the attention of one step to `model`, the model of a step net of your own.

    Args:
        model: its net gets the operators, its parameters are those of `LSTMWithAttention` that start with
            `weighted_decoder_hidden_state` and `attention`, under `<scope>/`.
        encoder_output_dim: E.
        encoder_outputs_transposed: `[N, E, S]`.
        weighted_encoder_outputs: `[S, N, E]`.
        decoder_hidden_state_t: `[1, N, D]`.
        decoder_hidden_state_dim: D.
        scope: prefix of all blobs.
        encoder_lengths: int32 `[N]`; positions past the end get weight 0.

    Returns:
        context `[1, N, E]`, weights `[N, S, 1]`, and the blobs worth recomputing in the backward pass.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: arXiv 1409.0473.
    """
    return _apply(
        "apply_regular_attention",
        model,
        encoder_output_dim,
        encoder_outputs_transposed,
        weighted_encoder_outputs,
        decoder_hidden_state_t,
        decoder_hidden_state_dim,
        scope,
        encoder_lengths,
    )


def apply_recurrent_attention(
    model: ModelHelper,
    encoder_output_dim: int,
    encoder_outputs_transposed: Blob,
    weighted_encoder_outputs: Blob,
    decoder_hidden_state_t: Blob,
    decoder_hidden_state_dim: int,
    attention_weighted_encoder_context_t_prev: Blob,
    scope: str,
    encoder_lengths: Optional[Blob] = None,
) -> Attended:
    """As `apply_regular_attention`, with energies that also depend on the context before, `[1, N, E]`.

    It has the parameters `weighted_prev_attention_context_w [E, E]` and `_b` beside the others.

    Source: arXiv 1601.03317, section 4.1.
    """
    return _apply(
        "apply_recurrent_attention",
        model,
        encoder_output_dim,
        encoder_outputs_transposed,
        weighted_encoder_outputs,
        decoder_hidden_state_t,
        decoder_hidden_state_dim,
        scope,
        encoder_lengths,
        [attention_weighted_encoder_context_t_prev],
    )


def _apply(
    caller: str,
    model: Any,
    encoder_output_dim: Any,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: Any,
    scope: Any,
    encoder_lengths: Any,
    previous_context: Sequence[Any] = (),
) -> Attended:
    checks = Checks(caller)
    checks.model(model)
    encoder_dim = checks.size("encoder_output_dim", encoder_output_dim)
    transposed = checks.blob("encoder_outputs_transposed", encoder_outputs_transposed)
    weighted = checks.blob("weighted_encoder_outputs", weighted_encoder_outputs)
    hidden = checks.blob("decoder_hidden_state_t", decoder_hidden_state_t)
    dim = checks.size("decoder_hidden_state_dim", decoder_hidden_state_dim)
    context = [checks.blob("attention_weighted_encoder_context_t_prev", blob) for blob in previous_context]
    scope = checks.scope(scope)
    lengths = checks.lengths("encoder_lengths", encoder_lengths)
    checks.done()
    specs = attention_specs(encoder_dim, dim, recurrent=bool(context))
    encoder = Encoder(
        core.BlobReference(transposed),
        core.BlobReference(weighted),
        None if lengths is None else core.BlobReference(lengths),
    )
    with model_parameters.building(caller, model, scope, specs) as created:
        previous = core.BlobReference(context[0]) if context else None
        return attend(model.net, created, create_zeros(model), encoder, core.BlobReference(hidden), previous)
