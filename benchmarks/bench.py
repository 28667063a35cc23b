"""How fast the recurrent networks are, against Caffe2's own, PyTorch's, and the matrix products that none does without.

    python benchmarks/bench.py
    python benchmarks/bench.py --quick --no-write
    python benchmarks/bench.py --times --shapes 50,32,128,256 --threads 1 --rounds 20
    python benchmarks/bench.py --other new=/path/to/python --other ort=/path/to/python:onnxruntime
    python benchmarks/bench.py --redraw

Each number of threads has a process of its own. For each cell, shape and pass it times in turn, best and median of the
rounds,

    stock Caffe2    the builder of caffe2.python, RNN executor on and off, the better of the two
    ours            caffe2_recurrent's, likewise
    ours optimised  the same net after caffe2_recurrent.optimize, for a number of threads that stays, likewise; an LSTM
                    with several threads also with a part of the batch for each, turn by turn in another process
    torch.nn.LSTM   of the torch that carries this Caffe2
    NAME            an LSTM in another interpreter, turn by turn in a process of its own
    products alone  the matrix products of the pass, each in its fastest layout
    operators alone what steps do beside them, with the fewest of Caffe2's operators, each the fastest

having made sure that all compute the same. Four more sections measure growth with the number of steps (--growth), peak
memory (--memory), what memory_optimization costs (--recompute), and drawn shapes as built and optimised (--sweep);
without any of the five, all are measured.

The numbers go to results.json beside the document, which is made from them alone, as is the plot. Sections that are not
measured stay what they were. The exit status is 1 if any candidate failed.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from caffe2.python import workspace

import machine
import reporting
import sections
from caffe2_recurrent.rewriting.calling_thread import FLAG
from interpreters import Interpreter, Other, read_other
from layers import CELLS, MAKERS, Shape, optimizer
from measuring import current_threads, set_threads
from other_interpreter import first_line

SHAPES = (
    Shape(20, 128, 40, 800),
    Shape(50, 32, 128, 256),
    Shape(100, 16, 64, 128),
    Shape(25, 1, 64, 100),
    Shape(100, 64, 512, 512),
)
OTHER_CELLS_SHAPES = SHAPES[1:3]
MEMORY_SHAPES = (SHAPES[1], SHAPES[0])
THREADS = (1, 2)
ROUNDS = 6
ENOUGH = 6.0  # seconds; see measuring.measure

QUICK_SHAPES = SHAPES[1:4]
QUICK_OTHER_CELLS_SHAPES = SHAPES[2:3]
QUICK_ROUNDS = 2
QUICK_ENOUGH = 0.3
QUICK_GROWTH = (25, 50, 100)
QUICK_SWEEP = 2

OUTPUT = Path(__file__).resolve().parent / "RESULTS.md"
SECTIONS = ("times", "growth", "memory", "recompute", "sweep")
# Measured with each number of threads.
BY_THREADS = ("times", "recompute", "sweep")
# Cells and shapes that are drawn.
SWEEP = 24

Results = Dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- options


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("{!r} is no whole number".format(text)) from None
    if number < 1:
        raise argparse.ArgumentTypeError("{} is too small; it must be 1 or more".format(number))
    return number


def _shape(text: str) -> Shape:
    sizes = text.split(",")
    if len(sizes) != len(Shape._fields):
        raise argparse.ArgumentTypeError("{!r} is not T,N,I,D".format(text))
    return Shape(*map(_at_least_one, sizes))


def _other(text: str) -> Other:
    try:
        return read_other(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_options(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time the recurrent networks; see the top of the file for what is timed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="T,N,I,D",
        help="instead of those that each section has; growth keeps its own",
    )
    parser.add_argument("--cells", choices=list(CELLS), nargs="+", metavar="CELL", default=list(CELLS),
                        help="of {} (default: all)".format(", ".join(CELLS)))  # fmt: skip
    parser.add_argument("--threads", type=_at_least_one, nargs="+", default=list(THREADS), metavar="N",
                        help="numbers of threads (default: 1 2)")  # fmt: skip
    parser.add_argument("--rounds", type=_at_least_one, metavar="N",
                        help="at least so many; what is fast gets more (default: {})".format(ROUNDS))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few rounds, small shapes: to see that all works")
    parser.add_argument("--other", type=_other, action="append", default=[], metavar="NAME=PYTHON[:KIND]",
                        help="another interpreter; KIND is torch, the default, or onnxruntime")  # fmt: skip
    for section, what in (
        ("times", "passes of all cells"),
        ("growth", "time over the number of steps"),
        ("memory", "peak memory of a training step"),
        ("recompute", "what memory_optimization costs"),
        ("sweep", "drawn shapes, as built and optimised"),
    ):
        parser.add_argument("--" + section, action="store_true", help="measure only this: " + what)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE",
                        help="the document; numbers and plot go beside it (default: RESULTS.md here)")  # fmt: skip
    parser.add_argument("--no-write", action="store_true", help="print the document only")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: document and plot from the numbers")
    options = parser.parse_args(arguments)
    _settle(parser, options)
    return options


def _settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Defaults that depend on other options, and what does not go together."""
    chosen = [section for section in SECTIONS if getattr(options, section)]
    others = {name for name in vars(options) if getattr(options, name) != parser.get_default(name)}
    if options.redraw and others - {"redraw", "output"}:
        parser.error("--redraw measures nothing and only writes: it does not go with other options than --output")
    names = [other.name for other in options.other]
    taken = sorted({name for name in names if names.count(name) > 1 or name in reserved_names()})
    if taken:
        parser.error("argument --other: the name {} is taken".format(", ".join(map(repr, taken))))
    if not (options.redraw or options.no_write) and not options.output.parent.is_dir():
        parser.error("argument --output: there is no folder {}".format(options.output.parent))
    if options.output.suffix != ".md":
        parser.error("argument --output: {} does not end in .md".format(options.output.name))
    options.sections = chosen or list(SECTIONS)
    options.threads = list(dict.fromkeys(options.threads))
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)


def reserved_names() -> List[str]:
    return [*MAKERS, sections.TORCH, sections.PRODUCTS, sections.OPERATORS]


def plan(options: argparse.Namespace) -> sections.Plan:
    lstm = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    others = options.shapes or (QUICK_OTHER_CELLS_SHAPES if options.quick else OTHER_CELLS_SHAPES)
    return sections.Plan(
        rounds=options.rounds,
        enough=QUICK_ENOUGH if options.quick else ENOUGH,
        threads=options.threads,
        cells={cell: lstm if cell == "LSTM" else others for cell in dict.fromkeys(options.cells)},
        growth_steps=QUICK_GROWTH if options.quick else sections.GROWTH_STEPS,
        memory_shapes=options.shapes or (MEMORY_SHAPES[:1] if options.quick else MEMORY_SHAPES),
        recompute_shapes=lstm,
        sweep=_swept(options),
    )


def _swept(options: argparse.Namespace) -> Sequence[Tuple[str, Shape]]:
    if options.shapes:
        return list(itertools.product(dict.fromkeys(options.cells), options.shapes))
    drawn = sections.drawn_shapes(QUICK_SWEEP if options.quick else SWEEP)
    return [(cell, shape) for cell, shape in drawn if cell in options.cells]


# ------------------------------------------------------------------------------------------------------------ measuring


def collect(options: argparse.Namespace, keep: Callable[[Results], object] = lambda results: None) -> Results:
    """The sections that were asked for, measured now; `keep` gets what there is after each of them."""
    if optimizer() is None:
        _progress(reporting.NOT_YET.format(sections.OURS))
    on = machine.description()
    settled = plan(options)
    found: Results = {}
    before = current_threads()
    try:
        for section in options.sections:
            bystanders = machine.Bystanders()
            found[section] = _measured(section, settled, options.other)
            found[section].update(machine=on, bystanders=bystanders.cores())
            if section in BY_THREADS:
                found[section][reporting.APART] = True
                for record in found[section]["records"]:
                    record.update({reporting.CHAINS: FLAG, reporting.CONSTANT: True, reporting.CONSTANT_WEIGHTS: True})
            keep({"sections": found})
    finally:
        set_threads(before)
    return {"sections": found}


def _measured(section: str, settled: sections.Plan, others: Sequence[Other]) -> Results:
    """Each of several numbers of threads in a process of its own: oneDNN runs what it has planned with that of then."""
    if section not in BY_THREADS or len(settled.threads) == 1:
        return _section(section, settled, others)
    parts = [_apart(section, settled._replace(threads=[threads]), others) for threads in settled.threads]
    return dict(parts[0], records=_by_shape([part["records"] for part in parts]))


def _apart(section: str, settled: sections.Plan, others: Sequence[Other]) -> Results:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, _initialize_child, (os.getpid(),)) as process:
        return process.submit(_section, section, settled, others).result()


def _by_shape(parts: Sequence[Sequence[sections.Record]]) -> List[sections.Record]:
    """The records of all parts, those of a cell and a shape beside each other."""
    order = {key: index for index, key in enumerate(map(_cell_and_shape, parts[0]))}
    return sorted(itertools.chain(*parts), key=lambda record: order[_cell_and_shape(record)])


def _cell_and_shape(record: sections.Record) -> Tuple[Optional[str], str]:
    return record.get("cell"), record["shape"]


def _initialize() -> None:
    workspace.GlobalInit(["bench", "--caffe2_log_level=3", FLAG])


def _initialize_child(parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _initialize()


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: what was killed must not go on beside what is measured next."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _section(section: str, settled: sections.Plan, others: Sequence[Other]) -> Results:
    if section == "times":
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(Interpreter(other)) for other in others]
            described, working = _asked_for_versions(opened)
            return {"others": described, "records": sections.times(settled, working, _progress)}
    measure = {
        "growth": sections.growth,
        "memory": sections.peaks,
        "recompute": sections.recompute,
        "sweep": sections.sweep,
    }
    return {"records": measure[section](settled, _progress)}


def _asked_for_versions(opened: Sequence[Interpreter]) -> Tuple[List[Results], List[Interpreter]]:
    described, working = [], []
    for interpreter in opened:
        other = interpreter.other
        entry: Results = {"name": other.name, "kind": other.kind}
        try:
            entry["versions"] = interpreter.versions()
            working.append(interpreter)
        except Exception as error:
            entry["failure"] = first_line(error)
            _progress("FAILED {}: {}".format(other.name, entry["failure"]))
        described.append(entry)
    return described, working


def _progress(line: str) -> None:
    # The document goes to standard output.
    print(line, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------------- writing


def numbers_beside(output: Path) -> Path:
    return output.with_name(output.stem.lower() + ".json")


def plot_beside(output: Path) -> Path:
    return output.with_suffix(".png")


def read(path: Path) -> Results:
    with open(path, encoding="utf-8") as file:
        found: Results = json.load(file)
    if not isinstance(found, dict) or not isinstance(found.get("sections"), dict):
        raise ValueError("they have no sections")
    for name, section in found["sections"].items():
        if not isinstance(section, dict) or not {"records", "machine"}.issubset(section):
            raise ValueError("the section {!r} has no records or no machine".format(name))
    return found


def merged(results: Results, earlier: Results) -> Results:
    """`results`, and the sections of `earlier` that they do not have."""
    both = dict(earlier.get("sections", {}), **results["sections"])
    return {"sections": {section: both[section] for section in SECTIONS if section in both}}


def write(results: Results, output: Path) -> None:
    """Numbers, plot and document, each complete or as it was."""
    _replace(numbers_beside(output), in_json(results).encode())
    picture = plot(results)
    if picture is not None:
        _replace(plot_beside(output), picture)
    text = reporting.document(results, plot_beside(output).name if picture is not None else None)
    _replace(output, text.encode())


def in_json(results: Results) -> str:
    """Indented, with a list of numbers on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + " ".join(found.group(1).split()) + "]", text) + "\n"


def plot(results: Results) -> Optional[bytes]:
    """None where there is nothing to draw, or nothing to draw it with."""
    times = results["sections"].get("times")
    if times is None or not any(record["cell"] == "LSTM" for record in times["records"]):
        return None
    try:
        import chart
    except ImportError as error:
        _progress("No plot: {}".format(error))
        return None
    return chart.draw(times)


def _replace(path: Path, content: bytes) -> None:
    """Who reads `path` finds the old content or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=str(path.parent), prefix=path.name + ".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, str(path))
    except BaseException:
        os.unlink(temporary)
        raise


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = read_options(arguments)
    numbers = numbers_beside(options.output)
    earlier: Results = {}
    if options.redraw or (numbers.exists() and not options.no_write):
        # Now, rather than after a quarter of an hour.
        try:
            earlier = read(numbers)
        except (OSError, ValueError) as error:
            print("bench.py: the numbers in {} cannot be read: {}".format(numbers, error), file=sys.stderr)
            return 2
    if options.redraw:
        write(earlier, options.output)
        return 0
    _initialize()
    if options.no_write:
        results = collect(options)
        print(reporting.document(results))
    else:
        results = collect(options, lambda part: write(merged(part, earlier), options.output))
        print(reporting.document(merged(results, earlier)))
    return 1 if reporting.failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
