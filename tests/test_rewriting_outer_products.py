"""`outer_products`: the gradient of matrices that steps multiply with vectors, behind the loop."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from attention_support import runs_of_attention
from caffe2_recurrent import LSTMWithAttention, optimize
from every_pair import every_pair
from step_nets import D, N, T
from test_rewriting_onednn import feed_parameters
from test_rewriting_rules import EXECUTOR, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept
from test_rewriting_vector_products import K, column_of, count_in_attention, every_attention, there_and_back

RULE = "outer_products"
WITH = pytest.mark.parametrize("rules", [[RULE], ["vector_products", RULE], None], ids=["alone", "rows", "all rules"])


def from_the_left(make, x, h):
    """tanh(x + h A A'), with rows: the gradients are products of rows, and of transposed ones."""
    row = make.cell.ExpandDims(make.cell.Squeeze(h, "row_values", dims=[0]), "row", dims=[1])
    inner = make.cell.BatchMatMul([row, make.reference("A", N, D, K)], "inner")
    back = make.cell.BatchMatMul([inner, make.reference("B", N, D, K)], "back", trans_b=1)
    make.cell.Squeeze(back, back, dims=[1])
    make.cell.ExpandDims(back, back, dims=[0])
    return make.cell.Tanh(make.cell.Sum([back, x], "total"), "h_t")


def kinds(net):
    return [operator.type for operator in net.Proto().op]


# Values.


@EXECUTOR
@WITH
@pytest.mark.parametrize("step", [there_and_back, from_the_left], ids=lambda step: step.__name__)
def test_values_and_gradients(step, rules, executor):
    net = assert_kept(step, RULE, 2, rules, executor)
    assert kinds(net).count("BatchMatMul") == 2
    inside = [operator.output[0] for operator in support.backward_step(net).op]
    assert not {"A_grad", "B_grad"} & set(inside)
    assert loop_of(net).gradient.parameters == []


@every_pair
@every_attention
@WITH
def test_attention(cell, variant, rules):
    """What is computed again is not there over all steps."""
    assert count_in_attention(cell, variant, RULE, rules) == (variant == "kept")


@pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
def test_no_steps_of_no_sequences(rules):
    """The engine takes no sequences only then."""

    def change(model):
        assert optimize(model, rules, even_if_slower=True, trials=False).counts[RULE] > 0

    sizes = [(5, 7, 4), (0, 0, 4), (3, 2, 4)]
    support.assert_same(runs_of_attention(change, sizes), runs_of_attention(lambda model: None, sizes))


def decoder(batch, outputs):
    """A function that gives what a decoder makes of an encoder of so many `outputs`, and its gradients."""
    workspace.ResetWorkspace()
    model = ModelHelper("decoder")
    names = ("x", None, "h", "c", "context", D, "encoder")
    hidden, *_, contexts, _ = LSTMWithAttention(model, *names, 4, K, "decoder", outputs_with_grads=(0, 4))
    seeds = {blob: model.net.AddExternalInput(seed) for blob, seed in ((hidden, "dh"), (contexts, "dc"))}
    gradients = model.net.AddGradientOperators(seeds)
    blobs = [str(blob) for blob in (hidden, contexts, *(gradients[blob] for blob in [*model.params, "encoder", "x"]))]
    workspace.RunNetOnce(model.param_init_net)
    feed_parameters(model, 1)

    def feed(batch, outputs):
        random = np.random.RandomState(2)
        shapes = {"x": (T, batch, 4), "h": (batch, K), "c": (batch, K), "context": (batch, D)}
        shapes.update({"encoder": (outputs, batch, D), "dh": (T, batch, K), "dc": (T, batch, D)})
        for blob, shape in shapes.items():
            workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))

    def values(batch, outputs):
        feed(batch, outputs)
        return support.run(model, blobs)

    feed(batch, outputs)
    return model, values


@pytest.mark.parametrize("rules", [["parameter_gradients", RULE], None], ids=["alone", "all rules"])
@pytest.mark.parametrize("batch", [1, N])
def test_an_encoder_of_one_output_may_have_several_in_another_run(batch, rules):
    _, values = decoder(batch, 1)
    expected = [values(*sizes) for sizes in ((N, 4), (1, 3), (3, 1))]
    model, values = decoder(batch, 1)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1
    assert [reason for reason in reasons_in(report, "parameter_gradients") if "may be larger in another run" in reason]
    for sizes, other in zip(((N, 4), (1, 3), (3, 1)), expected):
        support.assert_same(values(*sizes), other)


def test_a_matrix_that_the_step_uses_twice():
    """The engine adds up the sum of both shares."""

    def twice(make, x, h):
        matrices = make.reference("A", N, D, D)
        once = make.cell.BatchMatMul([matrices, column_of(make, h, "column")], "once")
        again = make.cell.BatchMatMul([matrices, once], "again")
        make.cell.Squeeze(again, again, dims=[2])
        make.cell.ExpandDims(again, again, dims=[0])
        return make.cell.Tanh(make.cell.Sum([again, x], "total"), "h_t")

    report = optimize(Net(twice).net, [RULE])
    assert (report.total, reasons_in(report, RULE)) == (0, ["'A_grad' is used for something else too"])


@pytest.mark.parametrize("position", [-1, -2, -3])
def test_a_wrong_product_is_seen(position):
    """The product, and what it is made of."""
    expected = Net(there_and_back).values()
    net = Net(there_and_back)
    optimize(net.net, [RULE])
    operators = list(net.net.Proto().op)
    (last,) = [index for index, operator in enumerate(operators) if list(operator.output) == [net.gradients["A"]]]
    at = last + 1 + position
    blob = core.BlobReference(operators[at].output[0])
    net.insert(at + 1, "Scale", [blob], [blob], scale=1.001)
    with pytest.raises(AssertionError, match="gradient of A"):
        support.assert_same(net.values(), expected)


# What it refuses.

SHAPES = {"A": (N, K, D), "B": (N, K, D), "h_initial": (N, D), "loop/X": (T, N, D)}


def loop():
    return loop_of(Net(there_and_back).net)


def of_a(loop):
    """What makes the gradient of A: of the gradient of `inner`, and of `column`."""
    return next(operator for operator in loop.gradient.operators if "A_grad" in operator.output)


def reason(loop, shapes=SHAPES):
    """Why the gradient of A stays."""
    return why(RULE, loop, shapes)[1]


def test_the_places_that_it_is_about():
    assert why(RULE, loop(), SHAPES) == [None, None]
    changed = loop()
    set_argument(of_a(changed), broadcast=1)
    assert len(why(RULE, changed, SHAPES)) == 1
    changed = loop()
    changed.gradient.parameters[:] = [found for found in changed.gradient.parameters if found.outer != "A"]
    assert len(why(RULE, changed, SHAPES)) == 1
    assert why(RULE, loop_of(Net(there_and_back, forward_only=True).net), SHAPES) == []


def test_refuses_what_the_step_uses():
    changed = loop()
    changed.gradient.operators.append(made("Tanh", ["A_grad"], ["more"]))
    assert reason(changed) == "'A_grad' is used for something else too"


def test_refuses_what_is_written_twice():
    changed = loop()
    copy = caffe2_pb2.OperatorDef()
    copy.CopyFrom(of_a(changed))
    changed.gradient.operators.insert(0, copy)
    assert "'A_grad' is written more than once" in why(RULE, changed, SHAPES)


def test_refuses_shapes_that_are_not_known():
    unknown = "the shape of 'inner_grad' is not known; give shapes"
    assert reason(loop(), {}) == unknown
    assert reason(loop(), {"A": SHAPES["A"], "B": SHAPES["B"]}) == unknown


def test_refuses_what_is_no_vector():
    changed = loop()
    of_a(changed).input[1] = "B"
    assert reason(changed) == "'B' has no vector for each matrix: {}".format((N, K, D))
    of_a(changed).input[1] = "column_rows"
    assert reason(changed) == "'column_rows' has no vector for each matrix: {}".format((N, D))


def test_refuses_what_is_computed_again():
    changed = loop()
    changed.shared.append("column")
    assert reason(changed) == "'column' is not kept, but computed again in the backward pass"


def test_refuses_a_gradient_that_changes_later():
    changed = loop()
    changed.gradient.operators.append(made("Scale", ["inner_grad"], ["inner_grad"]))
    assert reason(changed) == "'inner_grad' is changed after it has been read"


def test_refuses_what_may_have_several_vectors_in_another_run():
    changed = loop()
    of_a(changed).input[1] = "B"
    expected = "'B' {} may be larger in another run, as nothing says that it is a parameter".format((N, D, 1))
    assert reason(changed, {**SHAPES, "B": (N, D, 1)}) == expected
