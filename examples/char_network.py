"""The networks: one that trains, one that measures held-out text, one that writes, over the same parameters.

Characters [T, N] enter as one-hot vectors [T, N, V], so the input weights of the LSTM are the embedding. The
states live in blobs that each net reads at its start and overwrites at its end: the next run goes on where
this one stopped. No gradient flows back from run to run, which is what truncates the back-propagation.

T is the number of steps, N that of columns of text read side by side, V that of different characters, D
that of hidden units.
"""

import math
from typing import List, NamedTuple, Sequence

import numpy as np
from caffe2.python import brew, model_helper, optimizer, workspace

from caffe2_recurrent import LSTM
from char_corpus import UNKNOWN, columns
from example_engine import seed_operators

EVALUATION_COLUMNS = 16  # held-out text is read in so many stretches at once
SHORTEST_EVALUATION_COLUMN = 256  # every column starts without a context, so few short ones, or one
EVALUATION_STEPS = 128
GRADIENT_NORM_LIMIT = 5.0
RATE_DECAY = 0.7  # of the learning rate, from one epoch to the next
FORGET_BIAS = 1.0  # starts the cells off remembering


class Shape(NamedTuple):
    characters: int  # V
    hidden: int  # D


class Stream:
    """A forward net, and the blobs by which text goes into it and its states go round."""

    def __init__(self, name: str, shape: Shape, training: bool, measuring: bool) -> None:
        self.shape = shape
        self.model = model_helper.ModelHelper("char_" + name, init_params=training)
        blobs = [name + "/" + role for role in ("one_hot", "targets", "hidden", "cell")]
        self.one_hot, self.targets, self.hidden, self.cell = self.model.net.AddExternalInputs(*blobs)
        hidden_all, self.hidden_last, _, self.cell_last = LSTM(
            self.model,
            self.one_hot,
            None,
            (self.hidden, self.cell),
            shape.characters,
            shape.hidden,
            "char_lstm",
            forget_bias=FORGET_BIAS,
            forward_only=not training,
        )
        self.logits = brew.fc(self.model, hidden_all, "logits", shape.hidden, shape.characters, axis=2)
        if measuring:
            # The mean over T * N characters of -ln p(next character): nats, not bits.
            _, self.loss = self.model.net.SoftmaxWithLoss(
                [self.logits, self.targets], ["probabilities", "loss"], axis=2
            )

    def finish(self) -> None:
        """Closes the circle of the states, after every operator that still reads the old ones."""
        self.model.net.Copy(self.hidden_last, self.hidden)
        self.model.net.Copy(self.cell_last, self.cell)
        self.forget(1)
        self._feed(np.zeros([2, 1], dtype=np.int32))
        workspace.CreateNet(self.model.net)

    def forget(self, count: int) -> None:
        """Sets the states to zero, for text of `count` columns."""
        zeros = np.zeros([1, count, self.shape.hidden], dtype=np.float32)
        workspace.FeedBlob(self.hidden, zeros)
        workspace.FeedBlob(self.cell, zeros)

    def measure(self, rows: np.ndarray) -> float:
        """Reads ids [T + 1, N] but for the last row, which is only a target; returns bits per character."""
        self._feed(rows)
        workspace.RunNet(self.model.net)
        return float(workspace.FetchBlob(self.loss)) / math.log(2)

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Reads the text `ids` [characters] as one column; unnormalised ln p of what comes next, [V]."""
        self._feed(np.array([*ids, UNKNOWN], dtype=np.int32)[:, np.newaxis])
        workspace.RunNet(self.model.net)
        return workspace.FetchBlob(self.logits)[-1, 0]

    def _feed(self, rows: np.ndarray) -> None:
        inputs, targets = rows[:-1], rows[1:]
        one_hot = np.zeros(inputs.shape + (self.shape.characters,), dtype=np.float32)
        np.put_along_axis(one_hot, inputs[..., np.newaxis], 1, axis=2)
        workspace.FeedBlob(self.one_hot, one_hot)
        workspace.FeedBlob(self.targets, np.ascontiguousarray(targets))


class CharacterNetwork:
    """An LSTM over characters, its training and its uses. Starts from an empty workspace."""

    def __init__(self, shape: Shape, learning_rate: float, batches_per_epoch: int, seed: int) -> None:
        workspace.ResetWorkspace()
        self.training = Stream("training", shape, training=True, measuring=True)
        self._add_training(learning_rate, batches_per_epoch)
        seed_operators(self.training.model.param_init_net, seed)
        workspace.RunNetOnce(self.training.model.param_init_net)
        self.training.finish()

        self.evaluation = Stream("evaluation", shape, training=False, measuring=True)
        self.evaluation.finish()
        self.writing = Stream("writing", shape, training=False, measuring=False)
        self.writing.finish()

    def _add_training(self, learning_rate: float, batches_per_epoch: int) -> None:
        model = self.training.model
        model.AddGradientOperators([self.training.loss])
        # The rate depends on how many batches are done, never on how many are to come: a run of five epochs
        # and one of three that goes on for two more are the same run.
        adam = optimizer.build_adam(
            model,
            learning_rate,
            max_gradient_norm=GRADIENT_NORM_LIMIT,
            policy="step",
            stepsize=batches_per_epoch,
            gamma=RATE_DECAY,
        )
        auxiliary = adam.get_auxiliary_parameters()
        learned = model.GetParams() + auxiliary.local + auxiliary.shared
        states = [self.training.hidden, self.training.cell]
        self.persistent_blobs: List[str] = sorted({str(blob) for blob in learned + states})

    def train(self, rows: np.ndarray) -> float:
        """One step of Adam on ids [T + 1, N], which go on where the last ones ended; bits per character."""
        return self.training.measure(rows)

    def evaluate(self, ids: np.ndarray, steps: int = EVALUATION_STEPS) -> float:
        """Bits per character over the text `ids` [characters], read once with no state to begin with."""
        count = min(EVALUATION_COLUMNS, 1 + len(ids) // SHORTEST_EVALUATION_COLUMN)
        rows = columns(ids, count)
        self.evaluation.forget(count)
        total = 0.0
        for start in range(0, len(rows) - 1, steps):
            piece = rows[start : start + steps + 1]
            total += self.evaluation.measure(piece) * (len(piece) - 1)
        return total / (len(rows) - 1)

    def write(self, primer: np.ndarray, length: int, temperature: float, seed: int) -> List[int]:
        """`length` ids that go on from the text `primer` [characters]; each is read before the next is drawn.

        A temperature below 1 sharpens the distribution they are drawn from, one above 1 flattens it.
        """
        random = np.random.RandomState(seed)
        self.writing.forget(1)
        written: List[int] = []
        logits = self.writing.next_logits(primer)
        while len(written) < length:
            written.append(draw(logits, temperature, random))
            logits = self.writing.next_logits(written[-1:])
        return written


def draw(logits: np.ndarray, temperature: float, random: np.random.RandomState) -> int:
    """One id, never UNKNOWN, from softmax(logits / temperature)."""
    scores = logits.astype(np.float64)
    scores[UNKNOWN] = -np.inf
    # The largest one stays 0 at any temperature; the others may become -inf.
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / temperature)
    return int(random.choice(len(weights), p=weights / weights.sum()))
