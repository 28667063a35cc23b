"""GRU: gated recurrent unit (arXiv 1406.1078), over Caffe2's GRUUnit operator."""

from typing import Any, List, Optional, Sequence, Tuple, Union

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.arguments import Blob, OutputsWithGrads
from caffe2_recurrent.layer import Blobs, Cell, Outside, StepInputs, StepOutputs, fc, pair, unused_blob
from caffe2_recurrent.parameters import ParameterSpec, fc_specs
from caffe2_recurrent.sequence_layer import Kind, add_sequence_layer

GATES = ("reset_gate_t", "update_gate_t", "output_gate_t")


class GRUCell(Cell):
    caller = "GRU"

    def __init__(
        self, dim_in: int, dim: int, drop_states: bool, linear_before_reset: bool, memory_optimization: bool
    ) -> None:
        self.dim_in, self.dim = dim_in, dim
        self.states = {"hidden_t": dim}
        self._drop_states, self._linear_before_reset = drop_states, linear_before_reset
        self._memory_optimization = memory_optimization

    def parameters(self) -> List[ParameterSpec]:
        specs = fc_specs("i2h", self.dim_in, len(GATES) * self.dim)
        for gate in GATES:
            specs += fc_specs(gate, self.dim, self.dim)
        return specs

    def outside(self, net: core.Net, parameters: Blobs, sequence: core.BlobReference) -> Outside:
        return Outside(fc(net, sequence, parameters, "i2h", unused_blob(net, "i2h")))

    def step(self, net: core.Net, parameters: Blobs, inputs: StepInputs, shared: Any) -> StepOutputs:
        (hidden_prev,) = inputs.previous
        parts = net.Split([inputs.input_t], ["input_{}".format(gate) for gate in GATES], axis=2)
        reset = fc(net, hidden_prev, parameters, "reset_gate_t")
        update = fc(net, hidden_prev, parameters, "update_gate_t")
        net.Sum([reset, parts[0]], [reset])
        net.Sum([update, parts[1]], [update])
        opened = net.Sigmoid(reset, "reset_gate_t_sigmoid")
        if self._linear_before_reset:
            linear = fc(net, hidden_prev, parameters, "output_gate_t", "output_gate_t_linear")
            output, inner = net.Mul([opened, linear], "output_gate_t"), linear
        else:
            inner = net.Mul([opened, hidden_prev], "modified_hidden_t_prev")
            output = fc(net, inner, parameters, "output_gate_t")
        net.Sum([output, parts[2]], [output])
        # Not `gates_t`, as in MILSTMCell.
        gates, sizes = net.Concat([reset, update, output], ["joined_gates_t", "joined_gates_t_sizes"], axis=2)
        lengths = [] if inputs.lengths is None else [inputs.lengths]
        hidden = net.GRUUnit(
            [hidden_prev, gates, *lengths, inputs.timestep],
            "hidden_t",
            drop_states=self._drop_states,
            sequence_lengths=bool(lengths),
        )
        recompute = [*parts, reset, update, opened, inner, output, gates, sizes]
        return StepOutputs((hidden,), recompute if self._memory_optimization else [])


GRU_KIND = Kind(
    GRUCell.caller,
    ("hidden",),
    lambda dim_in, dim, options: GRUCell(
        dim_in, dim, options.drop_states, options.flags["linear_before_reset"], options.memory_optimization
    ),
    lambda parameters: {
        "input": pair(parameters, "i2h"),
        "recurrent": {gate: pair(parameters, gate) for gate in GATES},
    },
    flags=("linear_before_reset",),
)


def GRU(  # noqa: N802
    model: ModelHelper,
    input_blob: Blob,
    seq_lengths: Optional[Blob],
    initial_states: Optional[Sequence[Blob]],
    dim_in: int,
    dim_out: Union[int, Sequence[int]],
    scope: str,
    outputs_with_grads: OutputsWithGrads = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    linear_before_reset: bool = False,
    *,
    bidirectional: bool = False,
    dropout_ratio: float = 0.0,
    is_test: bool = False,
) -> Tuple[Any, ...]:
    """Add a GRU layer to a model.

        x_r, x_u, x_o = split(W x_t + b)                        (this order along the 3 * D axis)
        reset = sigmoid(x_r + U_r hidden_{t-1} + b_r)
        update = sigmoid(x_u + U_u hidden_{t-1} + b_u)
        output = tanh(x_o + U_o (reset * hidden_{t-1}) + b_o)   or, with linear_before_reset,
        output = tanh(x_o + reset * (U_o hidden_{t-1} + b_o))
        hidden_t = update * hidden_{t-1} + (1 - update) * output

    The parameters and their order are those of `caffe2.python.gru_cell.GRU`, so that its scripts and checkpoints
    carry over; `linear_before_reset` is what cuDNN and `torch.nn.GRU` compute.

    Args: as `LSTM`, with one initial state `(hidden,)`, and `linear_before_reset`, see above. `forget_bias` is accepted
    and unused, as in Caffe2. With `memory_optimization` the gates are computed again in the backward pass.

    Parameters under `<scope>/`: `i2h_w [3 D, dim_in]`, `i2h_b [3 D]`, and for the gates `reset_gate_t`,
    `update_gate_t`, `output_gate_t` each `_w [D, D]` and `_b [D]`.

    Returns:
        hidden_all `[T, N, D]`, hidden_last `[1, N, D]` of the last layer, both directions joined along the last axis
        (2 D); and, with `return_params`, a dict `{'input': {'weights', 'biases'}, 'recurrent': {'reset_gate_t':
        {'weights', 'biases'}, ...}}`, with several loops a list of these.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.

    Source: arXiv 1406.1078; caffe2/operators/gru_unit_op.h.
    """
    return add_sequence_layer(GRU_KIND, locals())
