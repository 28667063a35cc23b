"""What a net makes of encoded sequences for one loop, which is parted with the loop's batch."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import rewriting_support as support
from attention_support import ENCODED, SIZES, decoder, runs_of_attention
from caffe2_recurrent import AttentionType, optimize
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.batch_parts import encoded
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.batch_parts.parting import RULE

WEIGHTED, TRANSPOSED = "layer/weighted_encoder_outputs", "layer/encoder_outputs_transposed"
LAYOUTS = {WEIGHTED: Layout(3, 1), TRANSPOSED: Layout(3, 0)}
FLAG = calling_thread.FLAG
KINDS = ("FC", "FCGradient", "Transpose", "Sum")


@pytest.fixture(autouse=True)
def flag():
    workspace.GlobalInit(["tests", FLAG])
    yield
    workspace.GlobalInit(["tests", FLAG[:-1] + "0"])


def parted(change=lambda net: None, seen=(), kind=AttentionType.Regular):
    """The operators of these kinds that the net itself runs once its batch is parted. All is as it was, what is `seen`
    of it beside too."""

    def optimised(model):
        change(model.net)
        report = optimize(model, even_if_slower=True, batch_parts=2)
        assert report.counts[RULE] == 1, report
        nets.append(model.net)

    def values(change):
        """What is seen beside, of the last run."""
        found = runs_of_attention(change, kind=kind)
        return found[0] + [workspace.FetchBlob(blob) for blob in seen], {}

    nets = []
    support.assert_same(values(optimised), values(lambda model: change(model.net)))
    return [made.type for made in nets[0].Proto().op if made.type in KINDS]


def is_loop(operator):
    return operator.type == "RecurrentNetwork"


def inserted(kind, inputs, outputs, before=is_loop, **arguments):
    """A change of a net: another operator, in front of the first one that is as `before` says."""

    def change(net):
        operators = list(net.Proto().op)
        position = next(index for index, made in enumerate(operators) if before(made))
        operators.insert(position, core.CreateOperator(kind, inputs, outputs, **arguments))
        del net.Proto().op[:]
        net.Proto().op.extend(operators)

    return change


@pytest.mark.parametrize("kind", [AttentionType.Regular, AttentionType.Recurrent])
def test_what_is_made_of_encoded_sequences_is_parted(kind):
    assert parted(kind=kind) == []


def test_what_is_found():
    model, _ = decoder()
    ((position, loop),) = read_loops(model.net.Proto()).items()
    sizes = Sizes({"encoded": (4, 7, ENCODED)})
    found = encoded.find(model.net.Proto(), position, loop, LAYOUTS, sizes)
    assert [(each.rows, each.result, each.layout) for each in found] == [
        ("encoded", TRANSPOSED, Layout(3, 1)),
        ("encoded", WEIGHTED, Layout(3, 1)),
    ]
    assert encoded.find(model.net.Proto(), position, loop, LAYOUTS, Sizes({})) == []
    # Nothing else may know them, nor may the loop by another way than by name.
    model.net.Proto().external_output.append(WEIGHTED)
    loop.states[0] = loop.states[0]._replace(outer_initial=TRANSPOSED)
    assert encoded.find(model.net.Proto(), position, loop, LAYOUTS, sizes) == []


@pytest.mark.parametrize(
    "change, left",
    [
        (inserted("Copy", [WEIGHTED], ["seen"]), ["FC"]),
        (inserted("Copy", [TRANSPOSED], ["seen"]), ["Transpose"]),
        # Sequences are others by the time that the loop runs; what is behind it reads those.
        (inserted("Scale", ["encoded"], ["encoded"], scale=2.0), ["Transpose", "FC"]),
    ],
    ids=["a product that is seen", "a transposition that is seen", "encoded sequences that change"],
)
def test_what_is_made_for_others_too_is_not(change, left):
    found = parted(change)
    assert found[: len(left)] == left


@pytest.mark.parametrize("blob", [WEIGHTED + "_grad", TRANSPOSED + "_grad", "_encoded_grad_autosplit_0"])
def test_gradients_that_are_seen_are_put_together(blob):
    def change(net):
        net.Copy(blob, "seen")

    assert parted(change, seen=["seen"]) == []


def test_a_gradient_that_changes_before_others_read_it():
    """What goes on from it stays where it is."""
    gradient = WEIGHTED + "_grad"
    change = inserted("Scale", [gradient], [gradient], lambda made: gradient in made.input, scale=2.0)
    assert parted(change) == ["FCGradient", "Sum"]


def test_operators_that_wait_for_others_are_not_moved():
    def change(net):
        for made in net.Proto().op:
            if made.output[0] == WEIGHTED or made.type == "Transpose":
                made.control_input.append("x")

    assert parted(change) == ["Transpose", "FC", "FCGradient", "Transpose", "Sum"]


def test_products_whose_rows_have_no_batch_of_their_own():
    """An FC from an axis on that is in front of the batch, or at it, takes all sequences together."""
    sizes = Sizes({"x": (4, 7, ENCODED)})
    for axis, expected in ((1, None), (2, Layout(3, 1)), (3, Layout(3, 1))):
        made = core.CreateOperator("FC", ["x", "w", "b"], ["y"], axis=axis)
        assert encoded._layout_of_rows(made, {"y": Layout(3, 1)}, sizes) == expected
    for axes, expected in (([1, 2, 0], 1), ([2, 0, 1], 2), (None, 2)):
        made = core.CreateOperator("Transpose", ["x"], ["y"], **({} if axes is None else {"axes": axes}))
        assert encoded._layout_of_rows(made, {"y": Layout(3, 0)}, sizes) == Layout(3, expected)
    made = core.CreateOperator("Tanh", ["x"], ["y"])
    assert encoded._layout_of_rows(made, {"y": Layout(3, 0)}, sizes) is None


def test_without_enough_sequences_it_is_made_of_the_whole_batch():
    sizes = [SIZES[0], (3, 1, 5), (3, 2, 5), (3, 1, 2)]
    expected = runs_of_attention(lambda model: None, sizes)

    def change(model):
        assert optimize(model, even_if_slower=True, batch_parts=2).counts[RULE] == 1

    found = runs_of_attention(change, sizes)
    support.assert_same(found, expected)
    assert all(np.isfinite(value).all() for value in found[0])
