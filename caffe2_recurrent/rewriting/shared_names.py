"""Names of their own for the blobs that all steps of a rewritten loop share.

A loop's step workspaces outlive its operator, and so does the workspace of what steps share, which they see when they
look for a blob of their own that is not there yet: what one net shares under a name, a later one cannot keep in each
step under that name. So a loop that has been rewritten, one that has not, and one for another size, which keep and
share other blobs, can run in one workspace only if they call them by other names.

Source: sharedBlobsWs in caffe2/operators/rnn/recurrent_network_op.h.
"""

from typing import Dict, List

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.rewriting.onednn import ON_CPU
from caffe2_recurrent.wiring import Link

SHARED, KEPT = "_shared", "_kept"
ENGINES = ON_CPU.format("", "")


def set_apart(loop: Loop) -> None:
    """Rename what steps share, and what they do not share any more, in both steps."""
    written = {blob for operators in loop.steps for operator in operators for blob in operator.output}
    shared = [blob for blob in loop.shared if blob in written]
    of_engine = [blob for blob in loop.shared if ENGINES in blob and blob not in written]
    names = {blob: loop.names.new(blob + SHARED) for blob in shared if not blob.endswith(SHARED)}
    names.update({blob: loop.names.new(blob + KEPT) for blob in loop.shared_before if blob not in loop.shared})
    # What nothing writes any more is left out.
    loop.shared[:] = [names.get(blob, blob) for blob in shared] + [_of_engine(blob, names) for blob in of_engine]
    loop.links[:] = _renamed(loop.links, names)
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


def _of_engine(blob: str, names: Dict[str, str]) -> str:
    """A blob that the engine names after one that has another name now."""
    named_after, mark, kind = blob.partition(ENGINES)
    return names.get(named_after, named_after) + mark + kind


def _renamed(links: List[Link], names: Dict[str, str]) -> List[Link]:
    return [link._replace(inner=names.get(link.inner, link.inner)) for link in links]
