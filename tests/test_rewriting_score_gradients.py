"""`score_gradients`: the gradient of scores that a vector makes of tanh."""

import pytest
from caffe2.python import core

import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.rules import RULES, score_gradients
from caffe2_recurrent.rewriting.rules.score_gradients import AS_IT_IS, ATENS, CAFFE2S
from caffe2_recurrent.rewriting.trials.timing import Seconds
from every_pair import every_pair
from onednn_support import leaving_no_trace
from step_nets import D, N, T
from test_rewriting_outer_products import decoder
from test_rewriting_rules import EXECUTOR, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept
from test_rewriting_vector_products import count_in_attention, every_attention

RULE = "score_gradients"
S = 4
WITH = pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
SUMS = pytest.mark.parametrize("summing", [CAFFE2S, ATENS])


def attend(make, x, addends):
    return scored(make, x, make.cell.Tanh(make.cell.Add(addends, "added"), "squashed"))


def scored(make, x, squashed):
    """tanh(x + B s), s the scores at S positions."""
    vector = [make.reference("v", 1, D), make.reference("v_b", 1)]
    scores = make.cell.FC([squashed, *vector], "scores", axis=2)
    by_sequence = make.cell.Transpose(scores, "by_sequence", axes=[1, 0, 2])
    context = make.cell.BatchMatMul([make.reference("B", N, D, S), by_sequence], "context")
    make.cell.Squeeze(context, context, dims=[2])
    make.cell.ExpandDims(context, context, dims=[0])
    return make.cell.Tanh(make.cell.Sum([context, x], "total"), "h_t")


def keys_first(make, x, h):
    return attend(make, x, [make.reference("A", S, N, D), make.fc(h, "query")])


def query_first(make, x, h):
    return attend(make, x, [make.fc(h, "query"), make.reference("A", S, N, D)])


def query_is_the_state(make, x, h):
    return attend(make, x, [make.reference("A", S, N, D), h])


def in_rows(make, x, h):
    """As Caffe2's own attention has it: the query without a dimension of one, to be repeated."""
    query = make.cell.Squeeze(make.fc(h, "query"), "query_rows", dims=[0])
    squashed = make.cell.Tanh(make.cell.Add([make.reference("A", S, N, D), query], "added", broadcast=1), "squashed")
    return scored(make, x, squashed)


STEPS = pytest.mark.parametrize(
    "step", [keys_first, query_first, query_is_the_state, in_rows], ids=lambda step: step.__name__
)


OF_ONE = "with one sequence nothing tells what has one for each from what all sequences share"


def keys_for_all(make, x, h):
    return attend(make, x, [make.reference("A", S, 1, D), make.fc(h, "query")])


def query_for_all(make, x, h):
    """Nothing of the step is in its scores."""
    return attend(make, x, [make.reference("A", S, N, D), make.reference("q", 1, D)])


def make_up(monkeypatch, **seconds):
    """Times of the ways, in seconds of a step; the shapes that were asked about."""
    asked = []

    def tried(shape):
        asked.append(shape)
        ways = {"as_it_is": AS_IT_IS, "caffe2s": CAFFE2S, "atens": ATENS}
        return {way: Seconds(0.0, seconds.get(name, 9.0)) for name, way in ways.items()}

    monkeypatch.setattr(score_gradients, "_tried", tried)
    return asked


def force(monkeypatch, summing):
    make_up(monkeypatch, **{"caffe2s" if summing == CAFFE2S else "atens": 1.0})


def kinds(net):
    return [operator.type for operator in support.backward_step(net).op]


# Values.


@every_pair
@EXECUTOR
@WITH
@SUMS
@STEPS
def test_values_and_gradients(step, rules, summing, executor, monkeypatch):
    force(monkeypatch, summing)
    net = assert_kept(step, RULE, 1, rules, executor, parameters=["v"])
    assert "AddGradient" not in kinds(net) and ("ReduceSum" in kinds(net)) == (summing == CAFFE2S)
    assert kinds(net).count("TanhGradient") <= 1


@EXECUTOR
@STEPS
def test_an_aten_that_does_not_repeat(step, executor, monkeypatch):
    """As that of torch 1.4; it is tried once, and that leaves no trace even if it fails."""
    monkeypatch.setattr(score_gradients, "TANH_BACKWARD", "tanh_backward_of_another_kind")
    with leaving_no_trace():
        assert not score_gradients.aten_repeats.__wrapped__()
    monkeypatch.setattr(score_gradients, "aten_repeats", lambda: False)
    net = assert_kept(step, RULE, 1, [RULE], executor, parameters=["v"])
    assert kinds(net).count("ATen") >= 2


@every_pair
@every_attention
@WITH
@SUMS
def test_attention(cell, variant, rules, summing, monkeypatch):
    """Against the numpy loop. With all rules or alone, kept or computed again."""
    force(monkeypatch, summing)
    assert count_in_attention(cell, variant, RULE, rules) == 1


@pytest.mark.parametrize("batch, outputs", [(N, 4), (1, 3), (3, 1), (1, 1)])
def test_other_sizes_in_another_run(batch, outputs):
    others = ((N, 4), (1, 3), (3, 1))
    _, values = decoder(batch, outputs)
    expected = [values(*sizes) for sizes in others]
    model, values = decoder(batch, outputs)
    report = optimize(model, [RULE], even_if_slower=True)
    assert (report.counts[RULE], reasons_in(report, RULE)) == ((0, [OF_ONE]) if batch == 1 else (1, []))
    for sizes, other in zip(others, expected):
        support.assert_same(values(*sizes), other)


def test_the_second_time_there_is_nothing_to_do():
    net = Net(keys_first)
    assert optimize(net.model(["v"]), [RULE], even_if_slower=True).total == 1
    again = optimize(net.model(["v"]), [RULE], even_if_slower=True)
    assert again.total == 0 and not again.refusals


@pytest.mark.parametrize("kind", ["ATen", "ReduceSum", "Mul", "FCGradient"])
def test_a_wrong_gradient_is_seen(kind, monkeypatch):
    force(monkeypatch, CAFFE2S)
    expected = Net(keys_first).values()
    net = Net(keys_first)
    optimize(net.model(["v"]), [RULE])
    (gradient,) = [operator for operator in net.net.Proto().op if operator.type == "RecurrentNetworkGradient"]
    (step,) = [given.n for given in gradient.arg if given.name == "backward_step_net"]
    operators = list(step.op)
    # The last of the kind makes what is used.
    position = max(at for at, operator in enumerate(operators) if operator.type == kind)
    blob = operators[position].output[0]
    operators.insert(position + 1, made("Scale", [blob], [blob], scale=1.001))
    del step.op[:]
    step.op.extend(operators)
    with pytest.raises(AssertionError, match="gradient of"):
        support.assert_same(net.values(), expected)


def test_a_vector_that_is_left_out_is_seen(monkeypatch):
    """Behind the loop, that is."""
    force(monkeypatch, CAFFE2S)
    expected = Net(keys_first).values()
    net = Net(keys_first)
    optimize(net.model(["v"]), [RULE])
    (scaling,) = [operator for operator in net.net.Proto().op if "v" in operator.input and operator.type == "Mul"]
    blob = core.BlobReference(scaling.output[0])
    net.insert(len(net.net.Proto().op), "Scale", [blob], [blob], scale=1.001)
    with pytest.raises(AssertionError, match="gradient of A"):
        support.assert_same(net.values(), expected)


# Whether it pays.


@pytest.mark.parametrize(
    "seconds, summing",
    [
        ({"as_it_is": 1.1, "caffe2s": 1.0}, CAFFE2S),
        ({"as_it_is": 1.1, "caffe2s": 1.01, "atens": 1.0}, ATENS),
        ({"as_it_is": 1.09, "caffe2s": 1.0, "atens": 1.0}, None),
    ],
)
def test_the_fastest_is_taken(seconds, summing, monkeypatch):
    asked = make_up(monkeypatch, **seconds)
    net = Net(keys_first)
    report = optimize(net.model(["v"]), [RULE])
    assert set(asked) == {(S, N, D)}
    assert report.counts[RULE] == (summing is not None)
    assert ("ReduceSum" in kinds(net.net)) == (summing == CAFFE2S)
    slower = "for {} positions, {} sequences and {} numbers it is not faster".format(S, N, D)
    assert reasons_in(report, RULE) == ([] if summing else [slower])


def test_what_is_done_once_counts(monkeypatch):
    """In each of T steps a share of it."""
    found = {AS_IT_IS: Seconds(0.0, 2.0), CAFFE2S: Seconds(T * 1.0, 1.0), ATENS: Seconds(0.0, 9.0)}
    monkeypatch.setattr(score_gradients, "_tried", lambda shape: found)
    assert optimize(Net(keys_first).model(["v"]), [RULE]).total == 0


def test_ways_are_tried():
    with leaving_no_trace():
        found = score_gradients._tried.__wrapped__((5, 3, 4))
    assert set(found) == {AS_IT_IS, CAFFE2S, ATENS}
    assert all(seconds.step > 0 for seconds in found.values())
    assert [bool(seconds.once) for seconds in found.values()] == [False, True, True]


def test_without_trials_it_stays():
    assert optimize(Net(keys_first).model(["v"]), [RULE], trials=False).total == 0


# What it refuses.

SHAPES = {"A": (S, N, D), "B": (N, D, S), "v": (1, D), "h_initial": (N, D), "loop/X": (T, N, D), "query_w": (D, D)}
SHAPES.update({"query_b": (D,), "v_b": (1,)})


def loop(step=keys_first):
    return loop_of(Net(step).net)


def backward(loop, kind, blob):
    return next(operator for operator in loop.gradient.operators if operator.type == kind and blob in operator.input)


def scoring(loop):
    return backward(loop, "FCGradient", "v")


def squashing(loop):
    return backward(loop, "TanhGradient", "squashed")


def adding(loop):
    return backward(loop, "AddGradient", "A")


def reasons(loop, shapes=SHAPES):
    return why(RULE, loop, shapes)


MAY_BE = "'v' {} may be larger in another run, as nothing says that it is a parameter".format((1, D))


def test_the_places_that_it_is_about():
    # Nobody says here what is a parameter.
    assert reasons(loop()) == reasons(loop(query_first)) == reasons(loop(in_rows)) == [MAY_BE]
    assert why(RULE, loop_of(Net(keys_first, forward_only=True).net), SHAPES) == []
    for change in (
        lambda changed: changed.gradient.parameters.clear(),
        lambda changed: changed.gradient.operators.remove(adding(changed)),
        lambda changed: changed.gradient.operators.remove(squashing(changed)),
        lambda changed: scoring(changed).output.pop(),
    ):
        changed = loop()
        change(changed)
        assert reasons(changed) == []


def test_without_aten(monkeypatch):
    monkeypatch.setattr(score_gradients, "aten_is_missing", lambda: True)
    assert reasons(loop()) == ["this Caffe2 has no ATen operator"]


@pytest.mark.parametrize("argument", [{"axis": 1}, {"axis_w": 2}], ids=str)
def test_refuses_another_product(argument):
    changed = loop()
    set_argument(scoring(changed), **argument)
    assert reasons(changed) == ["'squashed' is not multiplied with rows along its last axis"]


@pytest.mark.parametrize("argument", [{"axis": 0}, {"axis_str": "N"}], ids=str)
def test_refuses_a_sum_of_another_kind(argument):
    changed = loop()
    set_argument(adding(changed), broadcast=1, **argument)
    assert reasons(changed) == ["'A' and 'query' are added along axes of their own"]


def test_refuses_the_gradient_of_something_else():
    changed = loop()
    squashing(changed).input[0] = "added"
    assert reasons(changed) == ["'squashed_grad' is not the gradient of 'added'"]


@pytest.mark.parametrize("blob", ["v", "A"])
def test_refuses_what_is_not_the_same_in_all_steps(blob):
    changed = loop()
    changed.operators.append(made("Copy", ["B"], [blob]))
    assert reasons(changed) == ["'{}' is not the same in all steps".format(blob)]


@pytest.mark.parametrize("blob", ["squashed", "scores_grad"])
def test_refuses_what_is_written_in_between(blob):
    changed = loop()
    position = changed.gradient.operators.index(scoring(changed))
    changed.gradient.operators.insert(position + 1, made("Copy", ["B"], [blob]))
    assert reasons(changed) == ["'{}' is written anew in between".format(blob)]


def test_refuses_what_is_used_for_something_else():
    for of in (
        lambda changed: scoring(changed).output[2],
        lambda changed: squashing(changed).output[0],
        lambda changed: adding(changed).output[0],
    ):
        changed = loop()
        # By names of their own.
        of_scores, of_sum = scoring(changed), adding(changed)
        of_scores.output[2] = squashing(changed).input[1] = "of_squashed"
        squashing(changed).output[0] = of_sum.input[0] = "of_sum"
        blob = of(changed)
        writing = next(at for at, found in enumerate(changed.gradient.operators) if blob in found.output)
        reading = writing + 1 if blob == "A_grad" else len(changed.gradient.operators)
        changed.gradient.operators.insert(reading, made("Tanh", [blob], ["more"]))
        assert reasons(changed) == ["'{}' is used for something else too".format(blob)]
    changed = loop()
    changed.gradient.operators.insert(0, made("Copy", ["A"], ["A_grad"]))
    assert reasons(changed) == ["'A_grad' is used for something else too"]


def test_refuses_what_is_shown_outside():
    changed = loop()
    (link,) = [link for link in changed.gradient.backward_links if link.outer == changed.gradient.sequence]
    changed.gradient.backward_links.append(link._replace(inner=scoring(changed).output[2]))
    assert reasons(changed) == ["'{}' is used for something else too".format(scoring(changed).output[2])]


def test_refuses_one_sequence():
    """The keys may be the same for all that there will be in another run."""
    one = {"h_initial": (1, D), "loop/X": (T, 1, D), "A": (S, 1, D), "B": (1, D, S)}
    assert reasons(loop(keys_for_all), {**SHAPES, **one}) == [OF_ONE]


@pytest.mark.parametrize(
    "step, blob, shape", [(keys_for_all, "A", (S, 1, D)), (query_for_all, "q", (1, D))], ids=["keys", "query"]
)
def test_refuses_what_all_sequences_share(step, blob, shape):
    (reason,) = reasons(loop(step), {**SHAPES, blob: shape})
    assert reason == "'{}' is shaped otherwise than scores of tanh need it: {}".format(blob, shape)


def test_refuses_shapes_that_are_not_known():
    assert reasons(loop(), {}) == ["the shape of 'squashed' is not known; give shapes"]


@pytest.mark.parametrize("blob, shape", [("v", (2, D)), ("A", (S, N, 1)), ("A", (S, 1, D))], ids=str)
def test_refuses_other_shapes(blob, shape):
    expected = "'{}' is shaped otherwise than scores of tanh need it: {}".format(blob, shape)
    assert reasons(loop(), {**SHAPES, blob: shape}) == [expected]


def test_refuses_what_may_be_larger_in_another_run():
    assert reasons_in(optimize(Net(keys_first).net, [RULE]), RULE) == [MAY_BE]


def test_the_number_of_steps_is_not_known():
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    changed = loop()
    (site,) = rule.sites(changed)
    assert rule.loss(changed, site, Sizes({})) == "the number of steps is not known; give shapes"
