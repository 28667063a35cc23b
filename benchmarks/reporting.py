"""The document, made from the stored numbers alone."""

import statistics
import textwrap
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from caffe2_recurrent.mkl_dispatch import VARIABLE
from layers import OPTIMISED, OURS, STOCK, TRAINING
from measuring import exponent, faster, median_ratio
from sections import EXECUTOR, IN_PARTS, KEPT_STEPS, OPERATORS, PRODUCTS, TORCH, threads_text, with_recompute
from targets import AIM, KEPT, MISSED, OF_PRODUCTS, OTHER_TORCH, RECOMPUTE, target, verdict

NONE = "–"
# Of sections: that each number of threads has had a process of its own.
APART = "apart"
# Of records: what Caffe2 was started with, so that the calling thread runs chains of operators.
CHAINS = "chains"
# Whether nets were optimised for a number of threads that stays.
CONSTANT, CONSTANT_WEIGHTS = "constant_threads", "constant_weights"
BY_BEST = "best times"
BY_MEDIAN = "medians over the rounds of the ratio within one round"
OR_OF_MEDIANS = (
    "; what is faster with\nthe RNN executor was timed apart, and beside it that is the ratio of the medians"
)
NOT_YET = "This version of the package has no `optimize`: there is no column for it, and ratios are those of `{}`."

Record = Dict[str, Any]
Results = Dict[str, Any]


# ------------------------------------------------------------------------------------------------- numbers of a record


class Times:
    """One record of the section `times`: seconds by candidate, each in its fastest variant."""

    def __init__(self, record: Record) -> None:
        self.cell, self.shape, self.pass_, self.threads = (
            record[field] for field in ("cell", "shape", "pass", "threads")
        )
        self.rounds: Dict[str, List[float]] = chosen(record["seconds"])
        # With several threads what has the RNN executor on is timed in a contest of its own.
        self._apart = {name for name, variants in record["seconds"].items() if faster(variants) == EXECUTOR[True]}
        if self.threads == 1:
            self._apart.clear()
        # Where it is not known, as if it were.
        self.is_rewritten = bool(record.get("rewritten", True))
        self._limits: Dict[str, Dict[str, Tuple[str, float]]] = {
            PRODUCTS: record.get("products", {}),
            OPERATORS: record.get("operators", {}),
        }

    @property
    def ours(self) -> Optional[str]:
        """Who stands for us in the ratios."""
        return next((name for name in (OPTIMISED, OURS) if name in self.rounds), None)

    def best(self, name: str) -> Optional[float]:
        if self._limits.get(name):
            # Of each product or operator its best time: the rounds have sums.
            return sum(seconds for _, seconds in self._limits[name].values())
        return min(self.rounds[name]) if name in self.rounds else None

    def median(self, name: str) -> Optional[float]:
        return statistics.median(self.rounds[name]) if name in self.rounds else None

    def ratio(self, theirs: str, ours: str, by_median: bool) -> Optional[float]:
        """Of the best times, or the median over the rounds of the ratio in one; without common ones of the medians."""
        if theirs not in self.rounds or ours not in self.rounds:
            return None
        if by_median and (theirs in self._apart) == (ours in self._apart):
            return median_ratio(self.rounds[theirs], self.rounds[ours])
        if by_median:
            return statistics.median(self.rounds[theirs]) / statistics.median(self.rounds[ours])
        their_best, our_best = self.best(theirs), self.best(ours)
        assert their_best is not None and our_best is not None
        return their_best / our_best


def chosen(seconds: Dict[str, Dict[str, List[float]]]) -> Dict[str, List[float]]:
    """For each candidate the rounds of its fastest variant."""
    found = {}
    for name, variants in seconds.items():
        variant = faster(variants)
        if variant is not None:
            found[name] = variants[variant]
    return found


class Rival(NamedTuple):
    """`kind` is what targets are set against."""

    name: str
    title: str
    kind: str


def rivals(section: Results) -> List[Rival]:
    version = str(section["machine"].get("torch", "")).partition("+")[0]
    found = [Rival(STOCK, STOCK, STOCK), Rival(TORCH, "{} {}".format(TORCH, version).strip(), TORCH)]
    for other in section.get("others", []):
        kind = OTHER_TORCH if other["kind"] == "torch" else other["kind"]
        version = other.get("versions", {}).get(other["kind"], "").partition("+")[0]
        title = "{} ({} {})".format(other["name"], other["kind"], version) if version else other["name"]
        found.append(Rival(other["name"], title, kind))
    return found


class Judgement(NamedTuple):
    ratio: float
    wanted: float
    verdict: str


def judge(times: Times, rival: Rival, by_median: bool) -> Optional[Judgement]:
    """None where there is nothing to reach or nothing was measured."""
    wanted = target(times.shape, rival.kind, times.pass_) if times.cell == "LSTM" else None
    if wanted is None or times.ours is None:
        return None
    ratio = times.ratio(rival.name, times.ours, by_median)
    if ratio is None:
        return None
    return Judgement(ratio, wanted, verdict(ratio, wanted, times.ratio(times.ours, PRODUCTS, by_median)))


# -------------------------------------------------------------------------------------------------------------- pieces


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown that can be read as it is, with numbers to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    to_the_right = [column > 0 for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if right else text.ljust(width) for text, width, right in zip(row, widths, to_the_right)
        ]
        return "| {} |".format(" | ".join(padded))

    rule = [("-" * (width - 1) + ":") if right else "-" * width for width, right in zip(widths, to_the_right)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def milliseconds(seconds: Optional[float]) -> str:
    """Three digits that matter."""
    if seconds is None:
        return NONE
    value = 1e3 * seconds
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if value < limit:
            return "{:.{}f}".format(value, digits)
    return "{:.0f}".format(value)


def two_digits(ratio: Optional[float]) -> str:
    return NONE if ratio is None else "{:.2f}".format(ratio)


def heading(cell: str, threads: int) -> str:
    return "## {}, {}".format(cell, threads_text(threads))


# ------------------------------------------------------------------------------------------------------------ document


def document(results: Results, picture: Optional[str] = None) -> str:
    """Markdown; `picture` is the name of the plot's file, if there is one."""
    parts = [_title(results), _introduction(results), *_machine(results)]
    sections = results["sections"]
    if "times" in sections:
        parts += _times_part(sections["times"], picture)
    if "growth" in sections:
        parts += _growth_part(sections["growth"]["records"])
    if "memory" in sections:
        parts += _memory_part(sections["memory"]["records"])
    if "recompute" in sections:
        parts += _recompute_part(sections["recompute"]["records"])
    if "sweep" in sections:
        parts += _sweep_part(sections["sweep"]["records"])
    parts += _failures_part(results)
    return "\n\n".join(parts) + "\n"


def _title(results: Results) -> str:
    """With the processors, and what MKL was told of them."""
    machines = [section["machine"] for section in results["sections"].values()]
    told = ["{}={}".format(VARIABLE, machine[VARIABLE]) if VARIABLE in machine else "" for machine in machines]
    named = [", ".join(filter(None, [machine["processor"], text])) for machine, text in zip(machines, told)]
    return "# How fast the recurrent networks are: {}".format("; ".join(dict.fromkeys(named)))


def _introduction(results: Results) -> str:
    times = results["sections"].get("times", {})
    # How it is measured now; documents of older numbers say how those were.
    apart = times.get(APART, False) or not times
    has_operators = any("operators" in record for record in times.get("records", ()))
    sentences = [
        "Written by `make bench`.",
        "Each number of threads has a process of its own, in which all candidates of a row are timed in turn, other "
        "interpreters turn by turn in theirs; who is fast runs off the clock first. Threads are set as Caffe2's "
        "`GlobalInit` sets them: MKL may use fewer where there is little to do. With several threads nets with the RNN "
        "executor are timed after all others, by themselves."
        if apart
        else "All candidates of a row were timed in turn in one process, one number of threads after the other, other "
        "interpreters turn by turn in their own.",
        "T steps, N sequences, I numbers in an input element, D in a state.",
        "*Training* is forward and backward to all parameters and the input, for a constant gradient of the output; "
        "*forward* is a net without a backward step, with the same weights in all runs.",
        "Of Caffe2's nets the time is that with the RNN executor on or off, whichever is less.",
        *_started(times.get("records", ())),
        *_in_parts(times.get("records", ())),
        "*Products alone* is the sum of the pass's matrix products, each in its fastest layout: the limit.",
    ]
    if has_operators:
        sentences.append(
            "*Operators alone* is what steps do beside them with the fewest of Caffe2's operators, each the fastest of "
            "its kind, without links, copies and what takes gates apart: a net that runs one operator after the other "
            "takes more than both."
        )
    return textwrap.fill(" ".join(sentences), 108, break_long_words=False, break_on_hyphens=False)


def _started(records: Sequence[Record]) -> Iterator[str]:
    """What Caffe2 was started with, and what nets were optimised with; which rows are from before that."""
    for flag in dict.fromkeys(record[CHAINS] for record in records if CHAINS in record):
        yield "Caffe2 is started with `{}`{}.".format(flag, _older(records, CHAINS))
    if any(CONSTANT in record for record in records):
        yield "Nets are optimised with `constant_threads=True`{}.".format(_older(records, CONSTANT))
    if any(CONSTANT_WEIGHTS in record for record in records):
        older = _older(records, CONSTANT_WEIGHTS)
        yield "Those of a forward pass are so with `constant_weights=True`{}.".format(older)


def _in_parts(records: Sequence[Record]) -> Iterator[str]:
    """Which times of ours are with the batch in parts."""
    variants = [(record, record["seconds"].get(OPTIMISED, {})) for record in records]
    if not any(IN_PARTS in found for _, found in variants):
        return
    # By the cell.
    rows: Dict[str, List[str]] = {}
    for record, found in variants:
        if faster(found) == IN_PARTS:
            rows.setdefault(record["cell"], []).append("{shape} {pass}".format(**record))
    listed = ["{} at {}".format(cell, "; ".join(found)) for cell, found in rows.items()]
    yield (
        "With several threads a layer optimised has all of them in each operator or, in a process of its own, a part "
        "of the batch for each of them (`batch_parts`), whichever takes less: the latter {}.".format(
            "for " + ", ".join(listed) if listed else "in no row"
        )
    )


def _older(records: Sequence[Record], key: str) -> str:
    """Which rows are from before that, or, where these are most, which are not."""
    since = [record for record in records if key in record]
    before = [record for record in records if key not in record]
    if not before:
        return ""
    if len(since) < len(before):
        return " in rows of {}; others are older, and without it".format("; ".join(_rows_in_words(since)))
    rows = ["{cell} at {shape}".format(**record) for record in before]
    return "; rows of {} are older, and without it".format(", ".join(dict.fromkeys(rows)))


def _rows_in_words(records: Sequence[Record]) -> Iterator[str]:
    """Which cells at which shapes with how many threads, those together that go together."""
    cells: Dict[Tuple[str, int], Dict[str, None]] = {}
    for record in records:
        cells.setdefault((record["shape"], record["threads"]), {})[record["cell"]] = None
    shapes: Dict[Tuple[Tuple[str, ...], int], List[str]] = {}
    for (shape, threads), found in cells.items():
        shapes.setdefault((tuple(found), threads), []).append(shape)
    for (of_cells, threads), at in shapes.items():
        plural = "s" * (threads > 1)
        yield "{} at {} with {} thread{}".format(", ".join(of_cells), " and ".join(at), threads, plural)


def _machine(results: Results) -> Iterator[str]:
    """Once, if all sections were measured on the same one; else with each section's title."""
    groups: List[Tuple[Dict[str, str], List[str]]] = []
    for name, section in results["sections"].items():
        for machine, names in groups:
            if machine == section["machine"]:
                names.append(name)
                break
        else:
            groups.append((section["machine"], [name]))
    for machine, names in groups:
        title = "## Machine" + ("" if len(groups) == 1 else ": {}".format(", ".join(names)))
        yield title
        yield "\n".join("- {}: {}".format(*item) for item in machine.items())
    yield from _bystanders(results)


def _bystanders(results: Results) -> Iterator[str]:
    known = {name: section.get("bystanders") for name, section in results["sections"].items()}
    texts = ["{:.2f} ({})".format(cores, name) for name, cores in known.items() if cores is not None]
    if texts:
        yield (
            "Cores that other programs kept busy meanwhile: {}.\n"
            "Where that is not close to 0, times with several threads are not to be trusted: threads that wait for\n"
            "each other lose most.".format(", ".join(texts))
        )


def _times_part(section: Results, picture: Optional[str]) -> Iterator[str]:
    all_times = [Times(record) for record in section["records"]]
    against = rivals(section)
    lstm = [times for times in all_times if times.cell == "LSTM"]
    if not any(OPTIMISED in times.rounds for times in all_times):
        yield NOT_YET.format(OURS)
    for threads in _distinct(times.threads for times in lstm):
        rows = [times for times in lstm if times.threads == threads]
        yield heading("LSTM", threads)
        yield "Milliseconds: best (median)."
        yield _times_table(rows, against)
        for by_median, what in ((False, BY_BEST), (True, BY_MEDIAN if threads == 1 else BY_MEDIAN + OR_OF_MEDIANS)):
            yield "Ratio of time, theirs / ours, from the {}:".format(what)
            yield _ratio_table(rows, against, by_median)
    if lstm:
        yield from _targets_part(lstm, against)
        yield from _layouts_part(section["records"])
        yield from _operators_part(section["records"])
        if picture:
            yield "![time over that of the products alone]({})".format(picture)
    rest = [times for times in all_times if times.cell != "LSTM"]
    if rest:
        yield "## Other cells"
        yield "Milliseconds: best (median), and stock Caffe2 / ours from best times and from medians."
        yield _other_cells_table(rest)
    yield "## Never slower"
    yield _slower_text(all_times)


def _slower_text(all_times: Sequence[Times]) -> str:
    slower = [times for times in all_times if is_slower(times)]
    if not any(OPTIMISED in times.rounds for times in all_times):
        return "Nothing to compare."
    if not slower:
        return "`optimize` made no row slower, by both best times and medians."
    lines = [
        # Two digits would call some of them equally fast.
        "- {}: {:.3f} and {:.3f} of the time{}".format(
            _where(times),
            *(times.ratio(OPTIMISED, OURS, by_median) for by_median in (False, True)),
            "" if times.is_rewritten else ", though it is the same net",
        )
        for times in slower
    ]
    return "\n".join(["`optimize` made these slower, by best times and by medians:\n", *lines])


def is_slower(times: Times) -> bool:
    ratios = [times.ratio(OURS, OPTIMISED, by_median) for by_median in (False, True)]
    return all(ratio is not None and ratio < 1 for ratio in ratios)


def _times_table(rows: Sequence[Times], against: Sequence[Rival]) -> str:
    names = [rival.name for rival in against] + [OURS, OPTIMISED, PRODUCTS, OPERATORS]
    titles = [rival.title for rival in against] + [OURS, OPTIMISED, PRODUCTS, OPERATORS]
    columns = [(name, title) for name, title in zip(names, titles) if any(name in times.rounds for times in rows)]
    return table(
        ["T,N,I,D, pass", *(title for _, title in columns)],
        [[_label(times), *(_time_text(times, name) for name, _ in columns)] for times in rows],
    )


def _time_text(times: Times, name: str) -> str:
    if name not in times.rounds:
        return NONE
    return "{} ({})".format(milliseconds(times.best(name)), milliseconds(times.median(name)))


def _ratio_table(rows: Sequence[Times], against: Sequence[Rival], by_median: bool) -> str:
    columns = [rival for rival in against if any(rival.name in times.rounds for times in rows)]
    header = ["T,N,I,D, pass", *(rival.title for rival in columns), "ours / products alone"]
    lines = []
    for times in rows:
        of_products = times.ratio(times.ours, PRODUCTS, by_median) if times.ours else None
        cells = [_ratio_text(times, rival, by_median) for rival in columns]
        lines.append([_label(times), *cells, two_digits(of_products)])
    return table(header, lines)


def _ratio_text(times: Times, rival: Rival, by_median: bool) -> str:
    judged = judge(times, rival, by_median)
    if judged is not None:
        return "{:.2f} of {}: {}".format(*judged)
    return two_digits(times.ratio(rival.name, times.ours, by_median) if times.ours else None)


def _targets_part(rows: Sequence[Times], against: Sequence[Rival]) -> Iterator[str]:
    judged = [
        (times, rival, best, median)
        for times in rows
        for rival in against
        for best, median in [[judge(times, rival, by_median) for by_median in (False, True)]]
        if best is not None and median is not None
    ]
    missed = [row for row in judged if MISSED in (row[2].verdict, row[3].verdict)]
    yield "## Targets"
    yield (
        "A target is met by its ratio, or by a time of at most {} times that of the products alone (met by the\n"
        "limit), both as they are printed. Of {}, {} are met by best times and {} by medians{}".format(
            OF_PRODUCTS,
            len(judged),
            sum(best.verdict != MISSED for _, _, best, _ in judged),
            sum(median.verdict != MISSED for _, _, _, median in judged),
            "; not these:" if missed else ".",
        )
    )
    if missed:
        header = ["T,N,I,D, pass", "threads", "against", "target", "best", "median"]
        header += ["ms too many", "ms beside products", "ms to take", "products and operators"]
        # Older numbers have no operators.
        shown = len(header) - int(all(_floor(row[0]) is None for row in missed))
        yield table(header[:shown], [_missed_row(*row)[:shown] for row in missed])
        yield from _floor_text([row for row in missed if row[2].verdict == MISSED])
    yield from _aim_part(rows, against)


def _missed_row(times: Times, rival: Rival, best: Judgement, median: Judgement) -> List[str]:
    """With the time that would have to go, and the time spent on anything else than products."""
    assert times.ours is not None
    spent, limit = times.best(times.ours), times.best(PRODUCTS)
    assert spent is not None
    return [
        _label(times),
        str(times.threads),
        rival.title,
        str(best.wanted),
        two_digits(best.ratio),
        two_digits(median.ratio),
        milliseconds(max(0.0, spent * (1 - best.ratio / best.wanted))),
        milliseconds(None if limit is None else spent - limit),
        milliseconds(_to_take(times, best)),
        milliseconds(_floor(times)),
    ]


def _to_take(times: Times, judgement: Judgement) -> float:
    """The seconds that would do: by the target, or in proportion to the products alone."""
    assert times.ours is not None
    spent, limit = times.best(times.ours), times.best(PRODUCTS)
    assert spent is not None
    return max(spent * judgement.ratio / judgement.wanted, OF_PRODUCTS * (limit or 0.0))


def _floor(times: Times) -> Optional[float]:
    """The seconds that products and operators take without anything else."""
    limits = [times.best(name) for name in (PRODUCTS, OPERATORS)]
    return None if None in limits else sum(filter(None, limits))


def _floor_text(missed: Sequence[Tuple[Times, Rival, Judgement, Judgement]]) -> Iterator[str]:
    floors = [(_floor(times), _to_take(times, best)) for times, _, best, _ in missed]
    known = [(floor, to_take) for floor, to_take in floors if floor is not None]
    if known:
        yield (
            "*To take* is what the target asks for, or {} times the products alone, whichever is more. In {} of\n"
            "the {} rows that are missed by best times that is less than products and operators alone take.".format(
                OF_PRODUCTS, sum(floor > to_take for floor, to_take in known), len(known)
            )
        )


def _aim_part(rows: Sequence[Times], against: Sequence[Rival]) -> Iterator[str]:
    """Beyond the targets: as fast as another torch everywhere."""
    for rival in against:
        if rival.kind != OTHER_TORCH:
            continue
        ratios = [times.ratio(rival.name, times.ours, by_median=False) for times in rows if times.ours]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            reached = sum(round(ratio, 2) >= AIM for ratio in known)
            yield "The aim beyond that, {:.1f} or more against {}, is reached in {} of {} rows (best times).".format(
                AIM, rival.title, reached, len(known)
            )


def _operators_part(records: Sequence[Record]) -> Iterator[str]:
    """What the operators alone are."""
    found = [record for record in records if "operators" in record]
    columns = _distinct(name for record in found for name in record["operators"])
    if found:
        yield "## Operators alone"
        yield "The operators of all steps of a pass, each the fastest of its kind, and their milliseconds."
        rows = []
        for record in found:
            row = [_label(Times(record)), str(record["threads"])]
            for column in columns:
                way, seconds = record["operators"].get(column, (None, None))
                row.append(NONE if way is None else "{}: {}".format(way, milliseconds(seconds)))
            rows.append(row)
        yield table(["T,N,I,D, pass", "threads", *columns], rows)


def _layouts_part(records: Sequence[Record]) -> Iterator[str]:
    """Which layouts the products alone are in, for training, which has all of them."""
    found = [record for record in records if record["pass"] == TRAINING and "products" in record]
    columns = _distinct(name for record in found for name in record["products"])
    if found:
        yield "## Products alone"
        yield (
            "The fastest layout of each product A B of a training pass, and its milliseconds. A': stored transposed;\n"
            "for C': the result is transposed; in 4: one matrix for each gate; oneDNN: an operator of oneDNN, over\n"
            "operands in its memory; image, filters: those of a convolution with kernels of 1 x 1; in blocks: as\n"
            "oneDNN itself lays out an image; in rows: with its channels last; kept: laid out by oneDNN once."
        )
        rows = []
        for record in found:
            cells = ["{}: {}".format(layout, milliseconds(seconds)) for layout, seconds in record["products"].values()]
            rows.append([record["shape"], str(record["threads"]), *cells])
        yield table(["T,N,I,D", "threads", *columns], rows)


def _other_cells_table(rows: Sequence[Times]) -> str:
    names = [name for name in (STOCK, OURS, OPTIMISED) if any(name in times.rounds for times in rows)]
    lines = []
    for times in rows:
        ratios = [times.ratio(STOCK, times.ours, by_median) if times.ours else None for by_median in (False, True)]
        lines.append(
            [
                "{} {}".format(times.cell, _label(times)),
                str(times.threads),
                *(_time_text(times, name) for name in names),
                *map(two_digits, ratios),
            ]
        )
    return table(["cell, T,N,I,D, pass", "threads", *names, "stock / ours", "by medians"], lines)


def _growth_part(records: Sequence[Record]) -> Iterator[str]:
    by_steps: Dict[int, Dict[str, float]] = {}
    for record in records:
        for name, rounds in chosen(record["seconds"]).items():
            column = "{}, {}".format(name, record["pass"])
            by_steps.setdefault(record["steps"], {})[column] = min(rounds)
    columns = _distinct(column for row in by_steps.values() for column in row)
    rows = [
        [str(steps), *(milliseconds(row.get(column)) for column in columns)] for steps, row in sorted(by_steps.items())
    ]
    for label, smallest in (("e", 0), ("e, upper half", sorted(by_steps)[len(by_steps) // 2] if by_steps else 0)):
        rows.append([label, *(two_digits(_exponent(by_steps, column, smallest)) for column in columns)])
    yield "## Growth with the number of steps"
    yield (
        "LSTM at N,I,D = {}, {}, best milliseconds, and the exponent e in time ~ T ** e.".format(
            records[0]["shape"].partition(",")[2], threads_text(records[0]["threads"])
        )
        if records
        else "Nothing was measured."
    )
    yield table(["T", *columns], rows)


def _exponent(by_steps: Dict[int, Dict[str, float]], column: str, smallest: int) -> Optional[float]:
    points = [(steps, row[column]) for steps, row in by_steps.items() if column in row and steps >= smallest]
    return exponent([steps for steps, _ in points], [seconds for _, seconds in points])


def _memory_part(records: Sequence[Record]) -> Iterator[str]:
    columns = _distinct(name for record in records for name in record["bytes"])
    yield "## Peak memory of a training step"
    yield "Megabytes (10^6 bytes) beyond input, parameters and net; the largest of three steps in a fresh process."
    yield table(
        ["T,N,I,D", *columns],
        [
            [
                record["shape"],
                *("{:.1f}".format(record["bytes"][c] / 1e6) if c in record["bytes"] else NONE for c in columns),
            ]
            for record in records
        ],
    )


def _recompute_part(records: Sequence[Record]) -> Iterator[str]:
    names = [name for name in (OURS, OPTIMISED) if any(name in record["seconds"] for record in records)]
    header = ["T,N,I,D", "threads"]
    for name in names:
        header += ["{}, ms".format(name), "with it", "ratio, best", "median", "bytes a step", "with it"]
    rows = []
    for record in records:
        seconds, kept = chosen(record["seconds"]), record["kept"]
        row = [record["shape"], str(record["threads"])]
        for name in names:
            row += _recompute_cells(seconds, kept, name)
        rows.append(row)
    yield "## What memory_optimization costs"
    yield (
        "LSTM, training, with and without `memory_optimization`; it is to cost at most {:.0f}% of the time and to\n"
        "keep {} bytes a step. Bytes are those of the steps' own workspaces, in loops of {} steps whose\n"
        "backward pass is no loop of its own.".format(100 * (RECOMPUTE - 1), KEPT, KEPT_STEPS)
    )
    yield table(header, rows)


def _recompute_cells(seconds: Dict[str, List[float]], kept: Dict[str, int], name: str) -> List[str]:
    other = with_recompute(name)
    sizes = [str(kept[key]) if key in kept else NONE for key in (name, other)]
    if name not in seconds or other not in seconds:
        return [milliseconds(min(seconds[key])) if key in seconds else NONE for key in (name, other)] + [
            NONE,
            NONE,
            *sizes,
        ]
    best, with_it = min(seconds[name]), min(seconds[other])
    ratio = with_it / best
    judged = "{:.2f}, {}".format(ratio, "met" if round(ratio, 2) <= RECOMPUTE else "not met")
    median = two_digits(median_ratio(seconds[other], seconds[name]))
    return [milliseconds(best), milliseconds(with_it), judged, median, *sizes]


def _sweep_part(records: Sequence[Record]) -> Iterator[str]:
    rows = [times for times in map(Times, records) if OPTIMISED in times.rounds and OURS in times.rounds]
    yield "## Drawn shapes"
    yield (
        "Cells in turn with shapes drawn among small and middling ones, as built and optimised: ours / ours\n"
        "optimised, by best times and in parentheses by medians."
    )
    again = sum(bool(record.get("again")) for record in records)
    if again:
        yield "{} rows seemed slower and were timed again, for longer; that is what counts.".format(again)
    lines = []
    for cell, threads in _distinct((times.cell, times.threads) for times in rows):
        of_cell = [times for times in rows if (times.cell, times.threads) == (cell, threads)]
        best, median = ([times.ratio(OURS, OPTIMISED, by) or 0.0 for times in of_cell] for by in (False, True))
        ratios = ["{:.2f} ({:.2f})".format(*map(pick, (best, median))) for pick in (min, statistics.median, max)]
        lines.append([cell, str(threads), str(len(of_cell)), *ratios])
    yield table(["cell", "threads", "rows", "least", "median", "most"], lines)
    yield _slower_text(rows)


def _failures_part(results: Results) -> Iterator[str]:
    lines = failures(results)
    if lines:
        yield "## Failed"
        yield "\n".join("- {}".format(line) for line in lines)


def failures(results: Results) -> List[str]:
    """A line for each candidate that could not be measured."""
    found = []
    for name, section in results["sections"].items():
        for other in section.get("others", []):
            if "failure" in other:
                found.append("{}: {}".format(other["name"], other["failure"]))
        for record in section["records"]:
            where = ", ".join(str(record[field]) for field in ("cell", "shape", "pass") if field in record)
            if "threads" in record:
                where += ", " + threads_text(record["threads"])
            for candidate, line in record["failures"].items():
                found.append("{}, {}: {}: {}".format(name, where, candidate, line))
    return found


def _where(times: Times) -> str:
    return "{} {}, {}".format(times.cell, _label(times), threads_text(times.threads))


def _label(times: Times) -> str:
    return "{}, {}".format(times.shape, times.pass_)


def _distinct(values: Any) -> List[Any]:
    return list(dict.fromkeys(values))
