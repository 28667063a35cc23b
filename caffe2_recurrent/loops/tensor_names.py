"""Which blobs of a net are names of one tensor, and what operators change under all of these.

An `Alias` shows a blob under another name, also in a net that an operator runs, and a loop shows slices of its states
as its outputs.

Source: caffe2/operators/alias_with_name.h; applyOffsetAlias in rnn/recurrent_network_op.h.
"""

from typing import Dict, Iterable, Iterator, List, Mapping, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import STATES, nets_of, strings
from caffe2_recurrent.operators import OPERATOR, SHOWING, opened


def names_of_tensors(net: caffe2_pb2.NetDef) -> Mapping[str, Set[str]]:
    """For each blob that has another name, all of them."""
    return _merged([*_shown(net), *_of_states(net)])


def names_shown(net: caffe2_pb2.NetDef) -> Mapping[str, Set[str]]:
    """Likewise, but for the slices that loops show."""
    return _merged(_shown(net))


def _merged(groups: Iterable[List[str]]) -> Mapping[str, Set[str]]:
    found: Dict[str, Set[str]] = {}
    for together in groups:
        merged = {*together}.union(*(found[blob] for blob in together if blob in found))
        found.update(dict.fromkeys(merged, merged))
    return found


def _shown(net: caffe2_pb2.NetDef) -> Iterator[List[str]]:
    for operator in opened(net.op):
        if operator.type in SHOWING:
            yield [operator.input[0], *operator.output]


def _of_states(net: caffe2_pb2.NetDef) -> Iterator[List[str]]:
    for operator in opened(net.op):
        if operator.type == OPERATOR:
            shown = list(zip(strings(operator, "alias_src"), strings(operator, "alias_dst")))
            for states in strings(operator, STATES):
                yield [states, *(output for source, output in shown if source == states)]


def written_by(operator: caffe2_pb2.OperatorDef) -> List[str]:
    """With what is written in nets that it runs."""
    found = [*operator.output]
    for net in nets_of(operator):
        for inner in net.op:
            found += written_by(inner)
    return found


def changed_by(operators: Iterable[caffe2_pb2.OperatorDef], tensors: Mapping[str, Set[str]]) -> Set[str]:
    """All blobs that read otherwise behind the operators."""
    found: Set[str] = set()
    for operator in operators:
        for blob in written_by(operator):
            # What shows a tensor gives it a name, and changes nothing under the others.
            found.update([blob] if operator.type in SHOWING else tensors.get(blob, [blob]))
    return found
