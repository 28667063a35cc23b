"""Products as weighted sums of rows."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core

import rewriting_support as support
from caffe2_recurrent.rewriting.emit import ATEN, Emitter, is_aten
from caffe2_recurrent.rewriting.products import gradients_apart, weighted_sums
from caffe2_recurrent.rewriting.products.gradients_apart import SUMS, Apart, Size, Weights
from caffe2_recurrent.rewriting.trials import timing, trial


def made(shape, others, by_columns):
    """The operators for A B, and what they make: A is of `shape`, or its transpose; B has `others` columns."""
    random = np.random.RandomState(0)
    blob = random.randn(*shape).astype(np.float32)
    matrix = blob.reshape(-1, shape[-1])
    expected = matrix.T if by_columns else matrix
    rows = random.randn(expected.shape[1], others).astype(np.float32)
    emitter = Emitter(trial.lone_loop(["blob", "rows", "made"]), caffe2_pb2.OperatorDef(), "made")
    make = weighted_sums.by_columns if by_columns else weighted_sums.by_rows
    weighted_sums.emit(emitter, make(emitter, "blob", len(shape) - 1, shape[-1]), "rows", "made")
    return emitter.operators, timing.result(emitter.operators, {"blob": blob, "rows": rows}, "made"), expected @ rows


SHAPES = pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5), (1, 1, 5), (2, 3, 2, 1), (0, 5), (0, 3, 5)], ids=str)
BOTH = pytest.mark.parametrize("by_columns", [True, False], ids=["columns", "rows"])


@SHAPES
@BOTH
@pytest.mark.parametrize("others", [1, 7, 64, 100])
def test_values(shape, by_columns, others):
    _, found, expected = made(shape, others, by_columns)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@BOTH
def test_registers_are_cleared_at_once(by_columns):
    """Most of Caffe2's operators are compiled for SSE."""
    operators, _, _ = made((6, 5), 7, by_columns)
    assert [operator.type for operator in operators][-2:] == [weighted_sums.KIND, weighted_sums.CLEARING]


@pytest.mark.parametrize("missing", [ATEN, weighted_sums.CLEARING])
def test_without_what_clears_them_there_are_no_such_products(monkeypatch, missing):
    size = Size(6, Weights(7, 5), 3)
    assert Apart(SUMS) in gradients_apart.ways(size)
    there = core.IsOperator
    monkeypatch.setattr(core, "IsOperator", lambda kind: kind != missing and there(kind))
    assert not [way for way in gradients_apart.ways(size) if way is not None and SUMS in way]


def test_registers_are_cleared_behind_each_of_them():
    operators = gradients_apart.subject(Size(6, Weights(7, 5), 3), Apart(SUMS, SUMS)).step
    positions = [position for position, operator in enumerate(operators) if operator.type == weighted_sums.KIND]
    assert len(positions) == 2 and {operators[position + 1].type for position in positions} == {weighted_sums.CLEARING}


@pytest.mark.parametrize("changed", ["columns", "indices", "rows"])
def test_a_wrong_product_is_seen(changed):
    """Rows in place of columns, rows in another order, other rows."""
    subject = gradients_apart.subject(Size(6, Weights(6, 6), 3), Apart(SUMS))
    random = np.random.RandomState(0)
    values = {blob: random.randn(*shape).astype(np.float32) for blob, shape in subject.shapes.items()}
    values["reversed"] = np.tile(np.arange(6, dtype=np.int32)[::-1], 6)
    expected = values["dy"].T @ values["x"]
    assert support.difference(timing.result(subject.step, values, "dw"), expected) < support.TOLERANCE
    (product,) = [operator for operator in subject.step if operator.type == weighted_sums.KIND]
    if changed == "columns":
        (permuting,) = [operator for operator in subject.step if is_aten(operator, "permute")]
        support.argument(permuting, "dims").ints[:] = [0, 1]
    elif changed == "indices":
        product.input[2] = "reversed"
    else:
        product.input[0] = "w"
    assert support.difference(timing.result(subject.step, values, "dw"), expected) > 0.1
