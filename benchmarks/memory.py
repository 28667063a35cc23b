"""Peak memory of training steps. Run as a program, it measures one candidate, in a process that has done nothing else.

    python benchmarks/memory.py 'ours' 50,32,128,256 [--memory-optimization]

It prints the bytes by which the process grew at its largest during three training steps. The input, the parameters and
the net are there before; outputs, gradients and all that a pass keeps come on top.
"""

import argparse
import ctypes
import gc
import resource
import subprocess
import sys
from pathlib import Path
from typing import Callable, Optional, Sequence

from caffe2.python import workspace

from layers import MAKERS, TRAINING, Layer, Shape, lstm_values
from measuring import set_threads
from other_interpreter import TorchLSTM, without_folders

TORCH = "torch.nn.LSTM"
CANDIDATES = (*MAKERS, TORCH)
STEPS = 3
# What the first pass of all loads and allocates once does not belong to the shape.
WARM_UP = Shape(3, 2, 4, 5)


class ChildError(Exception):
    pass


def peak_in_child(candidate: str, shape: Shape, memory_optimization: bool = False) -> int:
    """What this module prints when it is run as a program."""
    command = [sys.executable, str(Path(__file__).resolve()), candidate, str(shape)]
    if memory_optimization:
        command.append("--memory-optimization")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing said"]
        raise ChildError(without_folders("status {}: {}".format(done.returncode, said[-1])))
    return int(done.stdout.split()[-1])


def peak(candidate: str, shape: Shape, memory_optimization: bool) -> int:
    _runner(candidate, WARM_UP, memory_optimization)(STEPS)
    run = _runner(candidate, shape, memory_optimization)
    before = _restart_peak()
    run(STEPS)
    return _peak() - before


def _runner(candidate: str, shape: Shape, memory_optimization: bool) -> Callable[[int], object]:
    if candidate == TORCH:
        return TorchLSTM(shape, True, {name: value.tobytes() for name, value in lstm_values(shape).items()}).run
    return Layer("LSTM", candidate, shape, TRAINING, memory_optimization=memory_optimization).run


def _restart_peak() -> int:
    """Make the peak what is in use now, and return it.

    Where Linux does not let us, the peak goes on from the largest use so far, which is then the one to compare with.
    """
    gc.collect()
    try:
        # Else what was let go of, and is still ours, would be used again without being counted.
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass
    return _peak()


def _peak() -> int:
    """The largest use of memory so far.

    The kernel's figure for this program alone comes first: `ru_maxrss` starts with the size of the process that started
    it.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description="Print the peak memory of training steps, in bytes.")
    parser.add_argument("candidate", choices=CANDIDATES)
    parser.add_argument("shape", metavar="T,N,I,D")
    parser.add_argument("--memory-optimization", action="store_true")
    options = parser.parse_args(arguments)
    workspace.GlobalInit(["memory", "--caffe2_log_level=3"])
    set_threads(1)
    shape = Shape(*(int(size) for size in options.shape.split(",")))
    print(peak(options.candidate, shape, options.memory_optimization))


if __name__ == "__main__":
    main()
