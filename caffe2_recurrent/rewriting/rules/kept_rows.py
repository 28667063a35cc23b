"""Rows of steps that are written out, in memory that stays from run to run."""

from typing import Dict, Iterable, Optional, Sequence

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import row_memory, unchanged_weights, unrolled
from caffe2_recurrent.rewriting.products import row_biases
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS


class KeptRows(Rule):
    """steps, written out for one sequence: rows of X;  the operators of the steps;  values of a state from its rows

    =>  in the first run: memory for X and for the values of the state, and views of their rows
        X copied there;  the operators of the steps, which write to the rows;  the memory shown as the values

    Sequences are those whose rows are the biases of products, as that of an LSTM's gates is. It is for weights that
    stay for good (`constant_weights`), and where something is made of them: the first run has to be told for that
    anyway. A copy takes less than to take a sequence apart, and a view next to nothing.
    """

    name = "kept_rows"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.unrolled is not None and not loop.unrolled.memory:
            yield Site("rows", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.unrolled is not None
        if loop.gradient is not None:
            return "it is trained, and its weights change from run to run"
        if Keeping.FOR_GOOD not in loop.may_keep:
            return "its weights may be others in a later run"
        if not loop.unrolled.is_for_one:
            return "the number of sequences may be another in a later run"
        if not unchanged_weights.found(loop, sizes):
            return "nothing is made of weights in its first run"
        if not _shapes(loop, sizes):
            return "of no sequence and no state are the sizes known"
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.unrolled is not None
        states = {state.outer_states for state in unrolled.states(loop)}
        for outer, shape in _shapes(loop, sizes).items():
            first = int(outer in states)
            rows = [unrolled.row_of(loop, outer, row + first) for row in range(loop.unrolled.steps)]
            loop.unrolled.memory[outer] = row_memory.add(loop, outer, rows, shape)


def _shapes(loop: Loop, sizes: Sizes) -> Dict[str, Sequence[int]]:
    """What rows of which memory is to stay look like to the steps, by their outer blobs."""
    assert loop.unrolled is not None
    found: Dict[str, Sequence[int]] = {}
    for outer in row_biases.of_sequences(loop):
        shape = sizes.shape(outer)
        if shape is not None and len(shape) == DIMENSIONS:
            found[outer] = [shape[-1]]
    for state in unrolled.states(loop):
        outer = state.outer_states
        written = {link.inner for link in loop.links if link.outer == outer and link.offset == 1}
        is_joined = any(alias.outer_states == outer and alias.offset == 1 for alias in loop.aliases)
        if is_joined and outer not in unrolled.whole(loop) and written.isdisjoint(loop.unrolled.shapeless):
            found[outer] = [1, 1, loop.unrolled.columns[outer]]
    return found
