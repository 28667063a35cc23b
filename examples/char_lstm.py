"""Trains a character-level LSTM on real text, with truncated back-propagation, and writes text of its own.

    python examples/char_lstm.py                       # the documentation in Python's standard library
    python examples/char_lstm.py --corpus novel.txt    # any UTF-8 text
    python examples/char_lstm.py --resume              # goes on from the checkpoint in the output folder

After each epoch it prints the bits per character on the held-out last tenth of the text, beside the unigram
entropy of that tenth: what the best code without any context would need. Ctrl-C saves a checkpoint and says
where.

Exit status: 0 done, 1 a result could not be written or training diverged, 2 bad input, 130 stopped by Ctrl-C.
"""

import argparse
import importlib.util
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NoReturn, Optional, Tuple

import char_corpus
from char_errors import CheckpointError, ExampleError, SetupError
from char_files import write_bytes

if TYPE_CHECKING:
    from char_training import Run

PROGRAM = "char_lstm"
OUTPUT = "demo_output"
# Where the command line and the checkpoint say nothing. None is the default corpus.
DEFAULTS: Dict[str, Any] = {
    "corpus": None,
    "epochs": 6,
    "hidden": 128,
    "steps": 64,
    "batch": 16,
    "lr": 0.01,
    "seed": 1,
}
MAY_CHANGE = ("corpus", "epochs")  # on resuming; of the corpus, what must be the same is its text


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, "{}: error: {}\n".format(self.prog, message))


def number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An argparse type: the value that `kind` reads, if `accepts` likes it; else an error names `wanted`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError("expected {}, got {!r}".format(wanted, text))
        return value

    return parse


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    count = number(int, lambda value: value >= 1, "a whole number of at least 1")
    positive = number(float, lambda value: 0 < value < math.inf, "a number above 0")
    seed = number(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295")
    parser = Parser(prog=PROGRAM, description="Trains a character-level LSTM and writes text.")

    def add(name: str, kind: Callable[[str], Any], text: str) -> None:
        parser.add_argument("--" + name, type=kind, help="{} (default: {})".format(text, DEFAULTS[name]))

    parser.add_argument(
        "--corpus", metavar="FILE", help="a UTF-8 text (default: the standard library's pydoc_data.topics)"
    )
    add("epochs", count, "how often to read the training text")
    add("hidden", count, "hidden units")
    add("steps", count, "how many characters back gradients flow")
    add("batch", count, "places in the text that are read side by side")
    add("lr", positive, "learning rate of the first epoch")
    add("seed", seed, "of the initial parameters and of the text written")
    parser.add_argument(
        "--resume",
        metavar="FILE",
        nargs="?",
        const="",
        help="go on from a checkpoint (without FILE: the one in the output folder)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for checkpoint.minidb, loss.png and sample.txt "
        "(default: that of the checkpoint resumed, else {})".format(OUTPUT),
    )
    parser.add_argument("--sample-length", type=count, default=500, help="characters to write (default: 500)")
    parser.add_argument(
        "--temperature",
        type=positive,
        default=0.7,
        help="of the text written: lower is more cautious (default: 0.7)",
    )
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse_arguments(arguments)
    try:
        require_extras()
        return train_and_write(options)
    except ExampleError as error:
        print("{}: error: {}".format(PROGRAM, error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\n{}: stopped at once; the checkpoint is the one saved last".format(PROGRAM), file=sys.stderr)
        return 130


def require_extras() -> None:
    missing = [name for name in ("tqdm", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError("{} missing: pip install 'caffe2_recurrent[demo]'".format(" and ".join(missing)))


def train_and_write(options: argparse.Namespace) -> int:
    # Not at the top: they need what require_extras() looks for, and --help need not wait for the engine.
    import char_checkpoint
    import char_network
    from char_training import Interruption, Run, Settings

    char_network.initialise_engine()
    resumed, output = locate(options)
    notes = char_checkpoint.read_notes(resumed) if resumed else {}
    settings = Settings(**settle(options, resumed, notes.get("settings", {})))
    corpus = char_corpus.load(settings.corpus)
    char_corpus.require_length(corpus, settings.batch, settings.steps)
    make_folder(output)

    run = Run(settings, corpus, output)
    say(
        "corpus: {}, {:,} characters ({:,} held out), {} different ones".format(
            corpus.name, corpus.size, len(corpus.held_out), len(corpus.alphabet) - 1
        )
    )
    if resumed:
        run.restore(resumed, notes)
        say("resumed from {} ({})".format(resumed, run.position()))
    with Interruption() as stop:
        done = run.train(stop)
    if not done:
        say(
            "interrupted ({}): saved to {}; go on with --resume {}".format(
                run.position(), run.checkpoint, run.checkpoint
            )
        )
        return 130
    finish(run, options.sample_length, options.temperature)
    return 0


def locate(options: argparse.Namespace) -> Tuple[Optional[str], str]:
    """The checkpoint to resume from, if any, and the folder for the results."""
    if options.resume is None:
        return None, options.output or OUTPUT
    checkpoint = options.resume or os.path.join(options.output or OUTPUT, "checkpoint.minidb")
    return checkpoint, options.output or os.path.dirname(checkpoint) or os.curdir


def settle(options: argparse.Namespace, resumed: Optional[str], saved: Dict[str, Any]) -> Dict[str, Any]:
    """The settings of the run: the command line's, else the checkpoint's, else the defaults."""
    given = {name: getattr(options, name) for name in DEFAULTS if getattr(options, name) is not None}
    if "corpus" in given:
        given["corpus"] = os.path.abspath(given["corpus"])  # a resumed run may start in another folder
    differences = [
        "--{} {} (got {})".format(name, saved[name], given[name])
        for name in given
        if name in saved and name not in MAY_CHANGE and given[name] != saved[name]
    ]
    if differences:
        raise CheckpointError("checkpoint {} expects {}".format(resumed, ", ".join(differences)))
    return {**DEFAULTS, **saved, **given}


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SetupError("cannot make the output folder {}: {}".format(path, error.strerror)) from error


def finish(run: "Run", length: int, temperature: float) -> None:
    """Writes the text, and says how well the network did and where everything is."""
    text = run.write(length, temperature)
    sample = os.path.join(run.output, "sample.txt")
    write_bytes(sample, text.encode("utf-8"))
    run.save()
    say("\n{}\n".format(text))
    reached = run.progress.held_out[-1]
    say(
        "held-out text: {:.2f} bits/char, {:.2f} below its unigram entropy of {:.2f}".format(
            reached, run.unigram - reached, run.unigram
        )
    )
    say("written: {}".format(", ".join([run.checkpoint, run.curve, sample])))


def say(line: str) -> None:
    # A terminal that lacks a character gets a question mark in its place, not an exception.
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)


if __name__ == "__main__":
    sys.exit(main())
