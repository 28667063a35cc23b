"""`step_shapes`: what shapes the blobs of a step have where an operator sees them."""

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

import comparing
from caffe2_recurrent import recurrent_net, step_values
from caffe2_recurrent.loops.sizes import SEVERAL, Sizes, find_sizes
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before
from cells import CELLS
from step_nets import D, N, T
from test_rewriting_rules import EVERY_STEP_NET, loop_of, made
from test_rewriting_sequence_bias import Net
from test_rewriting_vector_products import K, there_and_back

SHAPES = {"A": (N, K, D), "B": (N, K, D), "h_initial": (N, D), "loop/X": (T, N, D), "b": (D,)}


def loop():
    return loop_of(Net(there_and_back).net)


def end(loop, operators, shapes=SHAPES):
    return shapes_before(loop, Sizes(shapes), operators, len(operators))


def test_shapes_at_the_end_of_both_steps():
    found = loop()
    forward = end(found, found.operators)
    expected = {"column": (N, D, 1), "inner": (N, K, 1), "back": (1, N, D), "x_t": (1, N, D), "h_t": (1, N, D)}
    assert {blob: forward[blob] for blob in expected} == expected
    backward = end(found, found.gradient.operators)
    expected = {"h_t_grad": (1, N, D), "inner_grad": (N, K, 1), "A_grad": (N, K, D), "inner": (N, K, 1)}
    assert {blob: backward[blob] for blob in expected} == expected


def test_shapes_change_on_the_way():
    found = loop()
    product = next(index for index, operator in enumerate(found.operators) if "back" in operator.output)
    seen = [shapes_before(found, Sizes(SHAPES), found.operators, product + after) for after in range(4)]
    assert [shapes.get("back") for shapes in seen] == [None, (N, D, 1), (N, D), (1, N, D)]


def test_what_is_not_known():
    found = loop()
    forward = end(found, found.operators, {"A": (N, K, D), "b": (D,)})
    assert forward == {"A": (N, K, D), "b": (D,)}
    # What is made of it is unknown too, also in place, but for a slice, whose memory is given.
    found.operators[0] = made("ATen", ["h_prev"], ["column_rows"], operator="squeeze")
    assert not {"column_rows", "column", "inner"} & set(end(found, found.operators))
    found.operators.append(made("ATen", ["inner"], ["h_t"], operator="squeeze"))
    assert end(found, found.operators)["h_t"] == (1, N, D)
    found.operators.append(made("ATen", ["x_t"], ["b"], operator="squeeze"))
    assert "b" not in end(found, found.operators)
    found.operators.append(made("ATen", ["A"], ["A"], operator="squeeze"))
    assert "A" not in end(found, found.operators)


def test_what_a_product_by_onednn_in_front_of_the_loop_makes():
    """Which is inside of an If. A second call of `optimize` knows it, so the first one has to."""
    product = made("FC", ["x", "w", "b"], ["y"], axis=2)
    there = caffe2_pb2.OperatorDef()
    there.CopyFrom(product)
    there.device_option.device_type = caffe2_pb2.IDEEP
    nets = {name: caffe2_pb2.NetDef(op=[operator]) for name, operator in (("then_net", there), ("else_net", product))}
    chosen = made("If", ["is_longer", "x", "w", "b"], ["y"], **nets)
    assert Sizes({"x": (T, N, 2), "w": (D, 2), "b": (D,)}).made_by([chosen])["y"] == (T, N, D)


def test_what_aten_repeats():
    found = loop()
    found.operators.append(made("ATen", ["A", "h_initial", "row"], ["y"], operator="addcmul"))
    found.operators.append(made("ATen", ["y"], ["z"], operator="sigmoid"))
    shapes = {**SHAPES, "A": (5, N, D), "row": (D,)}
    told = end(found, found.operators, shapes)
    assert (told["y"], told["z"]) == ((5, N, D), (5, N, D))
    assert not {"y", "z"} & set(end(found, found.operators, SHAPES))


def test_what_may_be_several():
    """Of what is one now; parameters stay as they are, and so does what has one row whatever the sizes."""
    found = loop()
    sizes = Sizes({**SHAPES, "loop/X": (T, 1, D), "A": (1, K, D), "B": (1, K, D), "b": (1,)}, ["b"])
    several = shapes_before(found, sizes.when_larger(), found.operators, len(found.operators))
    expected = {"A": (SEVERAL, K, D), "b": (1,), "column": (SEVERAL, D, 1), "h_t": (1, SEVERAL, D)}
    assert {blob: several[blob] for blob in expected} == expected
    assert sizes.shape("A") == (1, K, D)


def test_an_init_net_tells_of_parameters():
    net = Net(there_and_back)
    sizes = find_sizes(net.net.Proto(), net.model(["b"]).param_init_net.Proto(), {"b": (1,), "A": (1, K, D)})
    larger = sizes.when_larger()
    assert (larger.shape("b"), larger.shape("A")) == ((1,), (SEVERAL, K, D))


def test_what_rules_have_put_before_the_loop():
    found = loop()
    found.add_before("Transpose", ["A"], "turned", axes=[2, 0, 1])
    (turned,) = found.before[-1].output
    assert end(found, found.operators)[turned] == (D, N, K)


def assert_true(net):
    """What is told of the blobs that steps keep is what they have after a run; the blobs that were told of."""
    found = loop_of(net)
    told = shapes_before(found, find_sizes(net.Proto(), None, {}), found.operators, len(found.operators))
    kept = step_values(net)
    both = sorted(set(kept) & set(told))
    assert {blob: told[blob] for blob in both} == {blob: kept[blob].shape[1:] for blob in both}
    return both


@EVERY_STEP_NET
def test_step_nets(make):
    nets = []
    step_net = make()
    comparing.run(recurrent_net, step_net, executor=False, rewrite=nets.append)
    if loop_of(nets[0]).has_backward_step:
        assert assert_true(nets[0])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells(cell):
    workspace.ResetWorkspace()
    model = cell.run(executor=False)[2]
    found = assert_true(model.net)
    if cell.name.startswith("attention"):
        assert any(blob.endswith("attention_weights") for blob in found), found


def test_slices_have_the_dimensions_of_their_sequence():
    found = loop()
    for shape in ((T, N), (T, N, 4, D)):
        assert end(found, found.operators, {**SHAPES, "loop/X": shape})["x_t"] == (1, *shape[1:])


def test_what_no_longer_fits_when_a_1_is_taken_for_more():
    found = loop()
    found.operators.append(made("ATen", ["h_initial", "row"], ["y"], operator="add"))
    shapes = {**SHAPES, "row": (1, D)}
    assert end(found, found.operators, shapes)["y"] == (N, D)
    larger = shapes_before(found, Sizes(shapes).when_larger(), found.operators, len(found.operators))
    assert larger["row"] == (SEVERAL, D) and "y" not in larger
