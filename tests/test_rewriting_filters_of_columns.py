"""Filters that a convolution reads as the weights of a trained loop lie, `[K, M]`."""

import numpy as np
import pytest
from caffe2.python import workspace

import onednn_support
import rewriting_support as support
from caffe2_recurrent.rewriting.products import filters_of_columns
from caffe2_recurrent.rewriting.products.kept_filters import KEPT_FILTERS
from caffe2_recurrent.rewriting.rules import packed_products
from caffe2_recurrent.rewriting.steps import step_counts
from onednn_support import leaving_no_trace, on_onednn, without_its_operators
from test_rewriting_kept_filters import ALL, IS_RIGHT, inner_nets

pytestmark = pytest.mark.usefixtures("trials_forgotten")

SIZES = pytest.mark.parametrize(
    "inner, outer", [(1, 1), (1, 16), (16, 1), (3, 2), (5, 33), (33, 5), (16, 4), (64, 48), (512, 128)]
)
# As where oneDNN lays out filters so, which is all that depends on the processor.
WORKS = filters_of_columns.are_right(5, 33)


@SIZES
def test_all_sizes_are_alike(inner, outer):
    with leaving_no_trace():
        assert filters_of_columns.are_right(inner, outer) == WORKS


def test_another_order_is_found(monkeypatch):
    """Without a margin filters come in blocks, and what has the memory is another tensor."""
    monkeypatch.setattr(filters_of_columns, "MARGIN", 0)
    with leaving_no_trace():
        assert not filters_of_columns.are_right(5, 33)


def test_memory_that_is_elsewhere_is_found(monkeypatch):
    monkeypatch.setattr(filters_of_columns, "shown", lambda there: there + "_elsewhere")
    with leaving_no_trace():
        assert not filters_of_columns.are_right(5, 33)


# ----------------------------------------------------------------------------------------------------- loops that train


@pytest.fixture
def kept(monkeypatch, backward_loops):
    """Products keep filters where they may, and backward passes are loops, as where numbers of threads matter."""
    onednn_support.force(monkeypatch, KEPT_FILTERS)
    onednn_support.promise_constant_threads(monkeypatch)
    onednn_support.numbers_matter(monkeypatch, True)
    monkeypatch.setattr(
        packed_products, "_fastest", lambda *given: KEPT_FILTERS if KEPT_FILTERS in given[4] else given[4][0]
    )
    monkeypatch.setattr(step_counts, "few", lambda *_: 0)


def transposing(net):
    """The operators that transpose weights for steps."""
    ifs = [inner for _, inner in inner_nets(net) if any(operator.type == "Assert" for operator in inner.op)]
    return [kind for inner in ifs for kind in on_onednn(inner.op) if kind == "Transpose"]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("are_right", [True, False])
def test_weights_of_the_backward_pass_are_read_where_they_lie(monkeypatch, are_right):
    monkeypatch.setattr(filters_of_columns, "are_right", lambda inner, outer: are_right and WORKS)
    model, blobs = support.lstm()
    support.Optimised(ALL)(model)
    assert len(transposing(model.net)) == ((not (are_right and WORKS)) and IS_RIGHT)
    plain, _ = support.lstm(name="plain")
    for net in (model.net, plain.net):
        workspace.CreateNet(net)
    random = np.random.RandomState(3)
    weights = workspace.FetchBlob("layer/gates_t_w")
    for _ in range(3):
        # As an optimizer changes them, in their place.
        workspace.FeedBlob("layer/gates_t_w", random.uniform(-1, 1, weights.shape).astype(np.float32))
        found = []
        for net in (model.net, plain.net):
            workspace.RunNet(net)
            found.append(support.values(blobs))
        support.assert_same(*found)


@pytest.mark.usefixtures("kept")
def test_weights_of_another_shape_are_refused_and_leave_nothing_behind():
    model, blobs = support.lstm()
    support.Optimised(ALL)(model)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = support.values(blobs)
    weights = workspace.FetchBlob("layer/gates_t_w")
    for columns in (1, 400):
        wider = np.concatenate([weights, np.ones((len(weights), columns), np.float32)], axis=1)
        workspace.FeedBlob("layer/gates_t_w", wider)
        with pytest.raises(RuntimeError):
            workspace.RunNet(model.net)
        workspace.FeedBlob("layer/gates_t_w", weights)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), expected)


@pytest.mark.usefixtures("kept")
def test_other_numbers_of_sequences():
    found = support.runs_of_other_sizes(support.Optimised(ALL))
    support.assert_same(found, support.runs_of_other_sizes(lambda model: None))


def test_without_onednn(monkeypatch):
    without_its_operators(monkeypatch)
    assert not filters_of_columns.are_right(5, 33)
