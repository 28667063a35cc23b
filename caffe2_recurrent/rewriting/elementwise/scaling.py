"""A scale and a shift of what a step has computed, with vectors that are the same in all steps: shift + scale * G."""

from typing import Iterable, Optional, Sequence

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.rewriting.emit import is_aten


def scalings(loop: Loop) -> Iterable[int]:
    """The positions of operators `addcmul(shift, G, scale)`, be the shift and the scale vectors or not."""
    for position, operator in enumerate(loop.operators):
        # With a value it scales once more.
        if is_aten(operator, "addcmul") and argument(operator, "value") is None:
            yield position


def why_not_by_vectors(
    loop: Loop, position: int, sizes: Sizes, others: Sequence[str] = (), columns: Optional[int] = None
) -> Optional[str]:
    """Why the operator at `position` may do something else than scale and shift columns.

    As many as `others`, which must be vectors too, have numbers; `columns`, where these are known.
    """
    shift, _, scale = loop.operators[position].input
    if not loop.references.issuperset([shift, scale]):
        return "what it is scaled with is not the same in all steps"
    shapes = sizes.made_by(loop.before)
    for blob in (scale, shift, *others):
        if len(shapes.get(blob, ())) != 1:
            return "'{}' is not known to be a vector; give shapes".format(blob)
        if shapes[blob] != shapes[scale]:
            return "'{}' is not as long as '{}': {} and {}".format(blob, scale, *shapes[blob], *shapes[scale])
    if columns is not None and shapes[scale] != (columns,):
        return "'{}' has {} numbers for {} columns".format(scale, *shapes[scale], columns)
    return None


def why_not_weights(rows: int, columns: int) -> Optional[str]:
    """Why a scale had better stay off weights `[M, columns]`, which each run scales to save passes over rows of M."""
    if rows < columns:
        return "with {} rows in the sequence, weights of {} columns cost more to scale".format(rows, columns)
    return None
