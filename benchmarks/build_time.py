"""How long `recurrent_net` takes to build, against the one thing that it cannot do without: Caffe2's gradient pass.

    python benchmarks/build_time.py
    python benchmarks/build_time.py --operators 1000 4000 --rounds 9 --kind own_fc in_place
    python benchmarks/build_time.py --with-caffe2            (minutes: Caffe2's own builder is quadratic)

For step nets of several kinds and sizes this times, in turn and in one process,

    pass      core.GradientRegistry.GetBackwardPass over the step's operators, alone
    build     caffe2_recurrent.recurrent_net, which contains such a pass
    caffe2    caffe2.python.recurrent.recurrent_net, if asked for

and prints milliseconds of CPU time (median and best of the rounds), the ratios build / pass and caffe2 / pass
(medians over the rounds of the ratio within one round), and with several sizes the growth: the exponent e in
`time ~ operators ** e`, fitted to the best times.
"""

import argparse
import contextlib
import gc
import math
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from caffe2.python import core, recurrent

from caffe2_recurrent import recurrent_net

OPERATORS = (500, 1000, 2000, 4000)
ROUNDS = 5
# One round of Caffe2's builder with a step net of that size takes about as long as all the rest.
CAFFE2_ONCE_FROM = 4000

PASS, BUILD, CAFFE2 = "pass", "build", "caffe2"
INPUT, STATE, OUTPUT = "x", "h_prev", "h"


class Step(NamedTuple):
    """A step net with its roles; `states` maps state inputs to outputs. The only sequence is `INPUT`."""

    net: core.Net
    states: Dict[str, str]
    recompute: Sequence[str] = ()


class Timing(NamedTuple):
    """Seconds of each round, by what was timed."""

    operators: int
    seconds: Dict[str, List[float]]

    def ratio(self, builder: str) -> float:
        """The median of `builder` / `PASS`, each taken within one round."""
        return statistics.median(
            builder_time / pass_time for builder_time, pass_time in zip(self.seconds[builder], self.seconds[PASS])
        )


# --------------------------------------------------------------------------------------------------- kinds of step net


def tanh_mul(operators: int) -> Step:
    """Tanh and Mul in turn."""
    net = _new_step(INPUT, STATE)
    _chain(net, net.Mul([STATE, INPUT], "y0"), 1, operators)
    return _finished(net, {STATE: OUTPUT})


def sum_first(operators: int) -> Step:
    """Sum(x, h_prev), then Tanh and Mul in turn: sequence and state would share one gradient blob."""
    net = _new_step(INPUT, STATE)
    _chain(net, net.Sum([INPUT, STATE], "y0"), 1, operators)
    return _finished(net, {STATE: OUTPUT})


def sums(operators: int) -> Step:
    """Nothing but Sum: no gradient needs an operator, and all of them meet at the sequence."""
    net = _new_step(INPUT, STATE)
    blob = STATE
    for index in range(operators):
        blob = net.Sum([blob, INPUT], _blob_name(index, operators))
    return _finished(net, {STATE: OUTPUT})


def own_fc(operators: int) -> Step:
    """Fully connected layers, each with parameters of its own."""
    parameters = [name.format(index) for index in range(operators) for name in ("w{}", "b{}")]
    net = _new_step(INPUT, STATE, *parameters)
    blob = net.FC([STATE, "w0", "b0"], "y0")
    for index in range(1, operators - 1):
        blob = net.FC([blob, "w{}".format(index), "b{}".format(index)], "y{}".format(index))
    net.Sum([blob, INPUT], OUTPUT)
    return _finished(net, {STATE: OUTPUT})


def shared_fc(operators: int) -> Step:
    """Fully connected layers that share one weight and one bias."""
    net = _new_step(INPUT, STATE, "w", "b")
    blob = STATE
    for index in range(operators - 1):
        blob = net.FC([blob, "w", "b"], "y{}".format(index))
    net.Sum([blob, INPUT], OUTPUT)
    return _finished(net, {STATE: OUTPUT})


def in_place(operators: int) -> Step:
    """Sum and Scale in place, in turn: every gradient that passes through a Sum is overwritten by a Scale."""
    net = _new_step(INPUT, STATE)
    blob = net.Mul([STATE, INPUT], "y")
    for index in range(1, operators - 1):
        if index % 2:
            net.Sum([blob, INPUT], [blob])
        else:
            net.Scale(blob, blob, scale=0.5)
    net.Tanh(blob, OUTPUT)
    return _finished(net, {STATE: OUTPUT})


def own_scale(operators: int) -> Step:
    """Sum and Scale in turn, each Scale with a factor of its own: no two operators have the same arguments."""
    net = _new_step(INPUT, STATE)
    blob = STATE
    for index in range(operators):
        name = _blob_name(index, operators)
        blob = net.Scale(blob, name, scale=1.0 / (index + 1)) if index % 2 else net.Sum([blob, INPUT], name)
    return _finished(net, {STATE: OUTPUT})


def many_states(operators: int) -> Step:
    """Two operators for each state."""
    states = {"h{}_prev".format(index): "h{}".format(index) for index in range(operators // 2)}
    net = _new_step(INPUT, *states)
    for state, output in states.items():
        net.Tanh(net.Mul([state, INPUT], output + "_product"), output)
    return _finished(net, states)


def recompute(operators: int) -> Step:
    """Tanh and Mul in turn, with all blobs computed again in the backward step."""
    step = tanh_mul(operators)
    return step._replace(recompute=[operator.output[0] for operator in step.net.Proto().op])


KINDS: Dict[str, Callable[[int], Step]] = {
    kind.__name__: kind
    for kind in (tanh_mul, sum_first, sums, own_fc, shared_fc, in_place, own_scale, many_states, recompute)
}


def _new_step(*inputs: str) -> core.Net:
    net = core.Net("step")
    # Names, not references: a step that belongs to no net yet has nothing to refer to.
    net.AddExternalInput(*inputs)
    return net


def _finished(net: core.Net, states: Dict[str, str]) -> Step:
    # Caffe2's builder takes the state outputs from there.
    net.AddExternalOutput(*(core.BlobReference(blob) for blob in states.values()))
    return Step(net, states)


def _chain(net: core.Net, blob: core.BlobReference, first: int, operators: int) -> None:
    """Operators number `first` and up, the last of which writes `OUTPUT`."""
    for index in range(first, operators):
        name = _blob_name(index, operators)
        blob = net.Tanh(blob, name) if index % 2 else net.Mul([blob, INPUT], name)


def _blob_name(index: int, operators: int) -> str:
    return OUTPUT if index == operators - 1 else "y{}".format(index)


# ------------------------------------------------------------------------------------------------------- what is timed


def gradient_pass(step: Step) -> Any:
    return core.GradientRegistry.GetBackwardPass(
        step.net.Proto().op, {output: output + "_grad" for output in step.states.values()}
    )


def build(builder: Callable[..., Any], step: Step) -> Any:
    """Call `recurrent_net`, ours or Caffe2's, with a fresh net around it."""
    return builder(
        core.Net("outer"),
        step.net,
        inputs=[(INPUT, "sequence")],
        initial_cell_inputs=[(state, state + "_initial") for state in step.states],
        links=step.states,
        recompute_blobs_on_backward=step.recompute or None,
    )


def subjects(with_caffe2: bool) -> Dict[str, Callable[[Step], Any]]:
    timed = {PASS: gradient_pass, BUILD: lambda step: build(recurrent_net, step)}
    if with_caffe2:
        timed[CAFFE2] = lambda step: build(recurrent.recurrent_net, step)
    return timed


def measure(kind: str, operators: int, rounds: int, with_caffe2: bool = False, collecting: bool = False) -> Timing:
    """Time everything in turn, `rounds` times, each time on a step net that nothing else has seen."""
    seconds: Dict[str, List[float]] = {}
    for round_ in range(rounds):
        once_only = operators >= CAFFE2_ONCE_FROM and round_ > 0
        timed = list(subjects(with_caffe2 and not once_only).items())
        # Who goes first finds other caches than who goes second.
        for name, subject in timed if round_ % 2 == 0 else reversed(timed):
            seconds.setdefault(name, []).append(_seconds(subject, KINDS[kind](operators), collecting))
    return Timing(operators, seconds)


def _seconds(subject: Callable[[Step], Any], step: Step, collecting: bool) -> float:
    """CPU time, which other programs on the machine disturb less than the clock on the wall."""
    with _garbage_collector(collecting):
        start = time.process_time()
        result = subject(step)
        elapsed = time.process_time() - start
    # Kept until here: letting go of the result is not part of making it.
    del result
    return elapsed


@contextlib.contextmanager
def _garbage_collector(collecting: bool) -> Iterator[None]:
    """Start without garbage, and unless `collecting`, leave what arises where it is.

    When a collection starts depends on all that was allocated before, so it would hit one subject or another.
    """
    gc.collect()
    if not collecting:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------- the report


def growth(timings: Sequence[Timing], name: str) -> Optional[float]:
    """The slope of the best times over the numbers of operators, both as logarithms; None for less than two."""
    points = [(math.log(timing.operators), math.log(min(timing.seconds[name]))) for timing in timings]
    if len(points) < 2:
        return None
    mean_x, mean_y = (statistics.mean(values) for values in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def header(names: Sequence[str]) -> str:
    times = "".join("{:>18}".format(name + " ms (best)") for name in names)
    ratios = "".join("{:>14}".format(name + "/pass") for name in names if name != PASS)
    return "{:<12}{:>10}{}{}".format("kind", "operators", times, ratios)


def row(kind: str, timing: Timing) -> str:
    times = "".join(
        "{:>9.1f} ({:>6.1f})".format(1e3 * statistics.median(seconds), 1e3 * min(seconds)).rjust(18)
        for seconds in timing.seconds.values()
    )
    ratios = "".join("{:>14.2f}".format(timing.ratio(name)) for name in timing.seconds if name != PASS)
    return "{:<12}{:>10}{}{}".format(kind, timing.operators, times, ratios)


def growth_row(kind: str, timings: Sequence[Timing], names: Sequence[str]) -> str:
    exponents = "".join("{:>18.2f}".format(growth(timings, name)) for name in names)
    return "{:<12}{:>10}{}".format(kind, "growth", exponents)


def report(options: argparse.Namespace) -> Iterator[str]:
    names = list(subjects(options.with_caffe2))
    yield header(names)
    for kind in options.kind:
        timings = []
        for operators in options.operators:
            timing = measure(kind, operators, options.rounds, options.with_caffe2, options.gc)
            # The order of the columns, whoever went first.
            timing = timing._replace(seconds={name: timing.seconds[name] for name in names})
            timings.append(timing)
            yield row(kind, timing)
        if len(timings) > 1:
            yield growth_row(kind, timings, names)


def _at_least(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError("{!r} is no whole number".format(text)) from None
        if number < minimum:
            raise argparse.ArgumentTypeError("{} is too small; it must be {} or more".format(number, minimum))
        return number

    return read


def read_options(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    described = "\n".join("  {:<12}{}".format(name, kind.__doc__) for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        description="Time recurrent_net against Caffe2's gradient pass alone.",
        epilog="kinds of step net:\n" + described,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--operators", type=_at_least(4), nargs="+", default=list(OPERATORS), metavar="N",
        help="sizes of the step net (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_at_least(1), default=ROUNDS, metavar="N",
        help="times that each is measured (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kind", choices=list(KINDS), nargs="+", default=list(KINDS), metavar="KIND",
        help="kinds of step net, see below (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--with-caffe2", action="store_true",
        help="time Caffe2's own builder too, only once from {} operators on".format(CAFFE2_ONCE_FROM),
    )  # fmt: skip
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on while timing")
    options = parser.parse_args(arguments)
    options.operators = sorted(set(options.operators))
    options.kind = list(dict.fromkeys(options.kind))
    return options


def main(arguments: Optional[Sequence[str]] = None) -> None:
    for line in report(read_options(arguments)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
