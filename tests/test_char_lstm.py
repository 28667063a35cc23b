"""examples/char_lstm.py: its figures against numpy, its checkpoints bit for bit, its errors word for word."""

from __future__ import annotations

import io
import math
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from caffe2.python import workspace

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from example_support import WITHOUT_PICTURES, Program, StopAfter, leave_out_pictures  # noqa: E402, I001

import char_corpus  # noqa: E402
import char_curve  # noqa: E402
import char_lstm  # noqa: E402
import char_network  # noqa: E402
import char_training  # noqa: E402
import example_checkpoint  # noqa: E402
import example_engine  # noqa: E402
import example_interruption  # noqa: E402
import example_pictures  # noqa: E402
from example_errors import CheckpointError, CorpusError, TrainingError, WriteError  # noqa: E402

pytestmark = pytest.mark.untraced

SMALL = ["--hidden", "12", "--steps", "10", "--batch", "4", "--lr", "0.02", "--sample-length", "40"]
BATCHES_PER_EPOCH = 67  # of the text below, with these sizes


@pytest.fixture(autouse=True)
def engine(fresh_workspace: None) -> None:
    """As the program starts it."""
    example_engine.initialise_engine()


@pytest.fixture(scope="module")
def text() -> str:
    """3,000 characters of sentences that are easy to get better at than unigrams are."""
    pick = random.Random(5).choice
    words = ["the", "cell", "keeps", "a", "state", "and", "gates", "it", "over", "time"]
    return " ".join(pick(words) + pick(["", "", "", ".\n"]) for _ in range(700))[:3000]


@pytest.fixture
def corpus_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    return path


def train(corpus: Path, output: Path, *more: str) -> int:
    return char_lstm.main(["--corpus", str(corpus), "--output", str(output), *SMALL, *more])


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch, char_curve)


program = Program(char_lstm)
error_of, contents, start = program.error_of, program.contents, program.start


# The corpus


def test_the_default_corpus_is_python_s_own_prose_without_repetitions() -> None:
    paragraphs = char_corpus.library_prose().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    assert char_corpus.library_prose() == char_corpus.library_prose()
    corpus = char_corpus.load(None)
    assert corpus.size > 200_000


def test_the_last_tenth_is_held_out_and_characters_unseen_in_training_share_an_id() -> None:
    corpus = char_corpus.from_text("ten", "abcabcabaX")
    assert corpus.alphabet == "\ufffdabc"
    assert corpus.training.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 1]
    assert corpus.held_out.tolist() == [char_corpus.UNKNOWN]


def test_columns_lie_side_by_side_and_overlap_by_the_target() -> None:
    rows = char_corpus.columns(np.arange(12), 3)
    assert rows.T.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_unigram_entropy() -> None:
    assert char_corpus.unigram_entropy(np.array([0, 1, 2, 3])) == 2
    assert char_corpus.unigram_entropy(np.array([7, 7, 7])) == 0
    ids = np.random.RandomState(3).randint(0, 5, size=1000)
    expected = -sum(share * math.log2(share) for share in (np.mean(ids == i) for i in range(5)))
    assert char_corpus.unigram_entropy(ids) == pytest.approx(expected, abs=1e-12)


def test_a_byte_order_mark_and_foreign_line_ends_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffzwei\r\nWörter".encode())
    assert char_corpus.read_text(str(path)) == "zwei\nWörter"


@pytest.mark.parametrize("batch, steps, needed", [(4, 10, 46), (1, 1, 11), (16, 64, 1139)])
def test_the_length_a_corpus_needs_is_the_least_that_fills_a_batch(batch: int, steps: int, needed: int) -> None:
    enough = char_corpus.from_text("enough", "x" * needed)
    char_corpus.require_length(enough, batch, steps)
    assert (len(char_corpus.columns(enough.training, batch)) - 1) // steps >= 1
    assert len(enough.held_out) >= 2
    with pytest.raises(CorpusError, match=f"{needed - 1:,} characters, .* needs {needed:,}"):
        char_corpus.require_length(char_corpus.from_text("short", "x" * (needed - 1)), batch, steps)


# The network


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def bits_by_numpy(ids: np.ndarray, hidden_size: int) -> float:
    """Bits per character over `ids`, read once from zero states, with the network's parameters in float64."""
    names = ["char_lstm/i2h_w", "char_lstm/i2h_b", "char_lstm/gates_t_w", "char_lstm/gates_t_b"]
    w, b, u, c = (workspace.FetchBlob(name).astype(np.float64) for name in names)
    v, d = (workspace.FetchBlob(name).astype(np.float64) for name in ("logits_w", "logits_b"))
    hidden, cell, total = np.zeros(hidden_size), np.zeros(hidden_size), 0.0
    for now, after in zip(ids[:-1], ids[1:]):
        i, f, o, g = np.split(w[:, now] + b + u @ hidden + c, 4)
        cell = sigmoid(f + char_network.FORGET_BIAS) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        logits = v @ hidden + d
        total += np.log(np.exp(logits).sum()) - logits[after]
    return total / (len(ids) - 1) / math.log(2)


@pytest.fixture
def network() -> char_network.CharacterNetwork:
    """Five characters, six hidden units, parameters so large that the states matter, and no learning."""
    network = char_network.CharacterNetwork(char_network.Shape(5, 6), 1e-30, 10, seed=4)
    for name in ("char_lstm/i2h_w", "char_lstm/gates_t_w", "logits_w"):
        workspace.FeedBlob(name, workspace.FetchBlob(name) * 3)
    return network


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.RandomState(8).randint(0, 5, size=121).astype(np.int32)


def test_bits_per_character_are_numpy_s(network: char_network.CharacterNetwork, ids: np.ndarray) -> None:
    expected = bits_by_numpy(ids, 6)
    assert network.evaluate(ids) == pytest.approx(expected, rel=1e-5)
    assert abs(expected - math.log2(5)) > 0.01


@pytest.mark.parametrize("steps", [1, 7, 40, 120, 500])
def test_evaluating_in_pieces_is_evaluating_in_one_run(
    network: char_network.CharacterNetwork, ids: np.ndarray, steps: int
) -> None:
    assert network.evaluate(ids, steps) == pytest.approx(network.evaluate(ids, len(ids)), rel=1e-6)


@pytest.mark.usefixtures("executor_in_created_nets")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
@pytest.mark.parametrize("executor", [False, True], ids=["as the program", "with executor"])
def test_the_engine_is_started_without_the_rnn_executor(ids: np.ndarray, executor: bool) -> None:
    if executor:
        workspace.GlobalInit(["caffe2", "--caffe2_rnn_executor=1"])
    before = len(os.listdir("/proc/self/task"))
    network = char_network.CharacterNetwork(char_network.Shape(5, 6), 1e-30, 10, seed=4)
    network.evaluate(ids)
    assert (len(os.listdir("/proc/self/task")) > before) == executor


def test_training_carries_the_states_over(network: char_network.CharacterNetwork, ids: np.ndarray) -> None:
    rows = ids[:, np.newaxis]
    network.training.forget(1)
    pieces = [network.train(rows[begin : begin + 13]) for begin in range(0, 120, 12)]
    assert np.mean(pieces) == pytest.approx(network.evaluate(ids), rel=1e-6)
    forgetful = []
    for begin in range(0, 120, 12):
        network.training.forget(1)
        forgetful.append(network.train(rows[begin : begin + 13]))
    assert abs(np.mean(forgetful) - np.mean(pieces)) > 1e-3


def test_columns_are_evaluated_by_themselves(network: char_network.CharacterNetwork) -> None:
    ids = np.random.RandomState(9).randint(0, 5, size=3 * 256 + 1).astype(np.int32)
    columns = char_corpus.columns(ids, 4).T
    assert network.evaluate(ids) == pytest.approx(np.mean([bits_by_numpy(c, 6) for c in columns]), rel=1e-5)


def test_every_operator_that_draws_has_a_seed_of_its_own(network: char_network.CharacterNetwork) -> None:
    operators = network.training.model.param_init_net.Proto().op
    seeds = [operator.device_option.random_seed for operator in operators]
    assert seeds == list(range(4, 4 + len(seeds)))


def test_what_is_drawn_follows_the_temperature() -> None:
    logits = np.log(np.array([0.9, 0.02, 0.08], dtype=np.float32))  # the first is never drawn
    for temperature, share in ((1.0, 0.8), (0.5, 16 / 17), (2.0, 2 / 3)):
        random_state = np.random.RandomState(0)
        drawn = [char_network.draw(logits, temperature, random_state) for _ in range(4000)]
        assert 0 not in drawn
        assert np.mean(np.array(drawn) == 2) == pytest.approx(share, abs=0.03)


def test_at_a_temperature_of_next_to_nothing_the_likeliest_is_drawn() -> None:
    logits = np.array([9.0, -3.0, 5.0, 4.0], dtype=np.float32)
    for temperature in (1e-3, 1e-300, 5e-324):
        assert char_network.draw(logits, temperature, np.random.RandomState(0)) == 2


# Whole runs


def test_a_run_beats_the_unigrams_and_leaves_everything_it_promised(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "folder"
    assert train(corpus_file, output, "--epochs", "3") == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = re.findall(
        r"^epoch (\d)/3  train (\S+)  held-out (\S+) bits/char  \(unigram (\S+)\)$", said.out, re.MULTILINE
    )
    assert [line[0] for line in lines] == ["1", "2", "3"]
    held_out = [float(line[2]) for line in lines]
    unigram = float(lines[0][3])
    corpus = char_corpus.load(str(corpus_file))
    assert unigram == pytest.approx(char_corpus.unigram_entropy(corpus.held_out), abs=0.005)
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < unigram - 1
    below = re.search(r"^held-out text: (\S+) bits/char, (\S+) below", said.out, re.MULTILINE)
    assert float(below.group(1)) == held_out[-1]
    assert float(below.group(2)) == pytest.approx(unigram - held_out[-1], abs=0.011)

    assert sorted(os.listdir(str(output))) == ["checkpoint.minidb", "loss.png", "sample.txt"]
    sample = (output / "sample.txt").read_text(encoding="utf-8")
    assert len(sample) == 40 and set(sample) <= set(corpus.alphabet[1:])
    assert "\n" + sample + "\n" in said.out
    notes = example_checkpoint.read_notes(str(output / "checkpoint.minidb"), "char_lstm")
    assert len(notes["progress"]["losses"]) == 3 * BATCHES_PER_EPOCH
    assert float(lines[2][1]) == pytest.approx(np.mean(notes["progress"]["losses"][-BATCHES_PER_EPOCH:]), abs=0.005)


@WITHOUT_PICTURES
def test_a_seed_makes_a_run_repeatable(corpus_file: Path, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert train(corpus_file, tmp_path / name, "--epochs", "1", "--seed", seed) == 0
        runs[name] = [
            contents(tmp_path / name / "checkpoint.minidb"),
            (tmp_path / name / "sample.txt").read_bytes(),
        ]
    assert runs["a"] == runs["b"]
    assert runs["a"][0]["char_lstm/i2h_w"] != runs["c"][0]["char_lstm/i2h_w"]
    assert runs["a"][1] != runs["c"][1]


@WITHOUT_PICTURES
def test_resuming_after_an_epoch_is_not_stopping_at_all(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus_file, tmp_path / "whole", "--epochs", "2") == 0
    assert train(corpus_file, tmp_path / "parts", "--epochs", "1") == 0
    capsys.readouterr()
    # The sizes and the corpus come from the checkpoint.
    checkpoint = tmp_path / "parts" / "checkpoint.minidb"
    assert char_lstm.main(["--resume", str(checkpoint), "--epochs", "2", "--sample-length", "40"]) == 0
    said = capsys.readouterr().out
    assert f"resumed from {checkpoint} (epoch 2/2, batch 0/{BATCHES_PER_EPOCH})\n" in said
    assert "epoch 1/2" not in said and "epoch 2/2" in said
    for name in ("loss.png", "sample.txt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert contents(tmp_path / "whole" / "checkpoint.minidb") == contents(checkpoint)


@WITHOUT_PICTURES
def test_resuming_what_is_done_only_writes(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus_file, tmp_path, "--epochs", "1") == 0
    before = contents(tmp_path / "checkpoint.minidb")
    (tmp_path / "sample.txt").unlink()
    assert char_lstm.main(["--resume", "--output", str(tmp_path), "--sample-length", "25"]) == 0
    assert "epoch 1/1" not in capsys.readouterr().out.split("resumed from")[1]
    assert len((tmp_path / "sample.txt").read_text(encoding="utf-8")) == 25
    assert contents(tmp_path / "checkpoint.minidb") == before


@WITHOUT_PICTURES
@pytest.mark.parametrize("batches", [0, 1, BATCHES_PER_EPOCH - 1, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 5])
def test_stopping_between_any_two_batches_changes_nothing(corpus_file: Path, tmp_path: Path, batches: int) -> None:
    corpus = char_corpus.load(str(corpus_file))
    settings = char_training.Settings(str(corpus_file), 2, hidden=12, steps=10, batch=4, lr=0.02, seed=1)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert char_training.CharacterRun(settings, corpus, str(tmp_path / "whole")).train(StopAfter(10**6))
    stopped = char_training.CharacterRun(settings, corpus, str(tmp_path / "parts"))
    assert not stopped.train(StopAfter(batches))
    assert len(stopped.progress.losses) == batches
    resumed = char_training.CharacterRun(settings, corpus, str(tmp_path / "parts"))
    resumed.restore(resumed.checkpoint, example_checkpoint.read_notes(resumed.checkpoint, "char_lstm"))
    assert resumed.train(StopAfter(10**6))
    whole, parts = (contents(tmp_path / name / "checkpoint.minidb") for name in ("whole", "parts"))
    assert whole == parts


@WITHOUT_PICTURES
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_saves_and_says_where(corpus_file: Path, tmp_path: Path) -> None:
    arguments = ["--corpus", str(corpus_file), *SMALL, "--epochs", "400"]
    parts = tmp_path / "parts"
    process = start(*arguments, "--output", str(parts))
    assert process.stdout.readline().startswith("corpus: ")
    assert process.stdout.readline().startswith("epoch 1/400  ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    checkpoint = parts / "checkpoint.minidb"
    last = out.splitlines()[-1]
    position = r"epoch (\d+)/400, batch \d+/67"
    said = re.fullmatch(rf"interrupted \({position}\): saved to (.+); go on with --resume (.+)", last)
    assert said, out
    assert said.group(2) == said.group(3) == str(checkpoint)

    # From here on in this process: the same bits must come out of another one.
    epochs = str(int(said.group(1)) + 1)
    assert char_lstm.main(["--resume", str(checkpoint), "--epochs", epochs, "--sample-length", "40"]) == 0
    assert train(corpus_file, tmp_path / "whole", "--epochs", epochs) == 0
    assert contents(tmp_path / "whole" / "checkpoint.minidb") == contents(checkpoint)


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with example_interruption.Interruption() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_outside_training_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(char_corpus, "load", interrupted)
    assert error_of(capsys) == (130, "\nchar_lstm: stopped at once; the checkpoint is the one saved last\n")


# What can go wrong


def test_a_corpus_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.txt"
    expected = f"char_lstm: error: cannot read corpus {path}: No such file or directory\n"
    assert error_of(capsys, "--corpus", str(path)) == (2, expected)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"", "is empty"),
        (b"fine so far \xff", "is not UTF-8 text: invalid start byte"),
        (b"x" * 1138, "is too short: 1,138 characters, and --batch 16 with --steps 64 needs 1,139"),
    ],
)
def test_a_corpus_of_no_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, complaint: str) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    expected = f"char_lstm: error: corpus {path} {complaint}\n"
    assert error_of(capsys, "--corpus", str(path), "--output", str(tmp_path)) == (2, expected)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1, got '0'"),
        (["--hidden", "-3"], "argument --hidden: expected a whole number of at least 1, got '-3'"),
        (["--batch", "1.5"], "argument --batch: expected a whole number of at least 1, got '1.5'"),
        (["--lr", "0"], "argument --lr: expected a number above 0, got '0'"),
        (["--lr", "nan"], "argument --lr: expected a number above 0, got 'nan'"),
        (["--temperature", "-1"], "argument --temperature: expected a number above 0, got '-1'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 4294967295, got '-1'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert error_of(capsys, *arguments) == (2, f"char_lstm: error: {complaint}\n")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "char_lstm: error: tqdm and matplotlib missing: pip install 'caffe2_recurrent[demo]'\n"
    assert error_of(capsys) == (2, expected)


def test_an_output_folder_that_is_a_file(corpus_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"char_lstm: error: cannot make the output folder {corpus_file}: File exists\n"
    assert error_of(capsys, "--corpus", str(corpus_file), "--output", str(corpus_file)) == (2, expected)


def test_a_rate_that_makes_training_diverge(corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = char_corpus.load(str(corpus_file))
    settings = char_training.Settings(str(corpus_file), 2, hidden=12, steps=10, batch=4, lr=0.02, seed=1)
    run = char_training.CharacterRun(settings, corpus, str(tmp_path))
    workspace.FeedBlob("logits_b", np.full(len(corpus.alphabet), np.nan, dtype=np.float32))
    with pytest.raises(TrainingError, match="no longer a number after 0 batches: try a smaller --lr"):
        run.train(StopAfter(10**6))
    assert not (tmp_path / "checkpoint.minidb").exists()


@WITHOUT_PICTURES
def test_a_run_that_is_worse_than_the_unigrams_says_so(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus_file, tmp_path, "--epochs", "1", "--lr", "1e-9") == 0
    found = re.search(
        r"^held-out text: (\S+) bits/char, (\S+) above its unigram entropy of (\S+)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    reached, distance, unigram = map(float, found.groups())
    assert distance == pytest.approx(reached - unigram, abs=0.011)


@pytest.fixture
def trained(corpus_file: Path, tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]) -> Path:
    assert train(corpus_file, tmp_path, "--epochs", "1") == 0
    capsys.readouterr()
    return tmp_path / "checkpoint.minidb"


def test_a_checkpoint_of_other_sizes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"char_lstm: error: checkpoint {trained} expects --hidden 12 (got 16), --seed 1 (got 2)\n"
    assert error_of(capsys, "--resume", str(trained), "--hidden", "16", "--seed", "2") == (2, expected)


def test_a_checkpoint_of_another_corpus(
    trained: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text + "!", encoding="utf-8")
    status = char_lstm.main(["--resume", str(trained), "--corpus", str(other)])
    sums = [char_corpus.from_text("", content).fingerprint[:12] for content in (text, text + "!")]
    assert (status, capsys.readouterr().err) == (
        2,
        f"char_lstm: error: checkpoint {trained} is of another corpus: expected 3,000 characters with "
        f"SHA-256 {sums[0]}..., got 3,001 characters with SHA-256 {sums[1]}...\n",
    )


def test_a_corpus_that_moved_but_did_not_change(trained: Path, corpus_file: Path) -> None:
    moved = corpus_file.with_name("moved.txt")
    corpus_file.rename(moved)
    assert char_lstm.main(["--resume", str(trained), "--corpus", str(moved)]) == 0


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checkpoint.minidb"
    expected = f"char_lstm: error: cannot read checkpoint {path}: No such file or directory\n"
    assert error_of(capsys, "--resume", "--output", str(tmp_path)) == (2, expected)


NO_CHECKPOINT = "is damaged, or not a checkpoint at all"


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda whole: whole[:-3], NO_CHECKPOINT),
        (lambda whole: whole[:5], NO_CHECKPOINT),
        (lambda whole: b"Once upon a time there was a text file", NO_CHECKPOINT),
        (lambda whole: b"", "is damaged: "),
        (lambda whole: whole.replace(b'"losses": [', b'"losses": [9'), NO_CHECKPOINT),
        (
            lambda whole: whole.replace(b'"held_out"', b'"held.out"'),
            "is damaged: its notes are not what was saved",
        ),
    ],
)
def test_a_damaged_checkpoint(
    trained: Path, capsys: pytest.CaptureFixture[str], damage: object, complaint: str
) -> None:
    trained.write_bytes(damage(trained.read_bytes()))
    status, error = error_of(capsys, "--resume", str(trained))
    assert status == 2
    assert error.startswith(f"char_lstm: error: checkpoint {trained} {complaint}")
    assert error.count("\n") == 1


def test_one_wrong_bit_in_the_parameters_is_found(trained: Path) -> None:
    notes = example_checkpoint.read_notes(str(trained), "char_lstm")
    example_checkpoint.restore(str(trained), notes)
    weights = workspace.FetchBlob("char_lstm/i2h_w").tobytes()
    whole = trained.read_bytes()
    at = whole.index(weights) + len(weights) // 2
    trained.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CheckpointError, match="is damaged: its content is not what was saved"):
        example_checkpoint.restore(str(trained), notes)


def test_a_checkpoint_of_another_version(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_checkpoint, "FORMAT", "of tomorrow")
    with pytest.raises(
        CheckpointError, match="another program or version: expected format 'of tomorrow', got 'caffe2_"
    ):
        example_checkpoint.read_notes(str(trained), "char_lstm")


def test_a_write_that_fails_leaves_the_old_checkpoint_whole(trained: Path) -> None:
    resource = pytest.importorskip("resource")
    before = trained.read_bytes()
    process = start(
        *["--resume", str(trained), "--epochs", "2"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    # Some builds of the engine begin with a warning where there is no GPU.
    last = error.splitlines()[-1]
    assert re.fullmatch(r"char_lstm: error: cannot write .*checkpoint\.minidb: .*", last), error
    assert trained.read_bytes() == before
    assert not [name for name in os.listdir(str(trained.parent)) if "part" in name]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    from example_files import write_bytes

    with pytest.raises(WriteError, match="cannot write .*none.sample.txt: the folder .*none. does not exist"):
        write_bytes(str(tmp_path / "none" / "sample.txt"), b"text")


# The curve


def test_the_curve_is_a_picture_with_something_on_it() -> None:
    image = pytest.importorskip("matplotlib.image")
    png = char_curve.draw([4.0, 3.5, 3.0, 2.5], [3.2, 2.4], unigram=4.5, batches_per_epoch=2)
    pixels = image.imread(io.BytesIO(png))
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def test_the_curve_s_points_are_means_placed_where_they_end() -> None:
    losses = [float(number) for number in range(250)]
    epochs, means = example_pictures.smoothed(losses, batches_per_epoch=100)  # two batches a point
    assert (epochs[0], means[0]) == (0.02, 0.5)
    assert (epochs[-1], means[-1]) == (2.5, 248.5)
    assert example_pictures.smoothed([1.0, 3.0], batches_per_epoch=1) == ([1.0, 2.0], [1.0, 3.0])
    assert example_pictures.smoothed([], batches_per_epoch=5) == ([], [])
