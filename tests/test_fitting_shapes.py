"""`fitting_shapes`: which shapes of an operator's inputs fit, against what Caffe2 infers from them."""

import itertools

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.loops import fitting_shapes
from caffe2_recurrent.loops.fitting_shapes import BY_ELEMENT, COMPARING, fit

TIMES = 300


def is_an_error(operator, shapes):
    """Whether it is one to Caffe2, which then knows nothing any more, the inputs among it."""
    net = caffe2_pb2.NetDef(op=[operator])
    given = {blob: list(shape) for blob, shape in zip(operator.input, shapes)}
    found, _ = workspace.InferShapesAndTypes([net], given, nets_proto=True)
    return not found


def operator_of(kind, count, **arguments):
    outputs = ["result", "sizes"] if kind == "Concat" else ["result"]
    return core.CreateOperator(kind, ["input_{}".format(number) for number in range(count)], outputs, **arguments)


def some_shape(random, most=4):
    return tuple(int(size) for size in random.choice([1, 1, 2, 3], random.randint(1, most + 1)))


def concatenations(random):
    axis = int(random.choice([0, 1, 2, -1]))
    first = some_shape(random)
    shapes = [first] + [some_shape(random) for _ in range(random.randint(0, 3))]
    if random.rand() < 0.6:
        own = axis % len(first)
        shapes = [(*first[:own], int(random.randint(1, 4)), *first[own + 1 :]) for _ in shapes]
    return operator_of("Concat", len(shapes), axis=axis, add_axis=int(random.rand() < 0.25)), shapes


def products(random):
    axes = {"axis": int(random.choice([1, 2, 3])), "axis_w": int(random.choice([1, 1, 2]))}
    return operator_of("FC", 3, **axes), [some_shape(random), some_shape(random), (3,)]


def squeezed(random):
    """Caffe2 infers something of dimensions that there are not, which a run refuses."""
    shape = some_shape(random)
    dims = sorted({int(axis) for axis in random.randint(0, len(shape), 2)})
    return operator_of("Squeeze", 1, dims=dims), [shape]


def of_two(kind):
    def drawn(random):
        arguments = {"broadcast": 1} if random.rand() < 0.3 else {}
        first = some_shape(random)
        second = first[random.randint(0, len(first)) :] if random.rand() < 0.4 else some_shape(random)
        return operator_of(kind, 2, **arguments), [first, second]

    return drawn


KINDS = {"Concat": concatenations, "FC": products, "Squeeze": squeezed}
KINDS.update({kind: of_two(kind) for kind in (*BY_ELEMENT, *COMPARING)})


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_an_error_to_caffe2_where_shapes_do_not_fit_and_nowhere_else(kind):
    random = np.random.RandomState(0)
    found = set()
    for _ in range(TIMES):
        operator, shapes = KINDS[kind](random)
        does_fit = fit(operator, shapes)
        assert is_an_error(operator, shapes) is not does_fit, (operator, shapes)
        found.add(does_fit)
    assert found == {False, True}


@pytest.mark.parametrize("kind", ["Concat", "FC", "Mul", "EQ", "Squeeze"])
def test_a_check_that_lets_all_pass_is_seen(kind, monkeypatch):
    monkeypatch.setitem(fitting_shapes._CHECKS, kind, lambda operator, shapes: True)
    with pytest.raises(AssertionError):
        test_it_is_an_error_to_caffe2_where_shapes_do_not_fit_and_nowhere_else(kind)


def test_dimensions_that_there_are_not_cannot_go():
    assert not fit(operator_of("Squeeze", 1, dims=[2]), [(2, 1)])


def test_of_others_nothing_is_known():
    shapes = itertools.repeat((1, 2), 2)
    assert fit(operator_of("MatMul", 2), list(shapes))
