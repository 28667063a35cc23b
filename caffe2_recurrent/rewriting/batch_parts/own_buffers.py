"""Loops of parts whose convolutions share nothing with any others.

    loop, or its gradient operator  =>  CreateScope(scope);  Do(scope): it

Convolutions of the CPU share a buffer and its lock, by names that the engine looks for in all workspaces around them.
There convolutions of another net may have left both, or those of this net for too few sequences. The steps of all parts
would share these; and whoever makes a convolution makes the lock anew, which the thread of another part may hold. That
ended processes. A `Do` has a workspace that sees no outer blobs but those that it is given: here all that the loop
knows, by their own names. Buffer and lock are none of them, so that the steps have their own.

Steps, and those of the backward pass with them, keep to the workspace in which the first of them ran, for as long as
the blob that holds them is there. So that blob and the scope are named after what the loop is: a net that is optimised
otherwise later has others.

What a `Do` runs is made in its first run. The gradient operator is in the scope too so that both find the same flags of
the process then: with the RNN executor on for one of the two alone, the other does not find the number of the step.

Source: caffe2/operators/do_op.h, create_scope_op.h, conv_op_shared.cc; Workspace in caffe2/core/workspace.h.
"""

import zlib
from typing import Dict, FrozenSet, Iterator, List, NamedTuple, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.loops.loop import is_in_parts
from caffe2_recurrent.loops.reading import outer_blobs, workspaces_of
from caffe2_recurrent.operator_arguments import argument, nets_of
from caffe2_recurrent.operators import LOOPS, copied, new_operator, opened, renamed
from caffe2_recurrent.rewriting.products.nnpack import is_by_nnpack

Operators = Sequence[caffe2_pb2.OperatorDef]


class Scope(NamedTuple):
    """What loops with the same step workspaces have for their own: names of the scope and of the blob that holds these,
    and the outer blobs that they know."""

    name: str
    workspaces: str
    seen: FrozenSet[str]


def with_own_buffers(operators: Operators) -> List[caffe2_pb2.OperatorDef]:
    """The operators of a net, copies of them where loops of parts have convolutions and get their own buffers."""
    loops: Dict[str, List[caffe2_pb2.OperatorDef]] = {}
    for parts in filter(is_in_parts, operators):
        for operator in opened(_side_by_side(parts).op, with_steps=False):
            if operator.type in LOOPS:
                loops.setdefault(workspaces_of(operator), []).append(operator)
    outer = frozenset(_outer_blobs(operators))
    scopes = {
        name: _scope(name, found, outer) for name, found in loops.items() if any(map(is_by_nnpack, opened(found)))
    }
    if not scopes:
        return list(operators)
    made = [renamed(operator, {name: scope.workspaces for name, scope in scopes.items()}) for operator in operators]
    for parts in filter(is_in_parts, made):
        _put_into(_side_by_side(parts), {scope.workspaces: scope for scope in scopes.values()})
    return made


def _side_by_side(parts: caffe2_pb2.OperatorDef) -> caffe2_pb2.NetDef:
    """The net of what runs parts that does so where there are enough sequences."""
    found = argument(parts, "then_net")
    assert found is not None
    return found.n


def _outer_blobs(operators: Operators) -> Iterator[str]:
    """All blobs of the workspace in which the operators run."""
    for operator in opened(operators, with_steps=False):
        yield from outer_blobs(operator) if operator.type in LOOPS else [*operator.input, *operator.output]


def _scope(workspaces: str, loops: Operators, outer: FrozenSet[str]) -> Scope:
    seen = outer.intersection(blob for loop in loops for blob in names_of(loop)).union(*map(outer_blobs, loops))
    content = [*(loop.SerializeToString() for loop in loops), *(blob.encode() for blob in sorted(seen))]
    own = "{}_{:08x}".format(workspaces, zlib.crc32(b"\0".join(content)))
    return Scope(own + "_scope", own, seen - {workspaces} | {own})


def _put_into(net: caffe2_pb2.NetDef, scopes: Dict[str, Scope]) -> None:
    """Change the net, and those that its operators run."""
    made: List[caffe2_pb2.OperatorDef] = []
    for operator in net.op:
        scope = scopes.get(workspaces_of(operator)) if operator.type in LOOPS else None
        if scope is None and operator.type not in LOOPS:
            for inner in nets_of(operator):
                _put_into(inner, scopes)
        # Copies: what is taken out of the net below is gone.
        made += [copied(operator)] if scope is None else _in_scope(operator, scope)
    del net.op[:]
    net.op.extend(made)


def _in_scope(loop: caffe2_pb2.OperatorDef, scope: Scope) -> List[caffe2_pb2.OperatorDef]:
    # An input has to be there before. All others are made with the operator, also what only the backward pass writes.
    read = list(dict.fromkeys(blob for blob in loop.input if blob))
    made = sorted(scope.seen.difference(read))
    # The workspace knows nets by name; there is one of the gradient operator, too.
    name = "making_{}".format(loop.output[0])
    net = caffe2_pb2.NetDef(name=name, type="simple", op=[loop], external_input=read, external_output=loop.output)
    bound = {"inner_blobs": [*read, *made], "outer_blobs_idx": list(range(len(read) + len(made)))}
    return [
        new_operator("CreateScope", [], [scope.name], loop),
        new_operator("Do", [*read, scope.name], [*made, scope.name], loop, net=net, **bound),
    ]
