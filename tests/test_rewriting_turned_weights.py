"""Weights that oneDNN transposes where they are copied to."""

import pytest

from caffe2_recurrent.rewriting.products import onednn, onednn_tensors, turned_weights
from onednn_support import leaving_no_trace, without_its_operators

pytestmark = pytest.mark.usefixtures("trials_forgotten")

SIZES = pytest.mark.parametrize(
    "inner, outer", [(1, 1), (1, 16), (16, 1), (3, 2), (5, 33), (33, 5), (64, 48), (512, 128), (1024, 256)]
)


@SIZES
def test_they_are_transposed(inner, outer):
    with leaving_no_trace():
        assert turned_weights.are_right(inner, outer) != onednn.is_missing()


def test_large_ones_do_not_pay(monkeypatch):
    monkeypatch.setattr(turned_weights, "are_right", lambda inner, outer: True)
    assert turned_weights.pay(1024, 1024) and not turned_weights.pay(1024, 1025)
    monkeypatch.setattr(turned_weights, "are_right", lambda inner, outer: False)
    assert not turned_weights.pay(5, 33)


def test_what_is_copied_as_it_lies_is_found(monkeypatch):
    """A tensor whose channels come first has the same memory, in the order of the weights themselves."""

    def as_slices(emitter, there, inner, columns):
        size = emitter.new("GivenTensorInt64Fill", [], "size", shape=[3], values=[1, inner, 1])
        onednn_tensors.add_slices(emitter, there, size, 33)
        emitter.reshape_in_place(onednn_tensors.shown(there), [1, 33, inner])

    monkeypatch.setattr(onednn_tensors, "add_rows", as_slices)
    with leaving_no_trace():
        assert not turned_weights.are_right(5, 33)


def test_memory_that_is_elsewhere_is_found(monkeypatch):
    def elsewhere(emitter, weights, there, inner, outer):
        turn(emitter, weights, there, inner, outer)
        return emitter.new("ConstantFill", [], "elsewhere", shape=[1, outer, inner], value=0.0)

    turn = turned_weights.turn
    monkeypatch.setattr(turned_weights, "turn", elsewhere)
    with leaving_no_trace():
        assert not turned_weights.are_right(5, 33)


def test_without_onednn(monkeypatch):
    without_its_operators(monkeypatch)
    assert not turned_weights.are_right(5, 33)
