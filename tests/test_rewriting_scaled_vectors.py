"""`scaled_vectors`: the scale of an MILSTM's gates, in the vectors that they are linear with."""

import numpy as np
import pytest
from caffe2.python import rnn_cell, workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import MILSTM, optimize
from cells import CELLS
from test_rewriting_rules import EXECUTOR, forward, loop_of, made, set_argument
from test_rewriting_rules import SHAPES as OF_LSTM
from test_rewriting_rules import why as why_so

RULE = "scaled_vectors"
ALONE = ["lstm_unit", RULE]
VECTORS = ["layer/" + name for name in ("lstm_scale", "lstm_shift", "alpha", "beta1", "beta2", "b")]
SHAPES = dict(OF_LSTM, **dict.fromkeys(VECTORS, (16,)))
WITH = pytest.mark.parametrize("rules", [ALONE, None], ids=["alone", "all rules"])
(CELL,) = [cell for cell in CELLS if cell.name == "milstm"]
VARIANTS = {
    "plain": CELL.but(),
    "lengths": CELL.but(lengths=[3, 1]),
    "states dropped": CELL.but(lengths=[2, 0], options={"drop_states": True}),
    "forget bias": CELL.but(options={"forget_bias": 1.25}),
    "one step": CELL.but(steps=1),
}
TOO = "'layer/{}' is needed elsewhere too"
ELSE = "it adds up something else than products with what ElementwiseLinear makes, and what it makes"


def why(rule, loop, shapes=SHAPES):
    return why_so(rule, loop, shapes)


def serving(cell):
    return cell.but(options=dict(cell.options, forward_only=True))


def fill(model):
    """No vector is one or zero."""
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(2)
    for blob in map(str, model.params):
        value = random.uniform(-1, 1, workspace.FetchBlob(blob).shape)
        workspace.FeedBlob(blob, value.astype(np.float32))


def milstm(builder=MILSTM, **options):
    """A model that is not trained, and its outputs' names."""
    model, blobs = support.lstm(builder, gradients=False, forward_only=True, **options)
    fill(model)
    return model, blobs


def kinds(net):
    return [operator.type for operator in support.step(net).op]


@EXECUTOR
@WITH
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_are_those_of_a_numpy_loop(variant, rules, executor):
    cell, rewrite = serving(VARIANTS[variant]), support.Optimised(rules)
    outputs, _, model = cell.run(executor, rewrite)
    assert rewrite.report.counts[RULE] == 1
    assert "Mul" not in kinds(model.net)[: kinds(model.net).index("ATen")]
    for index, expected in enumerate(cell.reference()):
        comparing.assert_close(outputs[index], expected, index)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_keeps_what_the_backward_step_reads(variant):
    cell, rewrite = VARIANTS[variant], support.Optimised(ALONE)
    _, gradients, model = cell.run(rewrite=rewrite)
    assert rewrite.report.counts[RULE] == 0
    assert [refusal.reason for refusal in rewrite.report.refusals if refusal.rule == RULE] == [
        TOO.format("mi_factor_t")
    ]
    for name, expected in cell.reference_gradients().items():
        comparing.assert_close(gradients[name], expected, name)


@pytest.mark.parametrize("swapped", ["nothing", "Mul", "Sum", "both"])
@pytest.mark.parametrize("builder", [MILSTM, rnn_cell.MILSTM], ids=["ours", "Caffe2's"])
def test_in_any_order(builder, swapped):
    model, blobs = milstm(builder, lengths=True)
    expected = support.run(model, blobs)
    for operator in support.step(model.net).op:
        if operator.type in ("Mul", "Sum") and swapped in (operator.type, "both"):
            operator.input[:] = list(operator.input)[::-1]
    report = optimize(model, ALONE, even_if_slower=True)
    assert report.counts[RULE] == 1, str(report)
    support.assert_same(support.run(model, blobs), expected)


def test_other_sizes_than_it_was_optimised_for():
    def optimised(model):
        fill(model)
        assert optimize(model, ALONE, even_if_slower=True).counts[RULE] == 1

    plain, rewritten = (
        support.runs_of_other_sizes(change, builder=MILSTM, gradients=False, forward_only=True)
        for change in (fill, optimised)
    )
    support.assert_same(rewritten, plain)


@pytest.mark.parametrize("vector", ["alpha", "beta1", "beta2", "b"])
def test_a_wrong_vector_is_seen(vector):
    model, blobs = milstm()
    expected = support.run(model, blobs)
    optimize(model, ALONE, even_if_slower=True)
    for operator in support.step(model.net).op:
        operator.input[:] = [
            "layer/" + vector if blob == "layer/{}_scaled".format(vector) else blob for blob in operator.input
        ]
    loop = support.operator(model.net)
    loop.input.append("layer/" + vector)
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(support.run(model, blobs), expected)


# What it refuses.


def scaled_loop():
    """After the rule that makes the scale; the loop, and how to find an operator of its step by its result."""
    model, _ = milstm()
    optimize(model, ["lstm_unit"], even_if_slower=True)
    loop = loop_of(model.net)
    return loop, lambda blob: next(other for other in loop.operators if "layer/" + blob in other.output)


def test_refuses():
    loop, _ = scaled_loop()
    assert why(RULE, loop) == [None]
    for blob in ("mi_factor_t", "mi_rest_t", "mi_gates_t"):
        loop, _ = scaled_loop()
        loop.operators.append(made("Tanh", ["layer/" + blob], ["again"]))
        assert why(RULE, loop) == [TOO.format(blob)]
        loop, _ = scaled_loop()
        loop.net.external_output.append("layer/" + blob)
        assert why(RULE, loop) == [TOO.format(blob)]


@pytest.mark.parametrize("blob", ["mi_factor_t", "mi_rest_t"])
def test_refuses_what_is_not_linear_with_vectors(blob):
    loop, made_by = scaled_loop()
    made_by(blob).type = "Div"
    assert why(RULE, loop) == [ELSE]
    loop, made_by = scaled_loop()
    set_argument(made_by(blob), axis=1)
    assert why(RULE, loop) == [ELSE]
    loop, made_by = scaled_loop()
    made_by(blob).input[1] = "layer/input_t"
    assert why(RULE, loop) == [ELSE]
    loop, made_by = scaled_loop()
    made_by(blob).input[0] = "unknown"
    assert why(RULE, loop) == ["'layer/{}' is not known to have one row for each sequence".format(blob)]


@pytest.mark.parametrize("blob", VECTORS)
def test_refuses_what_is_no_vector_of_all_columns(blob):
    loop, _ = scaled_loop()
    for shapes in (dict(SHAPES, **{blob: (1, 16)}), {name: SHAPES[name] for name in SHAPES if name != blob}):
        assert why(RULE, loop, shapes) == ["'{}' is not known to be a vector; give shapes".format(blob)]
    (reason,) = why(RULE, loop, dict(SHAPES, **{blob: (1,)}))
    scale, *others = VECTORS
    if blob == scale:
        assert reason == "'{}' is not as long as '{}': 16 and 1".format(others[0], scale)
    else:
        assert reason == "'{}' is not as long as '{}': 1 and 16".format(blob, scale)


def test_refuses_other_scales():
    loop, _ = scaled_loop()
    forward(loop, "ATen").input[2] = "layer/input_t"
    assert why(RULE, loop) == ["what it is scaled with is not the same in all steps"]
    loop, _ = scaled_loop()
    set_argument(forward(loop, "ATen"), value=2.0)
    assert why(RULE, loop) == []


def test_refuses_what_changes_meanwhile():
    expected = ["'layer/prev_t' is overwritten by the time that the sum is scaled"]
    loop, _ = scaled_loop()
    position = loop.operators.index(forward(loop, "Sum"))
    loop.operators.insert(position, made("Tanh", ["layer/prev_t"], ["layer/prev_t"]))
    assert why(RULE, loop) == expected
    # ATen does not work in place.
    loop, _ = scaled_loop()
    forward(loop, "ATen").output[0] = "layer/prev_t"
    assert why(RULE, loop) == expected


def test_refuses_a_square():
    loop, _ = scaled_loop()
    forward(loop, "Mul").input[:] = ["layer/mi_factor_t"] * 2
    assert why(RULE, loop) == [ELSE]


def test_is_about_sums_of_two_with_a_product():
    loop, _ = scaled_loop()
    forward(loop, "Sum").input.append("layer/input_t")
    assert why(RULE, loop) == []
    loop, _ = scaled_loop()
    # Along an axis it repeats what ATen would not.
    set_argument(forward(loop, "Mul"), broadcast=1)
    assert why(RULE, loop) == []
    loop, _ = scaled_loop()
    forward(loop, "Mul").type = "Add"
    assert why(RULE, loop) == []
