"""The sequence's gradient in memory that oneDNN has too, so that it need not be copied for products behind the loop."""

from typing import Iterable, List, NamedTuple, Optional, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import kept_results
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn, onednn_tensors, read_in_place
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.products.read_in_place import Copy
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.same_weights import EQUAL
from caffe2_recurrent.wiring import Link

Operators = List[caffe2_pb2.OperatorDef]


class _Memory(NamedTuple):
    """The state that holds the gradient in its slices from 1 on, and the copies that products make of that."""

    state: str
    copies: List[Copy]


class GradientInPlace(Rule):
    """a backward pass that is a loop of its own: the slices of dY are those of a state `[T + 1, N, K]`
    behind it: products over all steps, of a copy of dY that oneDNN has

    =>  before both loops, where T or N are others than in the run before: an outer blob `[T, N, K]`, and in its memory
        oneDNN's `[T N, K]`
        the slices are those of that blob;  products of what is there

    The copy takes some hundredths of the time of training, and with it the memory of dY.
    """

    name = "gradient_in_place"

    def sites(self, loop: Loop) -> Iterable[Site]:
        memory = _memory(loop)
        if memory is not None:
            assert loop.gradient is not None
            yield Site("gradient '{}'".format(loop.gradient.sequence), memory)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        missing = kept_results.missing()
        if missing:
            return "this Caffe2 has no {}, to keep its memory from run to run".format(" and ".join(missing))
        if loop.surroundings.net_frees:
            return "the net lets go of blobs that nothing reads any more, and its memory is to stay"
        for link in loop.all_links:
            if link.outer == site.where.state and link.offset != 1:
                return "'{}' is linked to another slice of it than that of the step".format(link.inner)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None and gradient.turned is not None
        state, copies = site.where
        there = loop.new_blob(gradient.sequence + "_there")
        loop.before += _made(loop, there, copies[0].width)
        loop.add_reference(shown(there))
        for links in (loop.links, gradient.links, gradient.backward_links):
            links[:] = [Link(link.inner, shown(there), 0) if link.outer == state else link for link in links]
        loop.states[:] = [other for other in loop.states if other.outer_states != state]
        loop.aliases[:] = [alias for alias in loop.aliases if alias.outer_states != state]
        loop.outputs[:] = [blob for blob in loop.outputs if blob not in (state, gradient.sequence)]
        loop.buffers.discard(state)
        gradient.turned = gradient.turned._replace(memory=None, shown=shown(there))
        for operators, names in _behind(loop):
            read_in_place.read(operators, names, {copy.blob for copy in copies}, there)


def _memory(loop: Loop) -> Optional[_Memory]:
    gradient = loop.gradient
    if gradient is None or gradient.turned is None:
        return None
    copies = [copy for operators, names in _behind(loop) for copy in read_in_place.copies(operators, names)]
    if not copies:
        return None
    if gradient.turned.memory is not None:
        return _Memory(gradient.turned.memory.outer_states, copies)
    states = [alias.outer_states for alias in loop.aliases if alias.outer_output == gradient.sequence]
    return _Memory(states[0], copies) if states else None


def _behind(loop: Loop) -> List[Tuple[Operators, Set[str]]]:
    """The operators that continue from the gradient just as the loop leaves it, and what they call it."""
    assert loop.gradient is not None
    sinks = [loop.surroundings.products[sink] for sink in sorted(loop.surroundings.sinks)]
    of_net = [(operators, read_in_place.gradients_read(operators)) for operators in sinks]
    return [(loop.after_gradient, {loop.gradient.sequence}), *of_net]


def _made(loop: Loop, there: str, width: int) -> Operators:
    """Operators that make both blobs."""
    rows = loop.add_before("Shape", loop.inputs[:1], "rows", axes=[0, 1])
    loop.known.of_shape.add(rows)
    emitter = Emitter(loop, loop.forward, there)
    onednn_tensors.add_slices(emitter, there, rows, width)
    made = onednn.in_a_net(emitter.operators, [there, shown(there)], loop)
    results = [blob for operator in made for blob in operator.output]
    seen = loop.new_blob(there + "_seen")
    return kept_results.when_changed(loop, {rows: EQUAL}, {rows: seen}, made, results, core.DataType.INT64)
