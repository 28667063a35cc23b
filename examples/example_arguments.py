"""Command lines: what all examples take, and how it meets what a checkpoint says."""

import argparse
import math
import os
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

from example_errors import CheckpointError

Kind = Callable[[str], Any]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, "{}: error: {}\n".format(self.prog, message))


def number(kind: Kind, accepts: Callable[[Any], bool], wanted: str) -> Kind:
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


COUNT = number(int, lambda value: value >= 1, "a whole number of at least 1")
POSITIVE = number(float, lambda value: 0 < value < math.inf, "a number above 0")
SEED = number(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295")


def add_settings(parser: Parser, defaults: Dict[str, Any], settings: Sequence[Tuple[str, Kind, str]]) -> None:
    """Adds an option for each (name, type, help text); not given, it is None, and `settle` says what it is then."""
    for name, kind, text in settings:
        parser.add_argument("--" + name, type=kind, help="{} (default: {})".format(text, defaults[name]))


def add_places(parser: Parser, output: str, files: List[str]) -> None:
    """Adds --resume and --output; `files` is what the program writes, `output` the folder it does so by default."""
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
        help="folder for {} and {} (default: that of the checkpoint resumed, else {})".format(
            ", ".join(files[:-1]), files[-1], output
        ),
    )


def locate(options: argparse.Namespace, output: str) -> Tuple[Optional[str], str]:
    """The checkpoint to resume from, if any, and the folder for the results."""
    if options.resume is None:
        return None, options.output or output
    checkpoint = options.resume or os.path.join(options.output or output, "checkpoint.minidb")
    return checkpoint, options.output or os.path.dirname(checkpoint) or os.curdir


def settle(
    options: argparse.Namespace,
    defaults: Dict[str, Any],
    resumed: Optional[str],
    saved: Dict[str, Any],
    path: str,
) -> Dict[str, Any]:
    """The settings of the run: the command line's, else the checkpoint's, else the defaults.

    Resumed, only `epochs` may change, and `path`, the setting that is the file with the data: of that, what must be
    the same is what it holds.
    """
    given = {name: getattr(options, name) for name in defaults if getattr(options, name) is not None}
    if path in given:
        given[path] = os.path.abspath(given[path])  # a resumed run may start in another folder
    differences = [
        "--{} {} (got {})".format(name, saved[name], given[name])
        for name in given
        if name in saved and name not in (path, "epochs") and given[name] != saved[name]
    ]
    if differences:
        raise CheckpointError("checkpoint {} expects {}".format(resumed, ", ".join(differences)))
    return {**defaults, **saved, **given}
