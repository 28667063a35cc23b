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
import os
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import char_corpus
from example_arguments import COUNT, POSITIVE, SEED, Parser, add_places, add_settings, locate, settle
from example_files import write_bytes
from example_program import INTERRUPTED, make_folder, run_program, say, train

if TYPE_CHECKING:
    from char_training import CharacterRun

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


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description="Trains a character-level LSTM and writes text.")
    parser.add_argument(
        "--corpus", metavar="FILE", help="a UTF-8 text (default: the standard library's pydoc_data.topics)"
    )
    add_settings(
        parser,
        DEFAULTS,
        [
            ("epochs", COUNT, "how often to read the training text"),
            ("hidden", COUNT, "hidden units"),
            ("steps", COUNT, "how many characters back gradients flow"),
            ("batch", COUNT, "places in the text that are read side by side"),
            ("lr", POSITIVE, "learning rate of the first epoch"),
            ("seed", SEED, "of the initial parameters and of the text written"),
        ],
    )
    add_places(parser, OUTPUT, ["checkpoint.minidb", "loss.png", "sample.txt"])
    parser.add_argument("--sample-length", type=COUNT, default=500, help="characters to write (default: 500)")
    parser.add_argument(
        "--temperature",
        type=POSITIVE,
        default=0.7,
        help="of the text written: lower is more cautious (default: 0.7)",
    )
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse_arguments(arguments)
    return run_program(PROGRAM, ["tqdm", "matplotlib"], lambda: train_and_write(options))


def train_and_write(options: argparse.Namespace) -> int:
    # Not at the top: they need what run_program() looks for, and --help need not wait for the engine.
    import example_checkpoint
    from char_training import CharacterRun, Settings
    from example_engine import initialise_engine

    # One thread, Caffe2's default: at the sizes this example is for a second one only costs time.
    initialise_engine()
    resumed, output = locate(options, OUTPUT)
    notes = example_checkpoint.read_notes(resumed, PROGRAM) if resumed else {}
    settings = Settings(**settle(options, DEFAULTS, resumed, notes.get("settings", {}), path="corpus"))
    corpus = char_corpus.load(settings.corpus)
    char_corpus.require_length(corpus, settings.batch, settings.steps)
    make_folder(output)

    run = CharacterRun(settings, corpus, output)
    say(
        "corpus: {}, {:,} characters ({:,} held out), {} different ones".format(
            corpus.name, corpus.size, len(corpus.held_out), len(corpus.alphabet) - 1
        )
    )
    if not train(run, resumed, notes):
        return INTERRUPTED
    finish(run, options.sample_length, options.temperature)
    return 0


def finish(run: "CharacterRun", length: int, temperature: float) -> None:
    """Writes the text, and says how well the network did and where everything is."""
    text = run.write(length, temperature)
    sample = os.path.join(run.output, "sample.txt")
    write_bytes(sample, text.encode("utf-8"))
    run.save()
    say("\n{}\n".format(text))
    reached = run.progress.held_out[-1]
    say(
        "held-out text: {:.2f} bits/char, {:.2f} {} its unigram entropy of {:.2f}".format(
            reached, abs(run.unigram - reached), "below" if reached < run.unigram else "above", run.unigram
        )
    )
    say("written: {}".format(", ".join([run.checkpoint, run.curve, sample])))


if __name__ == "__main__":
    sys.exit(main())
