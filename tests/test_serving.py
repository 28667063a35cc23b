"""Nets that predict, kept in files: another process, which knows Caffe2 alone, computes the same to the last bit."""

import collections
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, optimizer, workspace
from caffe2.python.model_helper import ExtractPredictorNet, ModelHelper
from caffe2.python.modeling.initializers import Initializer
from caffe2.python.predictor import predictor_exporter
from caffe2.python.predictor_constants import predictor_constants
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import random_step_nets
import rewriting_support
import step_nets
from caffe2_recurrent import (
    GRU,
    LSTM,
    MILSTM,
    AttentionType,
    LSTMWithAttention,
    optimize,
    prediction_net,
    recurrent_net,
    save_predictor,
)
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.rewriting.elementwise import lstm_forms
from caffe2_recurrent.rewriting.rules import lstm_unit
from errors_support import listed
from rewriting_support import as_read_from_a_file
from workspace_contents import contents

T, N, DIM_IN, D, S, E = 7, 5, 6, 16, 4, 8

SERVER = """
import json, sys
import numpy as np
from caffe2.python import workspace
from caffe2.python.predictor import predictor_exporter

for line in sys.stdin:
    task = json.loads(line)
    workspace.ResetWorkspace()
    net = predictor_exporter.prepare_prediction_net(task["path"], "minidb")
    for number, inputs in enumerate(task["calls"]):
        for name, value in np.load(inputs).items():
            workspace.FeedBlob(name, value)
        workspace.RunNet(net)
        found = {name: workspace.FetchBlob(name) for name in task["outputs"]}
        np.savez(task["found"].format(number), **found)
    assert not any(module.startswith("caffe2_recurrent") for module in sys.modules)
    print("done", flush=True)
"""


class OtherProcess:
    """A Python that loads what it is told to, and runs it."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, path, calls, outputs):
        """For each of the `calls`, inputs by name, the outputs by name."""
        given, found = str(path) + ".in{}.npz", str(path) + ".out{}.npz"
        for number, inputs in enumerate(calls):
            np.savez(given.format(number), **inputs)
        names = [str(blob) for blob in outputs]
        task = {
            "path": str(path),
            "calls": [given.format(n) for n in range(len(calls))],
            "outputs": names,
            "found": found,
        }
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        return [dict(np.load(found.format(number)).items()) for number in range(len(calls))]

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def other_process():
    process = OtherProcess()
    yield process
    process.close()


def feed(**values):
    for name, value in values.items():
        workspace.FeedBlob(name, value)


def random(*shape, seed=0):
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32)


# The nets: each builds into a model and returns inputs and outputs.


def lstm(model, **options):
    outputs = LSTM(model, "x", None, ("h0", "c0"), DIM_IN, D, "lstm", **options)
    return {"x": random(T, N, DIM_IN), "h0": random(N, D), "c0": random(1, N, D)}, outputs


def lstm_learned_states_and_lengths(model, **options):
    outputs = LSTM(model, "x", "lengths", None, DIM_IN, D, "lstm", drop_states=True, **options)
    return {"x": random(T, N, DIM_IN), "lengths": np.array([T, 1, 0, 3, 5], np.int32)}, outputs


def lstm_that_recomputes(model, **options):
    outputs = LSTM(model, "x", None, None, DIM_IN, D, "lstm", memory_optimization=True, **options)
    return {"x": random(T, N, DIM_IN)}, outputs


def two_layers(model, **options):
    outputs = LSTM(model, "x", None, None, DIM_IN, [D, 9], "lstm", **options)
    return {"x": random(T, N, DIM_IN)}, outputs


def bidirectional(model, **options):
    outputs = LSTM(model, "x", "lengths", None, DIM_IN, [D, D], "lstm", bidirectional=True, **options)
    return {"x": random(T, N, DIM_IN), "lengths": np.array([T, 1, 0, 3, 5], np.int32)}, outputs


def milstm(model, **options):
    outputs = MILSTM(model, "x", None, ("h0", "c0"), DIM_IN, D, "milstm", **options)
    return {"x": random(T, N, DIM_IN), "h0": random(D), "c0": random(D)}, outputs


def gru(model, **options):
    outputs = GRU(model, "x", None, ("h0",), DIM_IN, D, "gru", **options)
    return {"x": random(T, N, DIM_IN), "h0": random(N, D)}, outputs


def attention(model, kind=AttentionType.Recurrent, lengths=True, **options):
    names = ("x", None, "h0", "c0", "context0", E, "encoder", DIM_IN, D, "attention")
    encoder_lengths = "encoder_lengths" if lengths else None
    outputs = LSTMWithAttention(model, *names, attention_type=kind, encoder_lengths=encoder_lengths, **options)
    inputs = {"x": random(T, N, DIM_IN), "h0": random(D), "c0": random(D), "context0": random(E)}
    inputs["encoder"] = random(S, N, E)
    if lengths:
        inputs["encoder_lengths"] = np.array([S, 1, 0, 3, 2], np.int32)
    return inputs, outputs


def regular_attention(model, **options):
    return attention(model, AttentionType.Regular, lengths=False, **options)


def own_step(model, **options):
    """With weights that `optimize` lays out before any operator has read an input."""
    w = model.create_param("u_w", [D, D], Initializer("XavierFill"))
    b = model.create_param("u_b", [D], Initializer("ConstantFill", value=0.1))
    step = core.Net("elman_step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    step.AddExternalInputs(str(w), str(b))
    h_t = step.Tanh(step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z"), "h_t")
    step.AddExternalOutput(h_t)
    outputs = recurrent_net(model.net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, scope="own", **options)
    return {"x": random(T, N, D), "h0": random(N, D)}, outputs


NETS = [
    lstm,
    lstm_learned_states_and_lengths,
    lstm_that_recomputes,
    two_layers,
    bidirectional,
    milstm,
    gru,
    attention,
    regular_attention,
    own_step,
]


def trained(build, optimised=False):
    """A model after three steps of training, its inputs by name, and its outputs."""
    model = ModelHelper("trainer")
    inputs, outputs = build(model, outputs_with_grads="auto")
    loss = model.net.AveragedLoss(model.net.Sqr(outputs[0], "squared"), "loss")
    model.AddGradientOperators([loss])
    optimizer.build_adam(model, base_learning_rate=0.1)
    workspace.RunNetOnce(model.param_init_net)
    feed(**inputs)
    if optimised:
        assert optimize(model, even_if_slower=True).total
    before = [workspace.FetchBlob(blob) for blob in model.params]
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    assert not any(np.array_equal(workspace.FetchBlob(w), value) for w, value in zip(model.params, before))
    return model, inputs, outputs


def built_forward_only(build, optimised=False):
    trainer, _, _ = trained(build)
    model = ModelHelper("server", init_params=False)
    inputs, outputs = build(model, forward_only=True)
    if optimised:
        assert optimize(model, even_if_slower=True).total
    return model.net, model.GetAllParams(), inputs, outputs


def cut(build, before=False, after=False):
    model, inputs, outputs = trained(build, before)
    net, parameters = prediction_net(model, inputs, outputs)
    if after:
        optimize(net, even_if_slower=True)
    return net, parameters, inputs, outputs


def cut_by_caffe2(build):
    model, inputs, outputs = trained(build)
    net, _ = ExtractPredictorNet(model.net.Proto(), inputs, outputs)
    return net, model.GetAllParams(), inputs, outputs


WAYS = {
    "built forward only": built_forward_only,
    "built forward only, optimised": lambda build: built_forward_only(build, optimised=True),
    "cut": cut,
    "optimised, then cut": lambda build: cut(build, before=True),
    "cut, then optimised": lambda build: cut(build, after=True),
    "cut by Caffe2": cut_by_caffe2,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("build", NETS, ids=lambda build: build.__name__)
def test_another_process_computes_the_same_to_the_last_bit(build, way, other_process, tmp_path):
    net, parameters, inputs, outputs = way(build)
    calls = [inputs, {name: value[::-1].copy() for name, value in inputs.items()}, inputs]
    expected = []
    for call in calls:
        feed(**call)
        workspace.RunNetOnce(net)
        expected.append({str(blob): workspace.FetchBlob(blob) for blob in outputs})
    before = contents()
    path = tmp_path / "model.minidb"
    save_predictor(
        path,
        predictor_exporter.PredictorExportMeta(
            predict_net=net, parameters=parameters, inputs=list(inputs), outputs=outputs
        ),
    )
    assert contents() == before
    assert os.listdir(tmp_path) == ["model.minidb"]
    found = other_process.run(path, calls, outputs)
    for number, call in enumerate(expected):
        assert set(found[number]) == set(call)
        for name, value in call.items():
            assert found[number][name].dtype == value.dtype
            np.testing.assert_array_equal(found[number][name], value, err_msg="call {}, {}".format(number, name))
    assert not np.array_equal(expected[0][str(outputs[0])], expected[1][str(outputs[0])])


def exported(path, net, parameters, inputs, outputs):
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=net, parameters=parameters, inputs=list(inputs), outputs=outputs
    )
    save_predictor(path, meta)


# States that are carried over


def carrying(model, gradients=False, **options):
    """An LSTM whose last states are the initial ones of the next run."""
    states = model.net.AddExternalInputs("h0", "c0")
    hidden_all, hidden_last, _, cell_last = LSTM(model, "x", None, states, DIM_IN, D, "lstm", **options)
    if gradients:
        # They read the initial states, so they come before the copies.
        model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    model.net.Copy(hidden_last, "h0")
    model.net.Copy(cell_last, "c0")
    return hidden_all


def carrying_net(way, optimised):
    """The net, its parameters, the output; states are zero."""
    model = ModelHelper("carrying")
    hidden_all = carrying(model, gradients=way == "cut", forward_only=way == "forward only")
    workspace.RunNetOnce(model.param_init_net)
    feed(x=random(3, N, DIM_IN), h0=np.zeros((N, D), np.float32), c0=np.zeros((N, D), np.float32))
    if way == "forward only":
        net, parameters = model.net, [*model.GetAllParams(), "h0", "c0"]
    else:
        net, parameters = prediction_net(model, ["x"], [hidden_all])
        assert {"h0", "c0"} < {str(blob) for blob in parameters}
    if optimised:
        assert optimize(net, even_if_slower=True).total
    return net, parameters, hidden_all


@pytest.mark.parametrize("optimised", [False, True], ids=["as built", "optimised"])
@pytest.mark.parametrize("way", ["forward only", "cut"])
def test_states_go_on_in_the_other_process(way, optimised, other_process, tmp_path):
    """The file keeps the states as they are when it is written; runs go on from there, with any number of steps."""
    net, parameters, hidden_all = carrying_net(way, optimised)
    calls = [{"x": random(steps, N, DIM_IN, seed=steps)} for steps in (3, 5, 1, 4)]
    feed(**calls[0])
    workspace.RunNetOnce(net)
    exported(tmp_path / "model.minidb", net, parameters, ["x"], [hidden_all])
    expected = []
    for call in calls[1:]:
        feed(**call)
        workspace.RunNetOnce(net)
        expected.append(workspace.FetchBlob(hidden_all))
    found = other_process.run(tmp_path / "model.minidb", calls[1:], [hidden_all])
    for value, outputs in zip(expected, found):
        np.testing.assert_array_equal(outputs[str(hidden_all)], value)


def test_carried_states_are_those_of_one_long_run():
    net, _, hidden_all = carrying_net("cut", optimised=False)
    pieces = [random(steps, N, DIM_IN, seed=steps) for steps in (3, 5, 1, 4)]
    found = []
    for piece in pieces:
        feed(x=piece)
        workspace.RunNetOnce(net)
        found.append(workspace.FetchBlob(hidden_all))
    feed(x=np.concatenate(pieces), h0=np.zeros((N, D), np.float32), c0=np.zeros((N, D), np.float32))
    workspace.RunNetOnce(net)
    comparing.assert_close(np.concatenate(found), workspace.FetchBlob(hidden_all), "hidden", tolerance=1e-5)


def test_states_that_the_caller_carries(other_process, tmp_path):
    """Last states among the outputs, fed as initial ones: the same, to the last bit, as copies in the net."""
    net, _, hidden_all = carrying_net("cut", optimised=False)
    pieces = [random(3, N, DIM_IN, seed=seed) for seed in range(3)]
    expected = []
    for piece in pieces:
        feed(x=piece)
        workspace.RunNetOnce(net)
        expected.append(workspace.FetchBlob(hidden_all))
    outputs = [hidden_all, "lstm/hidden_t_last", "lstm/cell_t_last"]
    net, parameters = prediction_net(net, ["x", "h0", "c0"], outputs)
    assert [operator.type for operator in net.Proto().op] == ["FC", "RecurrentNetwork"]
    exported(tmp_path / "model.minidb", net, parameters, ["x", "h0", "c0"], outputs)
    states = {"h0": np.zeros((N, D), np.float32), "c0": np.zeros((N, D), np.float32)}
    for piece, value in zip(pieces, expected):
        (found,) = other_process.run(tmp_path / "model.minidb", [dict(states, x=piece)], outputs)
        np.testing.assert_array_equal(found[str(hidden_all)], value)
        states = {"h0": found["lstm/hidden_t_last"], "c0": found["lstm/cell_t_last"]}


# Cutting


def kinds(net):
    return [operator.type for operator in net.Proto().op]


def names_of(blobs):
    return [str(blob) for blob in blobs]


def arguments_of(operator):
    return {argument.name for argument in operator.arg}


def test_what_a_cut_leaves():
    model, inputs, outputs = trained(lstm)
    before = model.net.Proto().SerializeToString()
    net, parameters = prediction_net(model, inputs, outputs)
    assert model.net.Proto().SerializeToString() == before
    assert kinds(net) == ["FC", "RecurrentNetwork"]
    assert names_of(parameters) == ["lstm/i2h_w", "lstm/i2h_b", "lstm/gates_t_w", "lstm/gates_t_b"]
    assert all(isinstance(blob, core.BlobReference) for blob in parameters)
    assert list(net.Proto().external_input) == [*inputs, *names_of(parameters)]
    assert list(net.Proto().external_output) == names_of(outputs)
    gone = {"backward_step_net", "param", "param_grads", "outputs_with_grads", "backward_link_internal"}
    assert gone.isdisjoint(arguments_of(net.Proto().op[1]))
    assert {"step_net", "link_internal", "alias_src"} <= arguments_of(net.Proto().op[1])


def test_what_a_cut_leaves_of_steps_that_are_written_out(unrolled_steps):
    model, blobs = rewriting_support.lstm()
    assert optimize(model, ["parameter_gradients", "unrolled_steps"], even_if_slower=True).counts["unrolled_steps"] == 1
    net, _ = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    (chosen,) = [operator for operator in net.Proto().op if operator.type == "If"]
    (loop,) = net_argument(chosen, "else_net").op
    assert {"backward_step_net", "param", "outputs_with_grads"}.isdisjoint(arguments_of(loop))
    for steps in (rewriting_support.T, rewriting_support.T + 2):
        rewriting_support.feed(steps=steps)
        workspace.RunNetOnce(net)
        found = workspace.FetchBlob(blobs[0])
        workspace.RunNetOnce(model.net)
        assert (found == workspace.FetchBlob(blobs[0])).all()


def test_a_cut_keeps_how_a_net_runs():
    net = core.Net("source")
    net.Proto().type, net.Proto().num_workers = "async_scheduling", 3
    net.Proto().arg.add(name="model_id", i=7)
    net.Relu("x", "y")
    made = prediction_net(net, ["x"], ["y"]).net.Proto()
    assert (made.type, made.num_workers, made.arg[0].i) == ("async_scheduling", 3, 7)
    assert made.name == net.Name() + "_predict"


@pytest.mark.parametrize("as_file", [False, True], ids=["net", "file"])
def test_operators_before_the_first_input(as_file):
    """Caffe2's cut of this optimised net has no operator at all."""
    step_net = step_nets.two_states()
    net, outputs = comparing.build(recurrent_net, step_net)
    feed(**step_net.outer)
    assert optimize(net, rules=["transposed_weights"], even_if_slower=True).total == 2
    workspace.RunNetOnce(net)
    expected = [workspace.FetchBlob(blob) for blob in outputs]
    inputs = [outer for _, outer in step_net.inputs + step_net.initial]
    assert kinds(ExtractPredictorNet(net.Proto(), inputs, outputs)[0]) == []
    made, parameters = prediction_net(as_read_from_a_file(net) if as_file else net, inputs, outputs)
    assert kinds(made) == ["Transpose", "Transpose", "RecurrentNetwork"]
    assert sorted(names_of(parameters)) == ["ua_b", "ua_w", "ub_b", "ub_w"]
    workspace.RunNetOnce(made)
    for blob, value in zip(outputs, expected):
        np.testing.assert_array_equal(workspace.FetchBlob(blob), value)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.booleans())
def test_random_step_nets(seed, sequences, optimised, executor):
    """The cut computes what the training net has computed, to the last bit."""
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed, sequences)
    net, outputs = comparing.build(recurrent_net, step_net, outputs_with_grads="auto")
    seeds = comparing.output_gradients(step_net, {"outputs_with_grads": "auto"}, comparing.reference_outputs(step_net))
    for position, value in seeds.items():
        workspace.FeedBlob("given_{}".format(position), value.astype(np.float32))
    net.AddGradientOperators({outputs[n]: net.AddExternalInput("given_{}".format(n)) for n in seeds})
    feed(**step_net.outer)
    if optimised:
        optimize(net, even_if_slower=True)
    comparing.configure(net, executor)
    workspace.RunNetOnce(net)
    expected = [workspace.FetchBlob(blob) for blob in outputs]
    inputs = [outer for _, outer in step_net.inputs + step_net.initial]
    made, parameters = prediction_net(net, inputs, outputs)
    assert set(names_of(parameters)) <= set(step_net.outer)
    kept = {name: workspace.FetchBlob(name) for name in [*inputs, *names_of(parameters)]}
    workspace.ResetWorkspace()
    feed(**kept)
    workspace.RunNetOnce(made)
    for blob, value in zip(outputs, expected):
        np.testing.assert_array_equal(workspace.FetchBlob(blob), value)


@pytest.mark.parametrize(
    "form, factors",
    [
        (lstm_forms.ByTanh, ["Concat", "TanhGradient", "TanhGradient"]),
        (lstm_forms.BySigmoid, ["Concat", "Scale", "SigmoidGradient", "TanhGradient"]),
    ],
    ids=["by tanh", "by sigmoid"],
)
def test_optimised_before_or_after_the_cut(form, factors, monkeypatch):
    """Steps that were optimised for training compute more than those that were not; as docs/serving.md says."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)
    before, after = collections.Counter(operators_of_step("before")), collections.Counter(operators_of_step("after"))
    # What the backward step reads is made of the gates. A sum of shares takes the place of a sum.
    more = before - after - collections.Counter(["WeightedSum"])
    assert sorted(more.elements()) == factors


def operators_of_step(optimised):
    """The types of the operators in a step of an LSTM, optimised for training or, without its gradient, afterwards.

    What trials decide is left out: it need not be the same both times.
    """
    workspace.ResetWorkspace()
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, None, 64, 128, "lstm")
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    shapes = {"x": (20, 16, 64)}
    if optimised == "before":
        optimize(model, shapes=shapes, trials=False)
    workspace.RunNetOnce(model.param_init_net)
    net, _ = prediction_net(model, ["x"], [hidden_all])
    if optimised == "after":
        optimize(net, shapes=shapes, trials=False)
    (loop,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetwork"]
    (step_net,) = [argument.n for argument in loop.arg if argument.name == "step_net"]
    return [operator.type for operator in step_net.op]


def test_a_device_given_to_the_loader_stops_at_the_loop(tmp_path):
    """As docs/serving.md says; seen without running anything."""
    net, parameters, inputs, outputs = cut(lstm)
    workspace.RunNetOnce(net)
    exported(tmp_path / "model.minidb", net, parameters, inputs, outputs)
    device = core.DeviceOption(caffe2_pb2.CUDA, 0)
    loaded = predictor_exporter.load_from_db(str(tmp_path / "model.minidb"), "minidb", device)
    (made,) = [entry.value for entry in loaded.nets if entry.value.op[-1].type == "RecurrentNetwork"]
    (step_net,) = [argument.n for argument in made.op[-1].arg if argument.name == "step_net"]
    assert made.op[-1].device_option == device
    assert not any(operator.HasField("device_option") for operator in step_net.op)


@pytest.mark.parametrize("build", [LSTM, MILSTM, GRU], ids=lambda build: build.__name__)
def test_the_optimizer_of_learned_initial_states_goes(build, backward_loops):
    """A backward pass that is a loop may carry their gradients in blobs of which its operator says nothing."""
    model = ModelHelper("model")
    hidden_all, *_ = build(model, "x", None, None, DIM_IN, D, "layer")
    model.AddGradientOperators([model.net.AveragedLoss(model.net.Sqr(hidden_all, "squared"), "loss")])
    optimizer.build_adam(model, base_learning_rate=0.1)
    workspace.RunNetOnce(model.param_init_net)
    feed(x=random(T, N, DIM_IN))
    built, parameters = prediction_net(model, ["x"], [hidden_all])
    report = optimize(model, even_if_slower=True, trials=False)
    assert report.counts["carried_states"] or build is GRU
    net, of_optimised = prediction_net(model, ["x"], [hidden_all])
    assert set(names_of(of_optimised)) == set(names_of(parameters))
    kept = {name: workspace.FetchBlob(name) for name in names_of(parameters)}
    workspace.RunNetOnce(built)
    expected = workspace.FetchBlob(hidden_all)
    for _ in range(3):
        workspace.RunNetOnce(net)
    comparing.assert_close(workspace.FetchBlob(hidden_all), expected, "hidden")
    for name, value in kept.items():
        np.testing.assert_array_equal(workspace.FetchBlob(name), value)


def test_operators_of_the_gradient_pass_and_the_optimizer_go():
    model, inputs, outputs = trained(attention)
    net, parameters = prediction_net(model, inputs, outputs)
    assert set(names_of(parameters)) == set(names_of(model.GetAllParams()))
    assert not any("grad" in blob for operator in net.Proto().op for blob in operator.output)


def test_attention_zeros_are_among_all_parameters():
    model, _, _ = trained(attention)
    assert "attention/attention_zeros" in names_of(model.GetAllParams())
    assert "attention/attention_zeros" not in names_of(model.GetParams())
    assert names_of(model.GetComputedParams()) == ["attention/attention_zeros"]


def test_an_input_in_the_middle_of_a_net():
    model = ModelHelper("model")
    _, outputs = lstm(model)
    net, parameters = prediction_net(model, ["lstm/i2h", "h0", "c0"], outputs)
    assert kinds(net) == ["RecurrentNetwork"]
    assert names_of(parameters) == ["lstm/gates_t_w", "lstm/gates_t_b"]


def test_an_input_that_is_changed_in_place():
    net = core.Net("net")
    net.Relu("x", "x")
    net.Scale("x", "y", scale=2.0)
    made, parameters = prediction_net(net, ["x"], ["y"])
    assert kinds(made) == ["Relu", "Scale"] and parameters == []


def test_an_input_that_is_an_output_too():
    model = ModelHelper("model")
    carrying(model)
    net, parameters = prediction_net(model, ["x", "h0", "c0"], ["lstm/hidden_t_all", "h0"])
    assert kinds(net) == ["FC", "RecurrentNetwork", "Copy"]
    assert "h0" not in names_of(parameters)


def test_a_state_on_which_the_next_run_depends():
    """A count that the next run reads, and what it is made of; not what only the gradient pass or nobody reads."""
    net = core.Net("net")
    net.Scale("step_size", "doubled", scale=2.0)
    net.Add(["count", "doubled"], "next_count")
    net.Mul(["x", "count"], "y")
    net.Copy("next_count", "count")
    net.Add(["unread", "x"], "unread")
    made, parameters = prediction_net(net, ["x"], ["y"])
    assert kinds(made) == ["Scale", "Add", "Mul", "Copy"]
    assert names_of(parameters) == ["step_size", "count"]
    made, parameters = prediction_net(net, ["x", "count"], ["y"])
    assert kinds(made) == ["Mul"] and parameters == []


def test_an_operator_that_reads_the_states_of_a_loop():
    """They are no output of the loop's operator; a net is only made if it declares them."""
    step_net = step_nets.product()
    net, _ = comparing.build(recurrent_net, step_net, scope="own")
    net.AddExternalInput("own/h_prev_states")
    net.Copy("own/h_prev_states", "all_states")
    feed(**step_net.outer)
    workspace.RunNetOnce(net)
    expected = workspace.FetchBlob("all_states")
    made, parameters = prediction_net(net, ["X", "h_initial"], ["all_states"])
    assert kinds(made) == ["RecurrentNetwork", "Copy"]
    assert names_of(parameters) == ["own/h_prev_states"]
    kept = {name: workspace.FetchBlob(name) for name in ("X", "h_initial", "own/h_prev_states")}
    workspace.ResetWorkspace()
    feed(**kept)
    workspace.RunNetOnce(made)
    np.testing.assert_array_equal(workspace.FetchBlob("all_states"), expected)


def test_a_reference_that_is_no_input_of_the_operator():
    """The engine finds it by its name; so must the net that predicts."""
    step_net = step_nets.reference_summed_with_state()
    net, outputs = comparing.build(recurrent_net, step_net, forward_only=True)
    (operator,) = net.Proto().op
    operator.input[:] = [blob for blob in operator.input if blob != "w"]
    _, parameters = prediction_net(net, ["X", "h_initial"], outputs)
    assert names_of(parameters) == ["w"]


def test_names_under_the_current_scope():
    model = ModelHelper("model")
    with core.NameScope("here"):
        hidden_all, *_ = LSTM(model, "x", None, ("h0", "c0"), DIM_IN, D, "lstm")
        net, _ = prediction_net(model, ["x", "h0", "here/c0"], ["lstm/hidden_t_all"])
    assert list(net.Proto().external_output) == [str(hidden_all)]
    assert list(net.Proto().external_input)[:3] == ["here/x", "here/h0", "here/c0"]


def refused(kind, *arguments):
    with pytest.raises(kind) as caught:
        prediction_net(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


def test_inputs_and_outputs_that_do_not_fit():
    model, inputs, outputs = trained(lstm)
    name = model.net.Name()
    text = "net '{}' does not compute the output '{}' outside of its gradient pass"
    unknown = ["nothing", "lstm/hidden_all", "x_grad"]
    _, *found = refused(ValueError, model, inputs, [*unknown, outputs[0]]).splitlines()
    assert [line.split("; ")[0] for line in found] == ["  - " + text.format(name, blob) for blob in unknown]
    assert "; it computes 'lstm/i2h', 'lstm/hidden_t_all', 'lstm/hidden_t_last', " in found[0]
    assert found[1].endswith("; did you mean 'lstm/hidden_t_all' or 'lstm/hidden_t_last' or 'lstm/cell_t_all'?")
    depend = (
        "prediction_net: the outputs do not depend on the input '{}'; they depend on 'x', 'lstm/i2h_w', 'lstm/i2h_b', "
        "'h0', 'c0', 'lstm/gates_t_w', 'lstm/gates_t_b'"
    )
    assert refused(ValueError, model, [*inputs, "y"], outputs) == depend.format("y")
    assert refused(ValueError, model, inputs, []) == "prediction_net: outputs is empty"
    constant = core.Net("constant")
    constant.ConstantFill([], "one", shape=[1], value=1.0)
    assert refused(ValueError, constant, ["x"], ["one"]) == (
        "prediction_net: the outputs do not depend on the input 'x'; they depend on nothing"
    )
    assert refused(ValueError, model, ["x", "x"], [outputs[0], outputs[0]]) == listed(
        "prediction_net", "inputs names 'x' twice", "outputs names 'lstm/hidden_t_all' twice"
    )


def test_an_output_that_is_a_parameter():
    model = ModelHelper("model")
    carrying(model)
    assert refused(ValueError, model, ["x"], ["h0"]) == (
        "prediction_net: the output 'h0' is also a parameter: the net reads what its last run has written there"
    )


def test_operators_in_training_mode():
    model = ModelHelper("model")
    outputs = LSTM(model, "x", None, None, DIM_IN, [D, D], "lstm", dropout_ratio=0.5, is_test=False)
    brew.spatial_bn(model, "images", "normal", 3, is_test=False)
    text = "operator {} -> {} is in training mode; build the net that predicts with is_test=True"
    assert refused(ValueError, model, ["x"], outputs) == "prediction_net: " + text.format(
        "Dropout", "'lstm/layer_0/dropped', 'lstm/layer_0/dropout_mask'"
    )
    tested = ModelHelper("tested", init_params=False)
    outputs = LSTM(tested, "x", None, None, DIM_IN, [D, D], "lstm", dropout_ratio=0.5, is_test=True)
    assert "Dropout" in kinds(prediction_net(tested, ["x"], outputs).net)
    with_default = caffe2_pb2.NetDef(name="net")
    with_default.op.add(type="SpatialBN", input=["x"], output=["y"])
    assert refused(ValueError, with_default, ["x"], ["y"]) == "prediction_net: " + text.format("SpatialBN", "'y'")


def test_steps_in_training_mode(unrolled_steps):
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    step.Dropout([x_t], ["dropped", "mask"], ratio=0.5, is_test=0)
    step.AddExternalOutput(step.Mul(["dropped", h_prev], "h_t"))
    net = core.Net("net")
    outputs = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"}, forward_only=True)
    text = (
        "prediction_net: operator Dropout -> 'dropped', 'mask' is in training mode; build the net that predicts with "
        "is_test=True"
    )
    assert refused(ValueError, net, ["x"], outputs) == text
    report = optimize(net, ["unrolled_steps"], shapes={"x": (3, N, D), "h0": (N, D)}, even_if_slower=True)
    assert report.counts == {"unrolled_steps": 1}
    assert refused(ValueError, net, ["x"], outputs) == text
    within = core.Net("within")
    within.If("always", outputs, then_net=net.Proto())
    assert refused(ValueError, within, ["always"], outputs) == text


def test_wrong_types():
    assert refused(TypeError, None, 5, [3, b"y"]) == listed(
        "prediction_net",
        "model_or_net must be a ModelHelper, a core.Net or a NetDef; got None of type NoneType",
        "inputs must be a blob or a list of blobs; got 5 of type int",
        "outputs takes blobs or their names; got 3 of type int",
        "outputs takes blobs or their names; got b'y' of type bytes",
    )


# Files


def product():
    """The smallest net there is to save, and its `PredictorExportMeta`."""
    net = core.Net("product")
    net.Mul(["x", "w"], "y")
    feed(x=random(2, 3), w=random(2, 3))
    workspace.RunNetOnce(net)
    return net, predictor_exporter.PredictorExportMeta(predict_net=net, parameters=["w"], inputs=["x"], outputs=["y"])


OLD = b"what was there before"


def assert_old_file(path):
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("failure", [RuntimeError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_export_leaves_the_old_file(monkeypatch, tmp_path, failure):
    def write_half(db_type, path, meta):
        with open(path, "wb") as stream:
            stream.write(b"half of")
        feed(**{predictor_constants.META_NET_DEF: np.zeros(1, np.float32)})
        raise failure

    path = tmp_path / "model.minidb"
    path.write_bytes(OLD)
    _, meta = product()
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(predictor_exporter, "save_to_db", write_half)
        with pytest.raises(type(failure)):
            save_predictor(path, meta)
    assert_old_file(path)
    assert contents() == before
    save_predictor(str(path), meta)
    assert path.read_bytes() != OLD and os.listdir(tmp_path) == ["model.minidb"]
    assert contents() == before


@pytest.mark.parametrize("size", [10, 300, 2000])
def test_a_disk_that_is_full(tmp_path, size):
    """The engine's own writer, stopped by the system after so many bytes of the about 2500."""
    script = """
        import resource, sys
        import numpy as np
        from caffe2.python import core, workspace
        from caffe2.python.predictor import predictor_exporter
        from caffe2_recurrent import save_predictor

        net = core.Net("product")
        net.Mul(["x", "w"], "y")
        for name in "xw":
            workspace.FeedBlob(name, np.ones(500, np.float32))
        workspace.RunNetOnce(net)
        meta = predictor_exporter.PredictorExportMeta(predict_net=net, parameters=["w"], inputs=["x"], outputs=["y"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
        try:
            save_predictor(sys.argv[1], meta)
        except (OSError, RuntimeError) as error:
            print("failed")
    """
    path = tmp_path / "model.minidb"
    path.write_bytes(OLD)
    command = [sys.executable, "-c", textwrap.dedent(script), str(path), str(size)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=os.path.dirname(os.path.dirname(__file__)))
    assert result.stdout == "failed\n"
    assert_old_file(path)


def test_errors_of_the_file_system_name_the_file(tmp_path):
    _, meta = product()
    before = contents()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save_predictor(tmp_path / "nowhere" / "model.minidb", meta)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        save_predictor(tmp_path / "folder", meta)
    assert os.listdir(tmp_path) == ["folder"]
    assert contents() == before


def test_a_description_of_the_callers_own_stays(tmp_path):
    _, meta = product()
    feed(**{predictor_constants.META_NET_DEF: np.array([b"mine"])})
    before = contents()
    save_predictor(tmp_path / "model.minidb", meta)
    assert contents() == before


def test_a_file_that_is_written_within_a_name_scope(tmp_path):
    _, meta = product()
    save_predictor(tmp_path / "without", meta)
    before = contents()
    with core.NameScope("here"):
        save_predictor(tmp_path / "within", meta)
        assert core.ScopedName("x") == "here/x"
    assert contents() == before
    without, within = (
        predictor_exporter.load_from_db(str(tmp_path / name), "minidb") for name in ("without", "within")
    )
    for description in (without, within):
        for entry in description.nets:
            # Caffe2 numbers them.
            entry.value.ClearField("name")
    assert within == without


def test_the_file_is_that_of_caffe2s_exporter(tmp_path):
    _, meta = product()
    save_predictor(tmp_path / "ours", meta)
    predictor_exporter.save_to_db("minidb", str(tmp_path / "theirs"), meta)
    described = [predictor_exporter.load_from_db(str(tmp_path / name), "minidb") for name in ("ours", "theirs")]
    for description in described:
        for entry in description.nets:
            # Caffe2 numbers them.
            entry.value.ClearField("name")
    assert described[0] == described[1]


def save_refused(kind, path, meta):
    """The text of the error; the old file and the workspace stay."""
    path.write_bytes(OLD)
    before = contents()
    with pytest.raises(kind) as caught:
        save_predictor(path, meta)
    assert type(caught.value) is kind
    assert_old_file(path)
    assert contents() == before
    return str(caught.value)


def test_a_net_and_blobs_that_do_not_fit(tmp_path):
    net, _ = product()
    net.Add(["y", "b"], "z")
    workspace.RunOperatorOnce(core.CreateOperator("CreateMutex", [], ["mutex"]))
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=net, parameters=["missing", "mutex"], inputs=["x"], outputs=["y", "z", "q"], shapes={"q": [1]}
    )
    assert save_refused(ValueError, tmp_path / "model.minidb", meta) == listed(
        "save_predictor",
        "the net reads 'w', 'b', which must be among the parameters (or the inputs); prediction_net lists them",
        "the net does not compute the outputs 'q'",
        "there are no values in the workspace for the parameters 'missing', 'mutex'",
        "run the net once, or give shapes: nothing is known of the shape of 'z'",
    )


def test_all_parameters_but_those_that_a_loop_reads(tmp_path):
    """As with `GetParams`, which has no computed parameters."""
    model, inputs, outputs = trained(attention)
    net, _ = prediction_net(model, inputs, outputs)
    workspace.RunNetOnce(net)
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=net, parameters=model.GetParams(), inputs=list(inputs), outputs=outputs
    )
    assert save_refused(ValueError, tmp_path / "model.minidb", meta) == (
        "save_predictor: the net reads 'attention/attention_zeros', which must be among the parameters (or the "
        "inputs); prediction_net lists them"
    )


@pytest.mark.parametrize("says_so", ["net", "meta"])
def test_a_type_of_net_that_keeps_nothing(tmp_path, says_so):
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, None, 3, 4, "lstm", forward_only=True)
    workspace.RunNetOnce(model.param_init_net)
    model.net.Proto().type = "simple_refcount" if says_so == "net" else "simple"
    options = {} if says_so == "net" else {"net_type": "simple_refcount"}

    def meta():
        shapes = {"x": (5, 2, 3), str(hidden_all): (5, 2, 4)}
        return predictor_exporter.PredictorExportMeta(
            model.net, model.GetAllParams(), ["x"], [hidden_all], shapes, **options
        )

    save_predictor(tmp_path / "model.minidb", meta())
    model.net.Proto().type = "simple"
    optimize(model, shapes={"x": (5, 2, 3)}, even_if_slower=True)
    model.net.Proto().type = "simple_refcount" if says_so == "net" else "simple"
    assert save_refused(ValueError, tmp_path / "model.minidb", meta()) == (
        "save_predictor: a net of type simple_refcount lets go of what rules have it keep from run to run; give the "
        "net its type before `optimize`"
    )


def test_wrong_types_for_a_file(tmp_path):
    with pytest.raises(TypeError) as caught:
        save_predictor(3, "meta")
    assert str(caught.value) == listed(
        "save_predictor",
        "path must be a string or a pathlib.Path; got 3 of type int",
        "meta must be a PredictorExportMeta; got 'meta' of type str",
    )
    plan = predictor_exporter.PredictorExportMeta(predict_net=core.Plan("plan"), parameters=[], inputs=[], outputs=[])
    text = save_refused(TypeError, tmp_path / "model.minidb", plan)
    assert text.startswith('save_predictor: the predict_net of meta must be a net; got name: "plan')
    assert text.endswith("of type PlanDef")
