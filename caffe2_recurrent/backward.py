"""The backward step that belongs to a step net.

    1. the operators to recompute run again                                    (recompute.py)
    2. the gradient operators of the step, for `<o>_grad` of each state output o (step_gradients.py)
    3. every state, sequence and reference gets its gradient in a dense blob of its own:

           passed through, and wanted twice or linked elsewhere   Copy       -> <blob>_grad
           sparse (indices, values)                               SparseToDense -> <blob>_grad
           a state or sequence with no gradient at all            ConstantFill 0 -> <blob>_grad

       The engine fills a state's gradient slice by slice and reads every slice, so a gradient that is zero must be
       written too. A reference without a gradient is left out.
    4. a gradient that the step also receives from outside is added to, not overwritten:

           op -> o_grad      =>      op -> o_grad_accum;  o_grad = Sum(o_grad, o_grad_accum)

    5. where the outer net adds up gradients of a reference too, the parts that the step adds up get other names:
       Caffe2 calls both `_<reference>_grad_autosplit_<n>`, and a step writes to an outer blob of the name it looks for.
    6. blobs that this reads and does not write are kept by each forward step.

Source: RecurrentNetworkGradientOp in caffe2/operators/rnn/recurrent_network_op.h.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.cell import Cell
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.recompute import Recompute
from caffe2_recurrent.step_gradients import StepGradients, derive, gradient_name, operator_beside
from caffe2_recurrent.wiring import Link, OuterState

# What Caffe2 calls the gradients that it is about to add up, and the sparse ones that it has put together.
PART_OF_SUM = re.compile(r"_?(.+_grad)(?:_indices|_values)?(?:_autosplit_\d+|_(?:indices|values)_concat(?:_split)?)$")


@dataclass(frozen=True)
class Backward:
    """The backward step of a cell.

    `net` is None where nothing in the step has a gradient. `gradients` maps state inputs, sequences and references
    to the step-net blob that holds their gradient; `with_gradient` says which of them depend on the outputs at all.
    `kept` are the blobs that each forward step keeps for it, `shared_blobs` the recomputed ones.
    """

    net: Optional[caffe2_pb2.NetDef]
    gradients: Dict[str, str]
    with_gradient: frozenset
    kept: Tuple[str, ...]
    shared_blobs: Tuple[str, ...]

    def own_blobs(self, cell: Cell) -> List[str]:
        """What the backward step writes or is linked to; not gradients of parameters, which the engine renames."""
        if self.net is None:
            return []
        renamed = frozenset(self.gradients[blob] for blob in self.parameters(cell))
        linked = (gradient_name(state.inner_output) for state in cell.states)
        written = (blob for operator in self.net.op for blob in operator.output)
        recomputed = frozenset(cell.writes)
        blobs = dict.fromkeys(itertools.chain(linked, written))
        return [blob for blob in blobs if blob not in renamed and blob not in recomputed]

    def parameters(self, cell: Cell) -> List[str]:
        """The references that have a gradient, in the order of the operator's inputs."""
        return [blob for blob in cell.references if blob in self.gradients]


def derive_backward(
    cell: Cell, recompute: Recompute, read_outside: Callable[[str], bool], problems: Problems
) -> Optional[Backward]:
    """Derive the backward step of `cell`; `read_outside` says whether the outer net may also read a reference.

    Notes in `problems` what has no gradient. None where something is wrong with the cell, now or before.
    """
    outputs = [state.inner_output for state in cell.states if state.inner_output in cell.writes]
    output_gradients = {output: gradient_name(output) for output in outputs}
    derived = derive(cell.step_net.op, output_gradients, problems)
    if problems:
        return None
    boundary = [state.inner_input for state in cell.states] + [sequence.inner for sequence in cell.sequences]
    with_gradient = frozenset(blob for blob in boundary + list(cell.references) if blob in derived.of)
    if not with_gradient:
        return Backward(None, {}, with_gradient, (), tuple(recompute.shared_blobs))

    own = _OwnGradients(cell, derived, frozenset(output_gradients.values()))
    for blob in boundary:
        own.claim(blob, zero_if_missing=True)
    for blob in cell.references:
        own.claim(blob, zero_if_missing=False)
    body = derived.operators + own.operators
    _rename_parts(body, cell, read_outside)

    kept = _kept_blobs(cell, recompute.operators + body)
    net = caffe2_pb2.NetDef(name=cell.step_net.name + "_backward", type="simple")
    net.external_input.extend(kept)
    net.external_input.extend(output_gradients.values())
    net.external_input.extend(cell.step_net.external_input)
    net.external_input.extend(cell.step_net.external_output)
    net.op.extend(recompute.operators)
    accumulating = list(_accumulating(body, frozenset(net.external_input)))
    net.op.extend(accumulating)
    _check_apart(cell, output_gradients.values(), accumulating, problems)
    return Backward(net, own.gradients, with_gradient, kept, tuple(recompute.shared_blobs))


def _rename_parts(operators: Iterable[caffe2_pb2.OperatorDef], cell: Cell, read_outside: Callable[[str], bool]) -> None:
    references = {gradient_name(reference): reference for reference in cell.references}
    renamed: Dict[str, str] = {}
    for operator in operators:
        for output in operator.output:
            part = PART_OF_SUM.match(output)
            reference = references.get(part.group(1)) if part else None
            if reference is not None and read_outside(reference):
                renamed[output] = output + "_in_step"
    if not renamed:
        return
    for operator in operators:
        for blobs in (operator.input, operator.output):
            if not renamed.keys().isdisjoint(blobs):
                blobs[:] = [renamed.get(blob, blob) for blob in blobs]


def _check_apart(
    cell: Cell, received: Iterable[str], operators: Iterable[caffe2_pb2.OperatorDef], problems: Problems
) -> None:
    """A step has one workspace for both directions: a gradient must not carry the name of a blob of the step."""
    forward = set(cell.writes).union(cell.step_net.external_input)
    gradients = dict.fromkeys(itertools.chain(received, (blob for operator in operators for blob in operator.output)))
    clashing = [blob for blob in gradients if blob in forward]
    if clashing:
        problems.add(
            "the step net has {}, names that its backward step needs for gradients; rename them", names(clashing)
        )


def backward_links(cell: Cell, backward: Backward, outer: Sequence[OuterState]) -> List[Link]:
    """`<output>_grad` -> slice t + 1 and the state input's gradient -> slice t of `<states>_grad`; sequence's -> t."""
    if backward.net is None:
        return []
    links = []
    for state, blobs in zip(cell.states, outer):
        outer_grad = gradient_name(blobs.states)
        # The executor finds the step's successor in time by offset 1 standing before offset 0.
        links.append(Link(gradient_name(state.inner_output), outer_grad, 1))
        links.append(Link(backward.gradients[state.inner_input], outer_grad, 0))
    for sequence in cell.sequences:
        links.append(Link(backward.gradients[sequence.inner], gradient_name(sequence.outer), 0))
    return links


class _OwnGradients:
    """Hands each boundary blob of the step a dense gradient blob that nothing else is linked to."""

    def __init__(self, cell: Cell, derived: StepGradients, linked: frozenset) -> None:
        self.gradients: Dict[str, str] = {}
        self.operators: List[caffe2_pb2.OperatorDef] = []
        self._derived = derived
        self._taken = set(linked)
        self._step_operators = cell.step_net.op
        # Most steps need no operator of ours, so what it takes to add one is looked up with the first.
        self._written: Set[str] = set()
        self._readers: Dict[str, caffe2_pb2.OperatorDef] = {}

    def claim(self, blob: str, zero_if_missing: bool) -> None:
        gradient = self._derived.of.get(blob)
        if gradient is None and not zero_if_missing:
            return
        if gradient is None:
            self._add(blob, "ConstantFill", [blob], value=0.0)
        elif isinstance(gradient, core.GradientSlice):
            self._add(blob, "SparseToDense", [str(gradient.indices), str(gradient.values), blob])
        elif str(gradient) in self._taken:
            self._add(blob, "Copy", [str(gradient)])
        else:
            self.gradients[blob] = str(gradient)
        if zero_if_missing:
            # References may share: the engine adds each one's gradient to a sum of its own.
            self._taken.add(self.gradients[blob])

    def _add(self, blob: str, kind: str, inputs: List[str], **arguments: float) -> None:
        if not self.operators:
            self._written.update(output for operator in self._derived.operators for output in operator.output)
            self._readers = _first_readers(self._step_operators)
        target = gradient_name(blob)
        while target in self._written or target in self._taken:
            target += "_own"
        self._written.add(target)
        beside = self._readers.get(blob, self._step_operators[0])
        self.operators.append(operator_beside(kind, inputs, [target], beside, **arguments))
        self.gradients[blob] = target


def _first_readers(operators: Iterable[caffe2_pb2.OperatorDef]) -> Dict[str, caffe2_pb2.OperatorDef]:
    readers: Dict[str, caffe2_pb2.OperatorDef] = {}
    for operator in operators:
        for blob in operator.input:
            readers.setdefault(blob, operator)
    return readers


def _kept_blobs(cell: Cell, backward_operators: Sequence[caffe2_pb2.OperatorDef]) -> Tuple[str, ...]:
    written: Set[str] = set()
    needed: Set[str] = set()
    for operator in backward_operators:
        needed.update(blob for blob in operator.input if blob not in written)
        written.update(operator.output)
    # State outputs are kept in the state blobs.
    exported = frozenset(cell.step_net.external_output).union(state.inner_output for state in cell.states)
    in_order = dict.fromkeys(itertools.chain(cell.step_net.external_input, cell.writes))
    return tuple(blob for blob in in_order if blob in cell.writes and blob in needed and blob not in exported)


def _accumulating(operators: Iterable[caffe2_pb2.OperatorDef], received: frozenset) -> Iterable[caffe2_pb2.OperatorDef]:
    for operator in operators:
        clashing = [
            position
            for position, output in enumerate(operator.output)
            if output in received and output not in operator.input
        ]
        if not clashing:
            # An operator that also reads the blob adds to what is there by itself.
            yield operator
            continue
        renamed = caffe2_pb2.OperatorDef()
        renamed.CopyFrom(operator)
        outputs = [operator.output[position] for position in clashing]
        for position, output in zip(clashing, outputs):
            renamed.output[position] = output + "_accum"
        yield renamed
        for output in outputs:
            target = core.BlobReference(output)
            yield core.CreateOperator("Sum", [target, target + "_accum"], [target])
