"""What stands around a loop in its net and belongs to it: operators that make its sequences or go on from gradients."""

import itertools
from collections import Counter
from typing import Dict, FrozenSet, Iterable, List, Mapping, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop, laid_out_when_changed
from caffe2_recurrent.loops.parts import Surroundings
from caffe2_recurrent.loops.tensor_names import changed_by, names_of_tensors, names_shown, written_by
from caffe2_recurrent.operator_arguments import net_to_read
from caffe2_recurrent.operators import GRADIENT_OPERATOR, LOOPS, SHOWING, copied, is_on_onednn

# In place they change what a tensor looks like, not what it holds.
RESHAPING = frozenset(["ExpandDims", "Reshape", "Squeeze"])
# Types of nets that run one operator after the other.
ONE_BY_ONE = ("", "simple", "simple_refcount")
# The one that lets go of blobs once nothing reads them any more.
FREEING = "simple_refcount"

Products = Mapping[int, Sequence[caffe2_pb2.OperatorDef]]


def add_surroundings(net: caffe2_pb2.NetDef, loops: Mapping[int, Loop], names: Sequence[FrozenSet[str]]) -> None:
    """Tell the loops, by the positions of their forward operators, what stands around them in their net.

    `names` are those that each operator mentions.
    """
    mentioned = Counter(itertools.chain.from_iterable(names))
    read = frozenset(blob for operator in net.op for blob in operator.input)
    written = [written_by(operator) for operator in net.op]
    fed = read.difference(*written)
    tensors = names_of_tensors(net)
    is_in_order = net.type in ONE_BY_ONE
    for position, loop in loops.items():
        products = _products(net, {link.outer for link in loop.links})
        of_references = _products(net, loop.references)
        sinks = _sinks(net, loop, products)
        others = _others(net, loop)
        loop.surroundings = Surroundings(
            products=products,
            of_references={place: made for place, made in of_references.items() if place not in products},
            sources=_sources(net, loop, position, products, mentioned, tensors),
            sinks=sinks,
            ready=_ready(net, loop, sinks, tensors),
            laying_out=_laying_out(net, position),
            busy=_busy(net, loop, position),
            read_outside=set(net.external_output).union(*(names[other] for other in others)),
            written_outside=_written_outside(net, loop, others, written, tensors),
            fed=fed,
            net_frees=net.type == FREEING,
            is_in_order=is_in_order,
            has_company=not is_in_order and len(loops) > 1,
        )


def _others(net: caffe2_pb2.NetDef, loop: Loop) -> List[int]:
    """The positions of the operators of the net that are not the loop's."""
    own = loop.outer_operators
    # To compare two loops takes long.
    return [position for position, operator in enumerate(net.op) if operator.type not in LOOPS or operator not in own]


def _written_outside(
    net: caffe2_pb2.NetDef,
    loop: Loop,
    others: Iterable[int],
    written: Sequence[Sequence[str]],
    tensors: Mapping[str, Set[str]],
) -> Set[str]:
    """The outputs of the loop that `others` write to, under whatever name: those that this shows, or else all."""
    shown = names_shown(net)
    found: Set[str] = set()
    for position in others:
        if net.op[position].type not in SHOWING | RESHAPING:
            for blob in written[position]:
                own = shown.get(blob, {blob}).intersection(loop.outputs)
                found |= own or tensors.get(blob, set()).intersection(loop.outputs)
    return found


def _products(net: caffe2_pb2.NetDef, results: Set[str]) -> Dict[int, List[caffe2_pb2.OperatorDef]]:
    """The products of `net` that make some of `results`, or rows of another one, and the gradients of these.

    A loop that comes to read the rows of such a product itself has the same around it.
    """
    rows = set(results)
    products = []
    for operator in reversed(net.op):
        if operator.type == "FC" and rows.issuperset(operator.output):
            products.append(operator)
            rows.add(operator.input[0])
    sources = [operator.input[:2] for operator in products]
    return {
        position: [copied(operator)]
        for position, operator in enumerate(net.op)
        if operator in products or (operator.type == "FCGradient" and operator.input[:2] in sources)
    }


def _sources(
    net: caffe2_pb2.NetDef,
    loop: Loop,
    position: int,
    products: Products,
    mentioned: Mapping[str, int],
    tensors: Mapping[str, Set[str]],
) -> Dict[str, int]:
    """The FCs of `products` that nothing would miss if they ran right in front of the loop at `position`."""
    found = {}
    sequences = {link.outer for link in loop.links}
    for source, (operator,) in products.items():
        (result,) = operator.output[:1]
        if result not in sequences:
            continue
        changed = changed_by(net.op[source + 1 : position], tensors)
        own = [net.op[source], *loop.outer_operators]
        alone = mentioned[result] == len(own) and result not in net.external_output
        if operator.type == "FC" and source < position and alone and changed.isdisjoint(operator.input):
            found[result] = source
    return found


def _sinks(net: caffe2_pb2.NetDef, loop: Loop, products: Products) -> Set[int]:
    """The FCGradients of `products` to which the sequence's gradient is what it was when the loop ended."""
    if loop.gradient is None:
        return set()
    same = {loop.gradient.sequence}
    found = set()
    for position in range(gradient_operator_position(net, loop) + 1, len(net.op)):
        operator = net.op[position]
        if position in products and operator.type == "FCGradient" and operator.input[2] in same:
            found.add(position)
        is_alias = operator.type == "Alias" and operator.input[0] in same
        if same.intersection(operator.output):
            # All names are one tensor.
            break
        same.update(operator.output if is_alias else ())
    return found


def _ready(net: caffe2_pb2.NetDef, loop: Loop, sinks: Set[int], tensors: Mapping[str, Set[str]]) -> Set[int]:
    """Those of `sinks` whose rows nothing writes to between the end of the loop and them."""
    behind = gradient_operator_position(net, loop) + 1 if sinks else 0
    return {sink for sink in sinks if net.op[sink].input[0] not in changed_by(net.op[behind:sink], tensors)}


def gradient_operator_position(net: caffe2_pb2.NetDef, loop: Loop) -> int:
    """The position of the loop's gradient operator."""
    return next(position for position, operator in enumerate(net.op) if operator.input[-1:] == loop.outputs[-1:])


def _laying_out(net: caffe2_pb2.NetDef, position: int) -> List[caffe2_pb2.OperatorDef]:
    """The operators in front of the loop at `position` that leave inputs of it, or of each other, with oneDNN."""
    needed = set(net.op[position].input)
    found: List[caffe2_pb2.OperatorDef] = []
    in_front = itertools.chain.from_iterable(laid_out_when_changed(other) or [other] for other in net.op[:position])
    for operator in reversed(list(in_front)):
        inside = net_to_read(operator, "then_net").op if operator.type == "If" else []
        # What ends in a copy back is a product.
        stays_there = any(map(is_on_onednn, inside)) and all(other.type != "CopyIDEEPToCPU" for other in inside)
        if stays_there and not needed.isdisjoint(operator.output):
            found.insert(0, operator)
            needed.update(operator.input)
    return found


def _busy(net: caffe2_pb2.NetDef, loop: Loop, position: int) -> Set[str]:
    """The blobs of all operators in front of the gradient operator, but for the forward operator."""
    touched: Set[str] = set()
    for other, operator in enumerate(net.op):
        if operator.type == GRADIENT_OPERATOR and operator.input[-1] == loop.workspaces:
            break
        if other != position:
            touched.update(operator.input, operator.output)
    return touched
