"""`draw`: a picture of loops in a file."""

import os
from typing import Any, List, Mapping, Optional, Sequence, Union

from caffe2_recurrent.arguments import Blob, read_flag
from caffe2_recurrent.files import read_path, write_bytes
from caffe2_recurrent.loops.selection import AnyLoop, check_loop, find_loop
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.dot import LANDSCAPE, PORTRAIT, Page, dot_text, likely_page
from caffe2_recurrent.viewing.graph import Graph
from caffe2_recurrent.viewing.loop_graph import loop_graph
from caffe2_recurrent.viewing.source import NetOrOperator, SeenLoop, Source, read_source

TEXT = (".dot", ".gv")
RENDERED = (".svg", ".png", ".pdf")
# Dots and margins in inches; without the latter graphviz makes a page of PDF larger than a sheet.
SETTINGS = {".png": {"dpi": "150"}, ".pdf": {"margin": "0.35"}}
WITHOUT_GRAPHVIZ = "a path that ends in .dot or .gv is written without it"


def draw(
    net_or_op: NetOrOperator,
    path: Union[str, "os.PathLike[str]"],
    loop: AnyLoop = None,
    shapes: Optional[Mapping[Blob, Sequence[int]]] = None,
    backward: bool = True,
) -> str:
    """Draw the loops of a net on a page: outer net, step, backward step, and the links through time.

    The step runs down the page, and beside it the backward step runs up. A colour stands for each role, and a legend
    says which. `[t]`, `[t + 1]`, `[0]`, `[1:]` at a line say which slices of an outer blob a step's blob or an output
    is. Of the outer net there is what the loops read and write, with the operators next to them. Names are short of
    the loop's scope; an SVG shows them in full where the mouse points.

    Args:
        net_or_op: a `ModelHelper`, a `core.Net`, a `NetDef`, or a single RecurrentNetwork or
            RecurrentNetworkGradient operator.
        path: the file. Its ending says in what form: .svg, .png or .pdf, for which the package graphviz and its
            program `dot` are needed, fit on a page of DIN A4; .dot or .gv is the text in graphviz's language, for
            which nothing is needed.
        loop: one loop only: its number, from 0 on, or one of its outputs. None: all of them.
        shapes: as for `describe`; known sizes are in the drawing.
        backward: False leaves out the backward steps.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments.
        ImportError: the package graphviz is missing.
        RuntimeError: its program `dot` is missing. In all cases the file is as it was.

    Source of links and slices: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h.
    """
    types, values = Problems("draw"), Problems("draw")
    file = _file(path, types, values)
    backward = read_flag("backward", backward, types)
    check_loop(loop, types)
    source = read_source(net_or_op, shapes, types, values)
    loops = _chosen(source, loop, values)
    values.raise_if_any()
    graph = loop_graph(source, loops, backward)
    ending = _ending(file)
    write_bytes(file, dot_text(graph, likely_page(graph)).encode() if ending in TEXT else _rendered(graph, ending))
    return file


def _file(path: Any, types: Problems, values: Problems) -> str:
    file = read_path(path, types)
    if not types and _ending(file) not in (*RENDERED, *TEXT):
        values.add("path must end in {} or {}; got '{}'", ", ".join((*RENDERED, *TEXT[:-1])), TEXT[-1], file)
    return file


def _ending(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _chosen(source: Source, loop: AnyLoop, values: Problems) -> List[SeenLoop]:
    loops = list(source.loops)
    if loop is None or not loops:
        return loops
    position = find_loop(source.name, [seen.structure.outer_outputs for seen in loops], loop, values)
    return [] if position is None else [loops[position]]


def _rendered(graph: Graph, ending: str) -> bytes:
    try:
        import graphviz
    except ImportError as error:
        raise ImportError(
            "draw needs the package graphviz for {}: pip install 'caffe2_recurrent[draw]'; {}".format(
                ending, WITHOUT_GRAPHVIZ
            ),
            name="graphviz",
        ) from error

    def rendered(kind: str, page: Optional[Page] = None, **settings: str) -> bytes:
        content: bytes = graphviz.pipe("dot", kind, dot_text(graph, page, **settings).encode())
        return content

    try:
        # In the form "plain", the first line is `graph scale width height`.
        width, height = map(float, rendered("plain").split()[2:4])
        page = max((LANDSCAPE, PORTRAIT), key=lambda page: min(page.width / width, page.height / height))
        return rendered(ending[1:], page, **SETTINGS.get(ending, {}))
    except graphviz.ExecutableNotFound as error:
        raise RuntimeError(
            "draw needs graphviz's program dot for {}, and it is not on the PATH: apt install graphviz, or "
            "https://graphviz.org/download; {}".format(ending, WITHOUT_GRAPHVIZ)
        ) from error
