"""The pass over a net whose batches are to be parted: rules over the parts, which stay where they take less time."""

import itertools
from typing import Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names, all_names
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.rewriting import loop_trial
from caffe2_recurrent.rewriting.batch_parts import own_buffers, regions, side_by_side, worker_threads
from caffe2_recurrent.rewriting.batch_parts.parted_net import JOINING, Parted, Place, part
from caffe2_recurrent.rewriting.batch_parts.regions import Region
from caffe2_recurrent.rewriting.net_pass import Rewritten
from caffe2_recurrent.rewriting.report import Refusal, Report, Rewrite
from caffe2_recurrent.rewriting.trials import trial

RULE = "batch_parts"
WHAT = "the batch"
ONE, PARTS = "one loop", "parts"
# The time of parts, times this, has to be less than that of one loop.
GAIN = 1.02

Operators = List[caffe2_pb2.OperatorDef]
Rewriting = Callable[[caffe2_pb2.NetDef, Sizes, bool], Rewritten]
Finding = Callable[[caffe2_pb2.NetDef, Mapping[str, Shape]], Sizes]
Placed = List[Tuple[Place, caffe2_pb2.OperatorDef]]


class Choice(NamedTuple):
    """A net with the batches of some loops in parts: its operators with the places of those that they stand for."""

    operators: Placed
    report: Report


def rewritten_in_parts(
    net: caffe2_pb2.NetDef, parts: int, find_sizes: Finding, rewrite: Rewriting, even_if_slower: bool, trials: bool
) -> Tuple[Operators, Report]:
    """What `rewrite` makes of `net`, whose sizes `find_sizes` finds, with batches in so many parts."""
    # Rules add to sizes what they make.
    whole, sizes = rewrite(net, find_sizes(net, {}), False), find_sizes(net, {})
    found, refusals = _regions(net, parts, sizes, whole.report)
    choice = Choice([(Place(place), operator) for place, operator in zip(whole.places, whole.operators)], whole.report)
    while found:
        parted = part(net, found, parts, sizes)
        rewritten = rewrite(parted.net, find_sizes(parted.net, parted.shapes), True)
        candidate = _in_parts(net, found, whole, parted, rewritten)
        with trial.trying(trials):
            slower = {} if even_if_slower else _slower(found, whole, candidate, sizes)
        if not slower:
            choice = candidate
            break
        refusals += [Refusal(RULE, name, WHAT, reason) for name, reason in slower.items()]
        found = [region for region in found if region.loop.name not in slower]
    made = [Rewrite(RULE, region.loop.name, "{}, in {} parts".format(WHAT, parts)) for region in found]
    return [operator for _, operator in choice.operators], _reported(choice.report, whole.report, made, refusals)


def _regions(net: caffe2_pb2.NetDef, parts: int, sizes: Sizes, report: Report) -> Tuple[List[Region], List[Refusal]]:
    out_of_reach = {refusal.loop for refusal in report.refusals if refusal.rule == "all"}
    loops = {position: loop for position, loop in read_loops(net).items() if loop.name not in out_of_reach}
    reason = worker_threads.why_not() if loops else None
    found: List[Region] = []
    refusals: List[Refusal] = []
    for position, loop in loops.items():
        region = reason or regions.find(net, position, loop, parts, sizes)
        if isinstance(region, Region):
            found.append(region)
        else:
            refusals.append(Refusal(RULE, loop.name, WHAT, region))
    return found, refusals


def _in_parts(
    net: caffe2_pb2.NetDef, found: Sequence[Region], whole: Rewritten, parted: Parted, made: Rewritten
) -> Choice:
    otherwise = {}
    for region in found:
        otherwise[region.place] = _of(whole, region.forward)
        if region.backward:
            otherwise[region.backward[0]] = _of(whole, region.backward)
    operators = [*made.operators, *whole.operators]
    names = Names(itertools.chain(all_names(net), all_names(caffe2_pb2.NetDef(op=operators))))
    gradients = {region.backward[0] for region in found if region.backward}
    placed = _side_by_side(parted, made, otherwise, gradients, names)
    apart = own_buffers.with_own_buffers([operator for _, operator in placed])
    return Choice([(place, operator) for (place, _), operator in zip(placed, apart)], made.report)


def _of(whole: Rewritten, positions: Sequence[int]) -> Operators:
    return [operator for place, operator in zip(whole.places, whole.operators) if place in positions]


def _side_by_side(
    parted: Parted, made: Rewritten, otherwise: Mapping[int, Operators], gradients: Container[int], names: Names
) -> Placed:
    """The rewritten operators, those of one pass of a region as one that runs them, or what its place has else."""
    placed = [(parted.places[place], operator) for place, operator in zip(made.places, made.operators)]
    result: Placed = []
    for (position, is_part), grouped in itertools.groupby(placed, lambda found: (found[0][0], found[0][1] is not None)):
        group = list(grouped)
        if is_part:
            of_parts: Dict[Optional[int], Operators] = {}
            for place, operator in group:
                of_parts.setdefault(place.part, []).append(operator)
            joining = of_parts.pop(JOINING)
            enough, parts = parted.enough[position], list(of_parts.values())
            is_gradient = position in gradients
            operator = side_by_side.run(enough, parts, joining, otherwise[position], names, is_gradient)
            group = [(Place(position), operator)]
        result += group
    return result


def _slower(found: Sequence[Region], whole: Rewritten, candidate: Choice, sizes: Sizes) -> Dict[str, str]:
    """The loops for which parts do not take less time, and what is known of that."""
    slower: Dict[str, str] = {}
    for region in found:
        candidates = {
            ONE: _of(whole, region.positions),
            PARTS: [operator for place, operator in candidate.operators if place.position in region.positions],
        }
        seconds = loop_trial.seconds_of(region.loop, candidates, sizes)
        if isinstance(seconds, str):
            slower[region.loop.name] = "whether that takes less time is not known: {}".format(seconds)
        elif not GAIN * seconds[PARTS].step < seconds[ONE].step:
            slower[region.loop.name] = "in parts that run side by side it would take no less time"
    return slower


def _reported(report: Report, whole: Report, made: Sequence[Rewrite], refusals: Sequence[Refusal]) -> Report:
    """With each loop as the net has it, which runs where there are too few sequences, in front of its parts."""
    loops = [loop for loop in report.loops if loop not in whole.loops]
    return Report(
        (*whole.loops, *loops),
        (*report.rules, RULE),
        (*made, *whole.rewrites, *(rewrite for rewrite in report.rewrites if rewrite.loop in loops)),
        (*refusals, *whole.refusals, *(refusal for refusal in report.refusals if refusal.loop in loops)),
        report.dry_run,
        report.trials,
        (*whole.without_gradient, *(loop for loop in report.without_gradient if loop in loops)),
    )
