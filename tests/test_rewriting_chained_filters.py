"""`chained_steps` where products keep filters for a number of threads: the chain has that set in whatever thread."""

import pytest
from caffe2.python import workspace

import onednn_support
import rewriting_support as support
from caffe2_recurrent import describe, optimize, save_predictor, step_times
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.operators import opened
from caffe2_recurrent.rewriting.products import kept_filters, thread_numbers
from caffe2_recurrent.rewriting.products.kept_filters import KEPT_FILTERS
from caffe2_recurrent.rewriting.rules import packed_products
from caffe2_recurrent.rewriting.steps import step_counts
from every_pair import every_pair
from test_rewriting_chained_steps import FLAG, NO_FLAG, RULE
from test_rewriting_kept_filters import (
    ALL,
    FORWARD,
    FOUR_AND_ONE,
    IS_RIGHT,
    WEIGHTS,
    as_built,
    exported,
    run_in_threads,
)
from test_rewriting_kept_filters import parameters as weights
from test_rewriting_unchanged_weights import assert_runs_see, change

pytestmark = pytest.mark.usefixtures("chained_steps")

FLAGS = pytest.mark.parametrize("flag", [FLAG, NO_FLAG], ids=["calling thread", "own thread"])
PROMISES = {"even_if_slower": True, "constant_threads": True}


@pytest.fixture(autouse=True)
def kept_and_chained(monkeypatch):
    """Products keep filters wherever they may, and numbers of threads matter."""
    onednn_support.force(monkeypatch, KEPT_FILTERS)
    monkeypatch.setattr(
        packed_products, "_fastest", lambda *given: KEPT_FILTERS if KEPT_FILTERS in given[4] else given[4][0]
    )
    onednn_support.numbers_matter(monkeypatch, True)
    workspace.GlobalInit(["tests", FLAG])
    yield
    workspace.GlobalInit(["tests", NO_FLAG])


def chained(rules=ALL, kind="simple", **options):
    """An LSTM whose steps are a chain with filters that stay, and its results."""
    model, blobs = support.lstm(**FORWARD, **options)
    model.net.Proto().type = kind
    report = optimize(model, rules, **PROMISES)
    assert report.counts[RULE] == 1, report
    assert kept_filters.are_in(operators_of(model.net)) == IS_RIGHT
    return model, blobs


def operators_of(net):
    """All operators of the steps, in the order in which they run."""
    return list(opened(support.step(net).op))


# ------------------------------------------------------------------------------------------------------ from run to run


@every_pair
@FLAGS
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change(flag, kind, lengths):
    model, blobs = chained(kind=kind, lengths=lengths)
    workspace.GlobalInit(["tests", flag])
    sizes = [(2, 1), (14, 17), (1, 2), (14, 5), (3, 7)]
    changes = [None, None, *weights(), "x", "sizes", "sizes", *weights(), *["sizes"] * 3]
    assert_runs_see(changes, model, blobs, sizes, lengths=lengths)


@pytest.mark.parametrize("flag", [FLAG, NO_FLAG], ids=["calling thread", "own thread"])
@pytest.mark.parametrize("threads", ["abmABMbam", "asBbas", "ttMm"])
def test_threads_of_other_numbers(threads, flag):
    """With four threads of OpenMP till ATen sets their number, to that of MKL's: one."""
    rules = [*ALL, RULE]
    done = run_in_threads(threads, (3, 17, 20, 150), rules, ["--caffe2_log_level=2", flag], **FOUR_AND_ONE)
    assert done.returncode == 0, done.stderr.decode()


# ------------------------------------------------------------------------------------------------------ where it is set


def test_the_chain_sets_it_in_the_first_step_of_a_run():
    model, _ = chained()
    operators = operators_of(model.net)
    if not IS_RIGHT:
        return
    (position,) = [index for index, operator in enumerate(operators) if thread_numbers.to_be_set([operator])]
    assert [operator.type for operator in operators[position : position + 4]] == [
        "If",
        "ConstantFill",
        "ATen",
        "ConstantFill",
    ]
    assert thread_numbers.sets(operators[position + 2])
    assert not any(map(kept_filters.keeps_filters, operators[:position]))
    (blob,) = thread_numbers.to_be_set(operators)
    assert list(operators[position + 3].output) == [blob]
    # In each run, not when weights have changed.
    (filling,) = [operator for operator in model.net.Proto().op if blob in operator.output]
    assert filling.type == "ConstantFill"
    made = [operator for guard in model.net.Proto().op for operator in laid_out_when_changed(guard)]
    assert made and not any(blob in operator.output for operator in made)


@pytest.mark.parametrize("kind", ["dag", "async_scheduling"])
def test_no_other_step_does(kind):
    model, _ = chained(kind=kind)
    setting = [operator for operator in operators_of(model.net) if thread_numbers.sets(operator)]
    assert len(setting) == IS_RIGHT


@FLAGS
def test_it_is_set_once_in_a_run(flag):
    model, _ = chained()
    workspace.GlobalInit(["tests", flag])
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    for blob in thread_numbers.to_be_set(operators_of(model.net)):
        assert not workspace.FetchBlob(blob).any()


# ------------------------------------------------------------------------------------------------------ what others see


def test_a_second_call_leaves_it_alone():
    model, _ = chained()
    report = optimize(model, **PROMISES)
    assert report.total == 0
    assert [refusal.reason for refusal in report.refusals] == [
        "an earlier `optimize` has made the operators of its steps a chain"
    ]


@FLAGS
def test_tools_know_such_steps(flag):
    model, _ = chained()
    workspace.GlobalInit(["tests", flag])
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 2)
    assert "step 0" in str(step_times(model.net, runs=1))
    assert "Conv (oneDNN)" in str(describe(model.net)) or not IS_RIGHT


def test_whose_steps_are_timed_has_the_number_set(monkeypatch):
    model, _ = chained()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    fed, feed = {}, workspace.FeedBlob
    monkeypatch.setattr(workspace, "FeedBlob", lambda name, value: (fed.update({name: value}), feed(name, value))[1])
    step_times(model.net, runs=1)
    for blob in thread_numbers.to_be_set(operators_of(model.net)):
        assert fed[blob].all()


@pytest.mark.parametrize("kind", ["dag", "async_scheduling"])
def test_a_predictor_of_another_type_than_it_was_optimised_for(tmp_path, kind):
    """What stands in front of the loop would be in threads in which nothing has set their number."""
    model, blobs = chained()
    workspace.RunNetOnce(model.net)
    if IS_RIGHT:
        with pytest.raises(ValueError, match="a net of type {} runs its loops in threads of its own".format(kind)):
            save_predictor(tmp_path / "model.minidb", exported(model, blobs[:1], kind))
    save_predictor(tmp_path / "model.minidb", exported(model, blobs[:1], "simple"))


# ------------------------------------------------------------------------------------------------------------ refusals


def reasons(model, rules):
    report = optimize(model, rules, dry_run=True, **PROMISES)
    return [refusal.reason for refusal in report.refusals if refusal.rule == RULE]


def test_a_loop_that_is_trained(backward_loops, monkeypatch):
    monkeypatch.setattr(step_counts, "few", lambda *_: 0)
    found = reasons(support.lstm()[0], ALL)
    assert (
        found == 2 * ["its operators are made anew in each run, and those of such a net take longer to make"] * IS_RIGHT
    )


def test_steps_that_take_turns_in_two_workspaces():
    rules = [name for name in ALL if name != "one_workspace"]
    assert (
        reasons(support.lstm(**FORWARD)[0], rules)
        == ["its filters are for a number of OpenMP's threads, which is set in one of its workspaces alone"] * IS_RIGHT
    )


def test_another_weight_makes_other_operators():
    """Whose filters are laid out in the thread of another chain."""
    model, blobs = chained()
    workspace.GlobalInit(["tests", NO_FLAG])
    workspace.CreateNet(model.net)
    for seed in range(3):
        change(WEIGHTS, seed)
        workspace.RunNet(model.net, 2)
        support.assert_same(support.values(blobs), as_built(blobs))
