"""Putting a graph together, node by node and edge by edge."""

from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import string
from caffe2_recurrent.viewing.graph import Cluster, Edge, Graph, Kind, Line, Node, Role
from caffe2_recurrent.viewing.operator_text import type_text
from caffe2_recurrent.viewing.short_names import common_scope, short_names

OUTER = "outer"


class Parts:
    """The clusters, nodes and edges so far. A node's lines are full names until `graph` is called."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._clusters: List[Cluster] = []
        self._scopes: Dict[str, Tuple[str, ...]] = {}
        self._nodes: Dict[str, Node] = {}
        self._edges: Dict[Edge, None] = {}

    def cluster(self, key: str, label: str, scopes: Tuple[str, ...]) -> None:
        """A cluster in the outer one, with the scopes that the names in it are short of."""
        self._clusters.append(Cluster(key, OUTER, label))
        self._scopes[key] = scopes

    def operator(self, key: str, cluster: str, operator: caffe2_pb2.OperatorDef) -> str:
        kind = string(operator, "operator", "") if operator.type == "ATen" else ""
        self._nodes[key] = Node(
            key, cluster, Role.OPERATOR, (Line(" ".join([type_text(operator), kind]).rstrip(), ""),), ()
        )
        return key

    def blob(self, key: str, cluster: str, role: Role, blob: str, small: str = "") -> str:
        """A node of a cluster; one that is there already is changed only if its role said nothing."""
        known = self._nodes.get(key)
        if known is None or known.role is Role.VALUE:
            self._nodes[key] = Node(key, cluster, role, (Line(blob, small),), (blob,))
        return key

    def outer(self, blob: str, role: Role, small: str = "") -> str:
        """The node of a blob of the outer net, of which there is one."""
        return self.blob(outer_key(blob), OUTER, role, blob, small)

    def outer_roles(self) -> Dict[str, Role]:
        """The blobs of the outer net that are in the graph."""
        return {node.blobs[0]: node.role for node in self._nodes.values() if node.cluster == OUTER and node.blobs}

    def edge(self, tail: str, head: str, kind: Kind) -> None:
        self._edges[Edge(tail, head, kind)] = None

    def graph(self) -> Graph:
        """All of it, with short names, and blobs that the same operators read and write in one node."""
        scopes_of_loops = list(dict.fromkeys(self._scopes.values()))
        every = [scope for scopes in scopes_of_loops for scope in scopes]
        # Layers have equal names in scopes of their own.
        around = scopes_of_loops[0] if len(scopes_of_loops) == 1 else (common_scope(every),)
        without = " and ".join(filter(None, dict.fromkeys(around)))
        title = self._title + (", names without {}".format(without) if without else "")
        clusters = [Cluster(OUTER, None, title), *self._clusters]
        nodes = []
        for cluster in clusters:
            members = [node for node in self._nodes.values() if node.cluster == cluster.key]
            shown = short_names(
                (blob for node in members for blob in node.blobs), self._scopes.get(cluster.key, around), every
            )
            nodes += [node._replace(lines=tuple(_shown(line, shown) for line in node.lines)) for node in members]
        return Graph(self._title, tuple(clusters), *_merged(nodes, list(self._edges)))


def _shown(line: Line, shown: Mapping[str, str]) -> Line:
    return line._replace(text=shown.get(line.text, line.text))


def outer_key(blob: str) -> str:
    return "{} blob {}".format(OUTER, blob)


def _merged(nodes: Iterable[Node], edges: Sequence[Edge]) -> Tuple[Tuple[Node, ...], Tuple[Edge, ...]]:
    """Blobs with the same role and edges become one node."""
    around: Dict[str, List[Tuple[object, ...]]] = {}
    for edge in edges:
        around.setdefault(edge.tail, []).append(("to", edge.head, edge.kind))
        around.setdefault(edge.head, []).append(("from", edge.tail, edge.kind))
    groups: Dict[object, List[Node]] = {}
    for node in nodes:
        alike = (node.cluster, node.role, frozenset(around.get(node.key, ())))
        groups.setdefault(alike if node.blobs else node.key, []).append(node)
    place = {node.key: group[0].key for group in groups.values() for node in group}
    merged = [
        group[0]._replace(
            lines=tuple(line for node in group for line in node.lines),
            blobs=tuple(blob for node in group for blob in node.blobs),
        )
        for group in groups.values()
    ]
    moved = (edge._replace(tail=place[edge.tail], head=place[edge.head]) for edge in edges)
    return tuple(merged), tuple(dict.fromkeys(moved))
