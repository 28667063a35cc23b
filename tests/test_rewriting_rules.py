"""Each rule: that it fires, keeps values and gradients, and says why where it does not."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import rewriting_support as support
import rewritten_loops
import step_nets
from caffe2_recurrent import GRU, LSTM, optimize, recurrent_net
from caffe2_recurrent.loops.parts import Parameter
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import passes, turning
from caffe2_recurrent.rewriting.elementwise.lstm_forms import ByTanh
from caffe2_recurrent.rewriting.rules import RULES, executor_threads, lstm_unit
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.sequences import over_steps
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from onednn_support import leaving_no_trace, make_up
from step_nets import Maker

OURS = (
    "parameter_gradients",
    "transposed_weights",
    "lstm_unit",
    "scaled_weights",
    "sequence_bias",
    "joined_sequence",
    "zero_gradients",
    "gradient_buffer",
    "forward_links",
    "executor_threads",
)
EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
ALL = step_nets.AS_CAFFE2 + step_nets.MENDED
EVERY_STEP_NET = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
GATES_OF_LSTM = {"kept": {}, "recomputed": support.RECOMPUTED, "in the sequence": {"memory_optimization": True}}
# Rules that only have something to do after others.
FOLLOWING = {
    "scaled_weights": ["transposed_weights", "lstm_unit"],
    "joined_sequence": ["sequence_bias"],
    "zero_gradients": ["lstm_unit"],
}


def variants(cell):
    everything = {"outputs_with_grads": "auto"}
    yield cell
    yield cell.but(lengths=[3, 1], options=everything)
    yield cell.remembering_nothing().but(lengths=[2, 0], options=everything)
    yield cell.remembering_nothing().but(rank=1)
    yield cell.but(options={"forward_only": True}, lengths=[3, 2])
    yield cell.but(steps=1)
    if not cell.name.startswith("attention"):
        yield cell.but(lengths=[2, 1], options=dict(everything, drop_states=True))
    if not cell.name.startswith("gru"):
        yield cell.but(options={"forget_bias": 1.25})


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@EXECUTOR
def test_cells_have_the_values_and_gradients_that_they_had_and_those_of_a_numpy_loop(cell, executor):
    for variant in variants(cell):
        workspace.ResetWorkspace()
        before = variant.run(executor)
        workspace.ResetWorkspace()
        with support.optimising() as lines:
            outputs, gradients, _ = variant.run(executor)
        assert lines.counts["transposed_weights"]
        support.assert_same((outputs, gradients), before[:2])
        variant.assert_as_reference(outputs, gradients)


@EVERY_STEP_NET
@EXECUTOR
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make, executor):
    with support.optimising():
        comparing.assert_right(recurrent_net, make(), executor=executor)


@EVERY_STEP_NET
def test_each_rule_alone_keeps_values_and_gradients(make):
    expected = comparing.run(recurrent_net, make(), executor=False)
    for rule in OURS:
        workspace.ResetWorkspace()
        with support.optimising([rule]):
            support.assert_same(comparing.run(recurrent_net, make(), executor=False), expected)


@every_pair
@pytest.mark.parametrize("rule", OURS)
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "no lengths"])
@pytest.mark.parametrize("gates", GATES_OF_LSTM)
def test_each_rule_fires_on_an_lstm_and_keeps_its_values(rule, lengths, gates):
    options = {"lengths": lengths, **GATES_OF_LSTM[gates]}
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    first = ["sequence_in_place"] if gates == "in the sequence" else []
    report = optimize(model, [*first, *FOLLOWING.get(rule, ()), rule], even_if_slower=True)
    # Where sequences end, the gradient of the state before is not zero; gates that are computed again are kept apart,
    # and made of the slice as it was.
    with_gates = ("scaled_weights", "sequence_bias", "joined_sequence")
    idle = (rule == "zero_gradients" and lengths) or (rule in with_gates and gates != "kept")
    assert bool(report.counts[rule]) is not idle, str(report)
    support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.name in OURS], ids=lambda rule: rule.name)
def test_a_wrong_rewrite_is_seen(rule, monkeypatch):
    """What the tests above compare would not pass over a rule that changes a state by a thousandth."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    rewrite = type(rule).rewrite

    def rewrite_wrongly(self, loop, site, sizes):
        rewrite(self, loop, site, sizes)
        loop.operators.append(core.CreateOperator("Scale", ["layer/cell_t"], ["layer/cell_t"], scale=1.001))

    monkeypatch.setattr(type(rule), "rewrite", rewrite_wrongly)
    assert optimize(model, [*FOLLOWING.get(rule.name, ()), rule.name], even_if_slower=True).counts[rule.name]
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(support.run(model, blobs), expected)


def test_differences_are_seen():
    ones = np.ones((2, 3))
    assert support.difference(ones, ones) == 0
    assert support.difference(ones, 2 * ones) > 0.4
    assert support.difference(ones, np.ones((2, 2))) == support.difference(ones, ones / 0.0) == np.inf
    assert support.difference(ones * np.nan, ones) == np.inf
    with pytest.raises(AssertionError, match="gradient of x"):
        support.assert_same(([], {"x": ones}), ([], {"x": 2 * ones}))


def loop_of(net):
    (loop,) = read_loops(net.Proto()).values()
    return loop


def lstm_loop(**options):
    """The loop of an LSTM, to plant something in that a rule must not pass over."""
    return loop_of(support.lstm(**options)[0].net)


SHAPES = {"layer/i2h": (9, 3, 16), "layer/gates_t_w": (16, 4), "h0": (1, 3, 4), "c0": (1, 3, 4)}
SHAPES.update({"layer/lstm_shift": (16,), "layer/lstm_scale": (16,)})


def why(name, loop, shapes=SHAPES, loss=False):
    """What a rule says about each of its places in a loop."""
    (rule,) = [rule for rule in RULES if rule.name == name]
    sizes = Sizes(shapes)
    said = [rule.refusal(loop, site, sizes) for site in rule.sites(loop)]
    return [rule.loss(loop, site, sizes) for site in rule.sites(loop)] if loss and not any(said) else said


def backward(loop, kind):
    return next(operator for operator in loop.gradient.operators if operator.type == kind)


def forward(loop, kind):
    return next(operator for operator in loop.operators if operator.type == kind)


def made(kind, inputs, outputs, **arguments):
    return core.CreateOperator(kind, inputs, outputs, **arguments)


def set_argument(operator, **arguments):
    for name, value in arguments.items():
        kept = [given for given in operator.arg if given.name != name]
        del operator.arg[:]
        operator.arg.extend([*kept, core.utils.MakeArgument(name, value)])


GATES, GATES_GRADIENT = "layer/gates_t", "layer/gates_t_grad"


def test_an_lstm_can_be_rewritten_by_every_rule():
    loop = lstm_loop()
    for name in ("parameter_gradients", "transposed_weights", "lstm_unit", "gradient_buffer", "forward_links"):
        assert why(name, loop) == [None], name


def refusals_of_parameter_gradients():
    def axis(loop):
        set_argument(backward(loop, "FCGradient"), axis=1)
        return "it works along another axis than the last of [1, N, K]"

    def axis_w(loop):
        set_argument(backward(loop, "FCGradient"), axis_w=2)
        return "it works along another axis than the last of [1, N, K]"

    def weights(loop):
        loop.operators.insert(0, made("Tanh", ["w"], ["layer/gates_t_w"]))
        return "'layer/gates_t_w' is not the same in all steps"

    def rows(loop):
        loop.operators.insert(0, made("Transpose", ["layer/hidden_t_prev"], ["other"]))
        backward(loop, "FCGradient").input[0] = "other"
        return "'other' is not known to have one row for each sequence"

    def used(loop):
        loop.gradient.operators.append(made("Tanh", ["layer/gates_t_b_grad"], ["b_grad"]))
        return "'layer/gates_t_b_grad' is used for something else than the gradient of a parameter"

    def no_parameter(loop):
        backward(loop, "FCGradient").output[1] = "nobody"
        return "'nobody' is used for something else than the gradient of a parameter"

    def in_sum(loop):
        backward(loop, "FCGradient").output[1] = "share"
        loop.gradient.operators.append(made("Sum", ["share", "other"], ["layer/gates_t_b_grad"]))
        return "the gradient of 'layer/gates_t_b' is also made of something that stays in the loop"

    def recomputed(loop):
        loop.operators.insert(0, made("Copy", ["layer/hidden_t_prev"], ["copy"]))
        loop.shared.append("copy")
        backward(loop, "FCGradient").input[0] = "copy"
        return "'copy' is not kept, but computed again in the backward pass"

    def slice_(loop):
        loop.links[0] = loop.links[0]._replace(offset=-1)
        state = loop.links[0].outer
        return "'layer/hidden_t_prev' is linked to another slice of '{}' than that of the step".format(state)

    def changed(loop):
        loop.gradient.operators.append(made("Tanh", [GATES_GRADIENT], [GATES_GRADIENT]))
        return "'layer/gates_t_grad' is changed after it has been read"

    def summed(loop):
        backward(loop, "FCGradient").input[2] = "layer/hidden_t_prev_grad"
        del loop.gradient.operators[-1]
        return "'layer/hidden_t_prev_grad' is the gradient of a state, which other steps add to"

    def unknown(loop):
        backward(loop, "FCGradient").input[2] = "nowhere"
        return "'nowhere' is not computed by the backward step"

    def aten(loop):
        loop.gradient.operators.insert(0, made("ATen", [GATES_GRADIENT], ["made"], operator="tanh"))
        backward(loop, "FCGradient").input[2] = "made"
        return "'made' is written by ATen, which cannot write to a slice of an outer blob"

    return [axis, axis_w, weights, rows, used, no_parameter, in_sum, recomputed, slice_, changed, summed, unknown, aten]


def named(functions):
    return pytest.mark.parametrize("plant", functions, ids=lambda function: function.__name__)


@named(refusals_of_parameter_gradients())
def test_parameter_gradients_refuses(plant):
    loop = lstm_loop()
    assert why("parameter_gradients", loop) == [None]
    expected = plant(loop)
    assert why("parameter_gradients", loop) == [expected]


def test_values_over_steps_that_cannot_be_had():
    loop = lstm_loop()
    assert over_steps.of_forward(loop, "nowhere") == "'nowhere' is no blob of the step"
    loop.operators.append(made("ATen", ["layer/hidden_t"], ["made"], operator="tanh"))
    expected = "'made' is written by ATen, which cannot write to a slice of an outer blob"
    assert over_steps.of_forward(loop, "made") == expected


def test_rows_are_not_those_of_more_dimensions():
    loop = lstm_loop()
    expected = "'layer/hidden_t_prev' is not known to have one row for each sequence"
    shapes = {**SHAPES, "layer/layer/hidden_t_prev_states": (10, 3, 2, 2)}
    assert why("parameter_gradients", loop, shapes) == [expected]


def run_both(step_net, outputs, change=lambda net: None):
    """The report, with the values of a net checked against those that it had; numpy need not know its operators."""
    found = []
    for optimised in (False, True):
        workspace.ResetWorkspace()
        made_net = step_net()
        net, results = comparing.build(recurrent_net, made_net)
        for name, value in made_net.outer.items():
            workspace.FeedBlob(name, value)
        workspace.FeedBlob("seed", np.random.RandomState(5).rand(*outputs).astype(np.float32))
        gradients = net.AddGradientOperators({results[0]: net.AddExternalInput("seed")})
        change(net)
        report = optimize(net, OURS, even_if_slower=True) if optimised else None
        workspace.RunNetOnce(net)
        blobs = {name: workspace.FetchBlob(str(gradients[name])) for name in made_net.floats if name in gradients}
        found.append(([workspace.FetchBlob(result) for result in results], blobs))
    support.assert_same(found[1], found[0])
    return report


def reasons_in(report, rule):
    return [refusal.reason for refusal in report.refusals if refusal.rule == rule]


def test_a_product_along_another_axis_keeps_its_gradient():
    def make():
        make = Maker()
        x, h = make.sequence(), make.state()
        w, b = make.reference("w", 3, 6), make.reference("b", 3)
        make.link(h, make.cell.Tanh(make.cell.Mul([x, make.cell.FC([h, w, b], "u", axis=1)], "xu"), "h_t"))
        return make.done()

    report = run_both(make, (3, 2, 3))
    assert reasons_in(report, "parameter_gradients") == ["it works along another axis than the last of [1, N, K]"]


@pytest.mark.parametrize("shape", [(3, 1, 3), (3, 3, 1)], ids=str)
def test_weights_of_three_dimensions_keep_their_gradient(shape):
    def make():
        make = Maker()
        x, h = make.sequence(), make.state()
        product = make.cell.FC([h, make.reference("w", *shape), make.reference("b", 3)], "u", axis=2)
        make.link(h, make.cell.Tanh(make.cell.Mul([x, product], "xu"), "h_t"))
        return make.done()

    report = run_both(make, (3, 2, 3))
    assert reasons_in(report, "parameter_gradients") == ["'w' has 3 dimensions"]


def test_a_sequence_of_matrices_keeps_its_gradient():
    def make():
        make = Maker()
        (inner,) = make.cell.AddScopedExternalInputs("x_t")
        make.inputs.append((inner, make.value("X", 3, 2, 3, 4)))
        h = make.state(size=12)
        total = make.cell.Sum([make.fc(h, "u", 12, 12), make.fc(make.cell.Tanh(inner, "tx"), "v", 12, 12)], "total")
        make.link(h, make.cell.Tanh(total, "h_t"))
        return make.done()

    report = run_both(make, (3, 2, 12))
    assert "'tx' is not known to have one row for each sequence" in reasons_in(report, "parameter_gradients")


def test_a_sequence_read_one_step_ahead_keeps_its_gradient():
    def make():
        make = Maker()
        x, h = make.sequence(), make.state()
        (ahead,) = make.cell.AddScopedExternalInputs("y_t")
        make.inputs.append((ahead, make.value("Y", 4, 2, 3)))
        make.link(h, make.cell.Tanh(make.cell.Sum([make.fc(ahead, "v"), make.cell.Mul([x, h], "xh")], "total"), "h_t"))
        return make.done()

    def one_ahead(net):
        for kind in (support.LOOP, support.GRADIENT):
            operator = support.operator(net, kind)
            outer = support.argument(operator, "link_external").strings
            support.argument(operator, "link_offset").ints[list(outer).index(b"Y")] = 1

    report = run_both(make, (3, 2, 3), change=one_ahead)
    expected = "'y_t' is linked to another slice of 'Y' than that of the step"
    assert expected in reasons_in(report, "parameter_gradients")


# What the other rules refuse, and what they leave because it would not pay.


def test_transposed_weights_refuses():
    loop = lstm_loop()
    expected = "its weights 'layer/gates_t_w' have 3 dimensions"
    assert why("transposed_weights", loop, {"layer/gates_t_w": (16, 2, 2)}) == [expected]
    set_argument(forward(loop, "FC"), axis_w=2)
    assert why("transposed_weights", loop) == ["its weights 'layer/gates_t_w' are laid out in another way (axis_w)"]
    loop = lstm_loop()
    loop.operators.insert(0, made("Tanh", ["w"], ["layer/gates_t_w"]))
    assert why("transposed_weights", loop) == ["its weights 'layer/gates_t_w' are not the same in all steps"]


@pytest.fixture
def tried(monkeypatch):
    """Made-up times of a product: 10 as it is; transposed 8, and 9 to transpose the weights."""
    make_up(monkeypatch, Seconds(0.0, 10.0), Seconds(9.0, 8.0))


def test_transposed_weights_refrains_for_few_steps(tried):
    shapes = dict(SHAPES, **{"layer/i2h": (5, 3, 16)})
    assert why("transposed_weights", lstm_loop(), shapes, loss=True) == ["for [3, 4] x [4, 16] it is not faster"]
    assert why("transposed_weights", lstm_loop(), loss=True) == [None]


def test_transposed_weights_refrains_where_sizes_are_not_known(tried):
    expected = "the sizes are not known, and transposing may cost more than it gains; give shapes"
    assert why("transposed_weights", lstm_loop(), {}, loss=True) == [expected]


def test_transposed_weights_reaches_products_that_are_computed_again():
    model, _ = support.lstm(**support.RECOMPUTED)
    assert optimize(model, ["transposed_weights"], even_if_slower=True).counts == {"transposed_weights": 2}


def test_lstm_unit_refuses(monkeypatch):
    loop = lstm_loop(lengths=True)
    assert why("lstm_unit", loop) == [None]
    assert why("lstm_unit", loop, {}) == ["the size of the state 'layer/cell_t_prev' is not known; give shapes"]
    shapes = dict(SHAPES, **{"layer/i2h": (9, 3)})
    assert why("lstm_unit", loop, shapes) == ["the first sequence 'layer/i2h' has 2 dimensions"]
    forward(loop, "LSTMUnit").input[4] = "count"
    expected = "it counts the steps by 'count', not by the loop's 'layer/timestep'"
    assert why("lstm_unit", loop) == [expected]
    loop.operators.insert(0, made("Copy", ["lengths"], ["own"]))
    forward(loop, "LSTMUnit").input[3] = "own"
    assert why("lstm_unit", loop) == ["its lengths 'own' are not the same in all steps"]
    loop = lstm_loop()
    loop.gradient.operators.insert(0, forward(loop, "LSTMUnit"))
    assert why("lstm_unit", loop) == ["the backward step computes 'layer/cell_t' again"]
    monkeypatch.setattr(lstm_unit, "aten_is_missing", lambda: True)
    assert why("lstm_unit", loop) == ["this Caffe2 has no ATen operator"]


def test_lstm_unit_refrains_for_few_elements():
    loop = lstm_loop()
    assert why("lstm_unit", loop, loss=True) == ["with 12 elements in a state LSTMUnit is faster"]
    states = {"h0": (4,), "c0": (4,)}
    expected = "the batch size is not known, and LSTMUnit is faster for a small one; give shapes"
    assert why("lstm_unit", loop, states, loss=True) == [expected]
    large = lstm_unit.FEWEST_ELEMENTS
    assert why("lstm_unit", loop, {"h0": (large,), "c0": (large,)}, loss=True) == [None]
    assert why("lstm_unit", loop, {**SHAPES, "c0": (large,)}, loss=True) == [None]


def test_units_with_lengths_take_more_elements():
    """The operators that mix old and new states have to be gained, too."""
    loop, without = lstm_loop(lengths=True), lstm_unit.FEWEST_ELEMENTS
    for size in (without, lstm_unit.FEWEST_WITH_LENGTHS - 1):
        shapes = {**SHAPES, "x": (9, 1, 2), "h0": (size,), "c0": (size,), "layer/i2h": (9, 1, 4 * size)}
        assert why("lstm_unit", loop, shapes, loss=True) == [
            "with {} elements in a state LSTMUnit is faster".format(size)
        ]
        unknown = {blob: shapes[blob] for blob in ("h0", "c0")}
        expected = "the batch size is not known, and LSTMUnit is faster for a small one; give shapes"
        assert why("lstm_unit", loop, unknown, loss=True) == [expected]
    enough = lstm_unit.FEWEST_WITH_LENGTHS
    assert why("lstm_unit", loop, {"h0": (enough,), "c0": (enough,)}, loss=True) == [None]


def test_where_lengths_go_to_the_sequence_a_unit_takes_as_many_elements_as_without():
    size = lstm_unit.FEWEST_ELEMENTS
    assert size < lstm_unit.FEWEST_WITH_LENGTHS
    model, _ = support.lstm(lengths=True)
    shapes = {"x": (9, 1, 2), "h0": (1, size), "c0": (1, size), "lengths": (1,)}
    shapes.update({"layer/i2h_w": (4 * size, 2), "layer/i2h_b": (4 * size,)})
    shapes.update({"layer/gates_t_w": (4 * size, size), "layer/gates_t_b": (4 * size,)})
    workspace.ResetWorkspace()
    counts = optimize(model.net, ["ended_sequences", "lstm_unit"], shapes=shapes, trials=False).counts
    assert counts == {"ended_sequences": 1, "lstm_unit": 1}
    assert optimize(support.lstm(lengths=True)[0].net, ["lstm_unit"], shapes=shapes, trials=False).total == 0


def lengths_of_its_own(make):
    lengths = make.cell.AddScopedExternalInputs("lengths")[0]
    make.outer["lengths"] = np.array([3, 1], dtype=np.int32)
    return make.cell.Copy(lengths, "own")


@pytest.mark.parametrize("planted", ["lengths", "step number", "first sequence"])
def test_what_no_mask_can_be_made_of_keeps_its_values(planted):
    def make():
        make = Maker()
        timestep = make.cell.AddScopedExternalInputs("timestep")[0]
        if planted == "first sequence":
            (inner,) = make.cell.AddScopedExternalInputs("w_t")
            make.inputs.append((inner, make.value("W", 3, 2)))
        x, h, c = make.sequence("x_t", 12), make.state("h"), make.state("c")
        gates = make.cell.Sum([make.fc(h, "gates", 3, 12), x], "sum")
        lengths = lengths_of_its_own(make)
        lengths = lengths if planted == "lengths" else "lengths"
        count = make.cell.Sum([timestep, timestep], "twice") if planted == "step number" else timestep
        outputs = make.cell.LSTMUnit([h, c, gates, lengths, count], ["h_t", "c_t"])
        for state, output in zip((h, c), outputs):
            make.link(state, output)
        return make.done(timestep)

    report = run_both(make, (3, 2, 3))
    expected = {
        "lengths": "its lengths 'own' are not the same in all steps",
        "step number": "it counts the steps by 'twice', not by the loop's 'timestep'",
        "first sequence": "the first sequence 'W' has 2 dimensions",
    }
    assert reasons_in(report, "lstm_unit") == [expected[planted]]


def scaled_loop(**options):
    """An LSTM's loop after the rules that scaled_weights follows; gives it and its Sum and addcmul."""
    model, _ = support.lstm(**options)
    optimize(model, FOLLOWING["scaled_weights"], even_if_slower=True)
    loop = loop_of(model.net)
    scaling = next(operator for operator in loop.operators if operator.type == "ATen")
    return loop, forward(loop, "Sum"), scaling


def test_scaled_weights_refuses():
    loop, adding, scaling = scaled_loop()
    assert why("scaled_weights", loop) == [None]
    scaling.input[2] = "layer/input_t"
    assert why("scaled_weights", loop) == ["what it is scaled with is not the same in all steps"]
    loop, adding, scaling = scaled_loop()
    assert why("scaled_weights", loop, dict(SHAPES, **{"layer/lstm_scale": (1, 16)})) == [
        "'layer/lstm_scale' is not known to be a vector; give shapes"
    ]
    assert why("scaled_weights", loop, dict(SHAPES, **{"layer/lstm_shift": (1,)})) == [
        "'layer/lstm_shift' is not as long as 'layer/lstm_scale': 1 and 16"
    ]
    wide = {"layer/lstm_shift": (8,), "layer/lstm_scale": (8,)}
    transposed = "layer/gates_t_w_transposed"
    assert why("scaled_weights", loop, dict(SHAPES, **wide, **{transposed: (4, 16)})) == [
        "'layer/lstm_scale' has 8 numbers for 16 columns"
    ]
    set_argument(scaling, value=2.0)
    assert why("scaled_weights", loop) == []
    loop, adding, scaling = scaled_loop()
    scaling.output[0] = "layer/input_t"
    assert why("scaled_weights", loop) == ["it writes over what is added"]
    loop, adding, scaling = scaled_loop()
    adding.input.append("layer/input_t")
    assert why("scaled_weights", loop) == ["it adds 3 blobs"]
    loop, adding, scaling = scaled_loop()
    loop.operators.append(made("Tanh", [GATES], ["again"]))
    assert why("scaled_weights", loop) == ["'layer/gates_t' is needed elsewhere too"]
    loop, adding, scaling = scaled_loop()
    loop.gradient.operators.append(made("Tanh", [GATES], ["again"]))
    assert why("scaled_weights", loop) == ["'layer/gates_t' is needed elsewhere too"]
    loop, adding, scaling = scaled_loop()
    adding.input[0] = "layer/hidden_t_prev"
    assert why("scaled_weights", loop) == [
        "neither addend is a product with weights, the same in all steps, that nothing else reads"
    ]


@EXECUTOR
@pytest.mark.parametrize("options", [{}, {"drop_states": True}, {"forward_only": True}], ids=str)
def test_scaled_weights_as_they_lie(executor, options):
    """Without transposed weights before it; the same values as with them."""
    expected = None
    for before in ([], ["transposed_weights"]):
        workspace.ResetWorkspace()
        cell = CELLS[0].but(lengths=[3, 1], options=options)
        rewrite = support.Optimised([*before, "lstm_unit", "scaled_weights"])
        outputs, gradients, model = cell.run(executor, rewrite)
        assert rewrite.report.counts["scaled_weights"] == 1
        (product,) = [operator for operator in support.step(model.net).op if operator.type.startswith("FC")]
        assert product.type == ("FCTransposed" if before else "FC")
        assert product.input[1] == "layer/gates_t_w_scaled" + ("_transposed" if before else "")
        transposing = [operator.input[0] for operator in model.net.Proto().op if operator.type == "Transpose"]
        assert "layer/gates_t_w" not in transposing
        for index, value in enumerate(cell.reference()):
            comparing.assert_close(outputs[index], value, index)
        if not cell.options.get("forward_only"):
            for name, value in cell.reference_gradients().items():
                comparing.assert_close(gradients[name], value, name)
        if expected is not None:
            support.assert_same((outputs, gradients), expected)
        expected = outputs, gradients


@pytest.mark.parametrize("steps, batch, made", [(3, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize("rules", [FOLLOWING["scaled_weights"], ["lstm_unit"]], ids=["transposed", "as they lie"])
def test_scaled_weights_takes_a_sequence_that_is_worth_it(steps, batch, made, rules):
    model, _ = support.lstm()
    optimize(model, rules, even_if_slower=True)
    report = optimize(model, ["scaled_weights"], shapes={"x": (steps, batch, support.DIM_IN)})
    assert report.counts["scaled_weights"] == made
    expected = [] if made else ["with 3 rows in the sequence, weights of 4 columns cost more to scale"]
    assert [refusal.reason for refusal in report.refusals] == expected


@pytest.mark.parametrize("is_read", [True, False])
def test_scaled_weights_leave_transposed_ones_to_who_reads_them(is_read):
    loop = lstm_loop()
    for name in [*FOLLOWING["scaled_weights"], "scaled_weights"]:
        if is_read and name == "scaled_weights":
            loop.operators.append(made("Copy", ["layer/gates_t_w_transposed"], ["copied"]))
        (rule,) = [rule for rule in RULES if rule.name == name]
        assert len(passes.apply(rule, loop, Sizes(SHAPES), even_if_slower=True)[0]) == 1
    transposed = [operator.input[0] for operator in loop.before if operator.type == "Transpose"]
    assert transposed == ["layer/gates_t_w"] * is_read + ["layer/gates_t_w_scaled"]


def test_scaled_weights_knows_rows_of_products_in_the_usual_layout_only():
    model, _ = support.lstm()
    optimize(model, ["lstm_unit"], even_if_slower=True)
    loop = loop_of(model.net)
    assert why("scaled_weights", loop) == [None]
    refused = ["neither addend is a product with weights, the same in all steps, that nothing else reads"]
    set_argument(forward(loop, "FC"), axis_w=2)
    assert why("scaled_weights", loop) == refused
    set_argument(forward(loop, "FC"), axis_w=1)
    forward(loop, "FC").input[1] = "layer/input_t"
    assert why("scaled_weights", loop) == refused


def zero_loop():
    model, _ = support.lstm()
    optimize(model, ["lstm_unit"], even_if_slower=True)
    loop = loop_of(model.net)
    assert why("zero_gradients", loop) == [None]
    return loop, backward(loop, "ConstantFill").output[0]


def test_zero_gradients_refuses():
    loop, zero = zero_loop()
    loop.gradient.operators.insert(-1, made("Tanh", [zero], ["again"]))
    assert why("zero_gradients", loop) == ["'{}' is read elsewhere too".format(zero)]
    loop, zero = zero_loop()
    loop.gradient.operators[-1].output[0] = "total"
    assert why("zero_gradients", loop) == ["'{}' is linked to an outer blob".format(zero)]
    loop, zero = zero_loop()
    del loop.gradient.operators[-1].input[1:]
    assert why("zero_gradients", loop) == ["it adds nothing else"]
    loop, zero = zero_loop()
    addend = loop.gradient.operators[-1].input[1]
    for operator in (made("Tanh", [addend], ["again"]), made("Tanh", [zero], [addend])):
        loop.gradient.operators.insert(-1, operator)
        assert why("zero_gradients", loop)[0].endswith("elsewhere too")
        del loop.gradient.operators[-2]
    loop.gradient.operators.append(made("Tanh", [addend], ["again"]))
    assert why("zero_gradients", loop) == ["'{}' is read or linked elsewhere too".format(addend)]


def test_zero_gradients_refuses_gradients_of_parameters():
    """The engine calls them otherwise in the step, and adds them up."""
    loop, zero = zero_loop()
    addend = loop.gradient.operators[-1].input[1]
    loop.gradient.parameters.append(Parameter("layer/other", addend, "layer/other_grad"))
    assert why("zero_gradients", loop) == ["'{}' is read or linked elsewhere too".format(addend)]
    loop, zero = zero_loop()
    loop.gradient.operators[-1].output[0] = "total"
    loop.gradient.backward_links[:] = [link for link in loop.gradient.backward_links if link.inner != zero]
    loop.gradient.parameters.append(Parameter("layer/other", zero, "layer/other_grad"))
    assert why("zero_gradients", loop) == ["'{}' is the gradient of a parameter too".format(zero)]


def between(*operators):
    """An LSTM's loop with operators between the one that writes the addend and the Sum; and the addend."""
    loop, zero = zero_loop()
    addend = loop.gradient.operators[-1].input[1]
    loop.gradient.operators[-1:-1] = [
        made(kind, *[[blob.format(addend, zero) for blob in blobs] for blobs in names]) for kind, *names in operators
    ]
    return loop, addend


def test_zero_gradients_writes_no_total_too_early():
    loop, addend = between(("Tanh", ["x"], ["{1}"]), ("ConstantFill", ["x"], ["{1}"]))
    assert why("zero_gradients", loop)[-1] == "'{}' is read or linked elsewhere too".format(addend)
    loop, addend = between()
    backward(loop, "FCGradient").input[0] = addend
    assert why("zero_gradients", loop) == ["'{}' is read or linked elsewhere too".format(addend)]
    loop, addend = between()
    backward(loop, "FCGradient").type = "ATen"
    assert why("zero_gradients", loop) == ["'{}' is read or linked elsewhere too".format(addend)]


def test_gradients_of_inputs_that_nobody_wants_and_of_scales():
    """The product of a sequence that has no gradient, and an elementwise product with a parameter."""

    def make():
        make = Maker()
        x, y, h = make.sequence(), make.sequence("y_t"), make.state()
        stopped = make.cell.StopGradient(make.cell.Copy(y, "yy"), "stopped")
        w, b = make.reference("w", 3), make.reference("b", 3)
        scaled = make.cell.ElementwiseLinear([make.cell.Tanh(h, "th"), w, b], "scaled", axis=2)
        make.link(h, make.cell.Tanh(make.cell.Sum([scaled, x, make.fc(stopped, "v")], "total"), "h_t"))
        return make.done()

    report = run_both(make, (3, 2, 3))
    assert report.counts["parameter_gradients"] == 2


def test_zero_gradients_leaves_the_sum_of_others():
    loop, zero = zero_loop()
    loop.gradient.operators[-1].input.append("third")
    (rule,) = [rule for rule in RULES if rule.name == "zero_gradients"]
    (site,) = rule.sites(loop)
    rule.rewrite(loop, site, Sizes({}))
    assert zero not in loop.gradient.operators[-1].input and len(loop.gradient.operators[-1].input) == 2


def test_gradient_buffer_refuses():
    loop = lstm_loop()
    assert why("gradient_buffer", loop) == [None]
    expected = "the shape of the sequence 'layer/i2h' is not known; give shapes"
    assert why("gradient_buffer", loop, {}) == [expected]
    assert why("gradient_buffer", loop, {"layer/i2h": (9, 3)}) == [expected]
    loop.surroundings.busy.add(loop.gradient.sequence)
    expected = "other operators use 'layer/layer/i2h_grad' before it holds the sequence's gradient"
    assert why("gradient_buffer", loop) == [expected]
    loop = lstm_loop()
    loop.states[0] = loop.states[0]._replace(outer_states=loop.gradient.sequence)
    assert why("gradient_buffer", loop) == ["the sequence's gradient holds another blob already"]
    loop.operators[1].type = "ATen"
    expected = "'layer/gates_t' is written by ATen, which cannot write to a slice of an outer blob"
    assert why("gradient_buffer", loop) == [expected]
    loop.gradient.operators.append(made("Tanh", [GATES], ["again"]))
    assert why("gradient_buffer", loop) == ["'layer/gates_t' is still read when its gradient is there"]
    loop.gradient.operators.append(made("Tanh", [GATES_GRADIENT], [GATES_GRADIENT]))
    assert why("gradient_buffer", loop) == ["'layer/gates_t_grad' is written more than once"]
    loop.gradient.backward_links[:] = [link for link in loop.gradient.backward_links if link.inner != GATES_GRADIENT]
    assert why("gradient_buffer", loop) == ["'layer/gates_t_grad' is not the gradient of the first sequence"]


def test_gradient_buffer_refrains_for_small_steps():
    expected = "for 48 elements in a step the link costs more than it gains"
    assert why("gradient_buffer", lstm_loop(), loss=True) == [expected]
    assert why("gradient_buffer", lstm_loop(**support.RECOMPUTED), loss=True) == [None]


def test_a_gradient_that_shares_its_memory_keeps_its_value():
    """As after Caffe2's memonger, which gives several blobs one name where they do not meet."""

    def share(net):
        sequence = support.operator(net, support.GRADIENT).output[0]
        operators = list(net.Proto().op)
        operators.insert(1, made("ConstantFill", ["GATES_IN"], [sequence], value=3.0))
        del net.Proto().op[:]
        net.Proto().op.extend(operators)

    report = run_both(step_nets.lstm, (3, 2, 3), change=share)
    expected = "other operators use 'GATES_IN_grad' before it holds the sequence's gradient"
    assert reasons_in(report, "gradient_buffer") == [expected]


def test_forward_links_refuses():
    loop = lstm_loop()
    assert why("forward_links", loop) == [None]
    loop.gradient.operators.append(made("Tanh", [GATES], ["layer/hidden_t"]))
    assert why("forward_links", loop) == ["the backward step writes to 'layer/hidden_t'"]
    loop.gradient.links[0] = loop.gradient.links[0]._replace(offset=1)
    expected = "'layer/hidden_t_prev' is linked in another way than in the forward step"
    assert why("forward_links", loop) == [expected]


def test_executor_threads_leaves_steps_that_may_run_side_by_side():
    net, outputs = comparing.build(recurrent_net, step_nets.two_states())
    (reason,) = support.reasons(net, "executor_threads")
    assert reason.endswith("so steps may run side by side")
    assert reason.count("does not depend on") == 1


def executor_after(model):
    """Whether the RNN executor is on in both operators of a loop, and with how many threads; a second call agrees.

    None where nothing is said of that any more.
    """
    kinds = ("RecurrentNetwork", "RecurrentNetworkGradient")
    (state,) = {executor_settings(support.operator(model.net, kind)) for kind in kinds}
    assert optimize(model, ["executor_threads"]).total == 0
    return state


def executor_settings(operator):
    given = {given.name: given.i for given in operator.arg}
    return given.get("enable_rnn_executor"), given.get("rnn_executor.num_threads")


ON, OFF = (1, 1), (None, None)


def no_trial(*_):
    raise AssertionError("nothing was to be tried")


def test_executor_threads_turns_the_executor_off_for_large_states(monkeypatch):
    monkeypatch.setattr(executor_threads.loop_trial, "seconds", no_trial)
    model, _ = support.lstm()
    optimize(model, ["executor_threads"], shapes={"x": (9, 8192 // support.D, support.DIM_IN)})
    assert executor_after(model) == OFF


@pytest.mark.parametrize("without, state", [(0.5, OFF), (0.99, OFF), (1.01, ON)])
def test_executor_threads_goes_by_a_trial(without, state, monkeypatch):
    seen = []

    def seconds(loop, candidates, sizes):
        seen.append({name: executor_of(candidate) for name, candidate in candidates.items()})
        assert sizes.steps(loop) == 9
        return {executor_threads.ON: Seconds(0.0, 1.0), executor_threads.OFF: Seconds(0.0, without)}

    monkeypatch.setattr(executor_threads.loop_trial, "seconds", seconds)
    model, _ = support.lstm()
    # A buffer of four times the width, which no step reads, is no state.
    optimize(model, ["lstm_unit", "gradient_buffer"], even_if_slower=True)
    batch = 8192 // support.D - 1
    optimize(model, ["executor_threads"], shapes={"x": (9, batch, support.DIM_IN)})
    assert executor_after(model) == state
    assert seen == [{executor_threads.ON: ON, executor_threads.OFF: OFF}]


def executor_of(loop):
    """As `executor_after` has it, of a loop."""
    (state,) = {executor_settings(operator) for operator in loop.outer_operators}
    return state


def test_executor_threads_compares_with_what_then_applies(monkeypatch, backward_loops, unrolled_steps):
    """Without the executor steps may be written out, and a backward pass may be a loop of its own."""
    monkeypatch.setattr(turning, "pays", lambda *_: False)
    following = ["backward_loop", "unrolled_steps"]
    cases = ((9, following, True, False), (200, following, False, True), (9, [], False, False), (200, [], False, False))
    for steps, others, written_out, turned in cases:
        workspace.ResetWorkspace()
        monkeypatch.setattr(UnrolledSteps, "loss", lambda *_: None)
        model, _ = support.lstm()
        found = []

        def seconds(loop, candidates, sizes, found=found):
            found += [(of.unrolled is not None, of.gradient.turned is not None) for of in candidates.values()]
            return {executor_threads.ON: Seconds(0.0, 1.0), executor_threads.OFF: Seconds(0.0, 9.0)}

        monkeypatch.setattr(executor_threads.loop_trial, "seconds", seconds)
        rules = ["parameter_gradients", "executor_threads", *others]
        report = optimize(model, rules, shapes={"x": (steps, support.N, support.DIM_IN)})
        assert found == [(False, False), (written_out, turned)], (steps, others)
        # It was slower, so that none of this happens.
        assert executor_after(model) == ON
        assert [report.counts[rule] for rule in others] == [0] * len(others)


@pytest.mark.parametrize("known", [["x"], ["x", "h0"], ["x", "h0", "c0"]], ids=len)
def test_executor_threads_does_without_a_trial(known, monkeypatch):
    """Where sizes are not known, those of parameters included, the executor stays, with one thread."""
    monkeypatch.setattr(trial, "in_turn", no_trial)
    model, _ = support.lstm()
    workspace.ResetWorkspace()
    shapes = {"x": (9, support.N, support.DIM_IN), "h0": (support.N, support.D), "c0": (support.N, support.D)}
    optimize(model.net, ["executor_threads"], shapes={blob: shapes[blob] for blob in known})
    assert executor_after(model) == ON


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward only"])
@pytest.mark.parametrize("steps", [9, 200], ids=["few", "many"])
def test_executor_threads_tries_both(steps, gradients, monkeypatch, backward_loops, unrolled_steps):
    """In whatever scope, with steps written out or a backward pass that is a loop."""
    found = []
    right = executor_threads.loop_trial.seconds

    def seconds(*arguments):
        found.append(right(*arguments))
        return found[-1]

    # Which have trials of their own.
    monkeypatch.setattr(UnrolledSteps, "loss", lambda *_: None)
    monkeypatch.setattr(turning, "pays", lambda *_: False)
    monkeypatch.setattr(executor_threads.loop_trial, "seconds", seconds)
    model, _ = support.lstm(gradients=gradients)
    gpu = core.DeviceOption(caffe2_pb2.CUDA, 0)
    with leaving_no_trace(), core.NameScope("scope"), core.DeviceScope(gpu):
        rules = ["parameter_gradients", "executor_threads", "backward_loop", "unrolled_steps"]
        optimize(model, rules, shapes={"x": (steps, support.N, support.DIM_IN)})
    (times,) = found
    assert list(times) == [executor_threads.ON, executor_threads.OFF]
    assert all(time.step > 0 for time in times.values())


def test_executor_threads_leaves_what_was_set():
    model, _ = support.lstm()
    set_argument(support.operator(model.net), **{"rnn_executor.num_threads": 3})
    assert optimize(model, ["executor_threads"]).total == 0
    model, _ = support.lstm()
    comparing.configure(model.net, False)
    assert optimize(model, ["executor_threads"]).total == 0


@every_pair
@pytest.mark.parametrize("forward_only", [True, False], ids=["forward only", "training"])
@pytest.mark.parametrize("drop_states", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all rules"])
def test_padding_need_not_hold_numbers(masked, cell, drop_states, forward_only):
    """An LSTM has masks in its steps where the gates cannot be closed by the sequence."""

    def ended_early():
        model = ModelHelper("padded")
        options = {"drop_states": drop_states, "forward_only": forward_only}
        if cell == "LSTM":
            outputs = LSTM(model, "x", "lengths", ("h0", "c0"), support.DIM_IN, support.D, "layer", **options)
        else:
            outputs = GRU(model, "x", "lengths", ("h0",), support.DIM_IN, support.D, "layer", **options)
        support.feed()
        x = workspace.FetchBlob("x")
        for sequence, length in enumerate(workspace.FetchBlob("lengths")):
            x[length:, sequence] = np.nan
        assert np.isnan(x).any()
        workspace.FeedBlob("x", x)
        blobs = [str(output) for output in outputs]
        if not forward_only:
            found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
            # The gates of a GRU have other gradients that are NaN, with Caffe2's unit as well.
            blobs += [str(found[blob]) for blob in ("x", "h0") if cell == "LSTM"]
        workspace.RunNetOnce(model.param_init_net)
        random = np.random.RandomState(1)
        for parameter in map(str, model.params):
            shape = workspace.FetchBlob(parameter).shape
            workspace.FeedBlob(parameter, random.uniform(-1, 1, shape).astype(np.float32))
        return model, blobs

    expected = support.run(*ended_early())
    assert all(np.isfinite(output).all() for output in expected[0])
    workspace.ResetWorkspace()
    model, blobs = ended_early()
    rules = [rule.name for rule in RULES if not masked or rule.name != "ended_sequences"]
    counts = optimize(model, rules, even_if_slower=True).counts
    assert counts.get("ended_sequences", 0) == (cell == "LSTM" and not masked)
    assert counts["lstm_unit"] + counts["gru_unit"] == 1
    support.assert_same(support.run(model, blobs), expected)


def test_a_sum_that_the_step_exports_is_not_taken_apart(monkeypatch):
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByTanh)
    model, _ = support.lstm(gradients=False, forward_only=True)
    optimize(model, ["transposed_weights", "lstm_unit"], even_if_slower=True)
    step = support.step(model.net)
    step.external_output.append("layer/gates_t")
    assert support.reasons(model.net, "scaled_weights") == ["'layer/gates_t' is needed elsewhere too"]


def product_whose_name_was_that_of_something_larger(forward):
    """Linked to slices `[1, N, D / 2]`, the larger value would take the blob's memory from it."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state(shape=(step_nets.N, 2))
    if forward:
        first = make.fc(x, "a", step_nets.D, 4)
        second = make.cell.Split(first, ["p", "q"], axis=2)[1]
        make.cell.Tanh(make.cell.Sum([second, h], "qh"), first)
        make.link(h, make.fc(first, "h_t", 2, 2))
    else:
        product = make.fc(x, "a", step_nets.D, 4)
        second = make.cell.Split(product, ["p", "q"], axis=2)[1]
        make.cell.Negative(second, product)
        make.link(h, make.cell.Sum([make.cell.Negative(product, "n"), h], "h_t"))
    return make.done()


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_parameter_gradients_leaves_names_of_several_values_alone(forward):
    step_net = product_whose_name_was_that_of_something_larger(forward)
    net, _, _ = rewritten_loops.build(step_net)
    kind = "step" if forward else "backward step"
    text = "'a{}' is the name of several values of the {}, which may be of different sizes"
    assert text.format("" if forward else "_grad", kind) in support.reasons(net, "parameter_gradients")
    with support.optimising(["parameter_gradients"]):
        comparing.assert_right(recurrent_net, step_net)
