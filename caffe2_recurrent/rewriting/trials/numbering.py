"""Operators by names that do not tell whose they are, so that what is alike in two loops is one trial.

What the engine names after another blob follows that one: gradients, and what oneDNN's device has for the CPU.
"""

from typing import Dict, Iterable, List, Mapping, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.operator_arguments import TIMESTEP, argument, nets_of, remove_arguments
from caffe2_recurrent.operators import BACKWARD_PASS_OF, GRADIENT_SUFFIX, gradient_name, opened, renamed
from caffe2_recurrent.rewriting import engine_blobs

# No blob, the number of the step of a loop that does not say what it is called, and what the engine finds by its name.
KEPT = frozenset(["", TIMESTEP, *engine_blobs.CONVOLUTION_BUFFERS])
# The argument of the operator `Do` with the names of blobs in its net.
INNER_BLOBS = "inner_blobs"
# Arguments that name blobs to people and to us, and to no operator: that of `Assert` is what it fails with.
SAID = ("error_msg", BACKWARD_PASS_OF)


class Numbering:
    """The names of blobs and of nets in one trial: numbers in the order in which they are met, but for `given` ones."""

    def __init__(self, given: Optional[Mapping[str, str]] = None) -> None:
        self._blobs: Dict[str, str] = dict(given or {})
        self._nets: Dict[str, str] = {}

    def blob(self, name: str) -> str:
        if name not in self._blobs:
            self._blobs[name] = self._new(name)
        return self._blobs[name]

    def _new(self, name: str) -> str:
        if name in KEPT:
            return name
        if engine_blobs.is_of_engine(name):
            base = engine_blobs.named_after(name)
            return engine_blobs.renamed(name, {base: self.blob(base)})
        if name.endswith(GRADIENT_SUFFIX):
            return gradient_name(self.blob(name[: -len(GRADIENT_SUFFIX)]))
        return "blob#{}".format(len(self._blobs))

    def operators(self, operators: Iterable[caffe2_pb2.OperatorDef]) -> bytes:
        """Copies of operators between these blobs, serialised: equal for those that do the same."""
        made = [renamed(operator, {name: self.blob(name) for name in names_of(operator)}) for operator in operators]
        for operator in opened(made):
            self._forget_whose(operator)
        return bytes(caffe2_pb2.NetDef(op=made).SerializeToString())

    def _forget_whose(self, operator: caffe2_pb2.OperatorDef) -> None:
        for said in ("name", "debug_info"):
            operator.ClearField(said)
        remove_arguments(operator, SAID)
        inner = argument(operator, INNER_BLOBS)
        if inner is not None:
            inner.strings[:] = [self.blob(blob.decode()).encode() for blob in inner.strings]
        for net in nets_of(operator):
            # The engine may find a net by its name, so that two of one name stay two of one name.
            net.name = self._nets.setdefault(net.name, "net#{}".format(len(self._nets)))


def operators_of(serialised: bytes) -> List[caffe2_pb2.OperatorDef]:
    """What `Numbering.operators` has serialised."""
    return list(caffe2_pb2.NetDef.FromString(serialised).op)
