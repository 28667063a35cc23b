"""`optimize`: a net that has refused other numbers than floats still does, and leaves them as they are."""

import numpy as np
import pytest
from caffe2.python import workspace

import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.rewriting.elementwise import only_floats
from caffe2_recurrent.rewriting.products import separate_rows
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from every_pair import every_pair
from onednn_support import force
from test_rewriting_onednn import SAFE

pytestmark = pytest.mark.usefixtures("backward_loops", "unrolled_steps", "nnpack_products")

KINDS = ["float64", "int32", "uint8", "float16"]
RULES = {
    "all": None,
    "joined": ["sequence_bias", "joined_sequence"],
    "gates first": ["lstm_unit", "sequence_bias", "gates_first", "packed_products"],
    "over steps": ["products_over_steps"],
    "in steps": ["packed_products"],
    "written out": ["unrolled_steps"],
}
FED = ["x", "layer/i2h_w", "layer/i2h_b", "layer/gates_t_w", "layer/gates_t_b"]
MESSAGE = "expects elements to be (float|double|int),|same type|of tensor|dtype|Sum operator only supports"


def refused(model, blob, kind):
    """What the engine says of the net with numbers of this kind in a blob, which it has to leave alone."""
    value = (10 * workspace.FetchBlob(blob)).astype(kind)
    workspace.FeedBlob(blob, value)
    with pytest.raises(RuntimeError, match=MESSAGE) as refusal:
        workspace.RunNetOnce(model.net)
    left = workspace.FetchBlob(blob)
    assert left.dtype == value.dtype
    np.testing.assert_array_equal(left, value)
    return str(refusal.value)


@every_pair
@pytest.mark.parametrize("blob", FED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "training"])
def test_other_kinds_are_refused_as_before(gradients, rules, kind, blob):
    model, _ = support.lstm(gradients=gradients, forward_only=not gradients)
    optimize(support.without_executor(model), rules, even_if_slower=True, trials=False)
    workspace.RunNetOnce(model.net)
    refused(model, blob, kind)


@every_pair
@pytest.mark.parametrize("way", [*SAFE, NNPACK])
@pytest.mark.parametrize("rules", [None, ["packed_products"]], ids=["all", "in steps"])
@pytest.mark.parametrize("blob", FED)
def test_by_each_way_of_a_product(blob, rules, way, monkeypatch):
    force(monkeypatch, way)
    model, _ = support.lstm()
    optimize(support.without_executor(model), rules, even_if_slower=True)
    workspace.RunNetOnce(model.net)
    refused(model, blob, "float64")


def test_the_message_names_the_blob():
    model, _ = support.lstm(gradients=False, forward_only=True)
    optimize(model, ["products_over_steps"], even_if_slower=True, trials=False)
    assert "tensor contains double" in refused(model, "x", "float64")
    assert "x" in support.operator(model.net, "If").input


def test_of_what_is_flattened():
    """A product flattens what its axis leaves over; each dimension of a sequence counts for a slice of it."""
    model, outputs = support.lstm()
    expected = support.run(model, outputs)
    optimize(model, ["products_over_steps"], even_if_slower=True, trials=False)
    workspace.FeedBlob("x", workspace.FetchBlob("x").reshape(support.T, support.N, 1, support.DIM_IN))
    found = support.run(model, outputs[:4])
    support.assert_same(found, (expected[0][:4], {}))


@pytest.mark.parametrize("rules", [["sequence_bias", "joined_sequence"], ["packed_products"]])
def test_without_the_check_nothing_is_said(rules, monkeypatch):
    """What the tests above look for is what these operators do."""
    if rules == ["packed_products"]:
        monkeypatch.setattr(separate_rows, "in_steps", lambda way, *_: True)

    def nothing(emitter, blob, dimensions):
        return emitter.loop.inputs[0]

    monkeypatch.setattr(only_floats, "emit", nothing)
    model, _ = support.lstm(gradients=False, forward_only=True)
    optimize(support.without_executor(model), rules, even_if_slower=True, trials=False)
    workspace.RunNetOnce(model.net)
    blob = "layer/gates_t_w" if rules == ["packed_products"] else "x"
    workspace.FeedBlob(blob, workspace.FetchBlob(blob).astype(np.float64))
    workspace.RunNetOnce(model.net)
