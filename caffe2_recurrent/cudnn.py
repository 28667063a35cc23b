"""cudnn_LSTM: the layers of an LSTM as one operator of the GPU library cuDNN, with one flat blob of weights.

What lies where in the flat blob is cuDNN's own affair: the engine writes and reads it gate by gate.

    param_init_net          lstm_init_<side>_<gate>_<layer>  ->  RecurrentParamSet  ->  lstm_weight
    net                     input, hidden, cell, lstm_weight  ->  Recurrent  ->  lstm_output, ...
    lstm_param_extractor    lstm_weight  ->  RecurrentParamGet  ->  lstm_<side>_<gate>_<layer>

Source: caffe2/operators/rnn/recurrent_op_cudnn.cc.
"""

import math
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer
from caffe2.python.modeling.parameter_info import ParameterTags

from caffe2_recurrent import parameters
from caffe2_recurrent.arguments import Blob, outer_name
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.cudnn_gate_blobs import GateBlobs, Given, read_gate_blobs
from caffe2_recurrent.cudnn_machine import ASK_DOCTOR, OPERATOR, machine_trouble
from caffe2_recurrent.cudnn_machine import check_can_run as check_can_run
from caffe2_recurrent.parameters import ParameterSpec
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.weights import ROLES, SIDES, GetLSTMParamNames

ENGINE = "CUDNN"
WEIGHT = "lstm_weight"
OUTPUTS = ("lstm_output", "lstm_hidden_output", "lstm_cell_output", "lstm_rnn_scratch", "lstm_dropout_states")

GateMap = Dict[str, Dict[str, Dict[int, core.BlobReference]]]


class _Gate(NamedTuple):
    """One weight or bias of one gate in one layer, which cuDNN keeps as `shape`."""

    side: str
    name: str
    layer: int
    shape: Tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def suffix(self) -> str:
        return "{}_{}_{}".format(self.side, self.name, self.layer)


def cudnn_LSTM(  # noqa: N802
    model: ModelHelper,
    input_blob: Blob,
    initial_states: Sequence[Blob],
    dim_in: int,
    dim_out: int,
    scope: str,
    recurrent_params: Optional[Given] = None,
    input_params: Optional[Given] = None,
    num_layers: int = 1,
    return_params: bool = False,
) -> Tuple[Any, ...]:
    """Add an LSTM of one or more layers that cuDNN computes, on GPUs only.

        gates_t = W x_t + b_x + U hidden_{t-1} + b_h   (W, b_x: the side 'input'; U, b_h: 'recurrent')
        cell_t = sigmoid(f) * cell_{t-1} + sigmoid(i) * tanh(g)
        hidden_t = sigmoid(o) * tanh(cell_t)

    Layer 0 reads the input, layer n > 0 the hidden states of layer n - 1. Shapes: T steps, N sequences of full length
    in the batch, D = `dim_out`, L = `num_layers`. Call it in a `DeviceScope` of the GPU. Where this machine can only
    build such a net and not run it, a `UserWarning` says so; `check_can_run` tells it of a finished net.

    Strings that name blobs are taken to be under `<scope>/`, other than in `LSTM`; a `BlobReference` stands for
    itself.

    Args:
        model: gets the operator `Recurrent` and the parameter `lstm_weight`, one flat blob with, for each layer and
            gate, W `[D, dim_in]` (`[D, D]` from the second layer on), U `[D, D]`, b `[D]` and c `[D]`. A second call
            with the same scope uses the same parameter.
        input_blob: `[T, N, dim_in]`. The operators that fill `lstm_weight` look at its shape, so it must be there,
            with any values, when `param_init_net` runs.
        initial_states: (hidden, cell), each `[L, N, D]`.
        dim_in: size of an input element.
        dim_out: size D of the states.
        scope: prefix of all blobs, under the current `NameScope`.
        recurrent_params: blobs with the values to start U and c from, `{name: {layer: blob}}` with all names of
            `GetLSTMParamNames` and layers 0 to L - 1; for one layer also `{name: blob}`. None: U is random, uniform
            with variance 1 / D, and c zero, as in `LSTM`.
        input_params: the same for W and b.
        num_layers: number L of layers.
        return_params: return a net that takes `lstm_weight` apart as well.

    Returns:
        lstm_output `[T, N, D]`, the hidden states of the last layer; lstm_hidden_output and lstm_cell_output
        `[L, N, D]`, the last states. With `return_params` also a net and the blobs that it writes when run,
        `{'input': {name: {layer: blob}}, 'recurrent': {...}}`: W and U in rows, b and c.

    Only the gradient of lstm_output is passed back: the engine leaves out those of the last states. Dropout is off,
    so nothing is random but the initial values.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the model is as it was.
        RuntimeError: this Caffe2 does not know the operator.
    """
    checks = Checks("cudnn_LSTM")
    checks.model(model)
    checks.blob("input_blob", input_blob)
    checks.given_states(initial_states, ("hidden", "cell"))
    dim_in, dim_out = checks.size("dim_in", dim_in), checks.size("dim_out", dim_out)
    scope = checks.scope(scope)
    num_layers = checks.size("num_layers", num_layers)
    wants_extractor = checks.flag("return_params", return_params)
    values = read_gate_blobs({"recurrent": recurrent_params, "input": input_params}, num_layers, checks)
    checks.done()
    _require_operator()
    gates = list(_gates(dim_in, dim_out, num_layers))
    spec = ParameterSpec(WEIGHT, [sum(gate.size for gate in gates)], Initializer("ConstantFill"), ParameterTags.WEIGHT)
    is_new = _check_weight(model, scope, spec, bool(values))
    trouble = machine_trouble()
    if trouble is not None:
        # Before anything is built: a warning may be an error.
        warnings.warn("cudnn_LSTM: this net can be built here but not run: " + trouble, stacklevel=2)
    with parameters.building("cudnn_LSTM", model, scope, [spec]) as created:
        cudnn = _Cudnn(_full_name(input_blob), created[WEIGHT], dim_out, num_layers)
        if is_new and model.init_params:
            cudnn.fill(model.param_init_net, gates, values)
        outputs = cudnn.run(model.net, [_full_name(state) for state in initial_states])
        extractor = (cudnn.extract(gates),) if wants_extractor else ()
    return outputs + extractor


@core.GradientRegistry.RegisterGradient(OPERATOR)
def _refuse_gradient(operator: caffe2_pb2.OperatorDef, output_gradients: Sequence[Any]) -> NoReturn:
    """Caffe2 comes here where the engine's own gradient maker fails, which wants a gradient of the first output."""
    arrived = [output for output, gradient in zip(operator.output, output_gradients) if gradient is not None]
    raise ValueError(
        "cudnn_LSTM: the engine passes back a dense gradient of '{}' and nothing else; gradients arrived at {}. "
        "The last hidden state of the last layer is the last step of '{}'".format(
            operator.output[0], names(arrived), operator.output[0]
        )
    )


def _gates(dim_in: int, dim_out: int, num_layers: int) -> Iterator[_Gate]:
    """All gates, in the order in which they are filled and extracted."""
    gate_names = GetLSTMParamNames()
    for side in SIDES:
        for role in ROLES:
            for name in gate_names[role]:
                for layer in range(num_layers):
                    width = dim_in if side == "input" and layer == 0 else dim_out
                    yield _Gate(side, name, layer, (dim_out, width) if role == "weights" else (dim_out,))


class _Cudnn:
    """Operators of cuDNN on one flat blob of weights, made under the current `NameScope`."""

    def __init__(self, sequence: core.BlobReference, weight: core.BlobReference, dim_out: int, num_layers: int) -> None:
        self._sequence = sequence
        self._weight = weight
        self._options: Dict[str, Any] = {
            "hidden_size": dim_out,
            "rnn_mode": "lstm",
            "bidirectional": 0,
            # 1 turns dropout off.
            "dropout": 1.0,
            "input_mode": "linear",
            "num_layers": num_layers,
            "engine": ENGINE,
        }

    def fill(self, net: core.Net, gates: Sequence[_Gate], values: GateBlobs) -> None:
        """Set the weights gate by gate, to the given blobs or, on a side without any, to initial values."""
        for gate in gates:
            if gate.side in values:
                value = _full_name(values[gate.side][gate.name][gate.layer])
            else:
                value = _initial_value(net, gate)
            net.RecurrentParamSet([self._sequence, self._weight, value], [self._weight], **self._of_gate(gate))

    def run(self, net: core.Net, states: Sequence[core.BlobReference]) -> Tuple[core.BlobReference, ...]:
        """The outputs and the last hidden and cell states, from the first ones."""
        # The seed is that of dropout, which is off.
        outputs = net.Recurrent([self._sequence, *states, self._weight], _unused_names(net), seed=0, **self._options)
        net.AddExternalOutputs(*outputs[1:])
        return tuple(outputs[:3])

    def extract(self, gates: Sequence[_Gate]) -> Tuple[core.Net, GateMap]:
        """A net that takes the weights apart, and the blobs that it makes."""
        net = core.Net("lstm_param_extractor")
        net.AddExternalInputs(self._sequence, self._weight)
        mapping: GateMap = {side: {} for side in SIDES}
        for gate in gates:
            blob = net.RecurrentParamGet([self._sequence, self._weight], "lstm_" + gate.suffix, **self._of_gate(gate))
            mapping[gate.side].setdefault(gate.name, {})[gate.layer] = blob
        return net, mapping

    def _of_gate(self, gate: _Gate) -> Dict[str, Any]:
        return dict(self._options, layer=gate.layer, input_type=gate.side, param_type=gate.name)


def _full_name(blob: Blob) -> core.BlobReference:
    # Without a net of its own, operators take it whether their net knows it already or not.
    return core.BlobReference(outer_name(blob))


def _initial_value(net: core.Net, gate: _Gate) -> core.BlobReference:
    name = "lstm_init_" + gate.suffix
    if len(gate.shape) == 1:
        return net.ConstantFill([], name, shape=[gate.size], value=0.0)
    # XavierFill of a matrix; the blob is flat.
    bound = math.sqrt(3.0 / gate.shape[1])
    return net.UniformFill([], name, shape=[gate.size], min=-bound, max=bound)


def _unused_names(net: core.Net) -> List[str]:
    """The outputs' names; numbered, all of them, where the net has one under the current scope already."""
    suffix, number = "", 0
    while any(net.BlobIsDefined(core.ScopedName(name + suffix)) for name in OUTPUTS):
        number += 1
        suffix = "_{}".format(number)
    return [name + suffix for name in OUTPUTS]


def _require_operator() -> None:
    if not core.IsOperatorWithEngine(OPERATOR, ENGINE):
        raise RuntimeError(
            "cudnn_LSTM: this Caffe2 was built without cuDNN and does not know its operator {}; {}".format(
                OPERATOR, ASK_DOCTOR
            )
        )


def _check_weight(model: ModelHelper, scope: str, spec: ParameterSpec, has_values: bool) -> bool:
    """Whether the flat parameter is new and so to be filled."""
    problems = Problems("cudnn_LSTM")
    with core.NameScope(scope):
        parameters.check_shapes(model, [spec], problems)
        name = parameters.scoped_name(spec.name)
    is_new = name not in model.params
    if has_values and not is_new:
        problems.add(
            "the model has parameter '{}' already; leave out input_params and recurrent_params to share it", name
        )
    elif has_values and not model.init_params:
        problems.add("the model fills no parameters (init_params=False): input_params and recurrent_params do nothing")
    problems.raise_if_any()
    return is_new
