"""The training run over text: batches that go on where the last ones ended, and the text written afterwards."""

from typing import Any, Dict, NamedTuple, Optional

import char_curve
from char_corpus import Corpus, columns, unigram_entropy
from char_network import CharacterNetwork, Shape
from example_run import Run

PRIMER_LENGTH = 200


class Settings(NamedTuple):
    """What a run is made of. All but `epochs` must stay as they are when it is resumed."""

    corpus: Optional[str]  # absolute path, or None for the default corpus
    epochs: int
    hidden: int
    steps: int
    batch: int
    lr: float
    seed: int


class CharacterRun(Run):
    """Losses and held-out figures are in bits per character."""

    program = "char_lstm"
    learns_from, counts, unit = "corpus", "characters", "char"

    def __init__(self, settings: Settings, corpus: Corpus, output: str) -> None:
        self.corpus = corpus
        self.unigram = unigram_entropy(corpus.held_out)
        self.rows = columns(corpus.training, settings.batch)
        batches_per_epoch = (len(self.rows) - 1) // settings.steps
        self.network = CharacterNetwork(
            Shape(len(corpus.alphabet), settings.hidden), settings.lr, batches_per_epoch, settings.seed
        )
        super().__init__(settings, output, batches_per_epoch, self.network.persistent_blobs)

    def identity(self) -> Dict[str, Any]:
        return {"fingerprint": self.corpus.fingerprint, "size": self.corpus.size}

    def start_epoch(self) -> None:
        if self.progress.batch == 0:
            self.network.training.forget(self.settings.batch)

    def train_batch(self, batch: int) -> float:
        start = batch * self.settings.steps
        return self.network.train(self.rows[start : start + self.settings.steps + 1])

    def items(self, batches: int) -> int:
        return batches * self.settings.steps * self.settings.batch

    def measure(self) -> float:
        return self.network.evaluate(self.corpus.held_out)

    def loss_line(self, loss: float) -> str:
        return "{:.2f} bits/char".format(loss)

    def epoch_line(self) -> str:
        return "epoch {}/{}  train {:.2f}  held-out {:.2f} bits/char  (unigram {:.2f})".format(
            self.progress.epoch, self.settings.epochs, self.mean_loss(), self.progress.held_out[-1], self.unigram
        )

    def picture(self) -> bytes:
        return char_curve.draw(self.progress.losses, self.progress.held_out, self.unigram, self.batches_per_epoch)

    def write(self, length: int, temperature: float) -> str:
        """Text of the network's own, as if it went on from the end of the training text."""
        alphabet = self.corpus.alphabet
        primer = self.corpus.training[-PRIMER_LENGTH:]
        ids = self.network.write(primer, length, temperature, self.settings.seed)
        return "".join(alphabet[number] for number in ids)
