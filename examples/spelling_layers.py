"""Encoder and decoder, as every net of this example has them, over the same parameters.

    letters -> LSTM in both directions -> encoder outputs, which the decoder attends to
    the encoder's last states -> first states of the decoder, an LSTM with attention
    hidden state and context of the decoder -> unnormalised ln p of the next phoneme

Letters and phonemes enter as one-hot vectors, so the input weights of the LSTMs are their embeddings. The decoder
reads the phoneme before the one it is to say; in training that is the right one, whatever it would have said. What
it reads first, and says last, is the boundary of words.

S is the number of letters, T that of phonemes with the boundary, N that of words side by side, V that of different
letters, P that of different phonemes with the boundary, D that of hidden units in each direction of the encoder. The
decoder has 2 D, as many as the encoder's outputs.
"""

from typing import Any, NamedTuple, Tuple

import numpy as np
from caffe2.python import brew, core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM, LSTMWithAttention

FORGET_BIAS = 1.0  # starts the cells off remembering


class Shape(NamedTuple):
    letters: int  # V
    phonemes: int  # P
    hidden: int  # D


class Encoded(NamedTuple):
    outputs: core.BlobReference  # [S, N, 2 D]
    hidden: core.BlobReference  # the last one, [1, N, 2 D]
    cell: core.BlobReference


class Decoded(NamedTuple):
    logits: core.BlobReference  # [T, N, P]
    states: Tuple[core.BlobReference, ...]  # the last hidden state, cell state and context, [1, N, 2 D]


def add_encoder(model: ModelHelper, shape: Shape, letters: Any, lengths: Any, forward_only: bool) -> Encoded:
    outputs, hidden, _, cell = LSTM(
        model,
        letters,
        lengths,
        None,
        shape.letters,
        shape.hidden,
        "encoder",
        outputs_with_grads=(0, 1, 3),
        forget_bias=FORGET_BIAS,
        forward_only=forward_only,
        bidirectional=True,
    )
    return Encoded(outputs, hidden, cell)


def add_decoder(
    model: ModelHelper,
    shape: Shape,
    previous: Any,
    encoded: Encoded,
    context: Any,
    lengths: Any,
    weighted: Any,
    forward_only: bool,
) -> Decoded:
    """`weighted` is the linear map of the encoder's outputs where it is there already, else None."""
    size = 2 * shape.hidden
    hidden_all, hidden, _, cell, context_all, context = LSTMWithAttention(
        model,
        previous,
        None,
        encoded.hidden,
        encoded.cell,
        context,
        size,
        encoded.outputs,
        shape.phonemes,
        size,
        "decoder",
        weighted_encoder_outputs=weighted,
        forget_bias=FORGET_BIAS,
        forward_only=forward_only,
        encoder_lengths=lengths,
    )
    both, _ = model.net.Concat([hidden_all, context_all], ["hidden_and_context", "hidden_and_context_sizes"], axis=2)
    logits = brew.fc(model, both, "logits", 2 * size, shape.phonemes, axis=2)
    return Decoded(logits, (hidden, cell, context))


def one_hot(ids: np.ndarray, size: int) -> np.ndarray:
    """`ids` [...] as float32 vectors [..., size]."""
    vectors = np.zeros(ids.shape + (size,), dtype=np.float32)
    np.put_along_axis(vectors, ids[..., np.newaxis], 1, axis=-1)
    return vectors
