"""`describe`: the structure of loops in readable text."""

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence, Tuple

from caffe2_recurrent.arguments import Blob
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.source import NetOrOperator, SeenLoop, read_source
from caffe2_recurrent.viewing.text import loop_text


@dataclass(frozen=True, repr=False)
class Description:
    """What `describe` found: text when printed or shown, and the values behind it.

    `name` is what was described. Each of `loops` has a `structure` (roles, links, operators), `sizes`, and a `memory`:
    `memory.kept` lists what a step keeps, `memory.bytes_per_step` says how much that is.
    """

    name: str
    loops: Tuple[SeenLoop, ...]

    def __str__(self) -> str:
        heading = "{}: {} loop{}".format(self.name, len(self.loops), "" if len(self.loops) == 1 else "s")
        return "\n\n".join([heading, *map(loop_text, self.loops)])

    # So that a notebook and the interactive prompt show text, too.
    __repr__ = __str__


def describe(net_or_op: NetOrOperator, shapes: Optional[Mapping[Blob, Sequence[int]]] = None) -> Description:
    """The structure of recurrent nets as text, whoever built them: `print(describe(net))`.

    For each loop: its sequences, states, references and outputs, which of them get or pass on a gradient, what each
    step keeps for the backward pass and in how many bytes, what is computed again, how the loop runs, and the two step
    nets operator by operator. `x[t]` is the slice of `x` that step t sees; states `[T + 1, N, D]` begin with the
    initial value.

    Args:
        net_or_op: a `ModelHelper`, a `core.Net`, a `NetDef`, or a single RecurrentNetwork or
            RecurrentNetworkGradient operator.
        shapes: dimensions of the net's inputs, like `{'x': (20, 128, 40)}`. What is not given is taken from the blobs
            in the workspace, and inferred from there, without running anything; a `?` stands for what stays unknown.
            Also for blobs of the step of which Caffe2 cannot tell the size. Elements count as float32 where neither
            the workspace nor Caffe2's inference says otherwise.

    Returns:
        A `Description`: text when printed, and the values behind it.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: there is no loop, or `shapes` has blobs that no operator has, dimensions that a product cannot read,
            or a sequence of less than two; all of them.

    Source of what is kept: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h.
    """
    types, values = Problems("describe"), Problems("describe")
    source = read_source(net_or_op, shapes, types, values)
    values.raise_if_any()
    return Description(source.name, source.loops)
