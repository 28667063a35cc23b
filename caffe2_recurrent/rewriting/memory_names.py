"""Names of their own for blobs of a rewritten loop whose memory is of another kind than it was.

A loop's step workspaces outlive its operator. A blob there is kept by each step, shared by all steps, linked to a slice
of an outer blob, or a view of another blob; and what one net has made of it, the next net finds. What was shared
cannot be kept by each step under that name, and who writes to what was linked, or a view, writes to what it still
points to, which may be freed. So a loop that has been rewritten, one that has not, and one for another size can
run in one workspace only if a name tells the kind of memory.

Source: sharedBlobsWs and links in caffe2/operators/rnn/recurrent_network_op.h.
"""

from typing import Dict, List, Sequence

from caffe2_recurrent.blob_names import KEPT, LINKED, SHARED, VIEW
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.engine_blobs import is_of_engine, renamed
from caffe2_recurrent.rewriting.steps.columns import is_view
from caffe2_recurrent.wiring import Link


def set_apart(loop: Loop) -> None:
    """Rename what is of another kind than when the loop was read, or may be in another net, in both steps."""
    written = {blob for operators in loop.steps for operator in operators for blob in operator.output}
    shared = [blob for blob in loop.shared if blob in written]
    of_engine = [blob for blob in loop.shared if is_of_engine(blob) and blob not in written]
    endings = _endings(loop, shared)
    names = {blob: loop.names.new(blob + end) for blob, end in endings.items() if not blob.endswith(end)}
    # What nothing writes any more is left out.
    loop.shared[:] = [names.get(blob, blob) for blob in shared] + [renamed(blob, names) for blob in of_engine]
    loop.links[:] = _renamed(loop.links, names)
    if loop.unrolled is not None:
        shapeless = frozenset(names.get(blob, blob) for blob in loop.unrolled.shapeless)
        loop.unrolled = loop.unrolled._replace(shapeless=shapeless)
    nets = [loop.net]
    if loop.gradient is not None:
        loop.gradient.links[:] = _renamed(loop.gradient.links, names)
        loop.gradient.backward_links[:] = _renamed(loop.gradient.backward_links, names)
        nets.append(loop.gradient.net)
    for operators in loop.steps:
        for operator in operators:
            for blobs in (operator.input, operator.output):
                blobs[:] = [names.get(blob, blob) for blob in blobs]
    for net in nets:
        for declared in (net.external_input, net.external_output):
            declared[:] = [names.get(blob, blob) for blob in declared]


def _endings(loop: Loop, shared: Sequence[str]) -> Dict[str, str]:
    """What tells the kind, for blobs of which it has to be told."""
    steps = [*loop.steps, loop.net.op, *([loop.gradient.net.op] if loop.gradient is not None else [])]
    # What no step computes, now or before, is linked in all of them.
    computed = {blob for operators in steps for operator in operators for blob in operator.output}
    views = [blob for operators in loop.steps for operator in filter(is_view, operators) for blob in operator.output]
    linked = {link.inner for link in loop.all_links}
    endings = {blob: KEPT for blob in (*loop.original.shared, *loop.original.linked) if blob not in linked}
    endings.update(dict.fromkeys(shared, SHARED))
    endings.update(dict.fromkeys(linked & computed - loop.original.linked, LINKED))
    endings.update(dict.fromkeys(views, VIEW))
    return endings


def _renamed(links: List[Link], names: Dict[str, str]) -> List[Link]:
    return [link._replace(inner=names.get(link.inner, link.inner)) for link in links]
