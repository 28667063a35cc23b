"""Several layers and both directions, against `torch.nn.LSTM` and `torch.nn.GRU` of the wheel that carries Caffe2."""

import warnings

import numpy as np
import pytest
import torch
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import Initializer

import comparing
from caffe2_recurrent import GRU, LSTM, MILSTM, check_gradients
from errors_support import lstm_refused, model_snapshot
from every_pair import every_pair

T, N, DIM_IN = 4, 3, 2
SIZES = pytest.mark.parametrize("layers", [1, 2, 3])
DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["one direction", "both directions"])
LENGTHS = pytest.mark.parametrize("lengths", [None, [4, 2, 1]], ids=["full", "lengths"])
# torch takes all layers of one size.
D = 3


def scopes(layers, bidirectional):
    """The scope of each loop, layer by layer, forward before backward."""
    found = []
    for layer in range(layers):
        scope = "net" if layers == 1 else "net/layer_{}".format(layer)
        found += [scope + "/fw", scope + "/bw"] if bidirectional else [scope]
    return found


def reordered(parameter, order):
    """The gates of a parameter of torch in another order, along its first axis."""
    gates = np.split(parameter, len(order))
    return np.concatenate([gates[position] for position in order])


def lstm_blobs(torch_parameters, scope):
    """torch has input, forget, cell, output; the LSTM unit wants input, forget, output, cell."""
    w_ih, w_hh, b_ih, b_hh = (reordered(parameter, (0, 1, 3, 2)) for parameter in torch_parameters)
    return {"i2h_w": w_ih, "gates_t_w": w_hh, "i2h_b": b_ih, "gates_t_b": b_hh}


def gru_blobs(torch_parameters, scope):
    """torch and Caffe2 have reset, update, output."""
    w_ih, w_hh, b_ih, b_hh = torch_parameters
    blobs = {"i2h_w": w_ih, "i2h_b": b_ih}
    for gate, weights, biases in zip(("reset", "update", "output"), np.split(w_hh, 3), np.split(b_hh, 3)):
        blobs[gate + "_gate_t_w"], blobs[gate + "_gate_t_b"] = weights, biases
    return blobs


KINDS = {
    "lstm": (LSTM, torch.nn.LSTM, lstm_blobs, {}, 2),
    "gru": (GRU, torch.nn.GRU, gru_blobs, {"linear_before_reset": True}, 1),
}


def parameters_of(module, count):
    """The parameters of each loop of a torch module, in its order."""
    found = list(module.parameters())
    return [found[4 * loop : 4 * loop + 4] for loop in range(count)]


@every_pair
@SIZES
@DIRECTIONS
@LENGTHS
@pytest.mark.parametrize("kind", list(KINDS))
def test_values_and_gradients_are_those_of_torch(kind, layers, bidirectional, lengths):
    build, module_type, to_blobs, options, states_per_loop = KINDS[kind]
    torch.manual_seed(layers)
    module = module_type(DIM_IN, D, layers, bidirectional=bidirectional)
    loops = scopes(layers, bidirectional)
    directions = 2 if bidirectional else 1
    random = np.random.RandomState(0)
    x = random.randn(T, N, DIM_IN).astype(np.float32)
    states = random.randn(states_per_loop, len(loops), N, D).astype(np.float32)
    seed = random.randn(T, N, D * directions).astype(np.float32)
    if lengths is not None:
        seed *= (np.arange(T)[:, np.newaxis] < np.array(lengths))[:, :, np.newaxis]

    # torch
    sequence = torch.tensor(x, requires_grad=True)
    initial = [torch.tensor(state) for state in states]
    given = tuple(initial) if states_per_loop == 2 else initial[0]
    if lengths is None:
        output, last = module(sequence, given)
    else:
        packed = torch.nn.utils.rnn.pack_padded_sequence(sequence, lengths)
        output, last = module(packed, given)
        output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=T)
    (output * torch.tensor(seed)).sum().backward()
    last = last if states_per_loop == 2 else (last,)

    # ours
    model = ModelHelper("model")
    names = ["s{}".format(number) for number in range(len(loops) * states_per_loop)]
    outputs = build(
        model,
        "x",
        None if lengths is None else "lengths",
        names,
        DIM_IN,
        D if layers == 1 else [D] * layers,
        "net",
        outputs_with_grads=(0,),
        bidirectional=bidirectional,
        **options,
    )
    gradients = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("seed")})
    check_gradients(model.net, gradients)
    workspace.FeedBlob("x", x)
    workspace.FeedBlob("seed", seed)
    if lengths is not None:
        workspace.FeedBlob("lengths", np.array(lengths, dtype=np.int32))
    for number, name in enumerate(names):
        workspace.FeedBlob(name, states[number % states_per_loop, number // states_per_loop])
    for scope, group in zip(loops, parameters_of(module, len(loops))):
        for name, value in to_blobs([parameter.detach().numpy() for parameter in group], scope).items():
            workspace.FeedBlob("{}/{}".format(scope, name), value)
    assert {str(blob).rsplit("/", 1)[0] for blob in model.params} == set(loops)
    workspace.RunNetOnce(model.net)

    inside = np.ones((T, N), bool) if lengths is None else np.arange(T)[:, np.newaxis] < np.array(lengths)
    found = workspace.FetchBlob(outputs[0])
    assert found.shape == (T, N, D * directions)
    comparing.assert_close(found[inside], output.detach().numpy()[inside], "hidden_all", 1e-5)
    for position, state in enumerate(last):
        of_last_layer = state.detach().numpy()[-directions:]
        expected = np.concatenate(list(of_last_layer), axis=1)[np.newaxis]
        comparing.assert_close(workspace.FetchBlob(outputs[2 * position + 1]), expected, "last", 1e-5)
    comparing.assert_close(workspace.FetchBlob(str(gradients["x"])), sequence.grad.numpy(), "x", 1e-5)
    for scope, group in zip(loops, parameters_of(module, len(loops))):
        for name, value in to_blobs([parameter.grad.numpy() for parameter in group], scope).items():
            blob = "{}/{}".format(scope, name)
            comparing.assert_close(workspace.FetchBlob(str(gradients[blob])), value, blob, 1e-5)


def dropped_stack(is_test, ratio=0.5, builder=LSTM):
    model = ModelHelper("model")
    names = ["hidden", "cell"] * 2
    outputs = builder(model, "x", None, names, DIM_IN, [D, D], "net", dropout_ratio=ratio, is_test=is_test)
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(0)
    for name, shape in {"x": (T, N, DIM_IN), "hidden": (N, D), "cell": (N, D)}.items():
        workspace.FeedBlob(name, random.randn(*shape).astype(np.float32))
    return model, outputs


@pytest.mark.parametrize("builder", [LSTM, MILSTM])
def test_dropout_is_between_the_layers_and_off_in_test_mode(builder):
    model, outputs = dropped_stack(is_test=False, builder=builder)
    workspace.RunNetOnce(model.net)
    lower = workspace.FetchBlob("net/layer_0/hidden_t_all")
    dropped = workspace.FetchBlob("net/layer_0/dropped")
    kept = dropped != 0
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(dropped[kept], 2 * lower[kept], rtol=1e-6)
    trained = workspace.FetchBlob(outputs[0])
    parameters = {str(blob): workspace.FetchBlob(str(blob)) for blob in model.params}

    def without_dropping(is_test, ratio):
        workspace.ResetWorkspace()
        model, outputs = dropped_stack(is_test, ratio, builder)
        for name, value in parameters.items():
            workspace.FeedBlob(name, value)
        workspace.RunNetOnce(model.net)
        return workspace.FetchBlob(outputs[0]), [operator.type for operator in model.net.Proto().op]

    tested, _ = without_dropping(is_test=True, ratio=0.5)
    never, operators = without_dropping(is_test=False, ratio=0.0)
    np.testing.assert_array_equal(tested, never)
    assert "Dropout" not in operators
    assert not np.array_equal(tested, trained)


@pytest.mark.parametrize("builder", [LSTM, MILSTM, GRU], ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("dim_out", [3, [3]], ids=repr)
def test_dropout_of_one_layer_does_nothing_and_says_so(builder, dim_out):
    expected = (
        "^{}: dropout_ratio=0.2 does nothing, as it is for dropout between layers, and there is one layer$".format(
            builder.__name__
        )
    )
    model = ModelHelper("model")
    with pytest.warns(UserWarning, match=expected) as caught:
        builder(model, "x", None, None, 2, dim_out, "net", bidirectional=True, dropout_ratio=0.2)
    assert [warning.filename for warning in caught] == [__file__]
    assert "Dropout" not in {operator.type for operator in model.net.Proto().op}


@pytest.mark.parametrize("options", [{"dim_out": [3, 3]}, {"dim_out": 3, "is_test": True}], ids=["two", "test"])
def test_dropout_that_is_wanted_or_off_is_no_cause_for_a_warning(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LSTM(ModelHelper("model"), "x", None, None, 2, scope="net", dropout_ratio=0.2, **options)


def test_gradients_go_back_through_dropout():
    model, outputs = dropped_stack(is_test=False)
    gradients = model.AddGradientOperators([outputs[0]])
    workspace.RunNetOnce(model.net)
    assert np.abs(workspace.FetchBlob(str(gradients["net/layer_0/gates_t_w"]))).max() > 0


def test_layers_of_different_sizes_and_their_parameters():
    model = ModelHelper("model")
    *outputs, parameters = LSTM(model, "x", None, None, 2, [3, 5], "net", return_params=True, bidirectional=True)
    assert len(parameters) == 4
    names = [str(blobs["input"]["weights"]) for blobs in parameters]
    assert names == ["net/layer_{}/{}/i2h_w".format(layer, way) for layer in (0, 1) for way in ("fw", "bw")]
    workspace.RunNetOnce(model.param_init_net)
    shapes = [workspace.FetchBlob(name).shape for name in names]
    assert shapes == [(12, 2), (12, 2), (20, 6), (20, 6)]
    workspace.FeedBlob("x", np.zeros((T, N, 2), dtype=np.float32))
    workspace.RunNetOnce(model.net)
    assert [workspace.FetchBlob(blob).shape for blob in outputs] == [(T, N, 10), (1, N, 10)] * 2


def test_gru_returns_its_parameters():
    *_, parameters = GRU(ModelHelper("model"), "x", None, None, 2, 3, "net", return_params=True)
    assert str(parameters["input"]["biases"]) == "net/i2h_b"
    assert str(parameters["recurrent"]["update_gate_t"]["weights"]) == "net/update_gate_t_w"


def test_two_stacks_of_one_scope_share_parameters_and_nothing_else():
    model = ModelHelper("model")
    first = LSTM(model, "x", None, None, 2, [3, 3], "net", bidirectional=True, dropout_ratio=0.1)
    count = len(model.params)
    second = LSTM(model, "y", None, None, 2, [3, 3], "net", bidirectional=True, dropout_ratio=0.1)
    assert len(model.params) == count
    assert {str(blob) for blob in first}.isdisjoint(str(blob) for blob in second)
    written = [blob for operator in model.net.Proto().op for blob in operator.output]
    assert len(written) == len(set(written))


@pytest.mark.parametrize("builder", [LSTM, MILSTM, GRU])
@pytest.mark.parametrize("layers", [1, 2])
def test_both_directions_in_a_workspace_where_there_was_one(layers, builder):
    """Blobs that a loop has left are views of its states, all steps and the last one of the same memory."""
    outputs = []
    for workspaces in (["both"], ["one", "both"]):
        workspace.ResetWorkspace()
        random = np.random.RandomState(0)
        workspace.FeedBlob("x", random.uniform(-1, 1, (5, 3, 4)).astype(np.float32))
        for directions in workspaces:
            model = ModelHelper(directions)
            width = {"one": 4, "both": 2}[directions]
            results = builder(model, "x", None, None, 4, [width] * layers, "l", bidirectional=directions == "both")
            workspace.RunNetOnce(model.param_init_net)
            for parameter in map(str, model.params):
                shape = workspace.FetchBlob(parameter).shape
                value = np.random.RandomState(len(parameter)).uniform(-1, 1, shape)
                workspace.FeedBlob(parameter, value.astype(np.float32))
            workspace.RunNetOnce(model.net)
        outputs.append([workspace.FetchBlob(str(blob)) for blob in results])
    for alone, after in zip(*outputs):
        np.testing.assert_array_equal(after, alone)


WRONG = {
    "no sizes": (ValueError, {"dim_out": []}, "dim_out is an empty list; give the size of each layer"),
    "a size of no number": (TypeError, {"dim_out": [3, "a"]}, "dim_out[1] must be a whole number; got 'a' of type str"),
    "a size of zero": (
        ValueError,
        {"dim_out": [0, 3], "initial_states": ("H", "C") * 2},
        "dim_out[0] must be 1 or more; got 0",
    ),
    "too few states": (
        ValueError,
        {"dim_out": [3, 3], "bidirectional": True},
        "initial_states must be 8 blobs: hidden and cell of each of the 4 layers or directions; got 2",
    ),
    "ratio of one": (ValueError, {"dropout_ratio": 1.0}, "dropout_ratio must be 0 or more and less than 1; got 1.0"),
    "ratio that is not finite": (
        ValueError,
        {"dropout_ratio": float("nan")},
        "dropout_ratio must be a finite number; got nan",
    ),
    "ratio of a flag": (TypeError, {"dropout_ratio": False}, "dropout_ratio must be a number; got False of type bool"),
    "ratio of no number": (TypeError, {"dropout_ratio": "a"}, "dropout_ratio must be a number; got 'a' of type str"),
    "bidirectional": (TypeError, {"bidirectional": 2}, "bidirectional must be True or False; got 2 of type int"),
    "is_test": (TypeError, {"is_test": "no"}, "is_test must be True or False; got 'no' of type str"),
}


@pytest.mark.parametrize("kind, changes, text", WRONG.values(), ids=list(WRONG))
def test_wrong_arguments(kind, changes, text):
    if changes.get("dim_out") == []:
        changes = dict(changes, initial_states=None)
    assert lstm_refused(kind, **changes) == "LSTM: " + text


def test_a_failing_layer_takes_back_the_layers_before_it():
    model = ModelHelper("model")
    with core.NameScope("s"), core.NameScope("layer_1"):
        model.create_param("gates_t_w", [1, 1], Initializer("ConstantFill", value=0.0))
    before = model_snapshot(model)
    with pytest.raises(ValueError) as error:
        LSTM(model, "x", None, None, DIM_IN, [3, 3], "s")
    assert str(error.value) == "LSTM: parameter 's/layer_1/gates_t_w' has shape [1, 1], but this cell needs [12, 3]"
    assert model_snapshot(model) == before


@pytest.mark.parametrize("builder", [LSTM, MILSTM, GRU])
def test_options_reach_every_layer(builder):
    """Recomputing changes no gradient and no loop keeps more than the step number; forward_only derives nothing."""

    def run(**options):
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = builder(model, "x", "lengths", None, DIM_IN, [D, D], "net", bidirectional=True, **options)
        gradients = {} if options.get("forward_only") else model.AddGradientOperators([outputs[0]]) or model.grad_map
        random = np.random.RandomState(0)
        workspace.RunNetOnce(model.param_init_net)
        for parameter in model.params:
            shape = workspace.FetchBlob(str(parameter)).shape
            workspace.FeedBlob(str(parameter), random.uniform(-1, 1, size=shape).astype(np.float32))
        workspace.FeedBlob("x", random.randn(T, N, DIM_IN).astype(np.float32))
        workspace.FeedBlob("lengths", np.array([4, 2, 1], dtype=np.int32))
        workspace.RunNetOnce(model.net)
        fetched = {name: workspace.FetchBlob(str(gradients[name])) for name in ["x", *model.params] if gradients}
        loops = [operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork"]
        return workspace.FetchBlob(outputs[0]), fetched, loops

    hidden, gradients, loops = run()
    recomputed, again, shared = run(memory_optimization=True)
    served, _, forward = run(forward_only=True)
    np.testing.assert_array_equal(recomputed, hidden)
    np.testing.assert_array_equal(served, hidden)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(again[name], gradient, err_msg=str(name))
    assert len(loops) == len(shared) == len(forward) == 4

    def arguments(operator):
        return {argument.name: argument for argument in operator.arg}

    assert all(not arguments(loop)["recompute_blobs_on_backward"].strings for loop in loops)
    assert all(arguments(loop)["recompute_blobs_on_backward"].strings for loop in shared)
    assert all("backward_step_net" not in arguments(loop) for loop in forward)
