"""What a loop is made of beside its operators, and what is known of it: values, each with what it stands for.

`inner_X` is a name in the step nets, `outer_X` one in the net around them.
"""

import enum
from dataclasses import dataclass, field
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

from caffe2.proto import caffe2_pb2


class Keeping(enum.IntFlag):
    """What may outlive the operators that make it: filters that oneDNN lays out, for the steps of a run
    (`kept_filters.py`); what is made of weights, for other runs (`unchanged_weights.py`), or for all others, whatever
    becomes of the weights; what oneDNN has planned for a number of threads, where plans depend on that
    (`onednn_convolutions.py`); and that number, which is set in front of the loop, for steps that run in the same
    thread (`thread_numbers.py`).
    """

    NOTHING = 0
    FILTERS = 1
    WEIGHTS = 2
    PLANS = 4
    NUMBER = 8
    FOR_GOOD = 16


class Parameter(NamedTuple):
    """A reference whose gradient the gradient operator adds up over the steps."""

    outer: str
    inner_gradient: str
    outer_gradient: str


class State(NamedTuple):
    """`outer_states` `[T + 1, N, D]`, whose first slice the engine fills with `outer_initial`."""

    outer_states: str
    outer_initial: str


class StateGradient(NamedTuple):
    """The gradient of a state `[T + 1, N, D]`. `incoming` and `outgoing` are what a backward step calls those of the
    new and of the old state, `of_all` and `of_last` the gradients from outside of all values and of the last one.
    """

    outer: str
    of_initial: str
    incoming: str
    outgoing: str
    of_all: Optional[str]
    of_last: Optional[str]


class Carried(NamedTuple):
    """The gradient of a state that no link shows: the outer blob that is `incoming` and `outgoing` has what the step
    before has left there. `shape` is the outer blob of its shape, `[1, N, D]`.
    """

    of: StateGradient
    shape: str


class Turned(NamedTuple):
    """What a backward pass needs beside the backward step to be a loop of its own, see `backward_pass.py`: outer blobs.

    `last_step` is T - 1, `zeros` are initial gradients by the state. `memory` is to hold the gradient of the sequence,
    unless the loop has it already, and `shown` the blob whose memory has it, if that is neither's. `carried` are the
    gradients of some states, by the state.
    """

    last_step: str
    zeros: Dict[str, str]
    memory: Optional[State]
    carried: Dict[str, Carried]
    shown: Optional[str] = None


class RowBiases(NamedTuple):
    """Where products have rows of other blobs for their biases, see `row_biases.py`.

    `added` are, by the position of a product in the step, the positions of the Sums that add a row to it. `outgoing`
    are, by the outer gradient of a state, the positions of the products in the backward step that give it.
    """

    added: Dict[int, int]
    outgoing: Dict[str, int]


class RowMemory(NamedTuple):
    """Memory of which rows are views, see `row_memory.py`: an outer blob; for a sequence, zeros as long as a row, if it
    is not in it already when the steps begin."""

    blob: str
    zeros: str = ""
    is_full: bool = False


class Unrolled(NamedTuple):
    """`condition`, an outer blob, says whether there are the `steps` that a loop is written out for, see `unrolled.py`.

    `columns` are those of the states, by their outer blobs. `shapeless` are blobs of the steps that are linked and may
    have been written in another shape than that of a slice. `biases` are for one sequence alone. `memory` has, by their
    outer blobs, that of which rows are views (`row_memory.py`). In a chain each operator waits for the one before it.
    """

    steps: int
    condition: str
    columns: Dict[str, int]
    shapeless: FrozenSet[str]
    biases: RowBiases
    memory: Dict[str, RowMemory]
    is_chain: bool = False

    @property
    def is_for_one(self) -> bool:
        """Whether there must be one sequence."""
        return bool(self.biases.added or self.biases.outgoing)


@dataclass
class Surroundings:
    """What the net around a loop does that concerns it; `surroundings.py` finds that.

    `products` are operators of the net, by their positions, that make a sequence of the loop, or what another one of
    them reads, or continue from gradients of these, each in a list of what takes its place; `sources` are, by the
    sequence, those of them that make one for this loop alone and may as well run right in front of it, `sinks` the
    positions of those that continue from the gradient just as the loop leaves it, and `ready` of those among these
    whose other inputs are there by then. `of_references` are further ones, in the same way: they make what steps read
    by its own name, or continue from gradients of that. `laying_out` are operators that an earlier rewriting put there
    to lay out weights for oneDNN. `busy` are the outer blobs that other operators in front of the gradient operator
    read or write, `read_outside` those that something else than the loop may read, `written_outside` outputs of the
    loop whose memory something else writes to, `fed` blobs that operators of the net read and none writes. `net_frees`:
    the net lets go of blobs once nothing reads them any more. `is_in_order`: it runs one operator after the other, in
    the thread that calls it. `has_company`: it may run another loop at the same time.
    """

    products: Dict[int, List[caffe2_pb2.OperatorDef]] = field(default_factory=dict)
    of_references: Dict[int, List[caffe2_pb2.OperatorDef]] = field(default_factory=dict)
    sources: Dict[str, int] = field(default_factory=dict)
    sinks: Set[int] = field(default_factory=set)
    ready: Set[int] = field(default_factory=set)
    laying_out: List[caffe2_pb2.OperatorDef] = field(default_factory=list)
    busy: Set[str] = field(default_factory=set)
    read_outside: Set[str] = field(default_factory=set)
    written_outside: Set[str] = field(default_factory=set)
    fed: FrozenSet[str] = frozenset()
    net_frees: bool = False
    is_in_order: bool = False
    has_company: bool = False


@dataclass
class Known:
    """What rules have found out, or know because they did it, and what they leave does not tell any more.

    `rows` are blobs of both steps that are `[1, N, k]`, and `columns` says k for some that steps compute. `overwritten`
    maps blobs of the step to backward blobs of the same shape that may take their memory. `of_shape` are outer blobs
    for which only the shape of a sequence counts. `always_rows` are blobs `[1, N, k]`, with k, of whose shape
    the operators that write them do not tell: constants outside, what steps carry, products by oneDNN.
    """

    rows: Set[str] = field(default_factory=set)
    columns: Dict[str, int] = field(default_factory=dict)
    overwritten: Dict[str, str] = field(default_factory=dict)
    of_shape: Set[str] = field(default_factory=set)
    always_rows: Dict[str, int] = field(default_factory=dict)


class Original(NamedTuple):
    """The blobs that steps shared, and those that were linked, before anything was rewritten."""

    shared: Tuple[str, ...] = ()
    linked: FrozenSet[str] = frozenset()
