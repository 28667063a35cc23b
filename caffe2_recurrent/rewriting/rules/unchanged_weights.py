"""What is made of weights that have not changed since the last run is not made again."""

import contextlib
import functools
from typing import Dict, Iterable, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operators import new_operator, read_before_written
from caffe2_recurrent.rewriting import same_weights, unchanged_weights
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.numbering import Numbering, operators_of
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# A trial must be faster by this factor.
GAIN = 1.1
IN_EACH_RUN, WHEN_CHANGED = "in each run", "when changed"


class UnchangedWeights(Rule):
    """operators of weights alone; RecurrentNetwork

    =>  if this is the first run, or a weight is not equal to its copy: copies of the weights; the operators
        RecurrentNetwork

    with `constant_weights`

    =>  if this is the first run: the operators
        RecurrentNetwork

    Other rules scale, join, transpose and lay out weights once per run. A net that serves has the same ones in all
    runs: to see that takes less than to lay them out anew. A loop that is trained gets others in each run and stays as
    it is. What is made of weights, and copies of them, keep their memory between runs.
    """

    name = unchanged_weights.RULE

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.before and not loop.weights:
            yield Site("weights", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        reason = unchanged_weights.why_not(loop)
        if reason is not None:
            return reason
        if not unchanged_weights.found(loop, sizes):
            return "nothing in front of it is known to depend on weights alone"
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        weights = unchanged_weights.found(loop, sizes)
        made = unchanged_weights.made_of(loop, weights)
        if any(loop.workspaces in operator.output for operator in made):
            # To make operators of steps anew with it, which no trial sees, takes longer than to compare any weights.
            return None
        found = seconds(made, weights, sizes, loop.may_keep)
        if found is None:
            return "what is made of weights cannot be tried with arbitrary numbers"
        if GAIN * found[WHEN_CHANGED].step > found[IN_EACH_RUN].step:
            asked = "this is the first run" if Keeping.FOR_GOOD in loop.may_keep else "weights have changed"
            return "to see whether {} takes as long as what is made of weights".format(asked)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        loop.weights = _ways(unchanged_weights.found(loop, sizes), sizes)


def seconds(
    made: Iterable[caffe2_pb2.OperatorDef], weights: Iterable[str], sizes: Sizes, may_keep: Keeping
) -> Optional[Dict[str, Seconds]]:
    """The time of operators that depend on `weights` alone, in each run and where these have not changed.

    `may_keep` as loops have it.
    """
    numbering = Numbering()
    operators = numbering.operators(made)
    of_weights = tuple((numbering.blob(blob), sizes.shape(blob), way) for blob, way in _ways(weights, sizes).items())
    found: Optional[Dict[str, Seconds]] = _tried(operators, of_weights, may_keep & Keeping.FOR_GOOD)
    return found


def seconds_of_comparing(loop: Loop, weights: str, sizes: Sizes) -> float:
    """The time that it takes to see that weights have not changed, unless others ask for that already."""
    if weights in unchanged_weights.found(loop, sizes):
        return 0.0
    transposing = new_operator("Transpose", [weights], [weights + "_transposed"], loop.forward)
    found = seconds([transposing], [weights], sizes, loop.may_keep)
    return 0.0 if found is None else found[WHEN_CHANGED].step


def _ways(weights: Iterable[str], sizes: Sizes) -> Dict[str, str]:
    return {weight: same_weights.way(weight, sizes.shape(weight)) for weight in weights}


@trial.remembered
def _tried(
    made: bytes, of_weights: Tuple[Tuple[str, Optional[Shape], str], ...], may_keep: Keeping
) -> Optional[Dict[str, Seconds]]:
    operators = operators_of(made)
    # They would not be known to be weights otherwise.
    weights = {weight: shape for weight, shape, _ in of_weights if shape is not None}
    ways = {weight: way for weight, shape, way in of_weights if shape is not None}
    loop = trial.lone_loop([*weights, *read_before_written(operators)], may_keep=may_keep)
    guarded = unchanged_weights.when_changed(loop, ways, operators, [])
    subjects = {
        IN_EACH_RUN: functools.partial(Subject, operators, weights),
        WHEN_CHANGED: functools.partial(Subject, guarded, weights),
    }
    with contextlib.suppress(RuntimeError):
        return trial.in_turn(subjects)
    return None
