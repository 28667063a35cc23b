"""What a loop consists of, as a plain value.

    Loop (loops/loop.py) -> Structure -> text, graph

`inner_X` is a name in the step nets, `outer_X` one in the net around them.
"""

from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operators import LINK, read_before_written

Operators = Sequence[caffe2_pb2.OperatorDef]


class View(NamedTuple):
    """A step-net blob that is a view: slices `[t + offset, t + offset + window)` of an outer blob.

    Where an operator of the step makes it, `number` is the blob that it reads in place of t.
    """

    inner: str
    outer: str
    offset: int
    window: int
    number: str = "t"

    @property
    def places(self) -> str:
        """`[t]`, `[t + 1]`; with a window of 3, `[t:t + 3]`."""
        ends = (self.offset, self.offset + self.window)
        start, end = ("{} + {}".format(self.number, step) if step else self.number for step in ends)
        return "[{}]".format(start if self.window == 1 else "{}:{}".format(start, end))


class SequenceInput(NamedTuple):
    """A sequence `[T, N, ...]` of which the step sees a slice; `outer_gradient` is None if it gets none."""

    view: View
    outer_gradient: Optional[str]


class State(NamedTuple):
    """`outer_states` `[T + 1, N, D]`, of which the step reads `before` and writes `after`.

    The engine fills its first slice with `outer_initial`, whose gradient is `outer_gradient`, None if it gets none.
    `outer_states_gradient` holds the gradients of all values, as the backward step reads and writes them.
    """

    outer_states: str
    outer_initial: str
    before: Tuple[View, ...]
    after: Tuple[View, ...]
    outer_gradient: Optional[str]
    outer_states_gradient: Optional[str]


class Reference(NamedTuple):
    """An outer blob that every step reads by its name, and its gradient, None if it gets none.

    `inner_gradient` is what one step adds to it.
    """

    outer: str
    inner_gradient: Optional[str]
    outer_gradient: Optional[str]


class Output(NamedTuple):
    """An output of the loop, a view of all states from `offset` on; a negative offset counts from the end.

    `receives`: whether the backward pass takes a gradient from it, None where that shows with the gradient operator
    only. `outer_gradient` is the name of that gradient, where it is known.
    """

    outer: str
    outer_states: str
    offset: int
    receives: Optional[bool]
    outer_gradient: Optional[str]

    @property
    def places(self) -> str:
        """`[1:]`, `[-1:]`."""
        return "[{}:]".format(self.offset)


class Executor(NamedTuple):
    """The settings of the RNN executor; None for the engine's own numbers."""

    enabled: bool
    threads: Optional[int]
    streams: Optional[int]


@dataclass(frozen=True)
class Backward:
    """The backward step: its operators, and the views that are made anew for it.

    `forward_views` are those of the forward step again, `views` the gradients that it reads and writes.
    `in_net` says whether the net has the gradient operator, or only the forward operator the means for one.
    """

    name: str
    operators: Tuple[caffe2_pb2.OperatorDef, ...]
    forward_views: Tuple[View, ...]
    views: Tuple[View, ...]
    executor: Executor
    in_net: bool


@dataclass(frozen=True)
class Structure:
    """One loop.

    `buffers` are blobs that the step writes to slices of an outer blob without being a state. `shared` are blobs of
    the step that lie in the workspace that all steps have in common. `outer_inputs` and `outer_outputs` are those of
    the forward operator; the last output holds the steps' workspaces, which are `workspaces_in_turn` where there is no
    backward step. `scope` is what the loop's own outer blobs begin with.

    `shown` are views that operators of the step make, as in a backward pass that `optimize` has made a loop of its own;
    `backward_pass_of` then has the step workspaces of the loop which it belongs to. Steps that are `chained` have an
    operator that runs theirs, and these wait for each other.
    """

    name: str
    step_name: str
    operators: Tuple[caffe2_pb2.OperatorDef, ...]
    sequences: Tuple[SequenceInput, ...]
    states: Tuple[State, ...]
    buffers: Tuple[View, ...]
    references: Tuple[Reference, ...]
    outputs: Tuple[Output, ...]
    timestep: str
    shared: Tuple[str, ...]
    scope: str
    executor: Executor
    workspaces_in_turn: int
    device: caffe2_pb2.DeviceOption
    outer_inputs: Tuple[str, ...]
    outer_outputs: Tuple[str, ...]
    backward: Optional[Backward]
    shown: Tuple[View, ...] = ()
    backward_pass_of: Optional[str] = None
    chained: bool = False

    @property
    def views(self) -> List[View]:
        """All views of the forward step."""
        of_states = [view for state in self.states for view in (*state.before, *state.after)]
        return [sequence.view for sequence in self.sequences] + of_states + list(self.buffers)

    @property
    def written(self) -> List[str]:
        """Outputs of a backward pass that are no views of its states: what operators of its steps write slices of."""
        if self.backward_pass_of is None:
            return []
        of_states = {output.outer for output in self.outputs}
        return [blob for blob in self.outer_outputs[:-1] if blob not in of_states]

    @property
    def computed(self) -> List[str]:
        """What the step computes, in the order in which it does."""
        # An operator that makes a view has the blob that this is a view of among its outputs, too.
        outputs = (operator.output[:1] if operator.type == LINK else operator.output for operator in self.operators)
        return list(dict.fromkeys(blob for found in outputs for blob in found))

    @property
    def computed_again(self) -> List[str]:
        """What the backward step computes again, in the order in which it does."""
        if self.backward is None:
            return []
        forward = set(self.computed)
        again = (blob for operator in self.backward.operators for blob in operator.output)
        return list(dict.fromkeys(blob for blob in again if blob in forward))

    @property
    def read_back(self) -> List[str]:
        """What the backward step reads of that which the forward step has computed."""
        if self.backward is None:
            return []
        needed = read_before_written(self.backward.operators)
        return [blob for blob in self.computed if blob in needed]
