"""`lstm_to_torch` and `lstm_from_torch`: the same outputs and gradients on both sides, and no number lost between."""

import io
import itertools
import sys

import numpy as np
import pytest
import torch
from caffe2.proto import caffe2_pb2
from caffe2.python import core, optimizer, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.parameter_sharing import ParameterSharing
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
from caffe2_recurrent import GRU, LSTM, MILSTM, LSTMWithAttention, lstm_from_torch, lstm_to_torch, optimize
from caffe2_recurrent.attention import AttentionType
from caffe2_recurrent.exchange import torch_weights
from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.problems import names
from errors_support import listed
from every_pair import every_pair
from exchanged_lstms import DIRECTIONS, FORGET_BIAS, LAYERS, Stack, assert_brought_back, bits, gates, refused, weights

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
LENGTHS = pytest.mark.parametrize("lengths", [None, [4, 2, 1]], ids=["full", "lengths"])


def module_of(stack, **options):
    torch.manual_seed(stack.seed)
    return torch.nn.LSTM(stack.dim_in, stack.dim, stack.layers, bidirectional=stack.bidirectional, **options)


def tensors(state):
    return {name: torch.from_numpy(value) for name, value in state.items()}


def run_torch(stack, module):
    """What `Stack.run` gives, from torch; gradients by the names of our blobs, gates in our order."""
    values = stack.values()
    x = torch.tensor(values["x"], requires_grad=True)
    states = [
        torch.tensor(np.stack([values[blobs[side]] for blobs in stack.states]), requires_grad=True) for side in (0, 1)
    ]
    if stack.lengths is None:
        every, last = module(x, tuple(states))
    else:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, stack.lengths)
        every, last = module(packed, tuple(states))
        every, _ = torch.nn.utils.rnn.pad_packed_sequence(every, total_length=stack.steps)
    outputs = [every, *(torch.cat(list(state[-stack.directions :]), dim=1)[None] for state in last)]
    sum((output * torch.from_numpy(seed)).sum() for output, seed in zip(outputs, stack.seeds())).backward()
    gradients = {"x": x.grad.numpy()}
    for loop, blobs in enumerate(stack.states):
        gradients.update({blob: state.grad.numpy()[loop] for blob, state in zip(blobs, states)})
    parameters = [parameter.grad.numpy() for parameter in module.parameters()]
    for blob, gradient in zip(itertools.chain(*stack.parameters), parameters):
        gradients[blob] = gates(gradient, "ifgo", "ifog")
    return [output.detach().numpy() for output in outputs], gradients


def assert_same(stack, model, outputs, module):
    """Values and gradients; past the end of a sequence torch has 0 for all steps."""
    found, gradients = stack.run(model, outputs)
    expected, expected_gradients = run_torch(stack, module)
    if stack.lengths is not None:
        inside = np.arange(stack.steps)[:, None] < np.array(stack.lengths)
        found[0], expected[0] = found[0][inside], expected[0][inside]
    for name, one, other in zip(("hidden_all", "hidden_last", "cell_last"), found, expected):
        comparing.assert_close(one, other, name, tolerance=2e-6)
    assert sorted(gradients) == sorted(expected_gradients)
    for name, gradient in gradients.items():
        comparing.assert_close(gradient, expected_gradients[name], name, tolerance=1e-5)


class Full(Stack):
    """Gradients of hidden_all within the sequences only: past them torch gives constants."""

    def seeds(self):
        every, *last = super().seeds()
        if self.lengths is not None:
            every = every * (np.arange(self.steps)[:, None] < np.array(self.lengths))[:, :, None].astype(np.float32)
        return [every, *last]


# The same numbers come out.


@every_pair
@LAYERS
@DIRECTIONS
@FORGET_BIAS
@LENGTHS
def test_to_torch(layers, bidirectional, forget_bias, lengths):
    stack = Full(layers, bidirectional, forget_bias, lengths)
    model, outputs = stack.built()
    state = lstm_to_torch(model, "lstm")
    module = module_of(stack)
    assert list(state) == list(module.state_dict())
    module.load_state_dict(tensors(state))
    assert_same(stack, model, outputs, module)


@every_pair
@LAYERS
@DIRECTIONS
@FORGET_BIAS
@LENGTHS
def test_from_torch(layers, bidirectional, forget_bias, lengths):
    stack = Full(layers, bidirectional, forget_bias, lengths)
    model, outputs = stack.built()
    before = weights(stack)
    module = module_of(stack)
    lstm_from_torch(model, "lstm", module)
    assert all((workspace.FetchBlob(blob) != value).all() for blob, value in before.items())
    assert_same(stack, model, outputs, module)


@pytest.mark.parametrize(
    "order", ["".join(order) for order in itertools.permutations("ifgo") if order != tuple("ifgo")]
)
def test_the_comparison_notices_another_order_of_gates(order, monkeypatch):
    stack = Stack()
    model, outputs = stack.built()
    monkeypatch.setattr(torch_weights, "TORCH", order)
    module = module_of(stack)
    module.load_state_dict(tensors(lstm_to_torch(model, "lstm")))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(stack, model, outputs, module)


@pytest.mark.parametrize("planted", ["one bias", "directions", "forget_bias"])
def test_the_comparison_notices_a_small_mistake(planted):
    stack = Stack(2, True, forget_bias=0.01)
    model, outputs = stack.built()
    state = lstm_to_torch(model, "lstm")
    if planted == "one bias":
        state["bias_hh_l1_reverse"][0] += 1e-3
    elif planted == "directions":
        for name in NAMES:
            one, other = name + "_l0", name + "_l0_reverse"
            state[one], state[other] = state[other], state[one]
    else:
        state["bias_ih_l0"][3:6] -= 0.01
    module = module_of(stack)
    module.load_state_dict(tensors(state))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(stack, model, outputs, module)


# What lies where.


def test_names_shapes_and_values():
    stack = Stack(2, True)
    model, _ = stack.built()
    state = lstm_to_torch(model, "lstm", prefix="encoder.")
    expected = [
        "encoder.{}_l{}{}".format(name, layer, end) for layer in (0, 1) for end in ("", "_reverse") for name in NAMES
    ]
    assert list(state) == expected
    blobs = [blob for blobs in stack.parameters for blob in blobs]
    order = ["i2h_w", "gates_t_w", "i2h_b", "gates_t_b"]
    assert [blob.rsplit("/", 1)[1] for blob in blobs] == order * 4
    for name, blob in zip(expected, blobs):
        assert state[name].dtype == np.float32
        np.testing.assert_array_equal(state[name], gates(workspace.FetchBlob(blob), "ifog", "ifgo"))
    assert state["encoder.weight_ih_l1_reverse"].shape == (12, 6)


def test_forget_bias_goes_into_the_forget_gate_of_bias_ih():
    plain, biased = Stack(), Stack(forget_bias=0.5)
    expected = lstm_to_torch(plain.built()[0], "lstm")
    expected["bias_ih_l0"][3:6] += np.float32(0.5)
    found = lstm_to_torch(biased.built()[0], "lstm")
    for name in expected:
        np.testing.assert_array_equal(bits(found[name]), bits(expected[name]))


def test_the_state_is_a_copy():
    stack = Stack()
    model, _ = stack.built()
    before = weights(stack)
    for value in lstm_to_torch(model, "lstm").values():
        value[:] = 7
    for blob, value in before.items():
        np.testing.assert_array_equal(workspace.FetchBlob(blob), value)


# There and back.


@given(
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.sampled_from([0.0, -0.0, 1.0, -2.5, 0.1]),
)
@settings(max_examples=40)
def test_there_and_back(layers, bidirectional, dim_in, dim, seed, forget_bias):
    workspace.ResetWorkspace()
    stack = Stack(layers, bidirectional, forget_bias, dim_in=dim_in, dim=dim, seed=seed)
    model, _ = stack.built()
    before = weights(stack)
    state = lstm_to_torch(model, "lstm")
    module_of(stack).load_state_dict(tensors(state))
    for blob, value in before.items():
        workspace.FeedBlob(blob, np.zeros_like(value))
    lstm_from_torch(model, "lstm", state)
    assert_brought_back(before, forget_bias, dim)


@LAYERS
@DIRECTIONS
def test_from_torch_and_back(layers, bidirectional):
    stack = Stack(layers, bidirectional)
    model, _ = stack.built()
    module = module_of(stack)
    lstm_from_torch(model, "lstm", module)
    for name, value in lstm_to_torch(model, "lstm").items():
        np.testing.assert_array_equal(bits(value), bits(module.state_dict()[name].numpy()))


def test_no_bit_is_lost():
    """-0, infinities, the smallest number, a NaN with something in it."""
    stack = Stack()
    model, _ = stack.built()
    odd = np.array([0x80000000, 0x7F800000, 0xFF800000, 1, 0x7FC00123], dtype=np.uint32).view(np.float32)
    for blob, value in weights(stack).items():
        workspace.FeedBlob(blob, np.resize(odd, value.shape))
    before = weights(stack)
    state = lstm_to_torch(model, "lstm")
    for blob, value in before.items():
        workspace.FeedBlob(blob, np.zeros_like(value))
    lstm_from_torch(model, "lstm", tensors(state))
    for blob, value in before.items():
        np.testing.assert_array_equal(bits(workspace.FetchBlob(blob)), bits(value))


# What a state may be.


def as_file(state):
    stream = io.BytesIO()
    np.savez(stream, **state)
    stream.seek(0)
    return np.load(stream)


STATES = {
    "arrays": lambda state: state,
    "tensors": tensors,
    "parameters": lambda state: {name: torch.nn.Parameter(value) for name, value in tensors(state).items()},
    "doubles": lambda state: {name: value.double() for name, value in tensors(state).items()},
    "double arrays": lambda state: {name: value.astype(np.float64) for name, value in state.items()},
    "arrays in columns": lambda state: {name: np.asfortranarray(value) for name, value in state.items()},
    "in another order": lambda state: dict(reversed(list(state.items()))),
    "a file of arrays": as_file,
}


@pytest.mark.parametrize("change", STATES.values(), ids=list(STATES))
def test_kinds_of_states(change):
    stack = Stack(2)
    model, _ = stack.built()
    state = {name: value + 1 for name, value in lstm_to_torch(model, "lstm").items()}
    lstm_from_torch(model, "lstm", change(state))
    for name, value in lstm_to_torch(model, "lstm").items():
        np.testing.assert_array_equal(bits(value), bits(state[name]))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_tensors(kind):
    stack = Stack()
    model, _ = stack.built()
    module = module_of(stack).to(kind)
    lstm_from_torch(model, "lstm", module)
    for name, value in lstm_to_torch(model, "lstm").items():
        np.testing.assert_array_equal(value, module.state_dict()[name].float().numpy())


@FORGET_BIAS
def test_a_module_without_biases(forget_bias):
    stack = Stack(2, True, forget_bias)
    model, outputs = stack.built()
    module = module_of(stack, bias=False)
    lstm_from_torch(model, "lstm", module)
    found = [workspace.FetchBlob(blobs[position]) for blobs in stack.parameters for position in (2, 3)]
    forget = np.float32(-forget_bias) if forget_bias else 0
    for of_input, of_state in zip(found[::2], found[1::2]):
        assert of_input.tolist() == [0] * 3 + [forget] * 3 + [0] * 6 and of_state.tolist() == [0] * 12
    expected, _ = module(torch.tensor(stack.values()["x"]), tuple(torch.zeros(4, 3, 3) for _ in range(2)))
    for blob in itertools.chain(*stack.states):
        workspace.FeedBlob(blob, np.zeros((3, 3), np.float32))
    workspace.RunNetOnce(model.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), expected.detach().numpy(), "hidden_all", 2e-6)


def test_a_part_of_a_module():
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 2)
            self.encoder = torch.nn.LSTM(2, 3)

    stack = Stack()
    model, _ = stack.built()
    tagger = Tagger()
    lstm_from_torch(model, "lstm", tagger, prefix="encoder.")
    state = lstm_to_torch(model, "lstm", prefix="encoder.")
    for name, value in state.items():
        np.testing.assert_array_equal(bits(value), bits(tagger.state_dict()[name].numpy()))
    missing, unexpected = Tagger().load_state_dict(tensors(state), strict=False)
    assert (missing, unexpected) == (["embed.weight"], [])


def test_arrays_do_not_need_torch(monkeypatch):
    stack = Stack()
    model, _ = stack.built()
    monkeypatch.setitem(sys.modules, "torch", None)
    state = lstm_to_torch(model, "lstm")
    lstm_from_torch(model, "lstm", {name: -value for name, value in state.items()})
    np.testing.assert_array_equal(lstm_to_torch(model, "lstm")["bias_hh_l0"], -state["bias_hh_l0"])


# Which nets can be read.


OPTIONS = {
    "with its backward pass": {},
    "forward only": {"forward_only": True},
    "memory optimised": {"memory_optimization": True},
    "drops states": {"drop_states": True},
    "with dropout": {"dropout_ratio": 0.5},
    "with dropout, testing": {"dropout_ratio": 0.5, "is_test": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@DIRECTIONS
def test_options_that_change_no_weights(options, bidirectional):
    expected = lstm_to_torch(Stack(2, bidirectional).built()[0], "lstm")
    model, outputs = Stack(2, bidirectional, lengths=[4, 2, 1], options=options).built()
    if not options.get("forward_only"):
        model.AddGradientOperators([outputs[0]])
    found = lstm_to_torch(model, "lstm")
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("build", [optimizer.build_sgd, optimizer.build_adam], ids=["sgd", "adam"])
def test_after_training(build):
    """An optimizer writes to the parameters in the net itself."""
    stack = Stack(2, True)
    model, outputs = stack.built()
    model.AddGradientOperators([model.net.AveragedLoss(outputs[0], "loss")])
    build(model, base_learning_rate=0.1)
    workspace.RunNetOnce(model.param_init_net)
    stack.feed()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    state = lstm_to_torch(model, "lstm")
    for name, blob in zip(state, itertools.chain(*stack.parameters)):
        assert (workspace.FetchBlob(blob) != stack.values()[blob]).any()
        np.testing.assert_array_equal(state[name], gates(workspace.FetchBlob(blob), "ifog", "ifgo"))


def test_nets_of_all_kinds():
    stack = Stack(2, True)
    model, _ = stack.built()
    expected = lstm_to_torch(model, "lstm")
    read = caffe2_pb2.NetDef()
    read.ParseFromString(model.net.Proto().SerializeToString())
    for net in (model.net, model.net.Proto(), read):
        for name, value in lstm_to_torch(net, "lstm").items():
            np.testing.assert_array_equal(value, expected[name])
        lstm_from_torch(net, "lstm", expected)


def test_under_a_name_scope():
    model = ModelHelper("model")
    with core.NameScope("outer"):
        LSTM(model, "x", None, None, 2, 3, "lstm")
        stack = Stack(own_states=True, scope="outer/lstm")
        stack.feed()
        inside = lstm_to_torch(model, "lstm")
        lstm_from_torch(model, "lstm", inside)
    outside = lstm_to_torch(model, "outer/lstm")
    assert all((inside[name] == value).all() for name, value in outside.items())
    assert "no LSTM under 'lstm'; it has loops under 'outer/lstm'" in refused(ValueError, lstm_to_torch, model, "lstm")


def test_several_in_a_net():
    model = ModelHelper("model")
    stacks = [Stack(2, True, scope="one", seed=1), Stack(scope="two", seed=2), Stack(3, scope="one/two", seed=3)]
    for stack in stacks:
        stack.build(model)
        stack.feed()
    for stack in stacks:
        state = lstm_to_torch(model, stack.scope)
        for name, blob in zip(state, itertools.chain(*stack.parameters)):
            np.testing.assert_array_equal(state[name], gates(workspace.FetchBlob(blob), "ifog", "ifgo"))


def test_a_single_layer_or_direction_of_several():
    stack = Stack(2, True)
    model, _ = stack.built()
    whole = lstm_to_torch(model, "lstm")
    upper = lstm_to_torch(model, "lstm/layer_1")
    assert list(upper) == list(whole)[:8]
    for name, value in upper.items():
        np.testing.assert_array_equal(value, whole[name.replace("_l0", "_l1")])
    backward = lstm_to_torch(model, "lstm/layer_1/bw")
    for name, value in backward.items():
        np.testing.assert_array_equal(value, whole[name.replace("_l0", "_l1_reverse")])


def test_layers_that_were_put_on_one_another_by_hand():
    model = ModelHelper("model")
    lower = LSTM(model, "x", None, ("h0", "c0"), 2, 3, "net/layer_0")
    LSTM(model, lower[0], None, ("h1", "c1"), 3, 3, "net/layer_1")
    stack = Stack(2, scope="net")
    stack.feed()
    assert [value.shape for value in lstm_to_torch(model, "net").values()] == [(12, 2), (12, 3), (12,), (12,)] + [
        (12, 3),
        (12, 3),
        (12,),
        (12,),
    ]


def test_a_scope_that_is_used_twice_has_one_set_of_weights():
    stack = Stack(2, True)
    model, _ = stack.built()
    expected = lstm_to_torch(model, "lstm")
    stack.build(model)
    stack.build(model)
    found = lstm_to_torch(model, "lstm")
    assert all((found[name] == expected[name]).all() for name in expected)
    lstm_from_torch(model, "lstm", found)


def test_the_lstm_of_caffe2s_rnn_cell():
    model = ModelHelper("model")
    outputs = rnn_cell.LSTM(model, "x", "lengths", ("s0", "s1"), 2, 3, "stock", forget_bias=0.5)
    stack = Full(lengths=[4, 2, 1], forget_bias=0.5, scope="stock", options={"outputs_with_grads": (0,)})
    stack.feed()
    module = module_of(stack)
    lstm_from_torch(model, "stock", module)
    workspace.RunNetOnce(model.net)
    expected, _ = run_torch(stack, module)
    inside = np.arange(4)[:, None] < np.array([4, 2, 1])
    comparing.assert_close(workspace.FetchBlob(outputs[0])[inside], expected[0][inside], "hidden_all", 2e-6)
    for position, value in ((1, expected[1]), (3, expected[2])):
        comparing.assert_close(workspace.FetchBlob(outputs[position]), value, "last", 2e-6)


def test_shared_parameters():
    model = ModelHelper("model")
    with ParameterSharing({"lstm/layer_1": "lstm/layer_0"}):
        LSTM(model, "x", None, ("a", "b", "c", "d"), 3, [3, 3], "lstm")
    workspace.RunNetOnce(model.param_init_net)
    state = lstm_to_torch(model, "lstm")
    np.testing.assert_array_equal(state["weight_ih_l0"], state["weight_ih_l1"])
    lstm_from_torch(model, "lstm", {name: value + 1 for name, value in state.items()})
    np.testing.assert_array_equal(lstm_to_torch(model, "lstm")["weight_ih_l0"], state["weight_ih_l0"] + 1)
    state["weight_hh_l1"][0, 0] += 1
    state["bias_hh_l0"][0] += 1
    assert refused(ValueError, lstm_from_torch, model, "lstm", state) == listed(
        "lstm_from_torch",
        "'lstm/layer_0/gates_t_w' is shared by layers or directions whose weight_hh differs",
        "'lstm/layer_0/gates_t_b' is shared by layers or directions whose bias_hh differs",
    )


# Errors.

STEP = "'FC', 'Sum', 'LSTMUnit'"
READ = "lstm_to_torch: the loop that makes '{}' cannot be read as that of an LSTM: "
OTHER = "its step has {}, not {}; other cells have no counterpart, and a net must be read before `optimize` rewrites it"


def test_no_such_lstm():
    model, _ = Stack(2, True, scope="one").built()
    Stack(scope="two").build(model)
    name = model.net.Name()
    for scope in ("three", "on", "one/layer_2", "one/fw", "layer_0"):
        assert refused(ValueError, lstm_to_torch, model, scope) == (
            "lstm_to_torch: net '{}' has no LSTM under '{}'; it has loops under 'one', 'two'".format(name, scope)
        )


def test_no_loops_at_all():
    net = core.Net("empty")
    expected = "lstm_from_torch: net '{}' has no RecurrentNetwork operator; it has no operators"
    expected = expected.format(net.Name())
    assert refused(ValueError, lstm_from_torch, net, "s", {}) == expected


OTHERS = {
    "GRU": lambda model: GRU(model, "x", None, ("h",), 2, 3, "s"),
    "MILSTM": lambda model: MILSTM(model, "x", None, ("h", "c"), 2, 3, "s"),
    "LSTMWithAttention": lambda model: LSTMWithAttention(
        model, "x", None, "h", "c", "w", 3, "e", 2, 3, "s", AttentionType.Regular
    ),
}


@pytest.mark.parametrize("build", OTHERS.values(), ids=list(OTHERS))
def test_other_cells(build):
    model = ModelHelper("model")
    made = str(build(model)[0])
    text = refused(ValueError, lstm_to_torch, model, "s")
    step = next(argument for argument in model.net.Proto().op[-1].arg if argument.name == "step_net").n
    assert text == READ.format(made) + OTHER.format(names(operator.type for operator in step.op), STEP)


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_of_caffe2_in_one_loop(layers):
    model = ModelHelper("model")
    rnn_cell.LSTM(model, "x", "lengths", None, 2, [3] * layers, "s")
    assert refused(ValueError, lstm_to_torch, model, "s") == READ.format("s/layer_0/hidden_state_all") + (
        "its step has the {} layers of an LSTM of Caffe2's rnn_cell; each must have a loop of its own, as LSTM builds "
        "it: docs/leaving.md shows how to go on with the same weights".format(layers)
    )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_after_optimize(bidirectional):
    """What it makes of a loop is another loop; a model built anew reads the same blobs."""
    stack = Stack(1, bidirectional, steps=20, batch=16, dim_in=8, dim=128)
    model, outputs = stack.built()
    expected = lstm_to_torch(model, "lstm")
    model.AddGradientOperators([outputs[0]])
    optimize(model, shapes={"x": (20, 16, 8)})
    text = refused(ValueError, lstm_to_torch, model, "lstm")
    assert "a net must be read before `optimize` rewrites it" in text
    anew, _ = stack.build(ModelHelper("anew", init_params=False))
    found = lstm_to_torch(anew, "lstm")
    assert all((found[name] == expected[name]).all() for name in expected)


def changed(stack, change):
    """The net of a stack, with something in it changed."""
    model, _ = stack.built()
    net = caffe2_pb2.NetDef()
    net.CopyFrom(model.net.Proto())
    change(net)
    return net


def operator_of(net, output):
    return next(operator for operator in net.op if output in operator.output)


def in_step(change):
    """A change to the three operators of the first loop's step."""

    def apply(net):
        loop = next(operator for operator in net.op if operator.type == "RecurrentNetwork")
        change(*next(argument for argument in loop.arg if argument.name == "step_net").n.op)

    return apply


def swap_inputs(operator, one, other):
    operator.input[one], operator.input[other] = operator.input[other], operator.input[one]


def set_input(operator, position, blob):
    operator.input[position] = blob


def set_type(operator, kind):
    operator.type = kind


CONNECTED_OTHERWISE = {
    "states of the unit swapped": in_step(lambda product, total, unit: swap_inputs(unit, 0, 1)),
    "unit without a state": in_step(lambda product, total, unit: set_input(unit, 1, "x")),
    "unit without its step": in_step(lambda product, total, unit: unit.input.pop()),
    "unit over other gates": in_step(lambda product, total, unit: set_input(unit, 2, "lstm/input_t")),
    "product of something else": in_step(lambda product, total, unit: set_input(product, 0, "lstm/cell_t_prev")),
    "sum of three": in_step(lambda product, total, unit: total.input.append("x")),
    "sum of the product with itself": in_step(lambda product, total, unit: set_input(total, 1, total.input[0])),
    "sum with a reference": in_step(lambda product, total, unit: set_input(total, 1, "x")),
    "sequence of another operator": lambda net: set_type(operator_of(net, "lstm/i2h"), "FCTransposed"),
    "sequence from outside": lambda net: operator_of(net, "lstm/i2h").output.__setitem__(0, "elsewhere"),
    "sequence without a bias": lambda net: operator_of(net, "lstm/i2h").input.pop(),
}


@pytest.mark.parametrize("change", CONNECTED_OTHERWISE.values(), ids=list(CONNECTED_OTHERWISE))
def test_a_step_that_is_connected_otherwise(change):
    net = changed(Stack(), change)
    assert refused(ValueError, lstm_to_torch, net, "lstm") == READ.format("lstm/hidden_t_all") + (
        "the operators of its step, or the FC over all steps before it, are connected in another way; a net must be "
        "read before `optimize` rewrites it"
    )


def test_parameters_that_are_computed():
    model = ModelHelper("model")
    model.net.Scale("raw", "lstm/gates_t_w", scale=2.0)
    Stack().build(model)
    assert refused(ValueError, lstm_to_torch, model, "lstm") == READ.format("lstm/hidden_t_all") + (
        "the net computes 'lstm/gates_t_w' itself, where a parameter was expected"
    )


def test_every_loop_that_cannot_be_read_is_named():
    model = ModelHelper("model")
    GRU(model, "x", None, None, 2, [3, 3], "s")
    text = refused(ValueError, lstm_to_torch, model, "s")
    assert text.startswith("lstm_to_torch: 2 problems:\n  - the loop that makes 's/layer_0/hidden_t_all' cannot")
    assert "\n  - the loop that makes 's/layer_1/hidden_t_all' cannot" in text


NOT_ONE = "lstm_to_torch: the loops that make {} are not the layers and directions of one LSTM"


def test_loops_of_several_lstms_under_one_scope():
    model = ModelHelper("model")
    Stack(scope="s").build(model)
    Stack(scope="s/layer_0").build(model)
    assert refused(ValueError, lstm_to_torch, model, "s") == NOT_ONE.format(
        "'s/hidden_t_all', 's/layer_0/hidden_t_all'"
    )


@pytest.mark.parametrize(
    "scopes",
    [["s/layer_1"], ["s/layer_0", "s/layer_2"], ["s/fw"], ["s/layer_0/fw", "s/layer_0/bw", "s/layer_1/fw"]],
    ids=str,
)
def test_layers_or_directions_missing(scopes):
    model = ModelHelper("model")
    for scope in scopes:
        Stack(scope=scope).build(model)
    made = ", ".join("'{}/hidden_t_all'".format(scope) for scope in scopes)
    assert refused(ValueError, lstm_to_torch, model, "s") == NOT_ONE.format(made)


def test_layers_built_unequally_often():
    model = ModelHelper("model")
    Stack(2, scope="s", dim_in=3).build(model)
    Stack(scope="s/layer_1", dim_in=3).build(model)
    made = ["s/layer_0/hidden_t_all", "s/layer_1/hidden_t_all", "s/layer_1/hidden_t_all_1"]
    assert refused(ValueError, lstm_to_torch, model, "s") == NOT_ONE.format(", ".join(map(repr, made)))


READS = "lstm_to_torch: the loop that makes '{}' reads '{}', which is not {}"
ENDS = "lstm_to_torch: the loop that makes '{}' has lengths {} and drop_states={}; the first loop has {} and {}"
WIRED_OTHERWISE = {
    "a layer that reads something else": (
        Stack(2),
        lambda net: set_input(operator_of(net, "lstm/layer_1/i2h"), 0, "residual"),
        READS.format("lstm/layer_1/hidden_t_all", "residual", "made of 'lstm/layer_0/hidden_t_all'"),
    ),
    "a layer that reads the cells": (
        Stack(2),
        lambda net: set_input(operator_of(net, "lstm/layer_1/i2h"), 0, "lstm/layer_0/cell_t_all"),
        READS.format("lstm/layer_1/hidden_t_all", "lstm/layer_0/cell_t_all", "made of 'lstm/layer_0/hidden_t_all'"),
    ),
    "directions joined in the other order": (
        Stack(2, True),
        lambda net: swap_inputs(operator_of(net, "lstm/layer_0/joined_hidden_t_all"), 0, 1),
        None,
    ),
    "directions joined along another axis": (
        Stack(2, True),
        lambda net: setattr(operator_of(net, "lstm/layer_0/joined_hidden_t_all").arg[0], "i", 1),
        None,
    ),
    "directions added up": (
        Stack(2, True),
        lambda net: set_type(operator_of(net, "lstm/layer_0/joined_hidden_t_all"), "Sum"),
        None,
    ),
    "three sequences joined": (
        Stack(2, True),
        lambda net: operator_of(net, "lstm/layer_0/joined_hidden_t_all").input.append("x"),
        None,
    ),
    "joined without turning back": (
        Stack(2, True),
        lambda net: set_input(operator_of(net, "lstm/layer_0/joined_hidden_t_all"), 1, "lstm/layer_0/bw/hidden_t_all"),
        None,
    ),
    "something else turned back": (
        Stack(2, True),
        lambda net: set_input(operator_of(net, "lstm/layer_0/turned_hidden_t_all"), 0, "lstm/layer_0/bw/cell_t_all"),
        None,
    ),
    "turned within other lengths": (
        Stack(2, True, lengths=[4, 2, 1]),
        lambda net: set_input(operator_of(net, "lstm/layer_0/turned_hidden_t_all"), 1, "others"),
        None,
    ),
    "a backward direction that reads forward": (
        Stack(1, True),
        lambda net: set_input(operator_of(net, "lstm/bw/i2h"), 0, "x"),
        READS.format("lstm/bw/hidden_t_all", "x", "'x' turned round within its lengths"),
    ),
    "turned within lengths that the loops do not have": (
        Stack(1, True),
        lambda net: set_input(operator_of(net, "lstm/reversed_input"), 1, "others"),
        READS.format("lstm/bw/hidden_t_all", "lstm/reversed_input", "'x' turned round within its lengths")
        + ": it has none, and 'x' is turned within 'others'",
    ),
    "turned within twice the length": (
        Stack(1, True),
        lambda net: setattr(argument(operator_of(net, "lstm/ones"), "value"), "i", 2),
        READS.format("lstm/bw/hidden_t_all", "lstm/reversed_input", "'x' turned round within its lengths")
        + ": it has none, and 'x' is turned within 'lstm/full_lengths'",
    ),
    "turned within the length of another sequence": (
        Stack(1, True),
        lambda net: set_input(operator_of(net, "lstm/input_shape"), 0, "y"),
        READS.format("lstm/bw/hidden_t_all", "lstm/reversed_input", "'x' turned round within its lengths")
        + ": it has none, and 'x' is turned within 'lstm/full_lengths'",
    ),
    "turned back within lengths that the loops do not have": (
        Stack(2, True),
        lambda net: set_input(operator_of(net, "lstm/layer_0/turned_hidden_t_all"), 1, "others"),
        None,
    ),
    "other lengths": (
        Stack(2, lengths=[4, 2, 1]),
        in_step(lambda product, total, unit: set_input(unit, 3, "others")),
        ENDS.format("lstm/layer_1/hidden_t_all", "lengths", False, "others", False),
    ),
    "states dropped in the first layer alone": (
        Stack(2, lengths=[4, 2, 1]),
        in_step(lambda product, total, unit: setattr(argument(unit, "drop_states"), "i", 1)),
        ENDS.format("lstm/layer_1/hidden_t_all", "lengths", False, "lengths", True),
    ),
}


@pytest.mark.parametrize("stack, change, text", WIRED_OTHERWISE.values(), ids=list(WIRED_OTHERWISE))
def test_layers_that_are_connected_otherwise(stack, change, text):
    below = "made of 'lstm/layer_0/fw/hidden_t_all', 'lstm/layer_0/bw/hidden_t_all'"
    text = text or READS.format("lstm/layer_1/fw/hidden_t_all", "lstm/layer_0/joined_hidden_t_all", below)
    assert refused(ValueError, lstm_to_torch, changed(stack, change), "lstm") == text


def test_a_scope_used_twice_with_different_biases():
    model, _ = Stack().built()
    Stack(forget_bias=1.0).build(model)
    assert refused(ValueError, lstm_to_torch, model, "lstm") == (
        "lstm_to_torch: the loops that make 'lstm/hidden_t_all', 'lstm/hidden_t_all_1' differ in their parameters or "
        "in forget_bias"
    )


def test_layers_of_several_sizes():
    model = ModelHelper("model")
    LSTM(model, "x", None, None, 2, [3, 4], "lstm")
    workspace.RunNetOnce(model.param_init_net)
    text = "layers of torch.nn.LSTM have one size; those here have [3, 4]"
    assert refused(ValueError, lstm_to_torch, model, "lstm") == "lstm_to_torch: " + text
    state = lstm_to_torch(model, "lstm/layer_0")
    lacks = ", ".join("'{}_l1'".format(name) for name in NAMES)
    assert refused(ValueError, lstm_from_torch, model, "lstm", state) == listed(
        "lstm_from_torch", text, "state lacks " + lacks
    )


def test_blobs_that_do_not_fit():
    model, _ = Stack(2).built()
    workspace.FeedBlob("lstm/layer_0/i2h_b", np.zeros(5, np.float32))
    workspace.FeedBlob("lstm/layer_1/i2h_w", np.zeros((12, 2), np.float32))
    shape = "blob '{}' has shape {}; the {} of an LSTM of these sizes is {}"
    texts = [
        shape.format("lstm/layer_0/i2h_b", [5], "bias_ih", [12]),
        shape.format("lstm/layer_1/i2h_w", [12, 2], "weight_ih", [12, 3]),
    ]
    assert refused(ValueError, lstm_to_torch, model, "lstm") == listed("lstm_to_torch", *texts)
    assert refused(ValueError, lstm_from_torch, model, "lstm", {}) == listed("lstm_from_torch", *texts)


def test_blobs_that_are_missing_or_hold_something_else():
    model, _ = Stack().build()
    workspace.FeedBlob("lstm/i2h_w", "text")
    workspace.FeedBlob("lstm/i2h_b", np.zeros((4, 3), np.float32))
    workspace.FeedBlob("lstm/gates_t_w", np.zeros((12, 3), np.int32))
    text = refused(ValueError, lstm_to_torch, model, "lstm")
    kinds = "blob '{}' is {} with {} axes; a parameter like it has floating point numbers and {}"
    assert text == listed(
        "lstm_to_torch",
        "blob 'lstm/i2h_w' holds no tensor; run the model's param_init_net first",
        kinds.format("lstm/gates_t_w", "int32", 2, 2),
        kinds.format("lstm/i2h_b", "float32", 2, 1),
        "blob 'lstm/gates_t_b' is not in the workspace; run the model's param_init_net first",
    )


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


UNKNOWN = "which this LSTM does not have; with a prefix, other entries are left alone"
WRONG_STATES = {
    "entries missing": (
        lambda state: without(state, "weight_hh_l0", "bias_ih_l1"),
        "state lacks 'weight_hh_l0', 'bias_ih_l1'",
    ),
    "nothing": (
        lambda state: {},
        "state lacks 'weight_ih_l0', 'weight_hh_l0', 'weight_ih_l1', 'weight_hh_l1'",
    ),
    "a layer too many": (
        lambda state: dict(state, weight_ih_l2=state["weight_ih_l1"]),
        "state has 'weight_ih_l2', " + UNKNOWN,
    ),
    "one of another module": (
        lambda state: {"0." + name: value for name, value in state.items()},
        "2 problems:\n"
        "  - state lacks 'weight_ih_l0', 'weight_hh_l0', 'weight_ih_l1', 'weight_hh_l1'\n"
        "  - state has '0.weight_ih_l0', '0.weight_hh_l0', '0.bias_ih_l0', '0.bias_hh_l0', '0.weight_ih_l1', "
        "'0.weight_hh_l1', '0.bias_ih_l1', '0.bias_hh_l1', which this LSTM does not have; do you mean prefix='0.'?",
    ),
    "that of a GRU": (
        lambda state: {name: value[:-3] for name, value in state.items()},
        "state has the weights of a torch.nn.GRU: those of 3 gates, where an LSTM has 4",
    ),
    "a shape": (
        lambda state: dict(state, weight_ih_l0=state["weight_ih_l0"].T),
        "state['weight_ih_l0'] has shape [2, 12]; this LSTM takes [12, 2]",
    ),
    "a row instead of a vector": (
        lambda state: dict(state, bias_hh_l0=state["bias_hh_l0"][None]),
        "state['bias_hh_l0'] has shape [1, 12]; this LSTM takes [12]",
    ),
}


@pytest.mark.parametrize("change, text", WRONG_STATES.values(), ids=list(WRONG_STATES))
def test_states_that_do_not_fit(change, text):
    model, _ = Stack(2).built()
    found = refused(ValueError, lstm_from_torch, model, "lstm", change(lstm_to_torch(model, "lstm")))
    assert found == "lstm_from_torch: " + text


def test_a_projection():
    """What torch.nn.LSTM(2, 3, proj_size=1) has, also where torch is too old to make one."""
    model, _ = Stack().built()
    state = dict(torch.nn.LSTM(2, 3).state_dict(), weight_hh_l0=torch.zeros(12, 1), weight_hr_l0=torch.zeros(1, 3))
    assert refused(ValueError, lstm_from_torch, model, "lstm", state) == listed(
        "lstm_from_torch",
        "state has 'weight_hr_l0', " + UNKNOWN,
        "state['weight_hh_l0'] has shape [12, 1]; this LSTM takes [12, 3]",
    )


def test_all_that_does_not_fit_in_one_error():
    model, _ = Stack(2).built()
    gru = torch.nn.GRU(4, 3, bidirectional=True)
    takes = "state['{}'] has shape {}; this LSTM takes {}"
    assert refused(ValueError, lstm_from_torch, model, "lstm", gru) == listed(
        "lstm_from_torch",
        "state lacks 'weight_ih_l1', 'weight_hh_l1', 'bias_ih_l1', 'bias_hh_l1'",
        "state has 'weight_ih_l0_reverse', 'weight_hh_l0_reverse', 'bias_ih_l0_reverse', 'bias_hh_l0_reverse', "
        + UNKNOWN,
        takes.format("weight_ih_l0", [9, 4], [12, 2]),
        takes.format("weight_hh_l0", [9, 3], [12, 3]),
        takes.format("bias_ih_l0", [9], [12]),
        takes.format("bias_hh_l0", [9], [12]),
    )


def test_a_prefix_that_nothing_has():
    model, _ = Stack().built()
    lacks = ", ".join("'encoder.{}_l0'".format(name) for name in NAMES[:2])
    text = refused(ValueError, lstm_from_torch, model, "lstm", torch.nn.LSTM(2, 3), prefix="encoder.")
    assert text == "lstm_from_torch: state lacks " + lacks


def test_argument_of_the_wrong_type():
    model, _ = Stack().built()
    for function in (lstm_to_torch, lambda net, scope, **options: lstm_from_torch(net, scope, {}, **options)):
        text = refused(TypeError, function, None, 3, prefix=None)
        caller = text.split(":")[0]
        assert caller in ("lstm_to_torch", "lstm_from_torch")
        assert text == listed(
            caller,
            "net must be a ModelHelper, a core.Net or a NetDef; got None of type NoneType",
            "scope must be a string; got 3 of type int",
            "prefix must be a string; got None of type NoneType",
        )
    assert refused(TypeError, lstm_from_torch, model, "lstm", 3) == (
        "lstm_from_torch: state must be a torch.nn.LSTM or a state dict; got 3 of type int"
    )
    assert refused(TypeError, lstm_from_torch, model, "lstm", torch.nn.LSTM) == (
        "lstm_from_torch: state must be a torch.nn.LSTM or a state dict; got "
        "<class 'torch.nn.modules.rnn.LSTM'> of type type"
    )
    state = {"weight_ih_l0": [1.0], "weight_hh_l0": np.zeros(1, bool), "bias_ih_l0": np.zeros(1)}
    entry = "state['{}'] must be a tensor or an array of real numbers; got {}"
    assert refused(TypeError, lstm_from_torch, model, "lstm", state) == listed(
        "lstm_from_torch",
        entry.format("weight_ih_l0", "[1.0] of type list"),
        entry.format("weight_hh_l0", "ndarray [1] of bool"),
    )


TO_DENSE = ": use value.to_dense()"


@pytest.mark.parametrize(
    "change, kind, instead",
    [
        (lambda value: value.to("meta"), "float32", ", and on the device meta there are none: load the module first"),
        (lambda value: value.to_sparse(), "float32", TO_DENSE),
        (lambda value: value.to_sparse_csr() if value.dim() == 2 else value.to_sparse(), "float32", TO_DENSE),
        (lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8), "qint8", ": use value.dequantize()"),
        (lambda value: value > 0, "bool", ""),
    ],
    ids=["meta", "sparse", "sparse rows", "quantized", "bool"],
)
def test_tensors_without_numbers_side_by_side(change, kind, instead):
    model, _ = Stack().built()
    state = torch.nn.LSTM(2, 3).state_dict()
    text = "state['{}'] must be a tensor or an array of real numbers{}; got Tensor {} of torch.{}"
    changed = {key: change(value) for key, value in state.items()}
    assert refused(TypeError, lstm_from_torch, model, "lstm", changed) == listed(
        "lstm_from_torch", *(text.format(key, instead, list(value.shape), kind) for key, value in state.items())
    )


def test_a_tensor_that_shows_others_with_another_sign():
    model, _ = Stack().built()
    state = torch.nn.LSTM(2, 3).state_dict()
    lstm_from_torch(model, "lstm", {key: torch.complex(value, -value).conj().imag for key, value in state.items()})
    found = lstm_to_torch(model, "lstm")
    for key, value in state.items():
        np.testing.assert_array_equal(found[key], value.numpy())


@pytest.mark.parametrize("made", [torch.Tensor.double, lambda value: value.double().numpy()], ids=["tensor", "array"])
def test_numbers_that_are_beyond_float32(made):
    """What is infinite already stays so."""
    model, _ = Stack().built()
    state = {key: made(torch.full_like(value, 1)) for key, value in torch.nn.LSTM(2, 3).state_dict().items()}
    state["weight_hh_l0"][1, 2], state["bias_ih_l0"][0] = -1e39, np.inf
    text = refused(ValueError, lstm_from_torch, model, "lstm", state)
    assert text == "lstm_from_torch: 'lstm/gates_t_w' would get -1e+39, which float32 cannot hold"
    state["weight_hh_l0"][1, 2] = -3e38
    lstm_from_torch(model, "lstm", state)
    found = lstm_to_torch(model, "lstm")
    assert found["weight_hh_l0"][1, 2] == np.float32(-3e38) and found["bias_ih_l0"][0] == np.inf


@pytest.mark.parametrize("made", [np.zeros, torch.zeros])
def test_complex_numbers(made):
    """Of such a tensor torch would take the real part, and warn."""
    model, _ = Stack().built()
    state = {"weight_ih_l0": made((16, 3)), "weight_hh_l0": np.array(1j), "bias_ih_l0": made((16,)) * 1j}
    kind = str((made(1) * 1j).dtype)
    entry = "state['{}'] must be a tensor or an array of real numbers; got {}"
    assert refused(TypeError, lstm_from_torch, model, "lstm", state) == listed(
        "lstm_from_torch",
        entry.format("weight_hh_l0", "array(0.+1.j) of type ndarray"),
        entry.format("bias_ih_l0", "{} [16] of {}".format(type(made(1)).__name__, kind)),
    )


def test_an_empty_scope():
    model, _ = Stack().built()
    assert refused(ValueError, lstm_to_torch, model, "").startswith("lstm_to_torch: scope is empty; ")
