"""The training run: batches, epochs, what is saved when, and stopping on Ctrl-C without losing a batch."""

import dataclasses
import math
import os
import signal
import sys
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
from tqdm import tqdm

import char_checkpoint
import char_curve
from char_corpus import Corpus, columns, unigram_entropy
from char_errors import CheckpointError, TrainingError
from char_files import write_bytes
from char_network import CharacterNetwork, Shape

PRIMER_LENGTH = 200
RECENT_BATCHES = 20  # the progress bar shows their mean


class Settings(NamedTuple):
    """What a run is made of. All but `epochs` must stay as they are when it is resumed."""

    corpus: Optional[str]  # absolute path, or None for the default corpus
    epochs: int
    hidden: int
    steps: int
    batch: int
    lr: float
    seed: int


@dataclasses.dataclass
class Progress:
    epoch: int = 0  # finished ones
    batch: int = 0  # finished ones of the present epoch
    losses: List[float] = dataclasses.field(default_factory=list)  # of every batch so far, bits per character
    held_out: List[float] = dataclasses.field(default_factory=list)  # after every epoch, bits per character


class Interruption:
    """While it is entered, a first Ctrl-C only sets `requested`; a second one stops the program at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interruption":
        self._previous = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _first(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Run:
    def __init__(self, settings: Settings, corpus: Corpus, output: str) -> None:
        self.settings = settings
        self.corpus = corpus
        self.output = output
        self.unigram = unigram_entropy(corpus.held_out)
        self.rows = columns(corpus.training, settings.batch)
        self.batches_per_epoch = (len(self.rows) - 1) // settings.steps
        self.network = CharacterNetwork(
            Shape(len(corpus.alphabet), settings.hidden), settings.lr, self.batches_per_epoch, settings.seed
        )
        self.progress = Progress()

    @property
    def checkpoint(self) -> str:
        return os.path.join(self.output, "checkpoint.minidb")

    @property
    def curve(self) -> str:
        return os.path.join(self.output, "loss.png")

    def position(self) -> str:
        epochs, progress = self.settings.epochs, self.progress
        if progress.epoch >= epochs:
            return "{} epochs done".format(progress.epoch)
        return "epoch {}/{}, batch {}/{}".format(progress.epoch + 1, epochs, progress.batch, self.batches_per_epoch)

    def train(self, stop: Interruption) -> bool:
        """Trains to the end of the last epoch, and is True, or until `stop` asks for an end, and is False."""
        with self._bar() as bar:
            while self.progress.epoch < self.settings.epochs:
                if not self._train_epoch(bar, stop):
                    self.save()
                    return False
                self._close_epoch()
                bar.write(self._epoch_line())
                sys.stdout.flush()
        return not stop.requested

    def _train_epoch(self, bar: tqdm, stop: Interruption) -> bool:
        """The batches of the present epoch that are still to do; False if `stop` ended them early."""
        steps, progress = self.settings.steps, self.progress
        if progress.batch == 0:
            self.network.training.forget(self.settings.batch)
        while progress.batch < self.batches_per_epoch:
            if stop.requested:
                return False
            start = progress.batch * steps
            loss = self.network.train(self.rows[start : start + steps + 1])
            if not math.isfinite(loss):
                raise TrainingError(
                    "the loss is no longer a number after {} batches: try a smaller --lr".format(len(progress.losses))
                )
            progress.losses.append(loss)
            progress.batch += 1
            bar.set_postfix_str("{:.2f} bits/char".format(np.mean(progress.losses[-RECENT_BATCHES:])), refresh=False)
            bar.update(steps * self.settings.batch)
        return True

    def _close_epoch(self) -> None:
        self.progress.held_out.append(self.network.evaluate(self.corpus.held_out))
        self.progress.epoch += 1
        self.progress.batch = 0
        self.save()

    def _epoch_line(self) -> str:
        progress = self.progress
        return "epoch {}/{}  train {:.2f}  held-out {:.2f} bits/char  (unigram {:.2f})".format(
            progress.epoch,
            self.settings.epochs,
            np.mean(progress.losses[-self.batches_per_epoch :]),
            progress.held_out[-1],
            self.unigram,
        )

    def _bar(self) -> tqdm:
        characters = self.settings.steps * self.settings.batch
        # disable=None: no bar where nobody watches it, in a log file for one
        return tqdm(
            total=self.settings.epochs * self.batches_per_epoch * characters,
            initial=len(self.progress.losses) * characters,
            unit="char",
            unit_scale=True,
            dynamic_ncols=True,
            disable=None,
        )

    def write(self, length: int, temperature: float) -> str:
        """Text of the network's own, as if it went on from the end of the training text."""
        alphabet = self.corpus.alphabet
        primer = self.corpus.training[-PRIMER_LENGTH:]
        ids = self.network.write(primer, length, temperature, self.settings.seed)
        return "".join(alphabet[number] for number in ids)

    def save(self) -> None:
        """The checkpoint, from which a run goes on to the same end to the last bit, and the curve so far."""
        char_checkpoint.save(
            self.checkpoint,
            self.network.persistent_blobs,
            {
                "settings": self.settings._asdict(),
                "corpus": {"fingerprint": self.corpus.fingerprint, "size": self.corpus.size},
                "progress": dataclasses.asdict(self.progress),
            },
        )
        write_bytes(
            self.curve,
            char_curve.draw(self.progress.losses, self.progress.held_out, self.unigram, self.batches_per_epoch),
        )

    def restore(self, path: str, notes: Dict[str, Any]) -> None:
        """Goes on from the checkpoint `path` with these notes; its settings must be those of this run."""
        expected, got = notes["corpus"], {"fingerprint": self.corpus.fingerprint, "size": self.corpus.size}
        if expected != got:
            raise CheckpointError(
                "checkpoint {} is of another corpus: expected {}, got {}".format(
                    path, describe(expected), describe(got)
                )
            )
        char_checkpoint.restore(path, notes)
        self.progress = Progress(**notes["progress"])


def describe(corpus: Dict[str, Any]) -> str:
    return "{:,} characters with SHA-256 {}...".format(corpus["size"], corpus["fingerprint"][:12])
