"""`onednn_convolutions`: products over rows where they lie, and where a Caffe2 has them otherwise.

That every layout gives what numpy does, in nets too, is in `test_rewriting_products_over_steps`.
"""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2

import rewriting_support as support
from caffe2_recurrent import optimize, processor
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.engine_blobs import is_of_engine
from caffe2_recurrent.rewriting.products import onednn, onednn_convolutions, onednn_over_steps, thread_numbers
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, PRODUCT
from caffe2_recurrent.rewriting.products.onednn_convolutions import (
    IN_BLOCKS,
    IN_ROWS,
    ROWS_TRANSPOSED,
    TRANSPOSED,
    rows_stay_where_they_lie,
)
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout, layouts
from caffe2_recurrent.rewriting.rules import products_over_steps
from caffe2_recurrent.rewriting.trials import trial
from onednn_support import in_ifs, inner_nets, numbers_matter

INNER, OUTER = 5, 7
CONVOLVES = onednn.CONVOLUTION in onednn.ways()
# Tried anew each time.
tried = rows_stay_where_they_lie.__wrapped__
transposed_tried = onednn_convolutions.transposed_are_right.__wrapped__


TRANSPOSED_ARE_RIGHT = CONVOLVES and transposed_tried()


@pytest.fixture(autouse=True)
def convolving(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)


def in_rows(kind=PRODUCT):
    return Layout(INNER, OUTER, convolved=IN_ROWS) in layouts(kind, INNER, OUTER)


@pytest.mark.parametrize("there", [False, True])
def test_it_is_a_layout_of_products_where_rows_stay(there, monkeypatch):
    monkeypatch.setattr(onednn_convolutions, "rows_stay_where_they_lie", lambda inner, outer: there)
    assert in_rows() is there
    assert not in_rows("FCGradient")
    assert Layout(INNER, OUTER, convolved=IN_BLOCKS) in layouts(PRODUCT, INNER, OUTER)


@pytest.mark.parametrize("inner", [1, 2, 16, 100])
@pytest.mark.parametrize("outer", [2, 16, 100])
def test_rows_stay_where_they_lie_here(inner, outer):
    if CONVOLVES:
        assert tried(inner, outer)


@pytest.mark.parametrize(
    "flags, promised, expected",
    [
        (["avx2", "fma"], False, True),
        (["avx2", "avx512f"], False, False),
        (["avx2", "avx512f"], True, True),
        ([], False, False),
        ([], True, True),
    ],
)
def test_with_avx512_threads_have_to_stay(flags, promised, expected, monkeypatch, tmp_path):
    """Or where nothing is known of the processor; then products are had in another way."""
    description = tmp_path / "cpuinfo"
    description.write_text("vendor_id : AuthenticAMD\nflags : {}\n".format(" ".join(flags)) if flags else "")
    monkeypatch.setattr(processor, "CPUINFO", str(description))
    monkeypatch.setattr(
        products_over_steps, "seconds", lambda size, layout: float(layout is None or layout.convolved != IN_ROWS)
    )
    model, _ = support.lstm()
    report = optimize(model, ["products_over_steps"], even_if_slower=True, constant_threads=promised)
    assert report.counts["products_over_steps"]
    inside = in_ifs(model.net)
    assert any(operator.type == onednn.CHANNELS_LAST for operator in inside) is (expected and CONVOLVES)


OPERATORS = {
    IN_ROWS: caffe2_pb2.OperatorDef(type=PRODUCT, input=["x", "w", "b"], output=["y"]),
    TRANSPOSED: caffe2_pb2.OperatorDef(type=GRADIENT, input=["x", "w", "dy"], output=["dw", "db"]),
    ROWS_TRANSPOSED: caffe2_pb2.OperatorDef(type=GRADIENT, input=["x", "w", "dy"], output=["dw", "db"]),
}
PLANNED = {IN_ROWS: onednn.TO, TRANSPOSED: "ConvTranspose", ROWS_TRANSPOSED: "ConvTranspose"}


@pytest.mark.parametrize("way", OPERATORS)
def test_the_number_of_threads_is_set_before(way, monkeypatch):
    """By ATen's operator, in each net, in front of what oneDNN plans."""
    operator, layout = OPERATORS[way], Layout(INNER, OUTER, convolved=way)

    def types():
        loop = trial.lone_loop([*operator.input, *operator.output])
        made = onednn_over_steps.in_a_net(loop, operator, Layout(INNER, OUTER), layout)
        return [other.type for other in in_ifs(caffe2_pb2.NetDef(op=made))]

    numbers_matter(monkeypatch, True)
    found = types()
    assert found.index("ATen") < found.index(PLANNED[way])
    numbers_matter(monkeypatch, False)
    assert "ATen" not in types()
    numbers_matter(monkeypatch, True)
    monkeypatch.setattr(thread_numbers, "aten_is_missing", lambda: True)
    assert "ATen" not in types()


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("way", [TRANSPOSED, ROWS_TRANSPOSED])
def test_with_avx512_transposed_gradients_take_the_promise(promised, way, monkeypatch):
    numbers_matter(monkeypatch, True)
    monkeypatch.setattr(
        products_over_steps, "seconds", lambda size, layout: float(layout is None or layout.convolved != way)
    )
    model, _ = support.lstm()
    optimize(model, ["products_over_steps"], even_if_slower=True, constant_threads=promised)
    found = [operator.type for operator in in_ifs(model.net)].count("ConvTranspose")
    assert found == (promised and TRANSPOSED_ARE_RIGHT)


def planted(monkeypatch, wrong):
    """Let what `onednn.add` adds be what `wrong` makes of it."""
    add = onednn.add
    monkeypatch.setattr(onednn, "add", lambda emitter, *operator, **others: add(emitter, *wrong(*operator), **others))


def test_not_if_rows_are_read_in_another_order(monkeypatch):
    """As an image whose channels come first, which has as many numbers."""

    def channels_first(emitter, rows, width):
        return onednn_convolutions.copy_there(emitter, rows, emitter.blob("image"), [1, width, 1, -1])

    monkeypatch.setattr(onednn_convolutions, "_image_of_rows", channels_first)
    assert not tried(INNER, OUTER)


def test_not_if_the_bias_is_left_out(monkeypatch):
    def without_bias(kind, inputs, outputs):
        return kind, inputs[:2] if kind == "Conv" else inputs, outputs

    planted(monkeypatch, without_bias)
    assert not tried(INNER, OUTER)


@pytest.mark.parametrize("there", [False, True])
def test_transposed_is_a_layout_of_gradients_where_it_is_right(there, monkeypatch):
    monkeypatch.setattr(onednn_convolutions, "transposed_are_right", lambda: there)
    for way in (TRANSPOSED, ROWS_TRANSPOSED):
        assert (Layout(INNER, OUTER, convolved=way) in layouts(GRADIENT, INNER, OUTER)) is there
        assert Layout(INNER, OUTER, convolved=way) not in layouts(PRODUCT, INNER, OUTER)


def test_not_if_operands_change_places(monkeypatch):
    def changed(kind, inputs, outputs):
        return kind, inputs[::-1] if kind == "ConvTranspose" else inputs, outputs

    planted(monkeypatch, changed)
    assert not transposed_tried()


def test_not_if_filters_are_those_of_the_first_run(monkeypatch):
    """As without the argument that says that this is training."""
    add = onednn.add

    def keeping(emitter, kind, inputs, outputs, **arguments):
        if kind == "ConvTranspose":
            arguments["training_mode"] = 0
        return add(emitter, kind, inputs, outputs, **arguments)

    monkeypatch.setattr(onednn, "add", keeping)
    monkeypatch.setattr(onednn_convolutions, "ROWS", (17, 17))
    assert not transposed_tried()


def test_not_transposed_if_an_operator_is_missing(monkeypatch):
    def unknown(kind, inputs, outputs):
        return "NoSuchOperator" if kind == "ConvTranspose" else kind, inputs, outputs

    planted(monkeypatch, unknown)
    assert not transposed_tried()


def test_not_if_an_operator_is_missing(monkeypatch):
    def unknown(kind, inputs, outputs):
        return "NoSuchOperator" if kind == onednn.CHANNELS_LAST else kind, inputs, outputs

    planted(monkeypatch, unknown)
    assert not tried(INNER, OUTER)


@pytest.mark.parametrize("rows, stays", [(None, False), (3, False), (4, True)])
def test_all_that_it_makes_is_freed_but_large_results(rows, stays, monkeypatch):
    """With the memory that the engine has for what runs on the CPU."""
    monkeypatch.setattr(onednn_over_steps, "LITTLE", 0)
    monkeypatch.setattr(onednn_over_steps, "LARGE", 4 * OUTER * np.dtype(np.float32).itemsize)
    operator = caffe2_pb2.OperatorDef(type=PRODUCT, input=["x", "w", "b"], output=["y"])
    loop = trial.lone_loop(["x", "w", "b", "y"])
    layout = Layout(INNER, OUTER, convolved=IN_ROWS)
    made = onednn_over_steps.in_a_net(loop, operator, Layout(INNER, OUTER), layout, rows)
    (inner,) = [net for (_, name), net in inner_nets(caffe2_pb2.NetDef(op=made)) if name == "then_net"]
    *others, freeing = inner.op
    written = {blob for other in others for blob in other.output}
    assert freeing.type == "Free" and any(map(is_of_engine, written)) and any(map(is_on_onednn, others))
    kept = written - set(freeing.input) - {"y"}
    assert len(kept) == stays
    assert all("results_in_rows" in blob for blob in kept)
