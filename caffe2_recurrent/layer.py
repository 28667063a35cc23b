"""How a cell becomes a layer of a model; every cell of this package goes this way.

    parameters -> what is computed for all steps at once -> step net -> loop (recurrent.py)

A cell says which parameters it has, what it computes outside of the loop, and what one step does. Blob names are under
`<scope>/`, and a second layer of the same scope shares the parameters and nothing else.
"""

import abc
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer

from caffe2_recurrent import arguments, parameters
from caffe2_recurrent.arguments import OutputsWithGrads
from caffe2_recurrent.blob_names import SHARED
from caffe2_recurrent.parameters import ParameterSpec
from caffe2_recurrent.recurrent import add_loop
from caffe2_recurrent.transaction import all_or_nothing

# The caller has no step net in which to rename a blob that the net has as well.
REMEDY = "rename the blob of the net, or build the layer under another scope"

Blobs = Dict[str, core.BlobReference]


class StepInputs(NamedTuple):
    """What a step receives: the slice `[1, N, ...]` of the sequence, states `[1, N, D]` in the cell's order, lengths
    int32 `[N]` or None, the step number."""

    input_t: core.BlobReference
    previous: Tuple[core.BlobReference, ...]
    lengths: Optional[core.BlobReference]
    timestep: core.BlobReference


class Outside(NamedTuple):
    """What a cell computes for all steps at once: the sequence that the loop runs over, and what else steps read."""

    sequence: core.BlobReference
    shared: Any = None


class StepOutputs(NamedTuple):
    """What a step makes: the next states in the cell's order, and the blobs that it need not keep: those that the
    backward pass reads are computed again there."""

    states: Tuple[core.BlobReference, ...]
    recompute: List[core.BlobReference]


class Cell(abc.ABC):
    """One kind of recurrent layer. Subclasses say what differs.

    `caller` is the name in errors; `states` maps the step-net name of each state to its size.
    """

    caller = "cell"
    states: Dict[str, int]

    @abc.abstractmethod
    def parameters(self) -> List[ParameterSpec]:
        """The parameters, but for initial states."""

    @abc.abstractmethod
    def outside(self, net: core.Net, parameters: Blobs, sequence: core.BlobReference) -> Outside:
        """Add what is computed for all steps at once."""

    @abc.abstractmethod
    def step(self, net: core.Net, parameters: Blobs, inputs: StepInputs, shared: Any) -> StepOutputs:
        """Add the operators of a step to `net`; `shared` is what `outside` gave."""


class Layer(NamedTuple):
    """A layer in a model: `<state>_all [T, N, D]` and `<state>_last [1, N, D]` for each state; parameters by name."""

    outputs: Tuple[core.BlobReference, ...]
    parameters: Blobs


def add_layer(
    model: ModelHelper,
    cell: Cell,
    sequence: str,
    lengths: Optional[str],
    initial: Optional[Sequence[str]],
    scope: str,
    outputs_with_grads: OutputsWithGrads,
    forward_only: bool,
) -> Layer:
    """Add a layer to `model`, which is as it was if that fails. Blobs are full names; `initial` None: parameters."""
    specs = _all_specs(cell, learn_initial=initial is None)
    with all_or_nothing(model):
        with parameters.building(cell.caller, model, scope, specs) as created:
            outside = cell.outside(model.net, created, core.BlobReference(sequence))
            step_net, inputs = _step_inputs(scope, cell, lengths)
            made = cell.step(step_net, created, inputs, outside.shared)
            step_net.AddExternalOutputs(*made.states)
            recompute = _shared_by_steps(step_net, made.recompute)
        values = [created[name] for name in _initial_names(cell)] if initial is None else initial
        request = arguments.read(
            cell.caller,
            net=model.net,
            cell_net=step_net,
            inputs=[(inputs.input_t, outside.sequence)],
            initial_cell_inputs=[
                (state, core.BlobReference(str(blob))) for state, blob in zip(inputs.previous, values)
            ],
            links=dict(zip(inputs.previous, made.states)),
            timestep=inputs.timestep,
            scope=scope,
            outputs_with_grads=outputs_with_grads,
            recompute_blobs_on_backward=recompute or None,
            forward_only=forward_only,
            scratch_sizes=None,
        )
        outputs = add_loop(request, recompute_unread=False, remedy=REMEDY)
    return Layer(outputs, created)


def unused_blob(net: core.Net, name: str) -> str:
    """`name`, numbered where the net has such a blob under the current scope already."""
    candidate, number = name, 0
    while net.BlobIsDefined(core.ScopedName(candidate)):
        number += 1
        candidate = "{}_{}".format(name, number)
    return candidate


def fc(
    net: core.Net, sequence: core.BlobReference, parameters: Blobs, name: str, output: Optional[str] = None
) -> core.BlobReference:
    """`sequence` `[T, N, dim_in]` times the parameters `<name>_w`, plus `<name>_b`: `[T, N, dim_out]`."""
    return net.FC([sequence, parameters[name + "_w"], parameters[name + "_b"]], output or name, axis=2)


def pair(parameters: Blobs, name: str) -> Blobs:
    """The weights and biases of a fully connected layer, as callers get them."""
    return {"weights": parameters[name + "_w"], "biases": parameters[name + "_b"]}


def _all_specs(cell: Cell, learn_initial: bool) -> List[ParameterSpec]:
    specs = list(cell.parameters())
    if learn_initial:
        specs += [
            ParameterSpec(name, [size], Initializer("ConstantFill", value=0.0))
            for name, size in zip(_initial_names(cell), cell.states.values())
        ]
    return specs


def _initial_names(cell: Cell) -> List[str]:
    """`initial_hidden_state` for the state `hidden_t`, as in Caffe2."""
    return ["initial_{}_state".format(state[: -len("_t")]) for state in cell.states]


def _shared_by_steps(step_net: core.Net, recompute: List[core.BlobReference]) -> List[core.BlobReference]:
    """The blobs that are computed again, under names that a layer which keeps them does not use.

    What steps share outlives the net (`docs/step_workspaces.md`): a later net of the same scope would find it, and all
    its steps would share what each has to keep.
    """
    renamed = {str(blob): str(blob) + SHARED for blob in recompute}
    for operator in step_net.Proto().op:
        for blobs in (operator.input, operator.output):
            blobs[:] = [renamed.get(blob, blob) for blob in blobs]
    return [core.BlobReference(blob) for blob in renamed.values()]


def _step_inputs(name: str, cell: Cell, lengths: Optional[str]) -> Tuple[core.Net, StepInputs]:
    net = core.Net(name)
    input_t, timestep, *previous = net.AddScopedExternalInputs(
        "input_t", "timestep", *(state + "_prev" for state in cell.states)
    )
    lengths_blob = None if lengths is None else core.BlobReference(lengths)
    return net, StepInputs(input_t, tuple(previous), lengths_blob, timestep)
