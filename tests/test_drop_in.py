"""`install` and `uninstall`: who sees which builder, and that everything comes back."""

import importlib
import inspect
import sys
import types

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import attention, core, model_helper, recurrent, rnn_cell, workspace

import caffe2_recurrent
import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import drop_in, install, optimize, optimized_once, optimized_runs, uninstall
from caffe2_recurrent.rewriting import calling_thread

CAFFE2S = dict(vars(recurrent))
CAFFE2S_ATTENTION = dict(vars(attention))
CAFFE2S_RUNNERS = {name: getattr(workspace, name) for name in optimized_runs.NAMES}
REMOVED = ("LSTM", "MILSTM", "LSTMWithAttention", "cudnn_LSTM", "GetLSTMParamNames", "InitFromLSTMParams")


@pytest.fixture(autouse=True)
def caffe2_as_it_was():
    uninstall()
    yield
    uninstall()
    assert dict(vars(recurrent)) == CAFFE2S
    assert dict(vars(attention)) == CAFFE2S_ATTENTION
    assert {name: getattr(workspace, name) for name in optimized_runs.NAMES} == CAFFE2S_RUNNERS


def module_with(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def import_by_name(name, origin="caffe2.python.recurrent"):
    namespace = {}
    exec("from {} import {} as found".format(origin, name), namespace)
    return namespace["found"]


@pytest.mark.parametrize("name", drop_in.NAMES_IN_RECURRENT)
def test_later_importers_get_ours(name):
    install()
    assert import_by_name(name) is getattr(caffe2_recurrent, name)
    assert getattr(importlib.import_module("caffe2.python.recurrent"), name) is getattr(caffe2_recurrent, name)


@pytest.mark.parametrize("name", REMOVED)
def test_names_that_caffe2_removed_are_back_and_go_again(name):
    assert not hasattr(recurrent, name)
    install()
    assert hasattr(recurrent, name)
    uninstall()
    assert not hasattr(recurrent, name)


def test_every_public_name_of_the_specification_is_there():
    assert set(drop_in.NAMES_IN_RECURRENT) | {"get_external_blob_names"} <= set(caffe2_recurrent.__all__)


def test_what_is_no_name_of_ours_stays():
    install()
    assert recurrent.core is core and recurrent.workspace is workspace


def test_the_module_is_imported_where_nobody_has_yet(monkeypatch):
    monkeypatch.delitem(sys.modules, "caffe2.python.recurrent")
    monkeypatch.delattr(importlib.import_module("caffe2.python"), "recurrent")
    install()
    assert import_by_name("recurrent_net") is caffe2_recurrent.recurrent_net
    uninstall()
    assert import_by_name("recurrent_net").__module__ == "caffe2.python.recurrent"


def test_earlier_importers_of_names_get_ours(monkeypatch):
    script = module_with(
        monkeypatch, "earlier_script", recurrent_net=recurrent.recurrent_net, loop=recurrent.recurrent_net, other=1
    )
    install()
    assert script.recurrent_net is script.loop is caffe2_recurrent.recurrent_net
    assert script.other == 1
    uninstall()
    assert script.recurrent_net is script.loop is CAFFE2S["recurrent_net"]


def test_later_modules_keep_what_they_imported_by_name(monkeypatch):
    install()
    script = module_with(monkeypatch, "later_script", recurrent_net=import_by_name("recurrent_net"))
    uninstall()
    assert script.recurrent_net is caffe2_recurrent.recurrent_net


def test_what_is_no_module_in_sys_modules_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_module", None)
    monkeypatch.setitem(sys.modules, "an_object", object())
    install()


def test_uninstall_leaves_what_others_changed_meanwhile(monkeypatch):
    script = module_with(monkeypatch, "earlier_script", recurrent_net=recurrent.recurrent_net)
    install()
    script.recurrent_net = recurrent.set_rnn_executor_config = "theirs"
    recurrent.LSTM = "also theirs"
    uninstall()
    try:
        assert script.recurrent_net == "theirs"
        assert (recurrent.set_rnn_executor_config, recurrent.LSTM) == ("theirs", "also theirs")
    finally:
        recurrent.set_rnn_executor_config = CAFFE2S["set_rnn_executor_config"]
        del recurrent.LSTM


def test_uninstall_leaves_alone_what_others_removed():
    install()
    del recurrent.LSTM
    uninstall()
    assert not hasattr(recurrent, "LSTM")


def test_both_are_idempotent(monkeypatch):
    script = module_with(monkeypatch, "earlier_script", recurrent_net=recurrent.recurrent_net)
    uninstall()
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]
    install()
    changes = list(drop_in._changes)
    install()
    assert drop_in._changes == changes
    uninstall()
    assert recurrent.recurrent_net is script.recurrent_net is CAFFE2S["recurrent_net"]
    uninstall()
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_a_second_install_mends_a_reload():
    install()
    # As importlib.reload does: the module's code runs again in the same dictionary.
    recurrent.recurrent_net = "reloaded"
    install()
    assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net
    uninstall()
    found, recurrent.recurrent_net = recurrent.recurrent_net, CAFFE2S["recurrent_net"]
    assert found == "reloaded"


def test_as_a_context_manager():
    with install():
        assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_the_context_ends_with_an_error_too():
    with pytest.raises(KeyError):
        with install():
            raise KeyError
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_an_inner_context_leaves_the_outer_installation():
    with install():
        with install():
            pass
        assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_a_context_within_an_installation_leaves_it():
    install()
    with install():
        pass
    assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net


def test_uninstalled_within_the_context():
    with install():
        uninstall()
        assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_a_context_that_was_uninstalled_leaves_what_came_after():
    with install():
        uninstall()
        install()
    assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net


def test_a_context_leaves_what_a_later_call_changed():
    with install():
        # As importlib.reload does.
        recurrent.recurrent_net = "reloaded"
        later = install()
    assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net
    assert not hasattr(recurrent, "LSTM")
    with later:
        pass
    found, recurrent.recurrent_net = recurrent.recurrent_net, CAFFE2S["recurrent_net"]
    assert found == "reloaded"


def test_loops_are_built_by_ours_through_the_module_and_through_rnn_cell(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("Caffe2's builder was called")

    monkeypatch.setattr(CAFFE2S["recurrent_net"], "__code__", refuse.__code__)
    with install():
        comparing.assert_right(recurrent.recurrent_net, step_nets.lstm())
        model = model_helper.ModelHelper("model")
        rnn_cell.LSTM(model, "x", "lengths", ("h", "c"), 2, 3, scope="lstm")
    assert [operator.type for operator in model.net.Proto().op][-1] == "RecurrentNetwork"


def test_attention_of_later_caffe2_is_left_alone():
    with install():
        for name in drop_in.NAMES_IN_ATTENTION:
            assert getattr(attention, name) is CAFFE2S_ATTENTION[name]
        assert rnn_cell.apply_regular_attention is CAFFE2S_ATTENTION["apply_regular_attention"]
        assert attention.AttentionType.SoftCoverage == 3


def test_attention_types_of_caffe2_and_ours_mean_the_same():
    with install():
        for name in ("Regular", "Recurrent"):
            assert getattr(recurrent.AttentionType, name) == getattr(attention.AttentionType, name)


class AttentionTypeOf2017:
    Regular, Recurrent = tuple(range(2))


def attention_of_2017(model, encoder_outputs_transposed, scope):
    """Only that it does not know `encoder_lengths` counts."""


def attention_of_later(model, encoder_outputs_transposed, scope, encoder_lengths=None):
    """As Caffe2's of today."""


def test_attention_of_2017_is_replaced_where_it_is_and_where_it_was_imported(monkeypatch):
    old = {
        "AttentionType": AttentionTypeOf2017,
        "apply_regular_attention": attention_of_2017,
        "apply_recurrent_attention": attention_of_later,
        "apply_dot_attention": attention_of_later,
    }
    module = module_with(monkeypatch, "caffe2.python.attention", **old)
    script = module_with(monkeypatch, "earlier_script", **old)
    with install():
        for namespace in (module, script):
            assert namespace.AttentionType is caffe2_recurrent.AttentionType
            assert namespace.apply_regular_attention is caffe2_recurrent.apply_regular_attention
            assert namespace.apply_recurrent_attention is attention_of_later
            assert namespace.apply_dot_attention is attention_of_later
    for namespace in (module, script):
        assert {name: vars(namespace)[name] for name in old} == old


@pytest.mark.parametrize("name", drop_in.NAMES_IN_ATTENTION)
@pytest.mark.parametrize("value", [None, 3, "text"])
def test_attention_that_is_nothing_we_know_is_left_alone(monkeypatch, name, value):
    module = module_with(monkeypatch, "caffe2.python.attention", **{name: value})
    with install():
        assert getattr(module, name) is value


def test_caffe2_without_attention(monkeypatch):
    monkeypatch.setitem(sys.modules, "caffe2.python.attention", None)
    with install():
        assert recurrent.apply_regular_attention is caffe2_recurrent.apply_regular_attention
        assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net


def test_signatures_that_help_shows_are_the_public_ones():
    install()
    assert list(inspect.signature(recurrent.recurrent_net).parameters)[:10] == list(
        inspect.signature(CAFFE2S["recurrent_net"]).parameters
    )


# Nets optimised on their way to the engine.


def installed(reports, **options):
    return install(optimize=True, **{"on_report": reports.append, "even_if_slower": True, **options})


def create_and_run(net):
    workspace.CreateNet(net, overwrite=True)
    workspace.RunNet(net.name if isinstance(net, caffe2_pb2.NetDef) else net)


def plan_of(net):
    plan = core.Plan("plan")
    plan.AddStep(core.ExecutionStep("step", net))
    return plan


RUNS = {
    "RunNetOnce": lambda net: workspace.RunNetOnce(net),
    "RunNetOnce of a proto": lambda net: workspace.RunNetOnce(net.Proto()),
    "CreateNet": create_and_run,
    "CreateNet of a proto": lambda net: create_and_run(net.Proto()),
    "RunPlan": lambda net: workspace.RunPlan(plan_of(net)),
    "RunPlan of a proto": lambda net: workspace.RunPlan(plan_of(net).Proto()),
    "RunPlan of a step": lambda net: workspace.RunPlan(core.ExecutionStep("step", net)),
    "RunNetOnce by name": lambda net: workspace.RunNetOnce(net=net),
    "CreateNet by name": lambda net: [workspace.CreateNet(overwrite=True, net=net), workspace.RunNet(net)],
    "RunPlan by name": lambda net: workspace.RunPlan(plan_or_step=plan_of(net)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_engine_gets_an_optimised_copy(run):
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    before, reports = model.net.Proto().SerializeToString(), []
    with installed(reports):
        run(model.net)
    assert model.net.Proto().SerializeToString() == before
    assert reports and all(report.counts["lstm_unit"] == 1 for report in reports)
    assert workspace.HasBlob("layer/gates_t_w_scaled")
    support.assert_same(support.values(blobs), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["operator", "operator in a net"])
def test_nets_of_a_plan_find_what_others_leave(inside):
    """Rules take out blobs that nothing in their net reads."""
    model, _ = support.lstm(gradients=False, forward_only=True)
    expected = support.run(model, ["layer/i2h"])[0]
    workspace.ResetWorkspace()
    model, _ = support.lstm(gradients=False, forward_only=True)
    watcher, reports = core.Net("watcher"), []
    watcher.Copy("layer/i2h", "seen")
    if inside:
        copying = caffe2_pb2.NetDef(name="copying", op=watcher.Proto().op)
        del watcher.Proto().op[:]
        workspace.FeedBlob("always", np.array([True]))
        watcher.Proto().op.extend([core.CreateOperator("If", ["always"], ["seen"], then_net=copying)])
        watcher.Proto().external_input.extend(["always", "layer/i2h"])
    plan = core.Plan("plan")
    plan.AddStep(core.execution_step("steps", [model.net, watcher]))
    with installed(reports):
        workspace.RunPlan(plan)
    assert [(report.counts["lstm_unit"], report.counts["sequence_bias"]) for report in reports] == [(1, 0)]
    np.testing.assert_allclose(workspace.FetchBlob("seen"), expected[0], rtol=1e-5, atol=1e-6)
    assert not model.net.Proto().external_output


def test_nets_of_a_plan_that_make_blobs_of_the_same_names_are_optimised():
    plan, reports = core.Plan("plan"), []
    nets = [support.lstm(gradients=False, forward_only=True, name=name)[0].net for name in ("first", "second")]
    plan.AddStep(core.execution_step("steps", nets))
    with installed(reports):
        workspace.RunPlan(plan)
    assert [report.counts["sequence_bias"] for report in reports] == [1, 1]


@pytest.mark.parametrize("name", CAFFE2S_RUNNERS)
def test_a_call_without_a_net_fails_as_caffe2s_does(name):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        CAFFE2S_RUNNERS[name]()
    with installed([]), pytest.raises(TypeError, match="missing 1 required positional argument"):
        getattr(workspace, name)()


def test_a_net_that_caffe2_has_cut_out_of_one_that_trains():
    """It has the argument for a backward step still, emptied."""
    expected = support.run(*support.lstm(gradients=False))[0][0]
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    cut, _ = model_helper.ExtractPredictorNet(model.net.Proto(), ["x", "h0", "c0"], blobs[:1])
    reports = []
    with installed(reports):
        workspace.RunNetOnce(cut)
    assert [report.counts["lstm_unit"] for report in reports] == [1]
    assert support.difference(workspace.FetchBlob(blobs[0]), expected) < support.TOLERANCE


def test_run_functions_that_were_imported_by_name(monkeypatch):
    script = module_with(monkeypatch, "earlier_script", RunNetOnce=workspace.RunNetOnce, create=workspace.CreateNet)
    model, _ = support.lstm()
    reports = []
    with installed(reports):
        script.RunNetOnce(model.net)
        script.create(model.net)
        assert script.create.__name__ == "CreateNet"
    assert len(reports) == 2
    assert (script.RunNetOnce, script.create) == (CAFFE2S_RUNNERS["RunNetOnce"], CAFFE2S_RUNNERS["CreateNet"])


def test_nothing_is_optimised_unless_asked_for():
    model, _ = support.lstm()
    with install(even_if_slower=True, on_report=pytest.fail):
        assert workspace.RunNetOnce is CAFFE2S_RUNNERS["RunNetOnce"]
        workspace.RunNetOnce(model.net)


def test_a_choice_of_rules():
    model, _ = support.lstm()
    reports = []
    with installed(reports, rules=["lstm_unit", "parameter_gradients"]):
        workspace.RunNetOnce(model.net)
    assert reports[0].counts == {"parameter_gradients": 1, "lstm_unit": 1}


def test_small_nets_are_left_alone_unless_asked_for():
    model, _ = support.lstm()
    reports = []
    with installed(reports, even_if_slower=False):
        workspace.RunNetOnce(model.net)
    assert reports[0].counts["lstm_unit"] == 0 and reports[0].refusals


def test_nets_without_loops_and_what_is_no_net_go_through_as_they_are():
    net = core.Net("net")
    net.ConstantFill([], "y", shape=[1])
    with installed([], on_report=pytest.fail):
        workspace.RunNetOnce(net)
        assert workspace.RunNetOnce(net.Proto().SerializeToString())
        with pytest.raises(Exception):  # noqa: B017 - whatever Caffe2 makes of it
            workspace.CreateNet(3)
    assert workspace.FetchBlob("y").tolist() == [0]


def test_a_net_that_has_been_optimised_goes_through_as_it_is():
    model, blobs = support.lstm()
    optimize(model, even_if_slower=True)
    reports = []
    with installed(reports):
        workspace.RunNetOnce(model.net)
    assert [report.total for report in reports] == [0]


def test_reports_are_not_asked_for():
    model, _ = support.lstm()
    with install(optimize=True, even_if_slower=True):
        workspace.RunNetOnce(model.net)
    assert workspace.HasBlob("layer/gates_t_w_scaled")


def test_a_loop_whose_gradient_is_in_another_net_is_left_alone():
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    operators = list(model.net.Proto().op)
    (position,) = [n for n, operator in enumerate(operators) if operator.type == support.LOOP]
    forward, backward = core.Net("forward"), core.Net("backward")
    forward.Proto().op.extend(operators[: position + 1])
    backward.Proto().op.extend(operators[position + 1 :])
    with installed([], on_report=pytest.fail):
        workspace.RunNetOnce(forward.Proto())
        workspace.RunNetOnce(backward.Proto())
    support.assert_same(support.values(blobs), expected)


def test_gradients_may_be_added_after_the_first_run():
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm(gradients=False)
    reports = []
    with installed(reports):
        workspace.RunNetOnce(model.net)
        assert reports == []
        gradients = model.net.AddGradientOperators({core.BlobReference(blobs[0]): model.net.AddExternalInput("dh")})
        workspace.RunNetOnce(model.net)
    assert reports[0].counts["parameter_gradients"] == 1
    blobs += [gradients[blob] for blob in ("x", "h0", "c0", *map(str, model.params))]
    support.assert_same(support.values(blobs), expected)


@pytest.fixture
def optimised(monkeypatch):
    """The names of the nets for which rules have been applied."""
    names = []

    def optimize_proto(net, *arguments):
        names.append(net.name)
        return caffe2_recurrent.rewriting.optimize_proto(net, *arguments)

    monkeypatch.setattr(optimized_once, "optimize_proto", optimize_proto)
    return names


def test_a_net_that_comes_again_is_optimised_once(optimised):
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    reports = []
    with installed(reports):
        for run in (workspace.RunNetOnce, create_and_run, workspace.RunNetOnce):
            run(model.net)
            support.assert_same(support.values(blobs), expected)
            assert workspace.HasBlob("layer/gates_t_w_scaled")
    assert optimised == [model.net.Name()]
    assert len(reports) == 3 and reports.count(reports[0]) == 3 and reports[0].total


def test_a_net_that_comes_again_with_nothing_to_rewrite_goes_through_as_it_is(optimised, monkeypatch):
    model, _ = support.lstm()
    given = []
    with installed([], rules=["gru_unit"]):
        monkeypatch.setattr(workspace.RunNetOnce, "_function", given.append)
        workspace.RunNetOnce(model.net)
        workspace.RunNetOnce(model.net)
    assert optimised == [model.net.Name()]
    assert given == [model.net, model.net]


def test_a_net_that_has_changed_is_optimised_anew(optimised):
    """Its operators, the sizes or the types of what it reads, what others read of it, or how it is to be done."""
    model, _ = support.lstm(gradients=False, forward_only=True)
    watcher = core.Net("watcher")
    watcher.Copy("layer/i2h", "seen")
    reports = []

    def run(times, what=model.net, function="RunNetOnce"):
        for _ in range(2):
            getattr(workspace, function)(what)
        assert len(optimised) == times

    with installed(reports):
        run(1)
        x = workspace.FetchBlob("x")
        workspace.FeedBlob("x", np.concatenate([x, x]))
        run(2)
        workspace.FeedBlob("x", x)
        run(2)
        plan = core.Plan("plan")
        plan.AddStep(core.execution_step("step", [model.net, watcher]))
        run(3, plan, "RunPlan")
        model.net.Copy("x", "copied")
        run(4)
        with installed(reports, rules=["lstm_unit"]):
            run(5)
        run(5)
    with installed(reports):
        run(6)


def test_the_type_of_what_a_net_reads_counts(optimised):
    model, _ = support.lstm(gradients=False, forward_only=True)
    x = workspace.FetchBlob("x")
    with installed([]):
        workspace.RunNetOnce(model.net)
        workspace.FeedBlob("x", x.astype(np.float64))
        with pytest.raises(RuntimeError, match="double"):
            workspace.RunNetOnce(model.net)
    assert len(optimised) == 2


def test_few_nets_are_remembered(optimised, monkeypatch):
    monkeypatch.setattr(optimized_once, "KEPT", 2)
    model, _ = support.lstm(gradients=False, forward_only=True)
    nets = []
    for name in ("first", "second", "third"):
        nets.append(caffe2_pb2.NetDef())
        nets[-1].CopyFrom(model.net.Proto())
        nets[-1].name = name
    first, second, third = nets
    with installed([]):
        for net in (first, second, first, third, first, second, third):
            workspace.RunNetOnce(net)
    assert optimised == ["first", "second", "third", "second", "third"]


def test_options_are_passed_on(monkeypatch):
    model, _ = support.lstm()
    seen = []

    def optimize_proto(net, options):
        seen.append(options)
        return caffe2_recurrent.rewriting.optimize_proto(net, options)

    monkeypatch.setattr(optimized_once, "optimize_proto", optimize_proto)
    given = [{"constant_threads": True, "trials": False}, {"constant_weights": True}, {"without": support.NAMES[1:]}]
    for options in (*given, {"batch_parts": 2}):
        with installed([], **options):
            workspace.RunNetOnce(model.net)
    assert [tuple(options[1:]) for options in seen] == [
        (True, False, (True, False), 1),
        (True, True, (False, True), 1),
        (True, True, (False, False), 1),
        (True, True, (False, False), 2),
    ]
    names = [[rule.name for rule in options.rules] for options in seen]
    assert names == [support.NAMES, support.NAMES, support.NAMES[:1], support.NAMES]


def test_nets_with_their_batch_in_parts():
    """Loops in them have run in parts, or the report says why not."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    reports = []
    workspace.GlobalInit(["tests", calling_thread.FLAG])
    try:
        with installed(reports, batch_parts=2):
            support.assert_same(support.run(model, blobs), expected)
    finally:
        workspace.GlobalInit(["tests", calling_thread.FLAG[:-1] + "0"])
    assert [report.counts["batch_parts"] for report in reports] == [1]


def test_a_second_install_takes_over_the_settings_and_wraps_nothing_twice():
    model, _ = support.lstm()
    first, second = [], []
    with installed(first):
        runners = [vars(workspace)[name] for name in optimized_runs.NAMES]
        with installed(second, even_if_slower=False):
            assert [vars(workspace)[name] for name in optimized_runs.NAMES] == runners
            workspace.RunNetOnce(model.net)
        assert (first, len(second)) == ([], 1)
        assert second[0].counts["lstm_unit"] == 0
        workspace.RunNetOnce(model.net)
    assert (len(first), len(second)) == (1, 1)
    assert first[0].counts["lstm_unit"] == 1


def test_a_context_that_began_to_optimise_ends_that_alone():
    with install():
        with installed([]):
            assert workspace.CreateNet is not CAFFE2S_RUNNERS["CreateNet"]
        assert workspace.CreateNet is CAFFE2S_RUNNERS["CreateNet"]
        assert recurrent.recurrent_net is caffe2_recurrent.recurrent_net
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_a_context_leaves_what_a_later_call_optimises():
    with install():
        installed([])
    assert isinstance(workspace.CreateNet, optimized_runs.Runner)
    assert recurrent.recurrent_net is CAFFE2S["recurrent_net"]


def test_settings_are_taken_back_in_any_order():
    model, _ = support.lstm()
    first, second, third = [], [], []
    installed(first)
    with installed(second):
        last = installed(third)
    workspace.RunNetOnce(model.net)
    assert (len(first), len(second), len(third)) == (0, 0, 1)
    with last:
        pass
    workspace.RunNetOnce(model.net)
    assert (len(first), len(second), len(third)) == (1, 0, 1)


def test_an_inner_context_leaves_an_outer_one_that_optimises():
    with installed([]):
        with install():
            pass
        assert isinstance(workspace.CreateNet, optimized_runs.Runner)
