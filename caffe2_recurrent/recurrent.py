"""`recurrent_net`: one RecurrentNetwork operator from a step net, with the backward step derived from it.

arguments -> step net -> backward -> wiring -> operator
"""

import functools
import itertools
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

from caffe2.python import core, workspace

from caffe2_recurrent import arguments, wiring
from caffe2_recurrent.arguments import Blob, OutputsWithGrads, Request
from caffe2_recurrent.backward import name_clashes
from caffe2_recurrent.backward.derivation import Backward, backward_links, derive_backward
from caffe2_recurrent.backward.gradient_maker import gradient_arguments
from caffe2_recurrent.backward.recompute import plan_recompute
from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.operator_arguments import (
    BACKWARD_STEP_NET,
    INITIAL,
    PARAMETER_GRADIENTS,
    PARAMETERS,
    RECOMPUTED,
    STATES,
    STEP_NET,
    STEP_NETS,
    TIMESTEP,
)
from caffe2_recurrent.operators import OPERATOR, gradient_name
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.step_net import StepNet, check_reads, read_step_net


@arguments.takes_scratch_sizes_before_timestep
def recurrent_net(
    net: core.Net,
    cell_net: core.Net,
    inputs: Iterable[Tuple[Blob, Blob]],
    initial_cell_inputs: Iterable[Sequence[Any]],
    links: Mapping[Blob, Blob],
    timestep: Optional[Blob] = None,
    scope: Optional[Blob] = None,
    outputs_with_grads: OutputsWithGrads = (0,),
    recompute_blobs_on_backward: Optional[Iterable[Blob]] = None,
    forward_only: bool = False,
    scratch_sizes: Any = None,
) -> Tuple[core.BlobReference, ...]:
    """Run a step net over a sequence: adds one `RecurrentNetwork` operator to `net`.

    Shapes: T steps, N sequences in the batch, D features of a state. All blobs that are linked (sequences, states)
    hold float32. A slice is a view: a step that writes to its sequence in place changes the outer blob.

    Args:
        net: the net that gets the operator.
        cell_net: the net of one step. Left as it is. Its external inputs are the sequences, the state inputs, the
            timestep; every other one is a reference: a parameter or any outer blob that every step reads. References
            become inputs of the operator and get a gradient where the step has one for them.
        inputs: pairs (step-net blob, outer sequence `[T, N, ...]`), one or more. The step sees slices `[1, N, ...]`;
            several of its blobs may see those of one sequence, whose gradient is then the sum of theirs.
        initial_cell_inputs: pairs (step-net state input, outer blob with its value before step 0), shaped `[D]` (the
            same for all N), `[N, D]` or `[1, N, D]`. Of `[S, N, D]` with S > 1 the steps read the first slice alone,
            and no step writes the last S - 1 of `<output>_all`, which is then `[T + S - 1, N, D]`, nor `<output>_last`;
            such a loop cannot be trained, as the engine's backward pass adds to memory that nobody has written.
        links: maps each state input to the step-net output that is its value at the next step.
        timestep: step-net blob that holds the step number (int32, one element); default `timestep`.
        scope: prefix of internal blobs, by default `<net name>/recurrent`. A scope that `net` has in use already
            gets a number added, and so do the names of the outputs.
        outputs_with_grads: positions of the returned outputs that receive a gradient from outside the loop, or
            'auto': whatever arrives is passed back. With positions, other gradients stop here; `check_gradients`
            names them.
        recompute_blobs_on_backward: step-net blobs to compute again in the backward pass, shared by all steps
            instead of kept in each.
        forward_only: derive no backward step; two or four step workspaces are then used in turn.
        scratch_sizes: ignored, with a `DeprecationWarning`, as is a third element in `initial_cell_inputs`. A list
            before `timestep` is taken for it: in 2016 it stood there.

    Returns:
        For each state in order, `<output>_all` `[T, N, D]` and `<output>_last` `[1, N, D]`.

    Raises:
        TypeError: arguments of the wrong type; all are named.
        ValueError: the roles do not fit the step net, a step operator has no gradient, positions are out of range.
            All faults are named, and `net` is as it was.

    Source: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h.
    """
    request = arguments.read(
        "recurrent_net",
        net,
        cell_net,
        inputs,
        initial_cell_inputs,
        links,
        timestep,
        scope,
        outputs_with_grads,
        recompute_blobs_on_backward,
        forward_only,
        scratch_sizes,
    )
    return add_loop(request)


def add_loop(
    request: Request, recompute_unread: bool = True, remedy: str = "rename it in the step net"
) -> Tuple[core.BlobReference, ...]:
    """What `recurrent_net` does with its arguments once their types are right; shapes and results are as there.

    `recompute_unread`: what is to be recomputed is so even where the backward step does not read it, as in Caffe2.
    `remedy`: what to do about a name that the step and the net both have. Raises `ValueError` as `recurrent_net` does.
    """
    problems = Problems(request.caller)
    step_net = read_step_net(request, problems)
    check_positions(request.outputs_with_grads, _output_names(step_net), problems)
    recompute = plan_recompute(step_net, request.recompute, recompute_unread, problems)
    readable = check_reads(step_net, problems)
    backward = None
    if readable and not request.forward_only:
        backward = derive_backward(step_net, recompute, _may_be_read_outside(request), problems)
    if backward is not None:
        step_net = backward.step_net
    scope, outer = _unused_names(request.net, step_net, request.scope)
    _check_apart(request, step_net, backward, _made(step_net, scope, outer, request.forward_only), remedy, problems)
    problems.raise_if_any()
    return _add_operator(request, step_net, backward, scope, outer)


def _check_apart(
    request: Request,
    step_net: StepNet,
    backward: Optional[Backward],
    made: Sequence[str],
    remedy: str,
    problems: Problems,
) -> None:
    if request.net is not request.cell_net:
        name_clashes.check_step(request.net, step_net, remedy, problems)
    if backward is not None:
        parameters = [backward.gradients[blob] for blob in backward.parameters]
        name_clashes.check_step_gradients(request.net, step_net, backward.blobs, parameters, remedy, problems)
    if not problems:
        name_clashes.check_made(step_net, made, problems)


def _may_be_read_outside(request: Request) -> Callable[[str], bool]:
    """Whether the net reads a blob beside the steps; with 'auto' names are chosen as if it did.

    The loop does where it is a sequence or an initial value as well.
    """
    if request.outputs_with_grads is None:
        return lambda blob: True

    @functools.lru_cache(maxsize=None)
    def read() -> FrozenSet[str]:
        beside = [outer for _, outer in request.sequences + request.initial_states]
        return frozenset(beside).union(blob for operator in request.net.Proto().op for blob in operator.input)

    return lambda blob: blob in read()


def check_positions(positions: Optional[Sequence[int]], outputs: Sequence[str], problems: Problems) -> None:
    """Note positions (None for 'auto') that are none of `outputs`, or given twice."""
    for position in dict.fromkeys(positions or ()):
        if not 0 <= position < len(outputs):
            listed = ", ".join("{} '{}'".format(index, output) for index, output in enumerate(outputs))
            problems.add("outputs_with_grads has position {}, but the outputs are {}", position, listed or "none")
        elif list(positions or ()).count(position) > 1:
            problems.add("outputs_with_grads has position {} ('{}') twice", position, outputs[position])


def _output_names(step_net: StepNet) -> List[str]:
    outputs = [state.inner_output or "<output of {}>".format(state.inner_input) for state in step_net.states]
    return [output + ending for output in outputs for ending in ("_all", "_last")]


def _add_operator(
    request: Request,
    step_net: StepNet,
    backward: Optional[Backward],
    scope: str,
    outer: Sequence[wiring.OuterState],
) -> Tuple[core.BlobReference, ...]:
    net = request.net
    inputs = _inputs(step_net, backward)
    first_position: Dict[str, int] = {}
    for position, blob in enumerate(inputs):
        first_position.setdefault(blob, position)
    found = wiring.aliases(outer)
    given: Dict[str, Any] = {
        STEP_NET: step_net.proto,
        STATES: [blobs.states for blobs in outer],
        INITIAL: [first_position[state.outer_initial] for state in step_net.states],
        TIMESTEP: step_net.timestep,
        ENABLE: 1,
    }
    given.update(wiring.link_arguments("link", wiring.forward_links(step_net, outer)))
    given.update(wiring.alias_arguments(found))
    if backward is not None:
        given.update(_backward_arguments(request, backward, outer, inputs))
    outputs = _produced(scope, outer)
    # A net copies each argument three times on its way into an operator; step nets are large, so they follow by
    # themselves, but for immediate mode, which runs the operator as it is made.
    large = {} if workspace.IsImmediate() else {name: given.pop(name) for name in STEP_NETS if name in given}
    # References without a net: the operator takes them whether `net` knows them already or not.
    results = net.RecurrentNetwork(
        [core.BlobReference(blob) for blob in inputs],
        [core.BlobReference(blob, net) for blob in outputs],
        **given,
    )
    operator = net.Proto().op[-1]
    for name, proto in large.items():
        operator.arg.add(name=name).n.CopyFrom(proto)
    return tuple(results[:-1])


def _inputs(step_net: StepNet, backward: Optional[Backward]) -> List[str]:
    """The operator's inputs, without references that have no gradient and are sequences or initial values as well.

    Of the gradients that belong to several positions of one blob Caffe2 takes the last one, even if there is none.
    """
    other_roles = step_net.outer_sources
    parameters = frozenset(backward.parameters if backward is not None else step_net.references)
    return other_roles + [blob for blob in step_net.references if blob in parameters or blob not in other_roles]


def _backward_arguments(
    request: Request, backward: Backward, outer: Sequence[wiring.OuterState], inputs: Sequence[str]
) -> Dict[str, Any]:
    parameters = backward.parameters
    position = {blob: index for index, blob in enumerate(inputs)}
    given: Dict[str, Any] = {
        PARAMETERS: [position[blob] for blob in parameters],
        PARAMETER_GRADIENTS: [backward.gradients[blob] for blob in parameters],
        RECOMPUTED: list(backward.shared_blobs),
    }
    if backward.net is not None:
        given[BACKWARD_STEP_NET] = backward.net
    given.update(wiring.link_arguments("backward_link", backward_links(backward, outer)))
    given.update(gradient_arguments(backward, request.outputs_with_grads))
    return given


def _unused_names(net: core.Net, step_net: StepNet, scope: Optional[str]) -> Tuple[str, List[wiring.OuterState]]:
    """`scope` and the outer blobs of the states; numbered where `net` has them already.

    Two operators that shared a state blob would spoil each other's gradients: the second forward pass overwrites
    what the first one's backward pass reads.
    """
    scope = "{}/recurrent".format(net.Name()) if scope is None else scope
    in_use = {
        blob.decode()
        for operator in net.Proto().op
        if operator.type == OPERATOR
        for argument in operator.arg
        if argument.name == STATES
        for blob in argument.strings
    }
    suffixes = itertools.chain([""], ("_{}".format(number) for number in itertools.count(1)))
    candidates = ((scope + suffix, wiring.outer_states(step_net, scope + suffix, suffix)) for suffix in suffixes)
    return next(
        (candidate, outer)
        for candidate, outer in candidates
        if in_use.isdisjoint(blobs.states for blobs in outer)
        and not any(net.BlobIsDefined(blob) for blob in _produced(candidate, outer))
    )


def _made(step_net: StepNet, scope: str, outer: Sequence[wiring.OuterState], forward_only: bool) -> List[str]:
    """All blobs that the operator, and its gradient, write outside."""
    made = [*_produced(scope, outer), *(blobs.states for blobs in outer)]
    if not forward_only:
        made += [gradient_name(blobs.states) for blobs in outer]
        made += [gradient_name(blob) for blob in dict.fromkeys(step_net.outer_inputs)]
    return made


def _produced(scope: str, outer: Sequence[wiring.OuterState]) -> List[str]:
    visible = [blob for blobs in outer for blob in (blobs.all_steps, blobs.last_step)]
    return visible + [core.ScopedName("{}/{}".format(scope, wiring.STEP_WORKSPACES))]
