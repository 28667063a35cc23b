"""What rules about the products around a loop refuse alike, and had better leave alone."""

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.rewriting.products import onednn, separate_rows
from net_products_support import SHAPES, said
from test_rewriting_rules import set_argument

# Both the product of an LSTM and its gradient, or this alone.
PLACES = {"products_over_steps": 2, "gradient_products": 1}
EVERY_RULE = pytest.mark.parametrize("rule, places", PLACES.items(), ids=list(PLACES))


@EVERY_RULE
def test_weights_of_unknown_size(rule, places):
    assert said(rule, {}) == ["the size of its weights 'layer/i2h_w' is not known; give shapes"] * places


@EVERY_RULE
def test_weights_that_are_laid_out_in_another_way(rule, places):
    expected = ["its weights 'layer/i2h_w' are laid out in another way"] * places
    assert said(rule, {"layer/i2h_w": (16, 1, 2)}) == expected
    assert said(rule, change=lambda operator: set_argument(operator, axis_w=2)) == expected


@EVERY_RULE
def test_an_axis_that_is_counted_from_the_end(rule, places):
    expected = ["its axis -1 is not counted from the first dimension on, from 1"] * places
    assert said(rule, change=lambda operator: set_argument(operator, axis=-1)) == expected


@EVERY_RULE
def test_products_of_onednn_and_of_a_gpu_are_no_places(rule, places):
    on_gpu = core.DeviceOption(caffe2_pb2.CUDA, 0)
    assert said(rule, change=onednn.on_onednn) == []
    assert said(rule, change=lambda operator: operator.device_option.CopyFrom(on_gpu)) == []


@EVERY_RULE
@pytest.mark.parametrize("known", ["layer/i2h_w", "steps", "batch"])
def test_a_loss_where_the_numbers_of_rows_are_not_known(rule, places, known, monkeypatch):
    # As torch 1.7's oneDNN has it, products of these sizes would be refused.
    monkeypatch.setattr(separate_rows, "over_steps", lambda layout: True)
    shapes = {"layer/i2h_w": SHAPES["layer/i2h_w"]}
    if known == "steps":
        shapes["layer/i2h"] = (9,)
    elif known == "batch":
        shapes["h0"] = (1, 3, 4)
    expected = ["the numbers of steps and sequences are not known; give shapes"] * places
    assert said(rule, shapes, loss=True) == expected
