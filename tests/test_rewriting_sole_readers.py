"""Operators that may take a result over from the one that makes it, and those that may not."""

import pytest

import comparing
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.rewriting.steps.sole_readers import drop_reader, sole_reader
from step_nets import Maker
from test_rewriting_rules import loop_of, made


def read_loop(reads):
    """The loop of a step of a product, what `reads` it, and its use, with gradients."""
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Mul([reads(make, make.fc(h, "u"), x), h], "h_t"))
    net, outputs = comparing.build(recurrent_net, make.done())
    net.AddGradientOperators({outputs[0]: net.AddExternalInput("seed")})
    return loop_of(net)


def apart(make, u, x):
    return make.cell.Sum([u, x], "total")


def in_place(make, u, x):
    make.cell.Sum([u, x], [u])
    return u


def later(make, u, x):
    make.cell.Tanh(x, "v")
    return make.cell.Sum([u, x], "total")


@pytest.mark.parametrize("reads, found", [(apart, 1), (in_place, 1), (later, 2)], ids=["apart", "in place", "later"])
def test_it_is_found(reads, found):
    loop = read_loop(reads)
    assert sole_reader(loop, loop.operators, 0) == found


def exported(loop):
    loop.net.external_output.append("u")


def linked(loop):
    loop.links.append(loop.links[0]._replace(inner="u", outer="others"))


def read_by_the_backward_step(loop):
    loop.gradient.operators.append(made("Tanh", ["u"], ["again"]))


def read_twice(loop):
    loop.operators.append(made("Tanh", ["u"], ["again"]))


def read_by_nobody(loop):
    del loop.operators[1]


def result_written_before(loop):
    loop.operators.insert(1, made("Tanh", ["h_prev"], ["total"]))


def result_read_before(loop):
    loop.operators.insert(1, made("Tanh", ["total"], ["again"]))


def other_input_written_before(loop):
    loop.operators.insert(1, made("Tanh", ["h_prev"], ["x_t"]))


NEEDED = [exported, linked, read_by_the_backward_step]
BEFORE = [result_written_before, result_read_before, other_input_written_before]


@pytest.mark.parametrize("plant", [*NEEDED, *BEFORE, read_twice, read_by_nobody], ids=lambda plant: plant.__name__)
def test_near_misses(plant):
    loop = read_loop(apart)
    plant(loop)
    assert sole_reader(loop, loop.operators, 0) is None


@pytest.mark.parametrize("plant", NEEDED, ids=lambda plant: plant.__name__)
def test_what_is_needed_of_a_reader_in_place(plant):
    """What has that name is what the reader makes."""
    loop = read_loop(in_place)
    plant(loop)
    assert sole_reader(loop, loop.operators, 0) == 1


def test_results_of_the_backward_step():
    """It is not known there who needs them."""
    loop = read_loop(apart)
    assert sole_reader(loop, list(loop.operators), 0) is None


@pytest.mark.parametrize("reads, left", [(apart, ["total"]), (in_place, ["u"])], ids=["gone", "still there"])
def test_blobs_that_all_steps_share(reads, left):
    loop = read_loop(reads)
    loop.shared[:] = list(dict.fromkeys(["u", *left]))
    assert drop_reader(loop, loop.operators, 0, 1).type == "Sum"
    assert loop.shared == left and [operator.type for operator in loop.operators] == ["FC", "Mul"]
