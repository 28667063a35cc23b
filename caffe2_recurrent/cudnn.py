"""cudnn_LSTM: the layers of an LSTM as one operator of the GPU library cuDNN, with one flat blob of weights.

What lies where in the flat blob is cuDNN's own affair: the engine writes and reads it gate by gate.

    param_init_net          lstm_init_<side>_<gate>_<layer>  ->  RecurrentParamSet  ->  lstm_weight
    net                     input, hidden, cell, lstm_weight  ->  Recurrent  ->  lstm_output, ...
    lstm_param_extractor    lstm_weight  ->  RecurrentParamGet  ->  lstm_<side>_<gate>_<layer>

Source: caffe2/operators/rnn/recurrent_op_cudnn.cc.
"""

import collections.abc
import math
import warnings
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer
from caffe2.python.modeling.parameter_info import ParameterTags

from caffe2_recurrent import parameters
from caffe2_recurrent.arguments import Blob, is_blob, outer_name
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.installation import DOCTOR
from caffe2_recurrent.parameters import ParameterSpec
from caffe2_recurrent.problems import Problems, given, names
from caffe2_recurrent.weights import ROLES, SIDES, GetLSTMParamNames

OPERATOR = "Recurrent"
OPERATORS = (OPERATOR, "RecurrentGradient", "RecurrentParamSet", "RecurrentParamGet")
ENGINE = "CUDNN"
WEIGHT = "lstm_weight"
OUTPUTS = ("lstm_output", "lstm_hidden_output", "lstm_cell_output", "lstm_rnn_scratch", "lstm_dropout_states")
ASK_DOCTOR = "`python -m {}` says what this installation can do".format(DOCTOR)

Given = Mapping[str, Union[Blob, Mapping[int, Blob]]]
# [side][name][layer]
GateBlobs = Dict[str, Dict[str, Dict[int, Blob]]]
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

        gates_t = W x_t + b + U h_{t-1} + c       (W, b: the side 'input'; U, c: 'recurrent')
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
    _check_states(initial_states, checks)
    dim_in, dim_out = checks.size("dim_in", dim_in), checks.size("dim_out", dim_out)
    scope = checks.scope(scope)
    num_layers = checks.size("num_layers", num_layers)
    wants_extractor = checks.flag("return_params", return_params)
    values = _read_gate_blobs({"recurrent": recurrent_params, "input": input_params}, num_layers, checks)
    checks.done()
    _require_operator()
    gates = list(_gates(dim_in, dim_out, num_layers))
    spec = ParameterSpec(WEIGHT, [sum(gate.size for gate in gates)], Initializer("ConstantFill"), ParameterTags.WEIGHT)
    is_new = _check_weight(model, scope, spec, bool(values))
    with parameters.building("cudnn_LSTM", model, scope, [spec]) as created:
        cudnn = _Cudnn(_full_name(input_blob), created[WEIGHT], dim_out, num_layers)
        if is_new and model.init_params:
            cudnn.fill(model.param_init_net, gates, values)
        outputs = cudnn.run(model.net, [_full_name(state) for state in initial_states])
        extractor = (cudnn.extract(gates),) if wants_extractor else ()
    trouble = machine_trouble()
    if trouble is not None:
        warnings.warn("cudnn_LSTM: this net can be built here but not run: " + trouble, stacklevel=2)
    return outputs + extractor


def check_can_run(net: Union[ModelHelper, core.Net, caffe2_pb2.NetDef]) -> None:
    """Raise if a net has operators of `cudnn_LSTM` that cannot run here, and say why.

    Creating such a net fails in the engine with an error that does not. Takes a model (whose two nets are checked), a
    net or a `NetDef`.

    Raises:
        RuntimeError: there is no GPU to use, or operators have no GPU as their device.
        TypeError: `net` is none of these.
    """
    problems = Problems("check_can_run")
    for proto in _protos(net):
        operators = [operator for operator in proto.op if operator.type in OPERATORS]
        trouble = machine_trouble() if operators else None
        if trouble is not None:
            problems.add("net '{}' has {} operators of cuDNN: {}", proto.name, len(operators), trouble)
            continue
        misplaced = [operator for operator in operators if _device_type(operator, proto) != caffe2_pb2.CUDA]
        if misplaced:
            problems.add(
                "net '{}': {} that compute {} are not on a GPU; build them in a DeviceScope of one, or call "
                "net.RunAllOnGPU()",
                proto.name,
                "{} of {} operators of cuDNN".format(len(misplaced), len(operators)),
                names(operator.output[0] for operator in misplaced),
            )
    problems.raise_if_any(RuntimeError)


def machine_trouble() -> Optional[str]:
    """Why operators of cuDNN cannot run on this machine, or None where they can."""
    if workspace.has_gpu_support and workspace.NumCudaDevices() > 0:
        return None
    return "cuDNN needs a GPU, and this Caffe2 has none to use; " + ASK_DOCTOR


def _protos(net: Any) -> List[caffe2_pb2.NetDef]:
    if isinstance(net, ModelHelper):
        return [net.param_init_net.Proto(), net.net.Proto()]
    if isinstance(net, core.Net):
        return [net.Proto()]
    if isinstance(net, caffe2_pb2.NetDef):
        return [net]
    raise TypeError("check_can_run takes a model, a core.Net or a NetDef; got {}".format(given(net)))


def _device_type(operator: caffe2_pb2.OperatorDef, proto: caffe2_pb2.NetDef) -> int:
    # An operator's own device counts before that of its net.
    option = operator.device_option if operator.HasField("device_option") else proto.device_option
    device: int = option.device_type
    return device


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


def _check_states(value: Any, checks: Checks) -> None:
    if not isinstance(value, (tuple, list)) or not all(map(is_blob, value)):
        checks.types.add("initial_states must be (hidden, cell) blobs; got {}", given(value))
    elif len(value) != 2:
        checks.values.add("initial_states must be two blobs (hidden, cell); got {}", len(value))


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


def _read_gate_blobs(given_blobs: Mapping[str, Any], num_layers: int, checks: Checks) -> GateBlobs:
    """The blobs for the gates, [side][name][layer]; a side without any is left out."""
    found: GateBlobs = {}
    for side, blobs in given_blobs.items():
        role = side + "_params"
        if isinstance(blobs, collections.abc.Mapping):
            _check_names(role, blobs, checks.values)
            found[side] = {
                name: _read_layers("{}['{}']".format(role, name), entry, num_layers, checks)
                for name, entry in blobs.items()
            }
        elif blobs is not None:
            checks.types.add("{} must be a dict of blobs or None; got {}", role, given(blobs))
    return found


def _check_names(role: str, blobs: Mapping[Any, Any], problems: Problems) -> None:
    expected = [name for names_of_role in GetLSTMParamNames().values() for name in names_of_role]
    missing = [name for name in expected if name not in blobs]
    unknown = [name for name in blobs if name not in expected]
    if missing:
        problems.add("{} lacks {}", role, names(missing))
    if unknown:
        problems.add("{} has {}; GetLSTMParamNames lists what it takes", role, names(unknown))


def _read_layers(role: str, entry: Any, num_layers: int, checks: Checks) -> Dict[int, Blob]:
    if is_blob(entry) and num_layers > 1:
        checks.values.add("{} must be a dict {{layer: blob}}, as there are {} layers", role, num_layers)
        return {}
    by_layer = {0: entry} if is_blob(entry) else entry
    if not isinstance(by_layer, collections.abc.Mapping) or not all(map(is_blob, by_layer.values())):
        checks.types.add("{} must be a blob, its name, or a dict {{layer: blob}}; got {}", role, given(entry))
        return {}
    if set(by_layer) != set(range(num_layers)):
        checks.values.add("{} has blobs for layers {}; there are {}", role, list(by_layer), list(range(num_layers)))
    return dict(by_layer)
