"""The networks that say words: one reads them, one says the next phoneme, again and again.

S is the number of letters, R that of rows, P that of different phonemes with the boundary, D that of hidden units in
each direction of the encoder.
"""

import contextlib
from typing import Iterator, List

import numpy as np
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.parameter_sharing import ParameterSharing

from caffe2_recurrent import retrieve_step_blobs
from spelling_batches import Padded
from spelling_layers import Encoded, Shape, add_decoder, add_encoder, one_hot


@contextlib.contextmanager
def apart(scope: str) -> Iterator[None]:
    """A net that is built in here has the trained parameters, and all other blobs, loops included, for itself."""
    with ParameterSharing({scope: ""}), core.NameScope(scope):
        yield


class Reader:
    """Reads letters: the encoder by itself, and the linear map of its outputs that attention compares with."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.model = ModelHelper("spelling_reader", init_params=False)
        with apart("reader"):
            self.letters, self.lengths = self.model.net.AddScopedExternalInputs("letters", "lengths")
            self.encoded = add_encoder(self.model, shape, self.letters, self.lengths, forward_only=True)
            weights, biases = (core.BlobReference("decoder/weighted_encoder_outputs_" + kind) for kind in "wb")
            self.weighted = self.model.net.FC([self.encoded.outputs, weights, biases], "weighted", axis=2)
        workspace.CreateNet(self.model.net, input_blobs=[str(self.letters), str(self.lengths)])

    def read(self, letters: Padded) -> List[np.ndarray]:
        """The encoder's outputs and their linear map [S, N, 2 D], its last hidden and cell state [1, N, 2 D]."""
        workspace.FeedBlob(self.letters, one_hot(letters.ids, self.shape.letters))
        workspace.FeedBlob(self.lengths, letters.lengths)
        workspace.RunNet(self.model.net)
        outputs, hidden, cell = self.encoded
        return [workspace.FetchBlob(blob) for blob in (outputs, self.weighted, hidden, cell)]


class Speaker:
    """Says one phoneme after the other, for several words at a time and several beginnings of each: R rows in all."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.reader = Reader(shape)
        self.model = ModelHelper("spelling_speaker", init_params=False)
        names = ("previous", "hidden", "cell", "context", "lengths", "outputs", "weighted")
        with apart("speaker"):
            self.inputs = dict(zip(names, self.model.net.AddScopedExternalInputs(*names)))
            previous, hidden, cell, context, lengths, outputs, weighted = self.inputs.values()
            encoded = Encoded(outputs, hidden, cell)
            # Not forward_only: attention() looks into the step, and the engine shows those of no such loop as short
            # as this one.
            self.decoded = add_decoder(
                self.model, shape, previous, encoded, context, lengths, weighted, forward_only=False
            )
        workspace.CreateNet(self.model.net, input_blobs=[str(blob) for blob in self.inputs.values()])

    def read(self, letters: Padded) -> None:
        """Reads the words that are to be said; to begin with there is one row for each."""
        self._outputs, self._weighted, hidden, cell = self.reader.read(letters)
        self._lengths = letters.lengths
        self._states = [hidden, cell, np.zeros_like(hidden)]
        self._attend_to(np.arange(len(letters.lengths)))

    def step(self, rows: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """ln p of what comes next, [R, P].

        Row r goes on where row `rows[r]` of the step before had come to, and reads phoneme `previous[r]`.
        """
        if not np.array_equal(self._words[rows], self._words):
            self._attend_to(self._words[rows])
        for name, state in zip(("hidden", "cell", "context"), self._states):
            workspace.FeedBlob(self.inputs[name], state[:, rows])
        workspace.FeedBlob(self.inputs["previous"], one_hot(previous[np.newaxis], self.shape.phonemes))
        workspace.RunNet(self.model.net)
        self._states = [workspace.FetchBlob(state) for state in self.decoded.states]
        return log_softmax(workspace.FetchBlob(self.decoded.logits)[0])

    def attention(self) -> np.ndarray:
        """How much of the last step's context came from each letter, [R, S]."""
        retrieve_step_blobs(self.model.net, "step")
        return workspace.FetchBlob("step_speaker/decoder/attention_weights0")[:, :, 0]

    def _attend_to(self, words: np.ndarray) -> None:
        """Makes row r one of word `words[r]`."""
        self._words = words
        workspace.FeedBlob(self.inputs["lengths"], self._lengths[words])
        workspace.FeedBlob(self.inputs["outputs"], self._outputs[:, words])
        workspace.FeedBlob(self.inputs["weighted"], self._weighted[:, words])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
