"""Whether the backward pass of a loop of few operators had better be a loop of its own.

`backward_loop` applies where operators of all steps do not stay in the cache. Where they do it may still be faster, as
oneDNN lays out filters for one workspace and not for one in each step, and its products may lie where others read
them. Other rules go by it before, so each way has its turn at all rules, and the two are timed with all that these
leave around the loop.
"""

import copy
from typing import Sequence

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import loop_trial, passes
from caffe2_recurrent.rewriting.rule import Rule
from caffe2_recurrent.rewriting.rules.backward_loop import BackwardLoop
from caffe2_recurrent.rewriting.steps import step_counts
from caffe2_recurrent.rewriting.trials import trial

# The loop of its own must be faster by this factor.
GAIN = 1.02
AS_IT_IS, TURNED = "a workspace for each step", "a loop of its own"


def pays(loop: Loop, rules: Sequence[Rule], sizes: Sizes) -> bool:
    """Whether a trial finds that faster; the loop stays as it is."""
    is_chosen = BackwardLoop.name in loop.rules and any(True for _ in BackwardLoop().sites(loop))
    count = step_counts.operators(loop, sizes)
    if not is_chosen or not trial.are_wanted() or count is None or count >= step_counts.few(loop, sizes):
        return False
    turned = _rewritten(loop, rules, sizes, turns=True)
    if turned.gradient is None or turned.gradient.turned is None:
        return False
    candidates = {AS_IT_IS: _rewritten(loop, rules, sizes, turns=False), TURNED: turned}
    found = loop_trial.seconds_with_surroundings(loop, candidates, sizes)
    if isinstance(found, str):
        return count >= step_counts.FEW
    return GAIN * found[TURNED].step < found[AS_IT_IS].step


def _rewritten(loop: Loop, rules: Sequence[Rule], sizes: Sizes, turns: bool) -> Loop:
    candidate = copy.deepcopy(loop)
    candidate.turns = turns
    # To which rules add what they make.
    passes.apply_all(rules, candidate, copy.deepcopy(sizes), even_if_slower=False)
    return candidate
