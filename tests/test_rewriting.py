"""`optimize`: which nets it takes, what it reports, and that it is all or nothing."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, gru_cell, optimizer, recurrent, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper
from google.protobuf import text_format

import comparing
import rewriting_support as support
import step_memory
import step_nets
from caffe2_recurrent import LSTM, MILSTM, optimize, recurrent_net, retrieve_step_blobs
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.rules import RULES, forward_links
from caffe2_recurrent.rewriting.trials.timing import Seconds
from onednn_support import make_up
from rewriting_support import LOOP, D, N, T

STEPS = ("step_net", "backward_step_net")


def bytes_of(net):
    return (net.Proto() if isinstance(net, core.Net) else net).SerializeToString()


def optimised(net, **options):
    report = optimize(net, **{"even_if_slower": True, **options})
    assert report.total
    support.assert_done(net.net if isinstance(net, ModelHelper) else net)
    return report


def with_steps_as_text(net):
    """As nets were written before 2018: the steps as strings."""
    proto = support.as_read_from_a_file(net)
    for operator in proto.op:
        for given in operator.arg:
            if given.name in STEPS:
                text = text_format.MessageToString(given.n).encode()
                given.ClearField("n")
                given.s = text
    return proto


FORMS = {
    "model": lambda model: model,
    "net": lambda model: model.net,
    "proto": lambda model: model.net.Proto(),
    "bytes": lambda model: support.as_read_from_a_file(model.net),
    "text": lambda model: text_format.Parse(text_format.MessageToString(model.net.Proto()), caffe2_pb2.NetDef()),
    "steps as text": lambda model: with_steps_as_text(model.net),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "no lengths"])
def test_every_form_of_a_net(form, lengths):
    expected = support.run(*support.lstm(lengths=lengths))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(lengths=lengths)
    net = FORMS[form](model)
    report = optimize(net, even_if_slower=True)
    assert report.counts["lstm_unit"] == report.counts["parameter_gradients"] == 1
    if isinstance(net, caffe2_pb2.NetDef) and form != "proto":
        workspace.RunNetOnce(core.Net(net))
        support.assert_same(support.values(blobs), expected)
    else:
        support.assert_same(support.run(model, blobs), expected)


def by_caffe2(name):
    """A model by one of Caffe2's own builders, and its first output."""
    model, scope = ModelHelper("model"), "layer"
    lengths, two = "lengths", ("h0", "c0")
    if name == "gru":
        outputs = gru_cell.GRU(model, "x", lengths, two[:1], support.DIM_IN, D, scope)
    elif name == "attention":
        kind = rnn_cell.AttentionType.Regular
        states = ("h0", "c0", "context", D, "encoder", None)
        outputs = rnn_cell.LSTMWithAttention(
            model, "x", lengths, *states, support.DIM_IN, D, scope, outputs_with_grads=(0,), attention_type=kind
        )
        workspace.FeedBlob("context", np.zeros((N, D), dtype=np.float32))
        workspace.FeedBlob("encoder", np.random.RandomState(3).rand(5, N, D).astype(np.float32))
    elif name == "layers":
        outputs = rnn_cell.LSTM(model, "x", lengths, two * 2, support.DIM_IN, [D, D], scope, outputs_with_grads=(0,))
    else:
        outputs = getattr(rnn_cell, name)(model, "x", lengths, two, support.DIM_IN, D, scope)
    return model, outputs[0]


def run_by_caffe2(name, seen):
    workspace.ResetWorkspace()
    support.feed()
    model, output = by_caffe2(name)
    gradients = model.net.AddGradientOperators({output: model.net.AddExternalInput("dh")})
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(8)
    for blob in sorted(map(str, model.params)):
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
    seen(model)
    return support.run(model, [output, *(gradients[str(blob)] for blob in model.params if str(blob) in gradients)])


@pytest.mark.parametrize("name", ["LSTM", "MILSTM", "LayerNormLSTM", "layers", "attention", "gru"])
def test_loops_by_caffe2s_own_builders(name):
    expected = run_by_caffe2(name, lambda model: None)
    found = run_by_caffe2(name, optimised)
    support.assert_same(found, expected)


def several_loops(nets, **options):
    """Two layers of two directions, and the blobs to compare."""
    workspace.ResetWorkspace()
    support.feed()
    sizes, states = [D, D, 5, 5], []
    for index, size in enumerate(sizes):
        for kind in "hc":
            states.append("{}{}".format(kind, index + 1))
            random = np.random.RandomState(index)
            workspace.FeedBlob(states[-1], random.uniform(-1, 1, (1, N, size)).astype(np.float32))
    model = ModelHelper("model")
    outputs = LSTM(
        model,
        "x",
        "lengths",
        states,
        support.DIM_IN,
        [D, 5],
        "layers",
        bidirectional=True,
        outputs_with_grads="auto",
        **options,
    )
    loss = model.net.SumElements(model.net.Tanh(outputs[0]), "loss")
    model.AddGradientOperators([loss])
    random = np.random.RandomState(4)
    workspace.RunNetOnce(model.param_init_net)
    for blob in sorted(map(str, model.params)):
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
    nets(model)
    return support.run(model, ["loss", *(model.param_to_grad[blob] for blob in model.params)])


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_layers_of_two_directions(kind):
    reports = []

    def of_kind(model):
        model.net.Proto().type = kind
        model.net.Proto().num_workers = 3
        # Loops make these in their first run, and a workspace is not safe from two at once.
        for loop in read_loops(model.net.Proto()).values():
            for state in loop.states:
                workspace.CreateBlob(state.outer_states)
                workspace.CreateBlob(state.outer_states + "_grad")

    def both(model):
        reports.append(optimised(model))
        of_kind(model)

    support.assert_same(several_loops(both), several_loops(of_kind))
    assert len(reports[0].loops) == 4
    assert str(reports[0]).count("\n  lstm_unit: ") == 4
    assert reports[0].counts["lstm_unit"] == reports[0].counts["gradient_buffer"] == 4


def test_two_loops_over_one_sequence_that_share_their_parameters():
    def run(change):
        workspace.ResetWorkspace()
        model, _ = support.lstm(gradients=False)
        first = "layer/hidden_t_all"
        second = LSTM(model, "x", None, ("c0", "h0"), support.DIM_IN, D, "layer")[0]
        given = model.net.AddExternalInput("dh")
        gradients = model.net.AddGradientOperators({core.BlobReference(first): given, second: given})
        change(model)
        return support.run(model, [first, second, *(gradients[str(blob)] for blob in [*model.params, "x"])])

    support.assert_same(run(optimised), run(lambda model: None))


def test_loops_of_one_name_are_told_apart():
    """Caffe2's builder gives two loops of one scope the same step workspaces."""

    def run(change, gradients):
        workspace.ResetWorkspace()
        net, outputs = core.Net("outer"), []
        for _ in range(2):
            step_net = step_nets.lstm()
            step_net.options.pop("forward_only", None)
            options = {} if gradients else {"forward_only": True}
            outputs += comparing.build(recurrent_net, step_net, net, scope="same", **options)[1][:1]
        first, second = (operator for operator in net.Proto().op if operator.type == LOOP)
        renamed = str(second.output[-1])
        for name, value in step_net.outer.items():
            workspace.FeedBlob(name, value)
        found = {}
        if gradients:
            workspace.FeedBlob("seed", np.ones((3, 2, 3), dtype=np.float32))
            found = net.AddGradientOperators({outputs[1]: net.AddExternalInput("seed")})
        for operator in net.Proto().op:
            for blobs in (operator.input, operator.output):
                for index, blob in enumerate(blobs):
                    blobs[index] = first.output[-1] if blob == renamed else blob
        report = change(net)
        workspace.RunNetOnce(net)
        return support.values([*outputs, *found.values()]), report

    for gradients in (False, True):
        expected, _ = run(lambda net: None, gradients)
        found, report = run(lambda net: optimize(net, even_if_slower=True), gradients)
        support.assert_same(found, expected)
        reasons = {refusal.reason for refusal in report.refusals if refusal.rule == "all"}
        assert reasons == (
            {"another loop has the same step workspaces, 'same/step_workspaces'"} if gradients else set()
        )
        assert bool(report.total) is not gradients


def test_a_net_without_loops():
    net = core.Net("net")
    net.Tanh("x", "y")
    before = bytes_of(net)
    report = optimize(net)
    assert (report.total, report.loops, str(report)) == (0, (), "no RecurrentNetwork operator in the net")
    assert set(report.counts.values()) == {0} and bytes_of(net) == before


def test_a_net_without_gradient_operators():
    """Its step no longer fits the backward step, so that one is taken away."""
    expected = support.run(*support.lstm(gradients=False))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(gradients=False)
    report = optimised(model)
    assert report.counts["lstm_unit"] == 1 and report.counts["parameter_gradients"] == 0
    support.assert_same(support.run(model, blobs), expected)
    with pytest.raises(ValueError, match="optimize it after AddGradientOperators"):
        model.net.AddGradientOperators([blobs[0]])


def test_a_gpu():
    model, _ = support.lstm()
    support.operator(model.net).device_option.device_type = caffe2_pb2.CUDA
    assert_left_alone(model.net, "it does not run on a CPU, and the rules are made for CPUs")


@pytest.mark.parametrize("which", [0, 1], ids=["step", "backward step"])
def test_nets_in_steps(which):
    """Rules rename blobs, which operators in such nets would not hear of."""
    model, _ = support.lstm()
    kind, name = ((support.LOOP, "step_net"), (support.GRADIENT, "backward_step_net"))[which]
    inner = caffe2_pb2.NetDef(op=[core.CreateOperator("Copy", ["layer/gates_t"], ["layer/gates_t"])])
    branch = core.CreateOperator("If", ["condition", "layer/gates_t"], ["layer/gates_t"], then_net=inner)
    support.argument(support.operator(model.net, kind), name).n.op.append(branch)
    assert_left_alone(model.net, "its steps have operators that run nets (If), and rules do not look into these")


def test_windows():
    model, _ = support.lstm()
    links = len(support.argument(support.operator(model.net), "link_offset").ints)
    support.operator(model.net).arg.append(core.utils.MakeArgument("link_window", [1] * (links - 1) + [2]))
    assert_left_alone(model.net, "its steps see windows of several slices")


def test_windows_of_one_slice_are_none():
    """Said of links that are not there any more, the engine would miss these."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    for kind in (support.LOOP, support.GRADIENT):
        support.operator(model.net, kind).arg.append(core.utils.MakeArgument("link_window", [1, 1, 1, 1, 1]))
    assert optimize(model, even_if_slower=True).total
    support.assert_same(support.run(model, blobs), expected)


def test_two_gradient_operators_of_one_loop():
    model, blobs = support.lstm()
    model.net.AddGradientOperators({core.BlobReference(blobs[0]): core.BlobReference("dh")})
    assert_left_alone(model.net, "it has several gradient operators")


def test_weights_that_are_written_before_the_gradient_operator():
    """The backward step reads them as they are then; rules lay them out before the loop."""
    model, _ = support.lstm()
    operators = list(model.net.Proto().op)
    position = [operator.type for operator in operators].index(support.GRADIENT)
    doubling = core.CreateOperator("Scale", ["layer/gates_t_w"], ["layer/gates_t_w"], scale=2.0)
    del model.net.Proto().op[:]
    model.net.Proto().op.extend([*operators[:position], doubling, *operators[position:]])
    assert_left_alone(model.net, "'layer/gates_t_w' is written between the loop and its gradient operator")


@pytest.mark.parametrize("declared", [True, False], ids=["in the step", "by the net"])
@pytest.mark.parametrize("blob", ["seen", "count"])
def test_steps_that_write_to_a_blob_outside(blob, declared):
    """All steps write to one blob, which Caffe2's builder has nothing against; where steps are written out each had its
    own."""

    def built():
        model, step = ModelHelper("model"), core.Net("step")
        outside = ["w", "b", "one", *(["seen", "count"] if declared else [])]
        step.AddExternalInput("x_t", "h_t", "timestep", *outside)
        step.Tanh(step.Sum([step.FC(["h_t", "w", "b"], "f", axis=2), "x_t"], "g"), "h")
        if blob == "count":
            step.Add(["count", "one"], "count")
        else:
            step.Copy("h", "seen")
        if not declared:
            model.net.Copy(blob, "before")
        inner, outer = map(core.BlobReference, ("h_t", "h"))
        recurrent.recurrent_net(
            model.net,
            step,
            [(core.BlobReference("x_t"), core.BlobReference("x"))],
            [(inner, core.BlobReference("h0"))],
            {inner: outer},
            timestep="timestep",
            scope="loop",
            outputs_with_grads=[0],
            forward_only=True,
        )
        return model

    def run(model):
        random = np.random.RandomState(0)
        for name, shape in {"x": (4, 3, 8), "h0": (3, 8), "w": (8, 8), "b": (8,)}.items():
            workspace.FeedBlob(name, random.uniform(-1, 1, shape).astype(np.float32))
        for name, value in {"one": np.ones(1), "count": np.zeros(1), "seen": np.zeros((1, 3, 8))}.items():
            workspace.FeedBlob(name, value.astype(np.float32))
        workspace.RunNetOnce(model.net)
        return support.values([blob, "h_all", "h_last"])

    expected = run(built())
    model = built()
    report = optimize(model, even_if_slower=True)
    text = "its steps write to '{}', which is a blob outside of them too".format(blob)
    assert report.total == 0 and [refusal.reason for refusal in report.refusals] == [text]
    assert np.abs(expected[0][0]).min() > 0
    support.assert_same(run(model), expected)


@pytest.mark.parametrize("blob", ["lengths", "layer/gates_t_w"])
def test_blobs_that_steps_find_though_nobody_names_them(blob):
    """As Caffe2's beam search has it; what is computed of them in front of the loop has to be told of them."""

    def built():
        model, blobs = support.lstm(lengths=True, gradients=False, forward_only=True)
        loop, proto = support.operator(model.net), model.net.Proto()
        initial = [loop.input[position] for position in support.argument(loop, "initial_recurrent_state_ids").ints]
        loop.input[:] = [name for name in loop.input if name != blob]
        assert [loop.input[position] for position in (1, 2)] == initial
        proto.external_input[:] = [name for name in proto.external_input if name != blob]
        return model, blobs

    expected = support.run(*built())
    model, blobs = built()
    assert blob not in model.net.Proto().external_input
    optimised(model)
    assert list(model.net.Proto().external_input).count(blob) == 1
    support.assert_same(support.run(model, blobs), expected)


def test_what_a_net_has_forgotten_to_declare_stays_so():
    """The engine says so when the net is created."""
    model, _ = support.lstm()
    declared = [blob for blob in model.net.Proto().external_input if blob != "dh"]
    model.net.Proto().external_input[:] = declared
    optimised(model)
    assert list(model.net.Proto().external_input) == declared


@pytest.mark.parametrize("builder", [LSTM, MILSTM])
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("products", [1, 2])
def test_products_in_front_of_what_the_loop_comes_to_read(products, gradients, builder):
    """A loop that makes its sequence itself reads what the product in front made; nothing is left for a second pass."""
    model = ModelHelper("model")
    x = "x"
    for number in range(products):
        x = brew.fc(model, x, "fc{}".format(number), support.DIM_IN, support.DIM_IN, axis=2)
    hidden_all, *_ = builder(model, x, None, ("h0", "c0"), support.DIM_IN, D, "layer", forward_only=not gradients)
    blobs = [hidden_all]
    if gradients:
        found = model.net.AddGradientOperators({hidden_all: model.net.AddExternalInput("dh")})
        blobs += [found[str(blob)] for blob in [*model.params, "x"]]
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(1)
    for blob in map(str, model.params):
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
    workspace.RunNetOnce(model.net)
    expected = support.values(blobs)
    report = optimised(model)
    assert [made.what for made in report.rewrites if made.what == "FC -> 'fc0'"] == ["FC -> 'fc0'"]
    workspace.RunNetOnce(model.net)
    support.assert_same(support.values(blobs), expected)


def assert_left_alone(net, reason):
    before = bytes_of(net)
    report = optimize(net, even_if_slower=True)
    assert report.total == 0 and bytes_of(net) == before
    (refusal,) = report.refusals
    assert refusal == ("all", "layer/hidden_t_all", LOOP, reason)
    assert str(report).endswith("left alone:\n    all: {}: {}".format(LOOP, reason))


def test_a_dry_run_changes_nothing_and_says_what_would_be_done():
    model, _ = support.lstm()
    before = bytes_of(model.net)
    planned = optimize(model, dry_run=True, even_if_slower=True)
    assert bytes_of(model.net) == before and planned.dry_run
    done = optimize(model, even_if_slower=True)
    assert bytes_of(model.net) != before
    assert (planned.rewrites, planned.refusals, planned.counts) == (done.rewrites, done.refusals, done.counts)
    count = "{} places".format(done.total)
    assert str(done).splitlines()[0] == count + " rewritten in 1 loop"
    assert str(planned).splitlines()[0] == count + " would be rewritten in 1 loop"
    assert str(planned).splitlines()[1:] == str(done).splitlines()[1:]
    for rewrite in done.rewrites:
        assert "  {}: {}".format(rewrite.rule, rewrite.what) in str(done).splitlines()


def test_what_was_left_alone_is_listed_with_its_reason():
    model, _ = support.lstm()
    report = optimize(model)
    reasons = {refusal.rule: refusal.reason for refusal in report.refusals}
    assert reasons["lstm_unit"] == "with 12 elements in a state LSTMUnit is faster"
    line = "    lstm_unit: LSTMUnit -> 'layer/hidden_t': " + reasons["lstm_unit"]
    assert line in str(report).splitlines()
    assert str(optimize(model, rules=["zero_gradients"])).startswith("no places rewritten in 1 loop")


def test_a_choice_of_rules():
    model, _ = support.lstm()
    report = optimize(model, rules=iter(["forward_links", "transposed_weights"]), even_if_slower=True)
    assert report.rules == ("transposed_weights", "forward_links")
    assert report.counts == {"transposed_weights": 1, "forward_links": 1} and report.total == 2
    assert {rewrite.rule for rewrite in report.rewrites} == set(report.rules)
    assert optimize(model, rules=[]).counts == {}


def test_one_rule_after_another_is_as_good_as_all_at_once():
    expected = support.run(*support.lstm())
    for names in (support.NAMES, support.NAMES[::-1]):
        workspace.ResetWorkspace()
        model, blobs = support.lstm()
        counted = {name: optimize(model, [name], even_if_slower=True).total for name in names}
        assert counted["parameter_gradients"] and counted["lstm_unit"]
        support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_error_half_way_leaves_the_net_as_it_was(rule, monkeypatch):
    model, _ = support.lstm(lengths=True)
    before = bytes_of(model.net)

    def fail(self, loop):
        raise KeyError("planted")

    monkeypatch.setattr(type(rule), "sites", fail)
    with pytest.raises(KeyError, match="planted"):
        optimize(model, even_if_slower=True)
    assert bytes_of(model.net) == before


def test_an_error_after_a_rewrite_leaves_the_net_as_it_was(monkeypatch):
    model, _ = support.lstm()
    before = bytes_of(model.net)

    def fail(self, loop, site, sizes):
        loop.gradient.links.clear()
        loop.operators.clear()
        raise KeyError("planted")

    monkeypatch.setattr(forward_links.ForwardLinks, "rewrite", fail)
    with pytest.raises(KeyError, match="planted"):
        optimize(model, even_if_slower=True)
    assert bytes_of(model.net) == before
    monkeypatch.undo()
    optimised(model)


def test_without_aten_the_other_rules_still_apply(monkeypatch):
    support.without_aten(monkeypatch)
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    report = optimize(model, even_if_slower=True)
    assert ("lstm_unit", "this Caffe2 has no ATen operator") in [(r.rule, r.reason) for r in report.refusals]
    assert report.counts["parameter_gradients"] == report.counts["transposed_weights"] == 1
    steps = [*support.step(model.net).op, *support.backward_step(model.net).op]
    assert "ATen" not in [operator.type for operator in [*steps, *model.net.Proto().op]]
    support.assert_same(support.run(model, blobs), expected)


def test_the_net_can_be_used_as_before():
    model, blobs = support.lstm()
    optimised(model)
    net = model.net
    assert all(net.BlobIsDefined(blob) for blob in blobs)
    assert net.BlobIsDefined("layer/gates_t_w_scaled") and not net.BlobIsDefined("layer/gates_t")
    net.Tanh(blobs[0], "more")
    assert str(net.NextBlob("layer/gates_t_w_scaled")) != "layer/gates_t_w_scaled"
    workspace.CreateNet(net)
    workspace.RunNet(net, 2)
    np.testing.assert_allclose(workspace.FetchBlob("more"), np.tanh(workspace.FetchBlob(blobs[0])), rtol=1e-5)
    copy = net.Clone("copy")
    workspace.RunNetOnce(copy)


def test_new_names_are_those_that_nobody_has():
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    taken = ["layer/gates_t_w_scaled", "layer/lstm_scale", "layer/zeros"]
    for name in taken:
        model.net.AddExternalInput(name)
        workspace.FeedBlob(name, np.array([7.0], dtype=np.float32))
    optimised(model)
    support.assert_same(support.run(model, blobs), expected)
    assert [workspace.FetchBlob(name).tolist() for name in taken] == [[7.0]] * 3


@pytest.mark.parametrize("memory", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_sizes_may_change_from_run_to_run(memory, executor):
    def run(change):
        def configured(model):
            change(model)
            comparing.configure(model.net, executor)

        return support.runs_of_other_sizes(configured, lengths=True, memory_optimization=memory)

    support.assert_same(run(optimised), run(lambda model: None))


def test_no_steps():
    expected = support.run_without_steps(lambda model: None)
    support.assert_same(support.run_without_steps(optimised), expected)


def test_a_training_net_and_one_that_only_runs_forward_share_parameters():
    def run(change):
        workspace.ResetWorkspace()
        trained, blobs = support.lstm()
        change(trained)
        evaluated, outputs = support.lstm(gradients=False, name="evaluated", forward_only=True)
        found = []
        for model in (trained, evaluated):
            workspace.CreateNet(model.net)
        for seed in range(3):
            support.feed(seed=seed)
            workspace.RunNet(trained.net)
            found += support.values(blobs)[0]
            support.feed(steps=4, seed=seed)
            workspace.RunNet(evaluated.net)
            found += support.values(outputs)[0]
        return found, {}

    support.assert_same(run(optimised), run(lambda model: None))


@pytest.mark.parametrize("builder", [LSTM, MILSTM], ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_training_gives_the_same_parameters(builder, kind):
    def train(change):
        workspace.ResetWorkspace()
        np.random.seed(1)
        model = ModelHelper("model")
        support.feed()
        outputs = builder(model, "x", "lengths", ("h0", "c0"), support.DIM_IN, D, "layer")
        model.AddGradientOperators([model.net.SumElements(model.net.Tanh(outputs[0]), "loss")])
        random = np.random.RandomState(2)
        optimizer.build_adam(model, base_learning_rate=0.01)
        workspace.RunNetOnce(model.param_init_net)
        for blob in sorted(map(str, model.params)):
            workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
        change(model)
        model.net.Proto().type, model.net.Proto().num_workers = kind, 3
        workspace.CreateNet(model.net)
        workspace.RunNet(model.net, 25)
        return support.values(["loss", *model.params])

    found, expected = train(optimised), train(lambda model: None)
    for ours, theirs in zip(found[0], expected[0]):
        assert support.difference(ours, theirs) < 1e-3


# Sizes.


def large(name="model", **options):
    model = ModelHelper(name)
    LSTM(model, "x", None, ("h0", "c0"), 3, 80, "layer", forward_only=True, **options)
    return model


SHAPES = {"x": (20, 16, 3), "h0": (1, 16, 80), "c0": (1, 16, 80)}


def refusals(report):
    return {refusal.rule: refusal.reason for refusal in report.refusals}


@pytest.fixture
def tried(monkeypatch):
    """Made-up times of a product: 10 as it is; transposed 8, and 9 to transpose the weights."""
    make_up(monkeypatch, Seconds(0.0, 10.0), Seconds(9.0, 8.0))


def test_sizes_that_are_given(tried):
    counts = optimize(large(), shapes=SHAPES).counts
    assert counts["lstm_unit"] == counts["transposed_weights"] == 1


def test_sizes_of_the_blobs_in_the_workspace():
    for name, shape in SHAPES.items():
        workspace.FeedBlob(name, np.zeros(shape, dtype=np.float32))
    assert optimize(large()).counts["lstm_unit"] == 1


@pytest.mark.parametrize("trained", [["i2h_w", "i2h_b"], ["gates_t_w", "gates_t_b"], ["gates_t_w"], []], ids=str)
@pytest.mark.parametrize("trials", [True, False])
def test_sizes_of_parameters_that_the_net_updates(trials, trained):
    """A net alone is rewritten like a model: what it updates it has read, so that its size is that of now."""

    def report(part):
        workspace.ResetWorkspace()
        model, _ = support.lstm()
        for blob, value in (("one", 1.0), ("rate", -0.1)):
            workspace.FeedBlob(blob, np.array([value], np.float32))
        for name in trained:
            parameter = "layer/" + name
            model.net.WeightedSum([parameter, "one", parameter + "_grad", "rate"], parameter)
        found = optimize(part(model), even_if_slower=True, trials=trials)
        workspace.RunNetOnce(model.net)
        return found.counts

    as_a_model = report(lambda model: model)
    assert as_a_model["joined_gradients" if onednn.CONVOLUTION in onednn.ways() else "products_over_steps"]
    assert report(lambda model: model.net) == report(lambda model: model.net.Proto()) == as_a_model


def test_sizes_of_what_the_net_makes_are_not_those_of_an_earlier_run():
    """What is read behind an operator that writes it may be of any size now."""
    net = core.Net("net")
    net.Copy("given", "made")
    net.Copy("made", "copied")
    net.Scale("updated", "updated", scale=0.5)
    for blob, shape in {"given": (2, 3), "made": (7, 7), "updated": (4,), "copied": (5,)}.items():
        workspace.FeedBlob(blob, np.zeros(shape, np.float32))
    sizes = find_sizes(net.Proto(), None, {})
    assert [sizes.shape(blob) for blob in ("given", "made", "updated", "copied")] == [(2, 3), None, (4,), None]


def test_sizes_that_are_given_come_before_those_of_the_workspace(tried):
    for name, shape in SHAPES.items():
        workspace.FeedBlob(name, np.zeros(shape, dtype=np.float32))
    report = optimize(large(), shapes={"x": (3, 1, 3), "h0": (1, 1, 80), "c0": (1, 1, 80)})
    assert refusals(report)["lstm_unit"] == "with 80 elements in a state LSTMUnit is faster"
    assert refusals(report)["transposed_weights"] == "for [1, 80] x [80, 320] it is not faster"


def test_sizes_that_are_not_known():
    expected = "the size of the state 'layer/cell_t_prev' is not known; give shapes"
    assert refusals(optimize(large()))["lstm_unit"] == expected
    workspace.FeedBlob("c0", "a string")
    workspace.C.Workspace.current.create_blob("h0")
    assert refusals(optimize(large()))["lstm_unit"] == expected


def test_sizes_of_a_second_layer_follow_from_the_first():
    model = ModelHelper("model")
    states = ("h0", "c0", "h1", "c1")
    LSTM(model, "x", None, states, 3, [80, 90], "layer", forward_only=True)
    shapes = {**SHAPES, "h1": (90,), "c1": (90,)}
    assert optimize(model, shapes=shapes).counts["lstm_unit"] == 2


def test_initial_states_of_impossible_shapes_are_no_error():
    report = optimize(large(), shapes={"h0": (), "c0": (5, 5, 5, 5)}, dry_run=True)
    assert report.loops == ("layer/hidden_t_all",)


# Memory.


def kept(builder=LSTM, change=lambda model: None, **options):
    workspace.ResetWorkspace()
    model, _ = support.lstm(builder, lengths=True, **options)
    change(model)
    workspace.RunNetOnce(model.net)
    return step_memory.owned_bytes(model.net)


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_with_memory_optimization_a_step_keeps_its_number_alone(executor):
    def change(model):
        optimised(model)
        comparing.configure(model.net, executor)

    assert kept(change=change, memory_optimization=True) == [4] * T


def test_a_step_of_an_lstm_keeps_half_of_what_it_kept():
    """The factor of the cell and the forget gate, where there were the gates."""
    assert kept() == [4 + 4 * N * 4 * D] * T
    assert max(kept(change=optimised)) <= 4 + 4 * N * 2 * D


def test_new_operators_run_where_the_loop_does():
    model, blobs = support.lstm()
    for operator in model.net.Proto().op:
        operator.device_option.CopyFrom(core.DeviceOption(caffe2_pb2.CPU, node_name="here"))
    optimize(model, even_if_slower=True)
    assert {operator.device_option.node_name for operator in model.net.Proto().op} == {"here"}


@pytest.mark.parametrize("chosen", [None, ["parameter_gradients", "transposed_weights"]], ids=str)
def test_rules_that_are_left_out(chosen):
    """Of those that are chosen, if some are."""
    model, _ = support.lstm()
    report = optimize(model, chosen, even_if_slower=True, without=["transposed_weights", "lstm_unit"])
    expected = support.NAMES if chosen is None else chosen
    assert list(report.rules) == [name for name in expected if name not in ("transposed_weights", "lstm_unit")]
    assert report.counts["parameter_gradients"] == 1
    assert optimize(model, ["lstm_unit"], without=["lstm_unit"]).rules == ()
    assert list(optimize(model, chosen, dry_run=True, trials=False, without=None).rules) == expected


def test_shapes_that_do_not_fit_the_net_are_as_good_as_none():
    """Where no product of the net and no loop reads them; here Caffe2 finds no shape of what is turned."""
    model = ModelHelper("misfit")
    turned = model.net.Transpose("batch_first", "x", axes=[1, 0, 2])
    LSTM(model, turned, None, None, support.DIM_IN, support.D, "layer", forward_only=True)
    report = optimize(model, shapes={"batch_first": (3, support.DIM_IN)})
    (reason,) = [refusal.reason for refusal in report.refusals if refusal.rule == "lstm_unit"]
    assert reason == "the batch size is not known, and LSTMUnit is faster for a small one; give shapes"


def test_steps_that_ran_before_are_not_run_again():
    """Step workspaces know nets by name, without the executor: the new steps have names of their own."""
    model, blobs = support.lstm()
    comparing.configure(model.net, executor=False)
    expected = support.run(model, blobs)
    before = [support.step(model.net).name, support.backward_step(model.net).name]
    optimize(model, ["lstm_unit"], even_if_slower=True)
    after = [support.step(model.net).name, support.backward_step(model.net).name]
    assert [name[:-9] for name in after] == before != after
    kept = [blob for blob in retrieve_step_blobs(model.net) if b"factor" in blob]
    support.assert_same(support.run(model, blobs), expected)
    assert kept == []
    assert [blob for blob in retrieve_step_blobs(model.net) if b"factor" in blob] != []


LOST = "  there is no gradient operator of it, and none can be added afterwards"


def test_the_report_says_that_gradients_can_no_longer_be_added():
    model, _ = support.lstm(gradients=False)
    plan = optimize(model, even_if_slower=True, dry_run=True)
    report = optimize(model, even_if_slower=True)
    for found in (plan, report):
        assert found.without_gradient == found.loops == ("layer/hidden_t_all",)
        assert LOST in str(found).splitlines()
    with pytest.raises(Exception, match="a gradient reaches the output 'layer/hidden_t_all'"):
        model.AddGradientOperators([model.net.SumElements("layer/hidden_t_all", "loss")])


@pytest.mark.parametrize("options", [{}, {"gradients": False, "forward_only": True}], ids=["has one", "wants none"])
def test_the_report_says_nothing_of_gradients_that_are_not_lost(options):
    model, _ = support.lstm(**options)
    report = optimize(model, even_if_slower=True)
    assert report.total and report.without_gradient == () and LOST not in str(report)
    # What has not been rewritten is as it was.
    model, _ = support.lstm(gradients=False, name="other")
    assert optimize(model, rules=[]).without_gradient == ()
