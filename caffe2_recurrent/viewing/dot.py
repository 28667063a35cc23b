"""Graph -> DOT text, laid out for a page.

The forward pass runs down the page and the backward pass up beside it, so that a gradient stands next to what it is the
gradient of. What a step keeps stands at one height on both sides.
Source: https://graphviz.org/doc/info/lang.html.
"""

import html
import re
from typing import Iterator, List, Mapping, NamedTuple, Optional

from caffe2_recurrent.viewing.graph import Cluster, Edge, Graph, Kind, Line, Node, Role

FONT = "Helvetica,Arial,sans-serif"
SIZE, SMALL = 10, 9
SMALL_COLOUR = "#505050"
LONGEST_LINE = 22

FILL = {
    Role.OPERATOR: "#3f4a5a",
    Role.SEQUENCE: "#c9dff5",
    Role.STATE: "#cdebc5",
    Role.REFERENCE: "#fff0ad",
    Role.KEPT: "#ffc98a",
    Role.COMPUTED_AGAIN: "#dccdf2",
    Role.GRADIENT: "#f8cccb",
    Role.VALUE: "#ffffff",
}
LINE = {
    Kind.FLOW: "#505050",
    Kind.TIME: "#2e8b2e",
    Kind.KEPT: "#e07b00",
    Kind.BACK: "#c0504d",
    Kind.TIME_BACK: "#c0504d",
}
BACKWARD = (Kind.BACK, Kind.TIME_BACK)
THROUGH_TIME = (Kind.TIME, Kind.TIME_BACK)
# Not in XML, and so not in a label.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Page(NamedTuple):
    """Width and height in inches, without margins."""

    width: float
    height: float


# DIN A4.
PORTRAIT, LANDSCAPE = Page(7.5, 10.9), Page(10.9, 7.5)


def dot_text(graph: Graph, page: Optional[Page] = None, **settings: str) -> str:
    """DOT text; what is larger than `page` is scaled down to it. `settings` are attributes of the whole graph."""
    return "".join(line + "\n" for line in _Layout(graph).lines(page, settings))


def likely_page(graph: Graph) -> Page:
    """How a page is best turned, before the layout is known: two passes beside each other are wide."""
    return LANDSCAPE if any(edge.kind in BACKWARD for edge in graph.edges) else PORTRAIT


class _Layout:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.identifiers = {node.key: "n{}".format(number) for number, node in enumerate(graph.nodes)}
        self.clusters = {node.key: node.cluster for node in graph.nodes}
        self.outermost = {cluster.key for cluster in graph.clusters if cluster.parent is None}
        of_backward = (edge for edge in graph.edges if edge.kind in BACKWARD)
        self.backward = {key for edge in of_backward for key in (edge.tail, edge.head)}

    def lines(self, page: Optional[Page], settings: Mapping[str, str]) -> Iterator[str]:
        yield "digraph {"
        yield from _settings(page, settings)
        yield "graph [labelloc=b, label=<{}>]".format(_legend(self.graph))
        for cluster in self.graph.clusters:
            if cluster.parent is None:
                yield "subgraph {} {{".format(_quoted("cluster " + cluster.key))
                yield _cluster(cluster, True)
                # graphviz 2.43 puts on the right what comes first.
                yield from self._side(cluster, True)
                yield from self._side(cluster, False)
                yield "}"
        yield from map(self._edge, self.graph.edges)
        yield "}"

    def _side(self, around: Cluster, backward: bool) -> Iterator[str]:
        """The nodes and clusters in `around` that belong to one pass, in a frame that cannot be seen."""
        yield "subgraph {} {{".format(_quoted("cluster {} side {}".format(around.key, int(backward))))
        yield 'graph [style=invis, label=""]'
        for node in self.graph.nodes:
            if node.cluster == around.key and (node.key in self.backward) == backward:
                yield self._node(node)
        for cluster in self.graph.clusters:
            members = [node for node in self.graph.nodes if node.cluster == cluster.key]
            if cluster.parent == around.key and any(node.key in self.backward for node in members) == backward:
                yield "subgraph {} {{".format(_quoted("cluster " + cluster.key))
                yield _cluster(cluster, False)
                yield from map(self._node, members)
                yield "}"
        yield "}"

    def _node(self, node: Node) -> str:
        operator = node.role is Role.OPERATOR
        look = {
            "style": "filled" if operator else "rounded,filled",
            "fillcolor": FILL[node.role],
            "fontcolor": "white" if operator else "black",
            "color": FILL[Role.OPERATOR] if operator else "#888888",
            "tooltip": ", ".join(node.blobs) or node.lines[0].text,
        }
        label = "<BR/>".join(part for line in node.lines for part in _label(line))
        return "{} [label=<{}>, {}]".format(self.identifiers[node.key], label, _attributes(look))

    def _edge(self, edge: Edge) -> str:
        look = {"color": LINE[edge.kind]}
        if edge.kind in THROUGH_TIME:
            look["penwidth"] = "2"
        if edge.kind is Kind.KEPT:
            look.update(style="dashed", penwidth="1.5")
        tail, head = self.identifiers[edge.tail], self.identifiers[edge.head]
        if self._runs_up(edge):
            tail, head = head, tail
            look["dir"] = "back"
        line = "{} -> {} [{}]".format(tail, head, _attributes(look))
        return "{{rank=same; {}; {}; {}}}".format(tail, head, line) if edge.kind is Kind.KEPT else line

    def _runs_up(self, edge: Edge) -> bool:
        """Whether the head is to stand above the tail. States stand below the step, which they enter at its head."""
        if edge.kind in THROUGH_TIME:
            return self.clusters[edge.tail] in self.outermost
        return edge.kind is Kind.BACK


def _settings(page: Optional[Page], settings: Mapping[str, str]) -> Iterator[str]:
    whole = {"rankdir": "TB", "newrank": "true", "nodesep": "0.1", "ranksep": "0.22"}
    font = {"fontname": FONT, "fontsize": str(SIZE)}
    if page is not None:
        whole["size"] = "{},{}".format(*page)
    yield "graph [{}]".format(_attributes({**whole, **font, **settings}))
    yield "node [{}]".format(
        _attributes({"shape": "box", "height": "0.2", "width": "0.3", "margin": "0.06,0.04", **font})
    )
    yield "edge [{}]".format(_attributes({"arrowsize": "0.5"}))


def _legend(graph: Graph) -> str:
    cells = [
        '<TD BGCOLOR="{}"><FONT COLOR="{}">{}</FONT></TD>'.format(
            FILL[role], "white" if role is Role.OPERATOR else "black", role.value
        )
        for role in graph.roles
    ]
    cells += [
        '<TD BORDER="0"><FONT COLOR="{}">{}</FONT></TD>'.format(
            LINE[kind], "<B>{}</B>".format(kind.value) if kind in THROUGH_TIME else kind.value
        )
        for kind in graph.kinds
    ]
    return '<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="4" COLOR="#888888"><TR>{}</TR></TABLE>'.format("".join(cells))


def _cluster(cluster: Cluster, outermost: bool) -> str:
    look = {"labelloc": "t", "labeljust": "l", "style": "rounded,filled"}
    colours = {"color": "#bbbbbb", "fillcolor": "#f6f6f6"} if outermost else {"color": "#777777", "fillcolor": "white"}
    # Each line flush left.
    label = "".join(_escape_string(line) + "\\l" for line in cluster.label.split("\n"))
    return 'graph [label="{}", {}]'.format(label, _attributes({**look, **colours}))


def _label(line: Line) -> List[str]:
    small = '<FONT POINT-SIZE="{}" COLOR="{}">{}</FONT>'.format(SMALL, SMALL_COLOUR, _escaped(line.small))
    return [_escaped(part) for part in _wrapped(line.text)] + ([small] if line.small else [])


def _wrapped(name: str) -> List[str]:
    """A long name in several lines, which end at a `_` or `/`."""
    lines = [""]
    for part in re.findall(r"[^_/]+[_/]*|[_/]+", name):
        if lines[-1].strip("_/") and len(lines[-1]) + len(part) > LONGEST_LINE:
            lines.append("")
        lines[-1] += part
    return lines


def _attributes(values: Mapping[str, str]) -> str:
    return ", ".join("{}={}".format(name, _quoted(value)) for name, value in values.items())


def _escaped(text: str) -> str:
    """As in XML, which labels between `<` and `>` are; a line break there is none of the text's."""
    return html.escape(_readable(text).replace("\n", " "))


def _quoted(text: str) -> str:
    return '"{}"'.format(_escape_string(text))


def _escape_string(text: str) -> str:
    """In these attributes graphviz replaces what a backslash begins, and what stands between `&` and `;`."""
    escaped = _readable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return escaped.replace("\n", "\\n")


def _readable(text: str) -> str:
    return CONTROL_CHARACTERS.sub("\ufffd", text)
