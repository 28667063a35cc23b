"""From the command line to the exit status: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence

from example_errors import ExampleError, SetupError
from example_interruption import Interruption

if TYPE_CHECKING:
    from example_run import Run

INTERRUPTED = 130


def run_program(program: str, packages: Sequence[str], body: Callable[[], int]) -> int:
    """The exit status of `body`, which needs these packages; what goes wrong in it is said in one line."""
    try:
        require(packages)
        return body()
    except ExampleError as error:
        print("{}: error: {}".format(program, error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\n{}: stopped at once; the checkpoint is the one saved last".format(program), file=sys.stderr)
        return INTERRUPTED


def require(packages: Sequence[str]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError("{} missing: pip install 'caffe2_recurrent[demo]'".format(" and ".join(missing)))


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SetupError("cannot make the output folder {}: {}".format(path, error.strerror)) from error


def train(run: "Run", resumed: Optional[str], notes: Dict[str, Any]) -> bool:
    """Trains, from the checkpoint `resumed` on if there is one; False if Ctrl-C put an end to it."""
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
    return done


def say(line: str) -> None:
    # A terminal that lacks a character gets a question mark in its place, not an exception.
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)
