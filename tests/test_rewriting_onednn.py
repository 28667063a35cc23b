"""`packed_products`: products of the steps by oneDNN, in both ways, and what else has to know of such operators."""

import numpy as np
import pytest
from caffe2.python import optimizer, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.predictor import predictor_exporter

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import (
    LSTM,
    describe,
    draw,
    optimize,
    prediction_net,
    recurrent_net,
    save_predictor,
    set_rnn_executor_config,
    step_times,
    step_values,
)
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.products import onednn, separate_rows, step_products
from caffe2_recurrent.rewriting.products.step_products import Size
from caffe2_recurrent.rewriting.trials.timing import Seconds
from onednn_support import (
    ADDED_THERE,
    FROM,
    THERE,
    assert_placed,
    force,
    in_ifs,
    inner_nets,
    leaving_no_trace,
    make_up,
    make_up_gain,
    on_onednn,
)
from step_nets import D, Maker
from test_rewriting_rules import (
    forward,
    loop_of,
    lstm_loop,
    made,
    scaled_loop,
    set_argument,
    why,
)
from test_step_times import assert_all_there, measured

RULE = "packed_products"
PRODUCTS = ["parameter_gradients", "transposed_weights", RULE]
CHOSEN = pytest.mark.parametrize("rules", [None, PRODUCTS], ids=["all rules", "products"])


# Not the one that reads behind the end of rows of the sizes here, as torch 1.7's does; it makes numbers of anything.
SAFE = [way for way in onednn.ways() if separate_rows.in_steps(way, D, 4 * D)]


pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture(params=SAFE)
def way(request, monkeypatch):
    """The way in which products are done, whatever is faster."""
    force(monkeypatch, request.param)
    return request.param


def optimised(rules=None):
    return support.Optimised(rules)


# Where it fires.

FORWARD, TRANSPOSED = "FC -> 'layer/gates_t'", "FCTransposed -> 'layer/gates_t'"
# Part of the gradient; the engine's sum of the parts stays.
BACKWARD = "BatchMatMul -> '_layer/hidden_t_prev_grad_autosplit_0'"
FIRES = {
    "as built": ([], {}, [FORWARD]),
    "forward only": ([], {"gradients": False, "forward_only": True}, [FORWARD]),
    "transposed": (["transposed_weights"], {}, [TRANSPOSED]),
    "backward step": (["parameter_gradients"], {}, [FORWARD, BACKWARD]),
    "in the sequence": ([], {"memory_optimization": True}, ["FC -> 'layer/gates_t_shared'"]),
    "recomputed": ([], support.RECOMPUTED, [FORWARD, FORWARD]),
    "all of them": (PRODUCTS[:2], support.RECOMPUTED, [TRANSPOSED, TRANSPOSED, BACKWARD]),
    "scaled": (
        ["transposed_weights", "lstm_unit", "scaled_weights"],
        {"lengths": True},
        ["FCTransposed -> 'layer/gates_t_product'"],
    ),
}


@pytest.mark.parametrize("before, options, places", FIRES.values(), ids=list(FIRES))
def test_products_of_the_steps(before, options, places, way):
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    rewrite = optimised([*before, RULE])
    rewrite(model)
    assert [rewrite.what for rewrite in rewrite.report.rewrites if rewrite.rule == RULE] == places
    # One is scaled first, and one is added in the place of the sequence.
    is_added = places[0] in (FORWARD, TRANSPOSED) and options != {"memory_optimization": True}
    added = ADDED_THERE[way] if is_added else THERE[way]
    assert_placed(model.net)
    # Of the step there is one; both operators of the loop have both steps.
    for (kind, name), inner in inner_nets(model.net):
        if kind != "If":
            assert on_onednn(inner.op) == (added if name == "step_net" else THERE[way] * (len(places) - 1))
            left = {operator.type for operator in inner.op if not is_on_onednn(operator)}
            assert left.isdisjoint(["FC", "FCTransposed", "BatchMatMul"])
    support.assert_same(support.run(model, blobs), expected)


def test_it_fires_where_a_trial_finds_it_faster(monkeypatch):
    make_up_gain(monkeypatch)
    model, _ = support.lstm()
    rewrite = support.Optimised(PRODUCTS, even_if_slower=False)
    rewrite(model)
    assert rewrite.report.counts == {"parameter_gradients": 1, "transposed_weights": 1, RULE: 2}
    # The faster of the two.
    assert on_onednn(support.step(model.net).op) == THERE[onednn.CONVOLUTION]


def test_a_batch_size_that_is_not_known(monkeypatch):
    """Nothing can be tried; values stay whatever it is."""
    monkeypatch.setattr(separate_rows, "in_steps", lambda way, *_: way in SAFE)
    model, blobs = support.lstm(gradients=False, forward_only=True)
    expected = support.run(model, blobs)
    for blob in ("x", "h0", "c0"):
        workspace.C.Workspace.current.remove_blob(blob)
    for blob in blobs + ["layer/i2h"]:
        workspace.C.Workspace.current.remove_blob(blob)
    assert optimize(model, [RULE], even_if_slower=True).counts == {RULE: 1}
    assert on_onednn(support.step(model.net).op) == ADDED_THERE[SAFE[0]]
    support.feed()
    support.assert_same(support.run(model, blobs), expected)


# Nets: their types, other sizes, other weights.


def feed_parameters(model, seed):
    random = np.random.RandomState(seed)
    for blob in sorted(map(str, model.params)):
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))


def sgd(model):
    optimizer.build_sgd(model, base_learning_rate=0.05)


def adam(model):
    optimizer.build_adam(model, base_learning_rate=0.01)


def trained(change, kind, builder=LSTM, with_optimizer=sgd, runs=10):
    """What a few steps with an optimizer leave of the parameters, in a net of this type."""
    workspace.ResetWorkspace()
    np.random.seed(1)
    model = ModelHelper("model")
    support.feed()
    output, *_ = builder(model, "x", "lengths", ("h0", "c0"), support.DIM_IN, support.D, "layer")
    model.AddGradientOperators([model.net.SumElements(model.net.Tanh(output), "loss")])
    with_optimizer(model)
    workspace.RunNetOnce(model.param_init_net)
    feed_parameters(model, 2)
    change(model)
    model.net.Proto().type, model.net.Proto().num_workers = kind, 3
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, runs)
    return support.values(["loss", *model.params])


def test_what_is_needed_for_laying_out_alone_is_freed(way):
    """Of what the Ifs compute, what they give stays."""
    model, blobs = support.lstm()
    optimised([*PRODUCTS, "products_over_steps"])(model)
    support.run(model, blobs)
    inside = {blob for operator in in_ifs(model.net) for blob in operator.output}
    given = {blob for operator in model.net.Proto().op if operator.type == "If" for blob in operator.output}
    empty = {blob for blob in inside if b"uninitialized" in bytes(repr(workspace.FetchBlob(blob)), "ascii")}
    assert "layer/gates_t_w_grad" in given and empty == inside - given != set()


def with_other_weights(change):
    """What a net gives in two runs of the net that is created once, with other weights in the second."""
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    change(model)
    workspace.CreateNet(model.net)
    found = []
    for seed in (5, 6):
        feed_parameters(model, seed)
        workspace.RunNet(model.net)
        found += support.values(blobs)[0]
    return found, {}


STEP = [(support.LOOP, "step_net")]
BACKWARD_STEP = [(support.LOOP, "backward_step_net"), (support.GRADIENT, "backward_step_net")]


@pytest.mark.parametrize("places", [STEP, BACKWARD_STEP], ids=["step", "backward step"])
def test_an_operator_that_keeps_its_weights_is_seen(places, monkeypatch):
    """What `training_mode` is for, at each of its places.

    The same cannot be planted in the products: of weights that oneDNN takes as they come, as here, the operator keeps
    the place in memory, and not a copy.
    """
    force(monkeypatch, onednn.CONVOLUTION)

    def change(model):
        optimised(PRODUCTS)(model)
        changed = 0
        for where, inner in inner_nets(model.net):
            for operator in inner.op:
                kept = [given for given in operator.arg if given.name != "training_mode"]
                if operator.type == "Conv" and where in places:
                    changed += len(operator.arg) - len(kept)
                    del operator.arg[:]
                    operator.arg.extend(kept)
        assert changed

    expected = with_other_weights(lambda model: None)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(with_other_weights(change), expected)


# Refusals.

SHAPES = {"layer/gates_t_w": (16, 4), "layer/i2h": (9, 3, 16), "h0": (1, 3, 4), "c0": (1, 3, 4)}


def refusal(loop, shapes=SHAPES):
    (reason,) = why(RULE, loop, shapes)
    return reason


def test_an_lstm_is_no_near_miss():
    assert refusal(lstm_loop()) is None


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert refusal(lstm_loop()) == "this Caffe2 has neither oneDNN nor NNPACK"


def test_weights_of_unknown_size():
    expected = "the size of its weights 'layer/gates_t_w' is not known; give shapes"
    assert refusal(lstm_loop(), {name: SHAPES[name] for name in ("layer/i2h", "h0")}) == expected


def as_product(kind, **arguments):
    """The loop of an LSTM with another kind of product."""
    loop = lstm_loop()
    product = forward(loop, "FC")
    product.type = kind
    del product.arg[:]
    set_argument(product, **arguments)
    return loop


LAID_OUT = {
    "axis_w": as_product("FC", axis=2, axis_w=2),
    "axis": as_product("FC"),
    "transposed, axis_w": as_product("FCTransposed", axis=2, axis_w=2),
    "trans_a": as_product("BatchMatMul", broadcast=1, trans_a=1),
    "a batch of products": as_product("BatchMatMul"),
}


@pytest.mark.parametrize("loop", LAID_OUT.values(), ids=list(LAID_OUT))
def test_weights_that_are_laid_out_in_another_way(loop):
    assert refusal(loop) == "its weights 'layer/gates_t_w' are laid out in another way"


def test_weights_of_three_dimensions():
    expected = "its weights 'layer/gates_t_w' are laid out in another way"
    assert refusal(lstm_loop(), {**SHAPES, "layer/gates_t_w": (16, 2, 2)}) == expected


@pytest.mark.parametrize("kind, arguments", [("FCTransposed", {"axis": 2}), ("BatchMatMul", {"broadcast": 1})])
def test_other_products_that_are_taken(kind, arguments):
    assert refusal(as_product(kind, **arguments), {**SHAPES, "layer/gates_t_w": (4, 16)}) is None


def test_rows_that_are_not_known_to_be_those_of_sequences():
    loop = lstm_loop()
    loop.operators.insert(0, made("Transpose", ["layer/hidden_t_prev"], ["other"]))
    forward(loop, "FC").input[0] = "other"
    assert refusal(loop) == "'other' is not known to have one row for each sequence"


def test_gradients_that_are_not_known_to_have_rows():
    """Only in the call in which the rule before has seen that they do."""
    model, _ = support.lstm()
    assert optimize(model, ["parameter_gradients"]).total
    expected = "'layer/gates_t_grad' is not known to have one row for each sequence"
    assert support.reasons(model.net, RULE) == [expected]


def test_weights_that_are_not_the_same_in_all_steps_are_no_place():
    loop = lstm_loop()
    loop.operators.insert(0, made("Tanh", ["w"], ["layer/gates_t_w"]))
    assert why(RULE, loop, SHAPES) == []


def test_products_of_onednn_are_no_place():
    loop = lstm_loop()
    onednn.on_onednn(forward(loop, "FC"))
    assert why(RULE, loop, SHAPES) == why("transposed_weights", loop, SHAPES) == []
    # With a product of a sequence.
    loop = loop_of(comparing.build(recurrent_net, step_nets.several_parameters())[0])
    product = next(operator for operator in loop.operators if operator.input[0] == "x_t")
    assert why("sequence_operators", loop) == [None]
    onednn.on_onednn(product)
    assert why("sequence_operators", loop) == []
    loop, _, _ = scaled_loop()
    assert why("scaled_weights", loop) == [None]
    onednn.on_onednn(forward(loop, "FCTransposed"))
    (reason,) = why("scaled_weights", loop)
    assert reason == "neither addend is a product with weights, the same in all steps, that nothing else reads"


def made_before(*kinds):
    """The loop of an LSTM whose weights operators before the loop make of 'w', one after the other."""
    loop, blob = lstm_loop(), "w"
    for kind in kinds:
        blob = loop.add_before(kind, [blob, "layer/scale"] if kind == "Mul" else [blob], "made_" + kind)
        loop.add_reference(blob)
    forward(loop, "FC").input[1] = blob
    return loop, blob


@pytest.mark.parametrize("kinds", [["Transpose"], ["Mul", "Transpose"], ["Transpose", "Mul"]], ids="-".join)
def test_weights_that_other_rules_have_made(kinds):
    loop, blob = made_before(*kinds)
    assert refusal(loop, {**SHAPES, "w": (4, 16), "layer/scale": (1,)}) is None
    assert refusal(loop) == "the size of its weights '{}' is not known; give shapes".format(blob)


def test_an_executor_with_threads_of_its_own():
    loop = lstm_loop()
    set_argument(loop.forward, **{"rnn_executor.num_threads": 3})
    expected = "the RNN executor has been given threads of its own, and oneDNN would start some in each of them"
    assert refusal(loop) == expected
    set_argument(loop.forward, enable_rnn_executor=0)
    assert refusal(loop) is None


@pytest.mark.usefixtures("nnpack_products")
def test_an_executor_that_an_earlier_call_has_left_on():
    """It was found to pay with the products as they are."""
    model, _ = support.lstm()
    optimize(model, ["transposed_weights", "executor_threads"], even_if_slower=True, trials=False)
    assert integer(support.operator(model.net), "enable_rnn_executor", 0) == 1
    found = optimize(model, ["packed_products"], even_if_slower=True, trials=False)
    expected = "an earlier `optimize` has left the RNN executor on, and the products as they are"
    assert found.total == 0 and {refusal.reason for refusal in found.refusals} == {expected}


@pytest.mark.parametrize("failing", ["not built in", "operators missing"])
def test_a_caffe2_without_onednn(failing, monkeypatch):
    is_missing = onednn.is_missing.__wrapped__
    assert not is_missing()
    if failing == "not built in":
        monkeypatch.setattr(onednn.workspace.C, "use_mkldnn", False)
    else:

        def fail(operator):
            raise RuntimeError("Cannot create operator of type '{}'".format(operator.type))

        monkeypatch.setattr(workspace, "RunOperatorOnce", fail)
    workspace.FeedBlob("mine", np.ones(2, dtype=np.float32))
    assert is_missing()
    assert workspace.Blobs() == ["mine"]


def test_a_caffe2_that_cannot_convolve_with_another_number_of_filters(monkeypatch):
    run, runs = workspace.RunNet, []

    def fail_again(name):
        runs.append(name)
        if len(runs) == 2:
            raise RuntimeError("std::exception")
        run(name)

    monkeypatch.setattr(workspace, "RunNet", fail_again)
    with leaving_no_trace():
        assert onednn.ways.__wrapped__() == (onednn.INNER_PRODUCT,)
    assert len(runs) == 2


# What had better stay.


def loss(loop, shapes=SHAPES):
    (reason,) = why(RULE, loop, shapes, loss=True)
    return reason


def test_a_loss_where_the_batch_size_is_not_known():
    expected = "the batch size is not known; give shapes"
    assert loss(lstm_loop(), {"layer/gates_t_w": SHAPES["layer/gates_t_w"]}) == expected


def test_a_loss_where_steps_may_run_side_by_side():
    step_net = step_nets.two_states()
    net, _ = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    reasons = support.reasons(net, RULE, even_if_slower=False)
    assert len(reasons) == 2 and len(set(reasons)) == 1
    assert reasons[0].startswith("it would take the RNN executor off: ")
    assert reasons[0].endswith("so steps may run side by side")


SLOWER = "for [3, 4] x [4, 16] no other way is faster"


@pytest.mark.parametrize(
    "inner_product, convolution, expected",
    [
        (Seconds(0.0, 1.0), Seconds(0.0, 9.0), None),
        (Seconds(0.0, 9.0), Seconds(0.0, 1.0), None),
        # Less than the error of a trial.
        (Seconds(0.0, 1.15), Seconds(0.0, 9.0), SLOWER),
        (Seconds(0.0, 9.0), Seconds(0.0, 1.3), SLOWER),
        # 9 steps.
        (Seconds(0.8, 1.0), Seconds(0.0, 9.0), None),
        (Seconds(0.9, 1.0), Seconds(0.0, 9.0), SLOWER),
        (Seconds(99.0, 0.1), Seconds(0.0, 1.0), None),
    ],
    ids=str,
)
def test_a_loss_where_a_trial_finds_one(inner_product, convolution, expected, monkeypatch):
    make_up(monkeypatch, Seconds(0.0, 1.2), inner_product=inner_product, convolution=convolution)
    assert loss(lstm_loop()) == expected


def test_what_is_done_once_counts_for_nothing_where_the_steps_are_not_known(monkeypatch):
    make_up(monkeypatch, Seconds(0.0, 2.0), inner_product=Seconds(99.0, 1.0), convolution=Seconds(99.0, 9.0))
    shapes = {name: SHAPES[name] for name in ("layer/gates_t_w", "h0")}
    assert loss(lstm_loop(), shapes) is None


def test_the_way_that_a_trial_finds_faster_is_taken(monkeypatch):
    """With one step the other way, which lays out its weights in no time."""
    make_up(monkeypatch, Seconds(0.0, 9.0), inner_product=Seconds(0.0, 2.0), convolution=Seconds(4.0, 1.0))
    for steps, way in ((9, onednn.CONVOLUTION), (1, onednn.INNER_PRODUCT)):
        model, _ = support.lstm(name="model{}".format(steps))
        support.feed(steps=steps)
        assert optimize(model, [RULE]).counts == {RULE: 1}
        assert on_onednn(support.step(model.net).op) == ADDED_THERE[way]
        workspace.ResetWorkspace()


@pytest.mark.parametrize(
    "kind, in_rows", [("FC", True), ("FCTransposed", False), ("BatchMatMul", False), ("BatchMatMul", True)]
)
@pytest.mark.parametrize("way", [step_products.AS_IT_IS, *onednn.ways()])
@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
def test_products_are_tried(kind, in_rows, way, is_added):
    """Each of them runs, by itself and in each way; nobody knows how long that takes."""
    found = step_products.tried(Size(kind, 3, 5, 7, kind != "BatchMatMul", in_rows, is_added), way)
    assert found.step > 0
    assert (found.once > 0) == (way != step_products.AS_IT_IS)


@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
def test_transposed_weights_are_tried(is_added):
    found = step_products.tried(Size("FC", 3, 5, 7, True, True, is_added), step_products.TRANSPOSED)
    assert found.step > 0 and found.once > 0


def test_weights_that_are_made_before_the_loop():
    """A product of two shapes that are broadcast, made once: its shape is that of neither factor."""
    make = Maker()
    x, h = make.sequence(), make.state()
    factors = [make.reference("g", D, 1), make.reference("v", 1, D)]
    total = make.cell.FC([h, make.cell.Mul(factors, "w"), make.reference("b", D)], "y", axis=2)
    make.link(h, make.cell.Sum([x, total], "h_t"))
    step_net = make.done(forward_only=True)
    with support.optimising(["invariants", RULE]) as lines:
        comparing.assert_right(recurrent_net, step_net)
    assert lines.counts[RULE] == lines.counts["invariants"] == 1


# The RNN executor.


@pytest.mark.parametrize("rules", [None, [RULE]], ids=["all rules", "alone"])
def test_the_rnn_executor_goes_off(rules):
    """And has no setting any more, by which somebody would turn it on again for all loops that have one."""
    model, _ = support.lstm()
    assert optimize(model, rules, even_if_slower=True).counts[RULE]
    for kind in (support.LOOP, support.GRADIENT):
        assert "enable_rnn_executor" not in [given.name for given in support.operator(model.net, kind).arg]


def test_a_loop_that_does_not_speak_of_the_rnn_executor():
    """As nets from before there was one."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    for kind in (support.LOOP, support.GRADIENT):
        arguments = support.operator(model.net, kind).arg
        arguments.remove(support.argument(support.operator(model.net, kind), "enable_rnn_executor"))
    assert optimize(model, [RULE], even_if_slower=True).counts == {RULE: 1}
    assert b"enable_rnn_executor" not in model.net.Proto().SerializeToString()
    support.assert_same(support.run(model, blobs), expected)


def test_the_rnn_executor_stays_as_it_was_set():
    model, blobs = support.lstm()
    for kind in (support.LOOP, support.GRADIENT):
        set_rnn_executor_config(support.operator(model.net, kind), num_threads=2)
    report = optimize(model, even_if_slower=True)
    assert report.counts[RULE] == report.counts["executor_threads"] == 0
    for kind in (support.LOOP, support.GRADIENT):
        operator = support.operator(model.net, kind)
        assert support.argument(operator, "enable_rnn_executor").i == 1
        assert support.argument(operator, "rnn_executor.num_threads").i == 2


# Looking at such loops, and keeping them in files.


# All that leave products for it, where no backward step is in the way either.
FOR_ONEDNN = [name for name in support.NAMES if name != "gates_first"]


def layer(rules=None, **options):
    """An LSTM that has run by oneDNN, and its report."""
    model, blobs = support.lstm(**options)
    report = optimize(model, rules or FOR_ONEDNN, even_if_slower=True)
    assert report.counts[RULE] and on_onednn(support.step(model.net).op)
    workspace.RunNetOnce(model.net)
    return model, blobs


def test_operators_that_lay_out_weights(way):
    """What `step_times` runs in its own workspace: all of these, in order, and none of the net's products."""
    model, _ = layer(["parameter_gradients", RULE, "products_over_steps"])
    (loop,) = read_loops(model.net.Proto()).values()
    there = {blob for operator in loop.surroundings.laying_out for blob in operator.output}
    assert "layer/i2h" not in there and loop.surroundings.laying_out
    assert [
        operator for operator in model.net.Proto().op if operator in loop.surroundings.laying_out
    ] == loop.surroundings.laying_out
    inside = [operator for operator in in_ifs(model.net) if is_on_onednn(operator) and operator.type != FROM]
    tensors = {blob for operator in inside for blob in operator.output}
    assert tensors & set(loop.inputs) <= there <= tensors


TRAINING, FORWARD_ONLY = {"lengths": True}, {"gradients": False, "forward_only": True}
KINDS = pytest.mark.parametrize("options", [TRAINING, FORWARD_ONLY], ids=["training", "forward only"])


@CHOSEN
@KINDS
def test_step_times(options, rules, way):
    model, _ = layer(rules, **options)
    found = step_times(model, runs=1)
    operators = [operator.type for operator in found.operators]
    first, kernel, last = THERE[way]
    assert operators.count(kernel) == (2 if options is TRAINING else 1)
    # With all rules something else happens to it.
    is_added = last not in ADDED_THERE[way] and rules is not None
    assert operators.count(last) == operators.count(kernel) - is_added
    assert operators.count(first) >= operators.count(kernel)


@KINDS
def test_step_times_measures_all_operators(options, way):
    model, _ = layer(None, **options)
    assert_all_there(measured(model, runs=1), model.net, support.T)


@CHOSEN
def test_step_values(rules, way):
    """Those that the unoptimised net computes too."""
    model, _ = support.lstm(**TRAINING)
    workspace.RunNetOnce(model.net)
    expected = step_values(model)
    workspace.ResetWorkspace()
    model, _ = layer(rules, **TRAINING)
    found = step_values(model)
    common = set(found) & set(expected)
    assert common > {"layer/hidden_t", "layer/cell_t", "layer/hidden_t_prev", "layer/cell_t_prev"}
    for blob in common:
        assert support.difference(found[blob], expected[blob]) < support.TOLERANCE, blob


@KINDS
def test_describe_and_draw(options, way, tmp_path):
    model, _ = layer(None, **options)
    text = str(describe(model))
    assert "T = {} steps, N = {} sequences".format(support.T, support.N) in text
    assert "sizes shown as ?" not in text
    draw(model, str(tmp_path / "loop.dot"))
    drawn = (tmp_path / "loop.dot").read_text()
    for kind in THERE[way]:
        assert kind in text and kind in drawn


@pytest.mark.parametrize("cut", ["built forward only", "before", "after"])
def test_predictors(cut, way, tmp_path):
    """The file holds parameters, and no tensors of oneDNN."""
    expected = support.run(*support.lstm(**FORWARD_ONLY))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**(FORWARD_ONLY if cut == "built forward only" else {}))
    inputs, outputs = ["x", "h0", "c0"], blobs[:4]
    if cut != "after":
        optimised(FOR_ONEDNN)(model)
    net, parameters = prediction_net(model, inputs, outputs)
    if cut == "after":
        optimised(FOR_ONEDNN)(net)
    assert in_ifs(net) and on_onednn(support.step(net).op)
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=net, parameters=parameters, inputs=inputs, outputs=outputs
    )
    workspace.RunNetOnce(net)
    save_predictor(tmp_path / "model.minidb", meta)
    workspace.ResetWorkspace()
    loaded = predictor_exporter.prepare_prediction_net(str(tmp_path / "model.minidb"), "minidb")
    support.feed()
    workspace.RunNet(loaded)
    found = support.values(outputs)
    support.assert_same((found[0], {}), (expected[0][:4], {}))
