"""Whether weights are equal to copies of them, `same_weights`: any change is seen, of any kind and in any of them."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace
from hypothesis import given, settings
from hypothesis import strategies as st

from caffe2_recurrent.rewriting import same_weights
from caffe2_recurrent.rewriting.same_weights import DISTANCE, EQUAL
from caffe2_recurrent.rewriting.trials import trial

WEIGHTS = {"u": (6, 5), "b": (6,), "v": (3, 2, 7), "w": (4, 9)}
COPIES = {blob: blob + "_copy" for blob in WEIGHTS}
ALL_WAYS = {
    "equal": dict.fromkeys(WEIGHTS, EQUAL),
    "distances": {"u": DISTANCE, "b": EQUAL, "v": DISTANCE, "w": DISTANCE},
    "one distance": {"u": EQUAL, "b": EQUAL, "v": EQUAL, "w": DISTANCE},
}
WAYS = pytest.mark.parametrize("ways", ALL_WAYS.values(), ids=list(ALL_WAYS))


@pytest.fixture
def values():
    random = np.random.RandomState(0)
    return {blob: random.uniform(-1, 1, shape).astype(np.float32) for blob, shape in WEIGHTS.items()}


def comparing(ways, weights=WEIGHTS):
    """A net that says whether any of the weights is not equal to its copy."""
    loop = trial.lone_loop([*weights, *COPIES.values(), "result"])
    copies = {blob: COPIES[blob] for blob in weights}
    return caffe2_pb2.NetDef(name="comparing", op=same_weights.compare(loop, ways, copies, "result"))


def is_different(net, values, copies):
    for blob, value in [*values.items(), *((COPIES[blob], value) for blob, value in copies.items())]:
        workspace.FeedBlob(blob, value)
    workspace.RunNetOnce(net)
    found = workspace.FetchBlob("result")
    assert found.dtype == bool and found.size == 1
    return bool(found.reshape(()))


@WAYS
def test_equal_ones(ways, values):
    net = comparing(ways)
    zero = {blob: np.zeros_like(value) for blob, value in values.items()}
    assert not is_different(net, values, {blob: value.copy() for blob, value in values.items()})
    assert not is_different(net, zero, {blob: -value for blob, value in zero.items()})


CHANGES = {
    "the next number": lambda number: np.nextafter(number, np.float32(2)),
    "the sign": np.negative,
    "much": lambda number: number + np.float32(1e30),
    "infinite": lambda number: np.float32(np.inf),
    "no number": lambda number: np.float32(np.nan),
}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(ALL_WAYS)), st.sampled_from(sorted(CHANGES)), st.booleans())
def test_a_change_of_one_number_is_seen(data, way, change, both):
    random = np.random.RandomState(data.draw(st.integers(0, 1000)))
    values = {blob: random.uniform(-1, 1, shape).astype(np.float32) for blob, shape in WEIGHTS.items()}
    copies = {blob: value.copy() for blob, value in values.items()}
    blob = data.draw(st.sampled_from(sorted(WEIGHTS)))
    position = data.draw(st.integers(0, values[blob].size - 1))
    for changed in (values, copies) if both else (values,):
        changed[blob].flat[position] = CHANGES[change](changed[blob].flat[position])
    # What is no number differs from itself. What is infinite does where it is subtracted.
    stays = both and change != "no number" and not (change == "infinite" and ALL_WAYS[way][blob] == DISTANCE)
    assert is_different(comparing(ALL_WAYS[way]), values, copies) != stays


@WAYS
@pytest.mark.parametrize("shape", [(0,), (5, 6), (30,), (6, 4), (6, 5, 1)])
def test_copies_of_other_shapes_are_no_error(ways, values, shape):
    """Of none if a run has failed, and of weights that have been fed with other sizes since."""
    copies = {**values, "u": np.resize(values["u"], shape)}
    assert is_different(comparing(ways), values, copies)
    assert is_different(comparing(ways), {**values, "u": copies["u"]}, values)


@pytest.mark.parametrize("way", [EQUAL, DISTANCE])
@pytest.mark.parametrize("blob", ["u", "v", "w"])
def test_one_alone(way, blob, values):
    net = comparing({blob: way}, [blob])
    assert not is_different(net, {blob: values[blob]}, {blob: values[blob]})
    assert is_different(net, {blob: values[blob]}, {blob: 2 * values[blob]})


def test_a_pair_that_is_not_compared_would_show(values):
    """The tests above would see it."""
    net = comparing(ALL_WAYS["distances"])
    (inner,) = [given.n for given in net.op[-1].arg if given.name == "then_net"]
    left_out = next(operator for operator in inner.op if "v" in operator.input)
    left_out.input[1] = "v"
    assert not is_different(net, values, {**values, "v": 2 * values["v"]})


@pytest.mark.parametrize(
    "shape, kind, expected",
    [
        ((64, 64), np.float32, DISTANCE),
        ((4, 16, 64), np.float32, DISTANCE),
        ((256, 16), np.float32, DISTANCE),
        ((63, 64), np.float32, EQUAL),
        ((4096,), np.float32, EQUAL),
        ((512, 15), np.float32, EQUAL),
        ((64, 64), np.float64, EQUAL),
        ((64, 64), np.int32, EQUAL),
    ],
)
def test_large_matrices_of_floats_by_their_distance(shape, kind, expected):
    workspace.FeedBlob("w", np.zeros(shape, kind))
    assert same_weights.way("w", shape) == expected


def test_what_is_not_known():
    assert same_weights.way("w", (64, 64)) == EQUAL
    workspace.FeedBlob("w", np.zeros((64, 64), np.float32))
    assert same_weights.way("w", None) == EQUAL
