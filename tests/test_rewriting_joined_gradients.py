"""`joined_gradients`: two gradients over all steps with the same dY, from one product of oneDNN's."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.products import joined_gradients as products
from caffe2_recurrent.rewriting.products import onednn, onednn_convolutions, onednn_over_steps
from caffe2_recurrent.rewriting.products.onednn_convolutions import IN_BLOCKS, ROWS_TRANSPOSED, TRANSPOSED
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout
from caffe2_recurrent.rewriting.rules import joined_gradients, products_over_steps
from caffe2_recurrent.rewriting.rules.joined_gradients import APART, JOINED
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, result
from net_products_support import GRADIENT, PRODUCT, Net, changed_between, outside, without_the_gradient_of_x
from onednn_support import EVERY_CELL, assert_cell, assert_placed
from step_nets import D, N, T
from test_rewriting_products_over_steps import results_stay
from test_rewriting_rules import EVERY_STEP_NET, lstm_loop, why

RULE = "joined_gradients"
MOVED = ["sequence_operators", "parameter_gradients", RULE]
OF_LSTM = ["parameter_gradients", RULE]
# Caffe2s before torch 1.7 cannot convolve, so that they can compute no gradient of rows by itself.
CONVOLVES = onednn.CONVOLUTION in onednn.ways()


def layouts(inner, outer):
    """Those that this Caffe2 has for both."""
    return products.layouts(inner, outer, keeps_plans=True)


LAYOUTS = [layout.convolved or layout.parts for layout in layouts(512, 64)]


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request, monkeypatch):
    """The layout that is the fastest; of parts, one has one column."""
    monkeypatch.setattr(Layout, "widths", property(lambda self: [1] * (self.parts - 1) + [self.inner - self.parts + 1]))

    def fastest(rows, widths, outer, keeps_plans):
        plain = Layout(sum(widths), outer)
        if isinstance(request.param, str):
            return plain._replace(convolved=request.param)
        return plain._replace(inner=sum(widths) + 3, parts=request.param)

    monkeypatch.setattr(joined_gradients, "_fastest", fastest)
    return request.param


def assert_kept(rules=OF_LSTM, fires=CONVOLVES, **options):
    """A net optimised twice gives what it gave, in the same shapes; the net and the report."""
    expected = Net(**options).values()
    made = Net(**options)
    rewrite = support.Optimised(rules)
    rewrite(made.net)
    assert rewrite.report.counts[RULE] == fires
    assert_placed(made.net)
    support.assert_same(made.values(), expected)
    return made.net, rewrite.report


# Where it fires.


def test_the_layouts_are_those_without_zeros_beside_the_gradient(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    monkeypatch.setattr(onednn_convolutions, "transposed_are_right", lambda: True)
    assert layouts(40, 3200) == [Layout(40, 3200), Layout(48, 3200)] + [
        Layout(40, 3200, convolved=way) for way in (IN_BLOCKS, TRANSPOSED, ROWS_TRANSPOSED)
    ]
    assert {each.outer for each in layouts(40, 100)} == {100}


@pytest.mark.parametrize("shape", [(T, N, 4), (T, N, 2, 2), (T, N, 17)], ids=str)
def test_with_the_gradient_of_the_product_that_makes_the_sequence(shape, layout):
    """Axes, shapes and values stay, whatever X has behind [T, N]."""
    net, _ = assert_kept(shape=shape)
    assert outside(net) == [PRODUCT] + [GRADIENT] * (0 if CONVOLVES else 2)


def test_a_gradient_operator_of_two_outputs(layout):
    """No gradient of rows is computed, and nothing of oneDNN's is left for it."""
    made = Net(change=without_the_gradient_of_x)
    del made.gradients["x"]
    rewrite = support.Optimised(OF_LSTM)
    rewrite(made.net)
    assert rewrite.report.counts[RULE] == 1
    places = [operator.output[0] for operator in made.net.Proto().op if operator.type == "If"]
    assert places == ["u0_w_grad"] and outside(made.net) == [PRODUCT]
    expected = Net()
    del expected.gradients["x"]
    support.assert_same(made.values(), expected.values())


@support.EVERY_LSTM
def test_an_lstm(options, layout):
    net, report = support.kept(options, OF_LSTM)
    if CONVOLVES:
        assert [rewrite.what for rewrite in report.rewrites if rewrite.rule == RULE] == [
            "'layer/gates_t_w_grad' and 'layer/i2h_w_grad'"
        ]
        assert GRADIENT not in outside(net)


@EVERY_CELL
def test_cells(name, variant):
    rewrite = support.Optimised(MOVED)
    assert_cell(name, variant, rewrite)
    # The gates of other cells are not all made of sums with the sequence.
    assert rewrite.report.counts[RULE] or not name.startswith("LSTM") or not CONVOLVES


@EVERY_STEP_NET
def test_step_nets(make):
    step_net = make()
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=support.Optimised(MOVED))
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)


def test_other_numbers_of_steps_and_sequences(layout):
    expected = support.runs_of_other_sizes(lambda model: None)
    support.assert_same(support.runs_of_other_sizes(support.Optimised(OF_LSTM)), expected)


def test_without_steps(layout):
    expected = support.run_without_steps(lambda model: None)
    support.assert_same(support.run_without_steps(support.Optimised(OF_LSTM)), expected)


@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("change", [lambda net: None, without_the_gradient_of_x], ids=["three", "two"])
def test_copies_that_stay_and_that_are_freed(stay, change, layout, monkeypatch):
    results_stay(monkeypatch, stay)
    expected, made = Net(), Net(change=change)
    for net in (expected, made):
        if change is without_the_gradient_of_x:
            del net.gradients["x"]
    before = expected.values()
    optimize(made.net, OF_LSTM, {"x": (T, N, 4)}, even_if_slower=True)
    workspace.CreateNet(made.net)
    for _ in range(2):
        workspace.RunNet(made.net)
    # A blob of oneDNN's keeps its memory for what has the same shape.
    (kept,) = [blob for blob in workspace.Blobs() if "_results" in blob]
    if stay:
        assert workspace.FetchBlob(kept).shape == (T * N, D)
    outputs = [workspace.FetchBlob(str(blob)) for blob in [*made.outputs, "X"]]
    gradients = {blob: workspace.FetchBlob(gradient) for blob, gradient in made.gradients.items()}
    support.assert_same((outputs, gradients), before)


def test_whoever_changes_a_gradient_changes_no_other():
    def in_place(model):
        for blob in ("layer/gates_t_w_grad", "layer/gates_t_b_grad"):
            model.net.Scale([blob], [blob], scale=3.0)

    def values(change):
        workspace.ResetWorkspace()
        model, blobs = support.lstm()
        change(model)
        in_place(model)
        return support.run(model, blobs)

    support.assert_same(values(lambda model: optimize(model, OF_LSTM, even_if_slower=True)), values(lambda model: None))


@pytest.mark.parametrize("wrong", ["widths", "rows", "copies"])
def test_a_wrong_pair_is_seen(wrong, monkeypatch):
    """What the tests above compare would not pass over one that takes the result apart wrongly, or reads a wrong X."""
    if not CONVOLVES:
        return
    in_a_net = products.in_a_net

    def wrongly(loop, pair, *others):
        if wrong == "rows":
            pair.second.input[0] = "other"
        of_both, of_second = in_a_net(loop, pair, *others)
        if wrong == "widths":
            (then,) = [given.n for given in of_both[-1].arg if given.name == "then_net"]
            (split,) = [operator for operator in then.op if operator.type == "Split"]
            split.output[:2] = split.output[1::-1]
            (widths,) = [given for given in split.arg if given.name == "split"]
            widths.ints[:2] = widths.ints[1::-1]
        elif wrong == "copies":
            (then,) = [given.n for given in of_second[-1].arg if given.name == "then_net"]
            _, of_bias = [operator for operator in then.op if operator.type == "Copy"]
            of_bias.input[0] = "u0_b"
            then.external_input.append("u0_b")
            of_second[-1].input.append("u0_b")
        return of_both, of_second

    monkeypatch.setattr(products, "in_a_net", wrongly)
    expected = Net(shape=(T, N, 17)).values()
    made = Net(shape=(T, N, 17), change=lambda net: net.AddExternalInput("other"))
    workspace.FeedBlob("other", np.ones((T, N, 17), dtype=np.float32))
    assert optimize(made.net, OF_LSTM, even_if_slower=True, trials=False).counts[RULE] == 1
    with pytest.raises(AssertionError, match="gradient of [wbu]"):
        support.assert_same(made.values(), expected)


# Where there is no pair.


def test_two_loops_over_one_result_are_no_places():
    """The second gradient is of the sum of theirs."""
    net, _ = assert_kept(fires=0, loops=2)
    assert outside(net).count(GRADIENT) == 3


def test_a_gradient_that_is_changed_in_between_is_no_place():
    assert_kept(fires=0, change=changed_between)


def test_a_loop_without_a_gradient_is_no_place():
    model, _ = support.lstm(gradients=False)
    assert optimize(model, OF_LSTM, even_if_slower=True).total == 0


# Refusals, and what had better stay.

SHAPES = {"layer/i2h_w": (16, 2), "layer/i2h": (9, 3, 16), "layer/gates_t_w": (16, 4)}


def said(shapes=SHAPES, change=lambda loop: None, **options):
    """What the rule says about the gradients of an LSTM."""
    loop = lstm_loop()
    (product,) = [operator for operator in loop.gradient.operators if operator.type == GRADIENT]
    moved = caffe2_pb2.OperatorDef(type=GRADIENT, output=["layer/gates_t_w_grad", "layer/gates_t_b_grad"])
    moved.input.extend(["states", "layer/gates_t_w", loop.gradient.sequence])
    moved.arg.extend(product.arg)
    loop.after_gradient.append(moved)
    change(loop)
    return why(RULE, loop, shapes, **options)


def second(loop):
    (sink,) = loop.surroundings.sinks
    return loop.surroundings.products[sink][0]


def test_an_lstm_is_no_near_miss():
    if CONVOLVES:
        assert said() == [None]


def test_what_neither_may_have_by_itself(monkeypatch):
    without = {blob: shape for blob, shape in SHAPES.items() if blob != "layer/gates_t_w"}
    assert said(without) == ["the size of its weights 'layer/gates_t_w' is not known; give shapes"]
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert said() == ["this Caffe2 has no oneDNN"]


def test_a_first_gradient_with_one_of_its_rows():
    assert said(change=lambda loop: loop.after_gradient[0].output.append("dx")) == ["'dx' is computed too"]


def test_weights_of_other_heights():
    shapes = {**SHAPES, "layer/i2h_w": (12, 2)}
    assert said(shapes) == ["'layer/gates_t_w' has 16 rows and 'layer/i2h_w' 12"]


def test_without_convolutions(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: (onednn.INNER_PRODUCT,))
    assert said() == ["this Caffe2 cannot convolve to have 'x_grad' by itself"]
    assert said(change=lambda loop: second(loop).output.pop()) == [None]


def test_an_image_of_one_channel(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    shapes = {"layer/i2h_w": (1, 2), "layer/i2h": (9, 3, 16), "layer/gates_t_w": (1, 4)}
    assert said(shapes) == ["'x_grad' would be of an image of one channel"]


def before_the_second(made, *operators):
    """Operators between the loop's gradient operator and the second gradient."""
    proto = made.Proto()
    position = next(index for index, operator in enumerate(proto.op) if operator.type == "FCGradient")
    every = [*proto.op[:position], *operators, *proto.op[position:]]
    del proto.op[:]
    proto.op.extend(every)


@pytest.mark.parametrize("name", ["x", "shown", "in an If"])
def test_rows_that_are_written_to_in_between(name):
    """By their own name, by another one, and by an operator inside of another one."""

    def change(net):
        blob = "shown" if name == "shown" else "x"
        doubling = core.CreateOperator("Scale", [blob], [blob], scale=2.0)
        if name == "in an If":
            inner = caffe2_pb2.NetDef(name="inner", op=[doubling], external_input=[blob], external_output=[blob])
            doubling = core.CreateOperator("If", ["yes", blob], ["another"], then_net=inner)
            net.ConstantFill([], "yes", shape=[1], dtype=core.DataType.BOOL, value=True)
            net.Copy("x", "another")
        if name == "shown":
            net.Alias("x", "shown")
        showing = [net.Proto().op.pop() for _ in range({"x": 0, "shown": 1, "in an If": 2}[name])][::-1]
        before_the_second(net, *showing, doubling)

    _, report = assert_kept(fires=0, change=change)
    reasons = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    assert reasons == ["'x' is written to before 'w_grad' is computed"]


def test_rows_that_are_read_in_between():
    """An alias that nothing writes to is none of these."""

    def change(net):
        net.Alias("x", "shown")
        net.Scale("shown", "doubled", scale=2.0)
        doubling, showing = net.Proto().op.pop(), net.Proto().op.pop()
        before_the_second(net, showing, doubling)

    assert_kept(change=change)


@pytest.mark.parametrize("known", ["steps", "batch"])
def test_a_loss_where_the_numbers_of_rows_are_not_known(known):
    if not CONVOLVES:
        return
    shapes = {blob: shape for blob, shape in SHAPES.items() if blob != "layer/i2h"}
    shapes.update({"layer/i2h": (9,)} if known == "steps" else {"h0": (1, 3, 4)})
    assert said(shapes, loss=True) == ["the numbers of steps and sequences are not known; give shapes"]


def test_a_loss_where_either_is_as_fast_by_mkl(monkeypatch):
    if CONVOLVES:
        monkeypatch.setattr(ProductsOverSteps, "loss", lambda self, loop, site, sizes: "because")
        assert said(loss=True) == ["because"]


@pytest.mark.parametrize("apart, reason", [(1.0, "for [16, 27] x [27, 4 + 2] it is not faster"), (1.1, None)])
def test_a_loss_where_a_trial_finds_one(apart, reason, monkeypatch):
    if not CONVOLVES:
        return
    seen = []

    def tried(*size):
        seen.append(size)
        return {APART: Seconds(0.0, apart), JOINED: Seconds(0.0, 1.0)}

    monkeypatch.setattr(ProductsOverSteps, "loss", lambda self, loop, site, sizes: None)
    monkeypatch.setattr(joined_gradients, "_tried", tried)
    assert said(loss=True) == [reason]
    assert seen == [(27, (4, 2), 16, 3, False)]


@pytest.mark.parametrize(
    "bytes_, reason", [(27 * 16 * 4, None), (27 * 16 * 4 - 1, "of [27, 16] each is faster by itself")]
)
def test_a_loss_where_the_gradient_is_large(bytes_, reason, monkeypatch):
    if CONVOLVES:
        found = {APART: Seconds(0.0, 2.0), JOINED: Seconds(0.0, 1.0)}
        monkeypatch.setattr(ProductsOverSteps, "loss", lambda self, loop, site, sizes: None)
        monkeypatch.setattr(joined_gradients, "_tried", lambda *size: found)
        monkeypatch.setattr(onednn_over_steps, "LITTLE", bytes_)
        assert said(loss=True) == [reason]


def test_without_trials_either_stays_by_itself():
    model, _ = support.lstm()
    assert optimize(model, OF_LSTM, {"x": (9, 3, 2)}, trials=False).counts[RULE] == 0


# The trial.


def test_the_fastest_layout(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    wanted = Layout(48, 64)
    monkeypatch.setattr(products_over_steps, "seconds", lambda size, layout: float(layout != wanted))
    assert joined_gradients._fastest(27, (30, 10), 64, False) == wanted
    assert joined_gradients._fastest(None, (30, 10), 64, False) == Layout(40, 64)


@pytest.mark.parametrize("results", [2, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["one layout", "different layouts"])
def test_what_is_tried(results, shared, monkeypatch):
    """Both candidates give what numpy does."""
    if not CONVOLVES:
        return
    if not shared:

        def one_each(size):
            plain = Layout(size.inner, size.outer)
            return plain if size.inner == 5 else plain._replace(outer=64)

        monkeypatch.setattr(products_over_steps, "fastest", one_each)
    subjects, in_turn = {}, trial.in_turn

    def seen_in_turn(candidates):
        if APART in candidates:
            subjects.update({name: candidate() for name, candidate in candidates.items()})
        return in_turn(candidates)

    monkeypatch.setattr(trial, "in_turn", seen_in_turn)
    rows, widths, outer = 6, (5, 4), 7
    with trial.trying(False):
        joined_gradients._tried.__wrapped__(rows, widths, outer, results, True)
    assert list(subjects) == [APART, JOINED]
    random = np.random.RandomState(0)
    for subject in subjects.values():
        values = {blob: random.randn(*shape).astype(np.float32) for blob, shape in subject.shapes.items()}
        x, z, v, dy = (values[blob].astype(np.float64) for blob in ("x", "z", "v", "dy"))
        expected = {"dw": dy.T @ x, "db": dy.sum(axis=0), "dv": dy.T @ z, "dc": dy.sum(axis=0), "dz": dy @ v}
        for blob in list(expected)[: 2 + results]:
            found = result(subject.step, values, blob)
            np.testing.assert_allclose(found, expected[blob], rtol=1e-4, atol=1e-4, err_msg=blob)


def test_the_pair_is_tried():
    """Both run, in the fastest layout; nobody knows how long that takes."""
    if CONVOLVES:
        found = joined_gradients._tried(6, (5, 4), 7, 3, True)
        assert min(seconds.step for seconds in found.values()) > 0
