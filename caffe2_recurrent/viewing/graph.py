"""The drawing of loops as a value: nodes, edges and clusters, each with its role; nothing here knows how to draw."""

import enum
from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Tuple


class Role(enum.Enum):
    """What a node stands for; the value is what the legend says."""

    OPERATOR = "operator"
    SEQUENCE = "sequence"
    STATE = "state"
    REFERENCE = "reference"
    KEPT = "kept for the backward step"
    COMPUTED_AGAIN = "computed again"
    GRADIENT = "gradient"
    VALUE = "other blob"


class Kind(enum.Enum):
    """What an edge stands for; the value is what the legend says."""

    FLOW = "forward pass"
    TIME = "to the next step"
    KEPT = "kept"
    BACK = "backward pass"
    TIME_BACK = "to the step before"


class Line(NamedTuple):
    """A line of a node: an operator's type or a blob's short name, and what is said about it in small print."""

    text: str
    small: str


class Node(NamedTuple):
    """An operator, or one or more `blobs`, by their full names.

    `key` is unique in the graph, `cluster` the key of a cluster.
    """

    key: str
    cluster: str
    role: Role
    lines: Tuple[Line, ...]
    blobs: Tuple[str, ...]


class Edge(NamedTuple):
    tail: str
    head: str
    kind: Kind


class Cluster(NamedTuple):
    """`parent` is the key of the cluster around it, None for the outermost."""

    key: str
    parent: Optional[str]
    label: str


@dataclass(frozen=True)
class Graph:
    title: str
    clusters: Tuple[Cluster, ...]
    nodes: Tuple[Node, ...]
    edges: Tuple[Edge, ...]

    @property
    def roles(self) -> List[Role]:
        """Those that occur, in the order of `Role`."""
        found = {node.role for node in self.nodes}
        return [role for role in Role if role in found]

    @property
    def kinds(self) -> List[Kind]:
        """Those that occur, in the order of `Kind`."""
        found = {edge.kind for edge in self.edges}
        return [kind for kind in Kind if kind in found]
