"""The network that trains, and beside it the ones that say words with what it has learned."""

from typing import List

import numpy as np
from caffe2.python import optimizer, workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import optimize
from example_engine import seed_operators
from spelling_batches import Batch
from spelling_layers import Shape, add_decoder, add_encoder, one_hot
from spelling_speaker import Speaker

GRADIENT_NORM_LIMIT = 5.0
RATE_DECAY = 0.5  # of the learning rate, over an epoch


class SpellingNetwork:
    """Encoder, attention and decoder, their training and their use. Starts from an empty workspace."""

    def __init__(
        self, shape: Shape, learning_rate: float, batches_per_epoch: int, seed: int, typical: Batch, trials: bool = True
    ) -> None:
        """`typical` is a batch of the sizes that most have; the training net is made fast for these.

        With `trials` operators are chosen by their times, so that two processes may differ in the last bits.
        """
        workspace.ResetWorkspace()
        self.shape = shape
        self.model = ModelHelper("spelling_training")
        names = ("letters", "lengths", "previous", "targets", "weights", "context")
        self.inputs = dict(zip(names, self.model.net.AddExternalInputs(*("training/" + name for name in names))))
        self._add_loss()
        self._add_training(learning_rate, batches_per_epoch)
        seed_operators(self.model.param_init_net, seed)
        workspace.RunNetOnce(self.model.param_init_net)
        self._feed(typical)
        self.report = optimize(self.model, trials=trials)
        workspace.CreateNet(self.model.net)
        self.speaker = Speaker(shape)

    def _add_loss(self) -> None:
        letters, lengths, previous, targets, weights, context = self.inputs.values()
        encoded = add_encoder(self.model, self.shape, letters, lengths, forward_only=False)
        decoded = add_decoder(self.model, self.shape, previous, encoded, context, lengths, None, forward_only=False)
        self.logits = decoded.logits
        # The mean of -ln p over all phonemes that are not padding, the boundary among them.
        _, self.loss = self.model.net.SoftmaxWithLoss(
            [self.logits, targets, weights], ["probabilities", "loss"], axis=2
        )

    def _add_training(self, learning_rate: float, batches_per_epoch: int) -> None:
        self.model.AddGradientOperators([self.loss])
        # The rate depends on how many batches are done, never on how many are to come: a run of five epochs
        # and one of three that goes on for two more are the same run.
        adam = optimizer.build_adam(
            self.model,
            learning_rate,
            max_gradient_norm=GRADIENT_NORM_LIMIT,
            policy="exp",
            gamma=RATE_DECAY ** (1 / batches_per_epoch),
        )
        auxiliary = adam.get_auxiliary_parameters()
        learned = self.model.GetParams() + auxiliary.local + auxiliary.shared
        self.persistent_blobs: List[str] = sorted({str(blob) for blob in learned})

    def train(self, batch: Batch) -> float:
        """One step of Adam; returns the loss before it, in nats per phoneme."""
        self._feed(batch)
        workspace.RunNet(self.model.net)
        return float(workspace.FetchBlob(self.loss))

    def _feed(self, batch: Batch) -> None:
        letters, phonemes = batch
        boundary = np.full([1, phonemes.ids.shape[1]], self.shape.phonemes - 1)
        inside = np.arange(len(phonemes.ids))[:, np.newaxis] < phonemes.lengths
        values = {
            "letters": one_hot(letters.ids, self.shape.letters),
            "lengths": letters.lengths,
            "previous": one_hot(np.concatenate([boundary, phonemes.ids[:-1]]), self.shape.phonemes),
            "targets": phonemes.ids.astype(np.int32),
            "weights": inside.astype(np.float32),
            "context": np.zeros(2 * self.shape.hidden, dtype=np.float32),
        }
        for name, value in values.items():
            workspace.FeedBlob(self.inputs[name], value)
