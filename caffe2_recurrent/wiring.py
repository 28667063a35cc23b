"""Links and aliases as values, and the operator arguments that say them.

A link makes a step-net blob a view into an outer blob, at (step + offset). An alias makes an outer blob a view into a
state blob from `offset` on; a negative offset counts from its end. Source: RecurrentNetworkOp's `extractLinks` and
`applyOffsetAlias`.
"""

from typing import Any, Dict, List, NamedTuple, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.step_net import StepNet

STEP_WORKSPACES = "step_workspaces"


class Link(NamedTuple):
    inner: str
    outer: str
    offset: int


class Alias(NamedTuple):
    outer_states: str
    outer_output: str
    offset: int


class OuterState(NamedTuple):
    """The outer blobs of a state: `[T + 1, N, D]` with all its values, and what callers see of it."""

    states: str
    all_steps: str
    last_step: str


def outer_states(step_net: StepNet, scope: str, suffix: str) -> List[OuterState]:
    return [
        OuterState(
            "{}/{}_states".format(scope, state.inner_input),
            "{}_all{}".format(state.inner_output, suffix),
            "{}_last{}".format(state.inner_output, suffix),
        )
        for state in step_net.states
    ]


def forward_links(step_net: StepNet, outer: Sequence[OuterState]) -> List[Link]:
    """state input -> slice t, state output -> slice t + 1 of the state blob; sequence -> slice t."""
    links = []
    for state, blobs in zip(step_net.states, outer):
        # The executor finds the step's successor in time by offset 0 standing before offset 1.
        links.append(Link(state.inner_input, blobs.states, 0))
        links.append(Link(state.inner_output, blobs.states, 1))
    return links + [Link(sequence.inner, sequence.outer, 0) for sequence in step_net.sequences]


def aliases(outer: Sequence[OuterState]) -> List[Alias]:
    """state blob from slice 1 on -> `_all`, its last slice -> `_last`."""
    found = []
    for blobs in outer:
        found.append(Alias(blobs.states, blobs.all_steps, 1))
        found.append(Alias(blobs.states, blobs.last_step, -1))
    return found


def link_arguments(prefix: str, links: Sequence[Link]) -> Dict[str, Any]:
    return {
        prefix + "_internal": [link.inner for link in links],
        prefix + "_external": [link.outer for link in links],
        prefix + "_offset": [link.offset for link in links],
    }


def alias_arguments(found: Sequence[Alias]) -> Dict[str, Any]:
    return {
        "alias_src": [alias.outer_states for alias in found],
        "alias_dst": [alias.outer_output for alias in found],
        "alias_offset": [alias.offset for alias in found],
    }


def own_prefix(operator: caffe2_pb2.OperatorDef) -> str:
    """What the loop's own outer blobs start with: the last output of its forward operator is `<scope>/step_workspaces`.

    Empty where somebody else has given that blob another name.
    """
    return prefix_of(operator.output[-1])


def prefix_of(workspaces: str) -> str:
    """As `own_prefix`, from the name of the step workspaces."""
    return workspaces[: -len(STEP_WORKSPACES)] if workspaces.endswith(STEP_WORKSPACES) else ""
