"""LSTM: the cell of Hochreiter and Schmidhuber (1997) with forget gate, over Caffe2's LSTMUnit operator."""

import numbers
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer

from caffe2_recurrent import parameters
from caffe2_recurrent.arguments import (
    Blob,
    OutputsWithGrads,
    is_blob,
    is_integer,
    outer_name,
    read_flag,
    read_outputs_with_grads,
)
from caffe2_recurrent.parameters import FCParameters, ParameterSpec
from caffe2_recurrent.problems import Problems, given
from caffe2_recurrent.recurrent import check_positions, recurrent_net
from caffe2_recurrent.transaction import all_or_nothing

GATES = 4


class _Request(NamedTuple):
    """The arguments of `LSTM` that name blobs of the model's net, as full names."""

    outer_input: str
    outer_lengths: Optional[str]
    outer_initial: Optional[Tuple[str, str]]


def LSTM(  # noqa: N802
    model: ModelHelper,
    input_blob: Blob,
    seq_lengths: Optional[Blob],
    initial_states: Optional[Sequence[Blob]],
    dim_in: int,
    dim_out: int,
    scope: str,
    outputs_with_grads: OutputsWithGrads = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
) -> Tuple[Any, ...]:
    """Add an LSTM layer to a model.

        gates_t = W x_t + b + U h_{t-1} + c
        i, f, o, g = split(gates_t)              (this order along the 4 * D axis)
        cell_t = sigmoid(f + forget_bias) * cell_{t-1} + sigmoid(i) * tanh(g)
        hidden_t = sigmoid(o) * tanh(cell_t)

    Shapes: T steps, N sequences in the batch, D = `dim_out`. `W x + b` is computed for all steps at once.

    Args:
        model: `ModelHelper` or `CNNModelHelper`; gets the operators and the parameters `i2h_w [4 D, dim_in]`,
            `i2h_b [4 D]`, `gates_t_w [4 D, D]`, `gates_t_b [4 D]` under `<scope>/`. A second call with the same
            scope uses the same parameters.
        input_blob: `[T, N, dim_in]`.
        seq_lengths: int32 `[N]`; None if every sequence is T long. Past its end a sequence's states stay what they
            were.
        initial_states: (hidden, cell), each `[D]`, `[N, D]` or `[1, N, D]`. None: they are parameters
            `initial_hidden_state`, `initial_cell_state` `[D]` that start at 0.
        dim_in: size of an input element.
        dim_out: size D of the states.
        scope: prefix of all blobs, under the current `NameScope`.
        outputs_with_grads: which of the four outputs receive a gradient, or 'auto'; see `recurrent_net`.
        return_params: return a dict of parameter blobs as well.
        memory_optimization: compute the gates again in the backward pass instead of keeping `[N, 4 D]` per step.
        forget_bias: added to the forget gate.
        forward_only: derive no backward step.
        drop_states: states past the end of a sequence are 0 instead.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]`, cell_all, cell_last and, with `return_params`,
        `{'input': {'weights', 'biases'}, 'recurrent': {'weights', 'biases'}}`.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: caffe2/operators/lstm_unit_op.h.
    """
    flags = {
        "return_params": return_params,
        "memory_optimization": memory_optimization,
        "forward_only": forward_only,
        "drop_states": drop_states,
    }
    request = _read(
        model, input_blob, seq_lengths, initial_states, dim_in, dim_out, scope, outputs_with_grads, forget_bias, flags
    )
    dim_in, dim_out = int(dim_in), int(dim_out)
    specs = parameters.fc_specs("i2h", dim_in, GATES * dim_out) + parameters.fc_specs(
        "gates_t", dim_out, GATES * dim_out
    )
    if request.outer_initial is None:
        specs += _state_specs(dim_out)
    with all_or_nothing(model):
        with core.NameScope(scope):
            problems = Problems("LSTM")
            parameters.check_shapes(model, specs, problems)
            problems.raise_if_any()
            created = parameters.create(model, specs)
            of_input, of_state = FCParameters(*created[:2]), FCParameters(*created[2:4])
            gate_inputs = model.net.FC(
                [core.BlobReference(request.outer_input), *of_input], _unused_blob(model.net, "i2h"), axis=2
            )
            step = _Step(scope, of_state, request.outer_lengths, forget_bias, drop_states)
        initial = request.outer_initial or tuple(str(blob) for blob in created[4:])
        outputs = recurrent_net(
            net=model.net,
            cell_net=step.net,
            inputs=[(step.input_t, gate_inputs)],
            initial_cell_inputs=[
                (step.hidden_t_prev, core.BlobReference(initial[0])),
                (step.cell_t_prev, core.BlobReference(initial[1])),
            ],
            links={step.hidden_t_prev: step.hidden_t, step.cell_t_prev: step.cell_t},
            timestep=step.timestep,
            scope=scope,
            outputs_with_grads=outputs_with_grads,
            recompute_blobs_on_backward=[step.gates_t] if memory_optimization else None,
            forward_only=forward_only,
        )
    if not return_params:
        return outputs
    params: Dict[str, Dict[str, core.BlobReference]] = {
        "input": dict(of_input._asdict()),
        "recurrent": dict(of_state._asdict()),
    }
    return outputs + (params,)


class _Step:
    """The step net of an LSTM, blobs under the current `NameScope`: gates `[1, N, 4 D]`, states `[1, N, D]`."""

    def __init__(
        self,
        name: str,
        of_state: FCParameters,
        seq_lengths: Optional[str],
        forget_bias: float,
        drop_states: bool,
    ) -> None:
        self.net = core.Net(name)
        self.input_t, self.timestep, self.hidden_t_prev, self.cell_t_prev = self.net.AddScopedExternalInputs(
            "input_t", "timestep", "hidden_t_prev", "cell_t_prev"
        )
        self.gates_t = self.net.FC([self.hidden_t_prev, *of_state], "gates_t", axis=2)
        self.net.Sum([self.gates_t, self.input_t], [self.gates_t])
        lengths = [] if seq_lengths is None else [core.BlobReference(seq_lengths)]
        self.hidden_t, self.cell_t = self.net.LSTMUnit(
            [self.hidden_t_prev, self.cell_t_prev, self.gates_t, *lengths, self.timestep],
            ["hidden_t", "cell_t"],
            forget_bias=float(forget_bias),
            drop_states=bool(drop_states),
            sequence_lengths=bool(lengths),
        )
        self.net.AddExternalOutputs(self.hidden_t, self.cell_t)


def _state_specs(dim: int) -> List[ParameterSpec]:
    return [
        ParameterSpec(name, [dim], Initializer("ConstantFill", value=0.0))
        for name in ("initial_hidden_state", "initial_cell_state")
    ]


def _unused_blob(net: core.Net, name: str) -> str:
    """`name`, numbered where the net has such a blob under the current scope already."""
    candidate, number = name, 0
    while net.BlobIsDefined(core.ScopedName(candidate)):
        number += 1
        candidate = "{}_{}".format(name, number)
    return candidate


def _read(
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Any,
    dim_in: Any,
    dim_out: Any,
    scope: Any,
    outputs_with_grads: Any,
    forget_bias: Any,
    flags: Dict[str, Any],
) -> _Request:
    """Check all arguments before anything is built; raises one error that names all faults."""
    types, values = Problems("LSTM"), Problems("LSTM")
    if not isinstance(model, ModelHelper):
        types.add("model must be a ModelHelper or CNNModelHelper; got {}", given(model))
    if not is_blob(input_blob):
        types.add("input_blob must be a blob or its name; got {}", given(input_blob))
    if seq_lengths is not None and not is_blob(seq_lengths):
        types.add("seq_lengths must be a blob, its name, or None for full length; got {}", given(seq_lengths))
    states = list(initial_states) if isinstance(initial_states, (tuple, list)) else None
    if initial_states is not None and (states is None or not all(is_blob(state) for state in states)):
        types.add("initial_states must be (hidden, cell) blobs or None; got {}", given(initial_states))
    elif states is not None and len(states) != 2:
        values.add("initial_states must be two blobs (hidden, cell); got {}", len(states))
    for name, size in (("dim_in", dim_in), ("dim_out", dim_out)):
        if not is_integer(size):
            types.add("{} must be a whole number; got {}", name, given(size))
        elif size < 1:
            values.add("{} must be 1 or more; got {}", name, size)
    if not isinstance(scope, str):
        types.add("scope must be a string; got {}", given(scope))
    elif not scope:
        values.add("scope is empty; parameters need a prefix that tells this layer from others")
    if not isinstance(forget_bias, numbers.Real):
        types.add("forget_bias must be a number; got {}", given(forget_bias))
    for name, flag in flags.items():
        read_flag(name, flag, types)
    positions = read_outputs_with_grads(outputs_with_grads, types)
    check_positions(positions, ["hidden_all", "hidden_last", "cell_all", "cell_last"], values)
    types.raise_if_any(TypeError)
    values.raise_if_any()
    return _Request(
        outer_name(input_blob),
        None if seq_lengths is None else outer_name(seq_lengths),
        None if states is None else (outer_name(states[0]), outer_name(states[1])),
    )
