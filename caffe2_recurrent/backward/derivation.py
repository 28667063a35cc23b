"""The backward step that belongs to a step net.

    1. the operators to recompute run again                                    (recompute.py)
    2. the gradient operators of the step, for `<o>_grad` of each state output o (step_gradients.py); what they need
       of blobs that are overwritten the step copies
    3. every state, sequence and reference gets its gradient in a dense blob of its own:

           passed through, and wanted twice or linked elsewhere   Copy       -> <blob>_grad
           sparse (indices, values)                               SparseToDense -> <blob>_grad
           a state or sequence with no gradient at all            ConstantFill 0 -> <blob>_grad
           of a sequence that the step sees as several blobs      Sum        -> <the first of them>_grad

       The engine fills a state's gradient slice by slice and reads every slice, so a gradient that is zero must be
       written too. A reference without a gradient is left out.
    4. a gradient that the step also receives from outside is added to, not overwritten. A state output may have had
       another value by its name before, of which nothing comes from outside:

           op -> o_grad      =>      op -> o_grad_accum;  o_grad = Sum(o_grad, o_grad_accum)

    5. where the outer net adds up gradients of a reference too, the parts that the step adds up get other names:
       Caffe2 calls both `_<reference>_grad_autosplit_<n>`, and a step writes to an outer blob of the name it looks for.
       So does the gradient of a reference that is a sequence as well.
    6. blobs that this reads and does not write are kept by each forward step.

Source: RecurrentNetworkGradientOp in caffe2/operators/rnn/recurrent_network_op.h.
"""

import itertools
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.backward.name_clashes import rename_gradients
from caffe2_recurrent.backward.recompute import Recompute
from caffe2_recurrent.backward.step_gradients import StepGradients, derive
from caffe2_recurrent.operators import (
    GRADIENT_OPERATOR,
    OPERATOR,
    copied,
    gradient_name,
    operator_beside,
    read_before_written,
)
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.step_net import StepNet
from caffe2_recurrent.wiring import Link, OuterState

# What a loop within the step adds to the backward step; see gradient_maker.py.
OF_LOOPS = frozenset([GRADIENT_OPERATOR, "Alias"])


@dataclass(frozen=True)
class Backward:
    """The backward step that belongs to `step_net`: the one it was derived from, with copies of what is overwritten.

    `net` is None where nothing in the step has a gradient. `gradients` maps state inputs, sequences and references
    to the step-net blob that holds their gradient; `with_gradient` says which of them have one at all. `blobs` is all
    that the gradient operators write or are linked to, `shared_blobs` what is recomputed and shared by the steps.
    """

    step_net: StepNet
    net: Optional[caffe2_pb2.NetDef]
    gradients: Dict[str, str]
    with_gradient: frozenset
    blobs: Tuple[str, ...]
    shared_blobs: Tuple[str, ...]

    @property
    def parameters(self) -> List[str]:
        """The references that have a gradient, in the order of the operator's inputs."""
        return [blob for blob in self.step_net.references if blob in self.gradients]


def derive_backward(
    step_net: StepNet, recompute: Recompute, read_outside: Callable[[str], bool], problems: Problems
) -> Optional[Backward]:
    """Derive the backward step of `step_net`; `read_outside` says whether the outer net may also read a reference.

    Notes in `problems` what has no gradient. None where something is wrong with the step_net, now or before.
    """
    outputs = [state.inner_output for state in step_net.states if state.inner_output in step_net.writes]
    output_gradients = {output: gradient_name(output) for output in outputs}
    derived = derive(step_net.proto.op, output_gradients, problems)
    _check_gradients_of_loops_within(step_net, derived, problems)
    if problems:
        return None
    boundary = [state.inner_input for state in step_net.states] + [sequence.inner for sequence in step_net.sequences]
    with_gradient = frozenset(blob for blob in boundary + list(step_net.references) if blob in derived.of)
    if not with_gradient:
        return Backward(step_net, None, {}, with_gradient, (), tuple(recompute.shared_blobs))

    if derived.overwritten:
        step_net = step_net.with_copies({index: (blob, copy) for index, blob, copy in derived.overwritten})
    own = _OwnGradients(step_net, derived, frozenset(output_gradients.values()))
    for blob in boundary:
        own.claim(blob, zero_if_missing=True)
    for seen_as in step_net.outer_sequences.values():
        own.add_up(seen_as)
    for blob in step_net.references:
        own.claim(blob, zero_if_missing=False)
    body = derived.operators + own.operators
    renamed = rename_gradients(body, step_net, read_outside)
    gradients = {blob: renamed.get(gradient, gradient) for blob, gradient in own.gradients.items()}

    again = recompute.before(body)
    kept = _kept_blobs(step_net, again + body)
    net = caffe2_pb2.NetDef(name=step_net.proto.name + "_backward", type="simple")
    net.external_input.extend(kept)
    net.external_input.extend(output_gradients.values())
    net.external_input.extend(step_net.proto.external_input)
    net.external_input.extend(step_net.proto.external_output)
    net.op.extend(again)
    ends = {output_gradients[output]: count for output, count in derived.of_last_values.items()}
    accumulating = list(_accumulating(body, frozenset(net.external_input), ends))
    net.op.extend(accumulating)
    written = (blob for operator in accumulating for blob in operator.output)
    blobs = tuple(dict.fromkeys(itertools.chain(output_gradients.values(), written)))
    return Backward(step_net, net, gradients, with_gradient, blobs, tuple(recompute.shared_blobs))


def _check_gradients_of_loops_within(step_net: StepNet, derived: StepGradients, problems: Problems) -> None:
    """A loop within the step makes gradients by names that this one needs for those of its references."""
    if not any(operator.type == GRADIENT_OPERATOR for operator in derived.operators):
        return
    for index, operator in enumerate(step_net.proto.op):
        shared = [blob for blob in operator.input if blob in step_net.references and blob in derived.of]
        if operator.type == OPERATOR and shared:
            problems.add(
                "step operator {} (RecurrentNetwork) reads {} of this loop, and both would make gradients by the same "
                "names; let it read a Copy that the step makes",
                index,
                names(dict.fromkeys(shared)),
            )


def backward_links(backward: Backward, outer: Sequence[OuterState]) -> List[Link]:
    """`<output>_grad` -> slice t + 1 and the state input's gradient -> slice t of `<states>_grad`; sequence's -> t."""
    if backward.net is None:
        return []
    links = []
    for state, blobs in zip(backward.step_net.states, outer):
        outer_grad = gradient_name(blobs.states)
        # The executor finds the step's successor in time by offset 1 standing before offset 0.
        links.append(Link(gradient_name(state.inner_output), outer_grad, 1))
        links.append(Link(backward.gradients[state.inner_input], outer_grad, 0))
    for outer_sequence, (first, *_) in backward.step_net.outer_sequences.items():
        links.append(Link(backward.gradients[first], gradient_name(outer_sequence), 0))
    return links


class _OwnGradients:
    """Hands each boundary blob of the step a dense gradient blob that nothing else is linked to."""

    def __init__(self, step_net: StepNet, derived: StepGradients, linked: frozenset) -> None:
        self.gradients: Dict[str, str] = {}
        self.operators: List[caffe2_pb2.OperatorDef] = []
        self._derived = derived
        self._taken = set(linked)
        # A loop within the step gives out views of its own memory.
        self._of_loops = {
            blob for operator in derived.operators if operator.type in OF_LOOPS for blob in operator.output
        }
        self._step_operators = step_net.proto.op
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
        elif str(gradient) in self._taken or str(gradient) in self._of_loops:
            self._add(blob, "Copy", [str(gradient)])
        else:
            self.gradients[blob] = str(gradient)
        if zero_if_missing:
            # References may share: the engine adds each one's gradient to a sum of its own.
            self._taken.add(self.gradients[blob])

    def add_up(self, blobs: Sequence[str]) -> None:
        """Give the first blob the sum of all their gradients."""
        if len(blobs) > 1:
            self._add(blobs[0], "Sum", [self.gradients[blob] for blob in blobs])
            self._taken.add(self.gradients[blobs[0]])

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


def _kept_blobs(step_net: StepNet, backward_operators: Sequence[caffe2_pb2.OperatorDef]) -> Tuple[str, ...]:
    needed = {*read_before_written(backward_operators)}
    # State outputs are kept in the state blobs.
    exported = frozenset(step_net.proto.external_output).union(state.inner_output for state in step_net.states)
    in_order = dict.fromkeys(itertools.chain(step_net.proto.external_input, step_net.writes))
    return tuple(blob for blob in in_order if blob in step_net.writes and blob in needed and blob not in exported)


def _accumulating(
    operators: Sequence[caffe2_pb2.OperatorDef], received: frozenset, ends: Mapping[str, int]
) -> Iterable[caffe2_pb2.OperatorDef]:
    """The operators, made to add to gradients that are `received`.

    `ends` says how many of them belong to what reads the last value of a state output. What comes after these and is
    written by the name of its gradient is that of a value before, which nobody outside has.
    """
    for position, operator in enumerate(operators):
        # An operator that also reads the blob adds to what is there by itself.
        clashing = [
            output
            for output in dict.fromkeys(operator.output)
            if output in received and output not in operator.input and position < ends.get(output, len(operators))
        ]
        if not clashing:
            yield operator
            continue
        renamed = copied(operator)
        renamed.output[:] = [output + "_accum" if output in clashing else output for output in operator.output]
        yield renamed
        for output in clashing:
            target = core.BlobReference(output)
            yield core.CreateOperator("Sum", [target, target + "_accum"], [target])
