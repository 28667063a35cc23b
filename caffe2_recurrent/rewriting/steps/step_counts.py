"""How many operators all steps of a loop have together, and how many of them are few."""

from typing import Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.trials import trial

# Fewer operators and links stay in the cache from run to run, and small steps are faster as they were, or written out.
FEW = 1000
# With states of so many elements operators do little beside being there, so that steps may be faster written out even
# where they do not stay there; a trial can tell. A loop that is not trained has them in a few workspaces, and loses to
# that later. The net gets about 100 bytes longer by each.
SMALL = 1024
FEW_OF_SMALL, FEW_OF_SMALL_FORWARD = 4000, 2400


def operators(loop: Loop, sizes: Sizes) -> Optional[int]:
    """Those of all steps, with their links; None if the number of steps is not known."""
    steps = sizes.steps(loop)
    return None if steps is None else steps * (sum(map(len, loop.steps)) + len(loop.all_links))


def elements(loop: Loop, sizes: Sizes) -> Optional[int]:
    """N times D of the largest state, if N and some D are known; a state that no step reads is none."""
    written = loop.written
    read = {link.outer for link in loop.links if link.inner not in written}
    shapes = (sizes.shape(state.outer_initial) for state in loop.states if state.outer_states in read)
    batch, size = sizes.batch(loop), max((shape[-1] for shape in shapes if shape), default=None)
    return None if batch is None or size is None else batch * size


def few(loop: Loop, sizes: Sizes) -> int:
    """How many are so few that steps may be written out."""
    found = elements(loop, sizes)
    if not trial.are_wanted() or found is None or found > SMALL:
        return FEW
    return FEW_OF_SMALL_FORWARD if loop.gradient is None else FEW_OF_SMALL
