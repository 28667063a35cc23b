"""A training run: batches, epochs, what is saved when, and where a run stands."""

import abc
import dataclasses
import math
import os
import sys
from typing import Any, Dict, List

import numpy as np
from tqdm import tqdm

import example_checkpoint
from example_errors import CheckpointError, TrainingError
from example_files import write_bytes
from example_interruption import Interruption

RECENT_BATCHES = 20  # the progress bar shows their mean


@dataclasses.dataclass
class Progress:
    epoch: int = 0  # finished ones
    batch: int = 0  # finished ones of the present epoch
    losses: List[float] = dataclasses.field(default_factory=list)  # of every batch so far
    held_out: List[float] = dataclasses.field(default_factory=list)  # the held-out figure after every epoch


class Run(abc.ABC):
    """What all examples do; a subclass says what it learns, and from what.

    `program` is the name in checkpoints, `learns_from` what its data is called in errors, `counts` what the data is
    counted in, `unit` the same for the progress bar. `settings` has the field `epochs`; all others must stay as they
    are when the run is resumed. `blobs` are those of the workspace that a checkpoint must have.
    """

    program: str
    learns_from: str
    counts: str
    unit: str

    def __init__(self, settings: Any, output: str, batches_per_epoch: int, blobs: List[str]) -> None:
        self.settings = settings
        self.output = output
        self.batches_per_epoch = batches_per_epoch
        self.blobs = blobs
        self.progress = Progress()

    @abc.abstractmethod
    def identity(self) -> Dict[str, Any]:
        """The fingerprint and the size of the data."""

    @abc.abstractmethod
    def start_epoch(self) -> None:
        """Gets ready for the batches of the present epoch that are still to do."""

    @abc.abstractmethod
    def train_batch(self, batch: int) -> float:
        """One step of training on batch number `batch` of the present epoch; returns the loss."""

    @abc.abstractmethod
    def items(self, batches: int) -> int:
        """How much data the first `batches` batches of an epoch have."""

    @abc.abstractmethod
    def measure(self) -> float:
        """The held-out figure."""

    @abc.abstractmethod
    def loss_line(self, loss: float) -> str:
        """The loss as the progress bar shows it."""

    @abc.abstractmethod
    def epoch_line(self) -> str:
        """What is said of the epoch that was finished last."""

    @abc.abstractmethod
    def picture(self) -> bytes:
        """The curve so far, a PNG."""

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
                bar.write(self.epoch_line())
                sys.stdout.flush()
        return not stop.requested

    def mean_loss(self) -> float:
        """Over the epoch that was finished last."""
        return float(np.mean(self.progress.losses[-self.batches_per_epoch :]))

    def _train_epoch(self, bar: tqdm, stop: Interruption) -> bool:
        """The batches of the present epoch that are still to do; False if `stop` ended them early."""
        progress = self.progress
        self.start_epoch()
        while progress.batch < self.batches_per_epoch:
            if stop.requested:
                return False
            loss = self.train_batch(progress.batch)
            if not math.isfinite(loss):
                raise TrainingError(
                    "the loss is no longer a number after {} batches: try a smaller --lr".format(len(progress.losses))
                )
            progress.losses.append(loss)
            progress.batch += 1
            bar.set_postfix_str(self.loss_line(float(np.mean(progress.losses[-RECENT_BATCHES:]))), refresh=False)
            bar.update(self.items(progress.batch) - self.items(progress.batch - 1))
        return True

    def _close_epoch(self) -> None:
        self.progress.held_out.append(self.measure())
        self.progress.epoch += 1
        self.progress.batch = 0
        self.save()

    def _bar(self) -> tqdm:
        items_per_epoch = self.items(self.batches_per_epoch)
        # disable=None: no bar where nobody watches it, in a log file for one
        return tqdm(
            total=self.settings.epochs * items_per_epoch,
            initial=self.progress.epoch * items_per_epoch + self.items(self.progress.batch),
            unit=self.unit,
            unit_scale=True,
            dynamic_ncols=True,
            disable=None,
        )

    def save(self) -> None:
        """The checkpoint, from which a run goes on to the same end to the last bit, and the curve so far."""
        notes = {
            "settings": self.settings._asdict(),
            self.learns_from: self.identity(),
            "progress": dataclasses.asdict(self.progress),
        }
        example_checkpoint.save(self.checkpoint, self.program, self.blobs, notes)
        write_bytes(self.curve, self.picture())

    def restore(self, path: str, notes: Dict[str, Any]) -> None:
        """Goes on from the checkpoint `path` with these notes; its settings must be those of this run."""
        expected, got = notes[self.learns_from], self.identity()
        if expected != got:
            raise CheckpointError(
                "checkpoint {} is of another {}: expected {}, got {}".format(
                    path, self.learns_from, self._describe(expected), self._describe(got)
                )
            )
        example_checkpoint.restore(path, notes)
        self.progress = Progress(**notes["progress"])

    def _describe(self, identity: Dict[str, Any]) -> str:
        return "{:,} {} with SHA-256 {}...".format(identity["size"], self.counts, identity["fingerprint"][:12])
