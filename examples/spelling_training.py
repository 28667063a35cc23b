"""The training run over a dictionary: batches of words, the baseline, and what the network says of other words."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from tqdm import tqdm

import spelling_curve
from alignment_picture import Alignment
from example_run import Run
from letter_context import LetterContext
from pronunciation_errors import Rates, rates
from spelling_batches import Batches, Codes, side_by_side
from spelling_decoding import beam_search
from spelling_dictionary import PHONEMES_PER_LETTER, Dictionary, Pronunciation
from spelling_layers import Shape
from spelling_network import SpellingNetwork

ROWS = 1024  # hypotheses that are gone on with side by side


class Settings(NamedTuple):
    """What a run is made of. All but `epochs` must stay as they are when it is resumed."""

    dictionary: Optional[str]  # absolute path, or None for the default dictionary
    epochs: int
    hidden: int
    batch: int
    lr: float
    seed: int


class SpellingRun(Run):
    """Losses are in nats per phoneme; the held-out figure is the phoneme error rate of greedy decoding."""

    program = "spelling_to_sound"
    learns_from, counts, unit = "dictionary", "words", "word"

    def __init__(self, settings: Settings, dictionary: Dictionary, output: str, trials: bool = True) -> None:
        self.dictionary = dictionary
        self.codes = Codes(dictionary)
        words = [self.codes.word(entry.word) for entry in dictionary.training]
        # Of several pronunciations the one that is listed first is learned.
        said = [self.codes.pronunciation(entry.pronunciations[0]) for entry in dictionary.training]
        self.baseline = self._measure_baseline(words, said)
        self.batches = Batches(words, said, self.codes.boundary, settings.batch, settings.seed)
        self.network = SpellingNetwork(
            Shape(len(self.codes.letters), self.codes.boundary + 1, settings.hidden),
            settings.lr,
            len(self.batches),
            settings.seed,
            self.batches.typical(),
            trials,
        )
        super().__init__(settings, output, len(self.batches), self.network.persistent_blobs)

    def _measure_baseline(self, words: List[np.ndarray], said: List[np.ndarray]) -> Rates:
        table = LetterContext(words, said, len(self.codes.letters), len(self.codes.phonemes))
        held_out = self.dictionary.held_out
        guesses = table.say([self.codes.word(entry.word) for entry in held_out])
        return rates([self.codes.said(guess) for guess in guesses], held_out)

    def identity(self) -> Dict[str, Any]:
        return {"fingerprint": self.dictionary.fingerprint, "size": self.dictionary.size}

    def start_epoch(self) -> None:
        self._order = self.batches.epoch(self.progress.epoch)

    def train_batch(self, batch: int) -> float:
        return self.network.train(self.batches.batch(self._order[batch]))

    def items(self, batches: int) -> int:
        return min(batches * self.settings.batch, len(self.dictionary.training))

    def measure(self) -> float:
        held_out = self.dictionary.held_out
        return rates(self.say([entry.word for entry in held_out]), held_out).phoneme_errors

    def loss_line(self, loss: float) -> str:
        return "loss {:.3f}".format(loss)

    def epoch_line(self) -> str:
        return "epoch {}/{}  loss {:.3f}  held-out phoneme errors {:.1%}  (letter context {:.1%})".format(
            self.progress.epoch,
            self.settings.epochs,
            self.mean_loss(),
            self.progress.held_out[-1],
            self.baseline.phoneme_errors,
        )

    def picture(self) -> bytes:
        return spelling_curve.draw(
            self.progress.losses, self.progress.held_out, self.baseline.phoneme_errors, self.batches_per_epoch
        )

    def say(self, words: Sequence[str], width: int = 1, show: bool = False) -> List[Pronunciation]:
        """The pronunciation of each word, found with a beam of `width`; `show` a progress bar."""
        order = sorted(range(len(words)), key=lambda place: len(words[place]))
        said: List[Pronunciation] = [()] * len(words)
        together = max(1, ROWS // width)
        with tqdm(total=len(words), unit="word", dynamic_ncols=True, disable=None if show else True) as bar:
            for start in range(0, len(order), together):
                places = order[start : start + together]
                chosen = [words[place] for place in places]
                self.network.speaker.read(side_by_side([self.codes.word(word) for word in chosen]))
                found = beam_search(
                    self.network.speaker.step,
                    len(chosen),
                    width,
                    self.codes.boundary,
                    longest=PHONEMES_PER_LETTER * len(chosen[-1]),
                )
                for place, symbols in zip(places, found):
                    said[place] = self.codes.said(symbols)
                bar.update(len(places))
        return said

    def explain(self, word: str, width: int) -> Alignment:
        """What the network says of the word, and which letters it looks at."""
        (said,) = self.say([word], width)
        speaker = self.network.speaker
        speaker.read(side_by_side([self.codes.word(word)]))
        weights = np.zeros([len(said), len(word)])
        previous = np.append(self.codes.boundary, self.codes.pronunciation(said))
        for row in range(len(said)):
            speaker.step(np.array([0]), previous[row : row + 1])
            weights[row] = speaker.attention()[0]
        return Alignment(word, word, said, weights)
