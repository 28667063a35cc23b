"""Rows of steps that are written out, in memory that stays from run to run."""

from typing import Dict, Iterable, Optional, Tuple

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import row_memory, unchanged_weights, unrolled
from caffe2_recurrent.rewriting.products import fixed_rows, row_biases
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS


class KeptRows(Rule):
    """steps, written out for one sequence: rows of X;  the operators of the steps;  values of a state from its rows

    =>  in the first run: memory for X and for the values of the state, and views of their rows
        X copied there;  the operators of the steps, which write to the rows;  the memory shown as the values

    Sequences are those whose rows are the biases of products, as that of an LSTM's gates is. It is for weights that
    stay for good (`constant_weights`), and where something is made of them: the first run has to be told for that
    anyway. A copy takes less than to take a sequence apart, and a view next to nothing. What `filters_over_steps` makes
    lies in such memory already: rows are views of that, and the steps run where it has been made there.
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
        if not _sequences(loop, sizes) and not _states(loop):
            return "of no sequence and no state are the sizes known"
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.unrolled is not None
        steps = range(loop.unrolled.steps)
        for outer, size in _sequences(loop, sizes).items():
            rows = [unrolled.row_of(loop, outer, step) for step in steps]
            there = _made_there(loop, outer)
            if there is None:
                loop.unrolled.memory[outer] = row_memory.of_vectors(loop, outer, rows, size)
            else:
                memory, is_there = there
                loop.unrolled.memory[outer] = row_memory.of_product(loop, outer, rows, size, memory)
                _go_by(loop, is_there, outer)
        for outer, size in _states(loop).items():
            rows = [unrolled.row_of(loop, outer, step + 1) for step in steps]
            loop.unrolled.memory[outer] = row_memory.of_values(loop, outer, rows, size)


def _sequences(loop: Loop, sizes: Sizes) -> Dict[str, int]:
    """Those whose rows are biases, by their outer blobs, with the elements of a row."""
    shapes = {outer: sizes.shape(outer) or () for outer in row_biases.of_sequences(loop)}
    # To rows of one element rows of any number could be added.
    return {outer: shape[-1] for outer, shape in shapes.items() if len(shape) == DIMENSIONS and shape[-1] > 1}


def _made_there(loop: Loop, outer: str) -> Optional[Tuple[str, str]]:
    """The memory in which a product has made a sequence as it is, and the blob that says whether it has; None if there
    is no such memory, or another sequence matters, too."""
    if unrolled.sequences(loop) != [outer] or row_biases.of_sequences(loop)[outer] is not None:
        return None
    return fixed_rows.memory_of(loop, outer)


def _go_by(loop: Loop, condition: str, sequence: str) -> None:
    """Have that decide whether the steps that are written out run, and not the numbers of steps and of sequences."""
    assert loop.unrolled is not None
    unread = {loop.unrolled.condition}
    for operator in reversed(loop.before[:]):
        if not unread.isdisjoint(operator.output):
            loop.drop_before(operator)
            unread.update(blob for blob in operator.input if blob != sequence)
    loop.unrolled = loop.unrolled._replace(condition=condition)


def _states(loop: Loop) -> Dict[str, int]:
    """Those of which all new values are put together, and nothing else is, likewise."""
    assert loop.unrolled is not None
    joined = {alias.outer_states for alias in loop.aliases if alias.offset == 1} - unrolled.whole(loop)
    shapeless = {link.outer for link in loop.links if link.inner in loop.unrolled.shapeless}
    of_states = [state.outer_states for state in unrolled.states(loop)]
    return {outer: loop.unrolled.columns[outer] for outer in of_states if outer in joined - shapeless}
