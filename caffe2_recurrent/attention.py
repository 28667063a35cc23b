"""Attention of one step over the outputs of an encoder.

    regular_j = W_e s_j + b_e + W_d hidden_t + b_d
    energy_j = v . tanh(regular_j)                                    Regular, arXiv 1409.0473
    energy_j = v . tanh(regular_j + W_c context_{t-1} + b_c)          Recurrent, arXiv 1601.03317 section 4.1
    context_t = sum over j of softmax(energy)_j s_j

`s_j` is output j of S of the encoder, `hidden_t` the decoder's new hidden state. What depends on the encoder alone,
`W_e s_j + b_e` and the transpose of its outputs, is given: a loop has it computed once, outside.
"""

from typing import Any, List, NamedTuple, Optional, Sequence

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer
from caffe2.python.modeling.parameter_info import ParameterTags

from caffe2_recurrent import parameters as model_parameters
from caffe2_recurrent.arguments import Blob
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.layer import Blobs, fc
from caffe2_recurrent.parameters import ParameterSpec, fc_specs

# The energy of a position past the end: its exponential is 0 in float32 beside that of any real one.
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
    """As `apply_regular_attention`, with energies that also depend on the context before.

    Args: as there, and `attention_weighted_encoder_context_t_prev`, the context of the step before, `[1, N, E]`.

    Parameters under `<scope>/`: those, and `weighted_prev_attention_context_w [E, E]`, `_b [E]`.

    Returns and raises what `apply_regular_attention` does.

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
