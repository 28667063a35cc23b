"""`numbering`: operators by names of no net, that do what they did."""

import contextlib

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import optimize, workspace_blobs
from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.operator_arguments import net, set_arguments, string, strings
from caffe2_recurrent.operators import BACKWARD_PASS_OF, opened, read_before_written
from caffe2_recurrent.rewriting.engine_blobs import CONVOLUTION_BUFFERS, ON_CPU
from caffe2_recurrent.rewriting.trials.numbering import Numbering, operators_of
from cells import CELLS

made = core.CreateOperator


def numbered(*operators):
    return Numbering().operators(operators)


def test_names_do_not_tell_whose_they_are():
    assert numbered(made("Mul", ["a", "b"], ["c"])) == numbered(made("Mul", ["x/b", "x/a"], ["x/c"]))


@pytest.mark.parametrize(
    "other",
    [
        made("Mul", ["a", "a"], ["c"]),
        made("Mul", ["a", "b"], ["a"]),
        made("Mul", ["a", "b"], ["b"]),
        made("Add", ["a", "b"], ["c"]),
        made("Mul", ["a", "b"], ["c"], broadcast=1),
        made("Mul", ["a", "b"], ["c"], engine="ENGINE"),
        made("Mul", ["a", "b"], ["c"], device_option=core.DeviceOption(caffe2_pb2.IDEEP)),
        made("Mul", ["a", "b"], ["c"], control_input=["d"]),
    ],
)
def test_what_they_do_counts(other):
    assert numbered(other) != numbered(made("Mul", ["a", "b"], ["c"]))


def test_their_order_counts():
    first, second = made("Tanh", ["a"], ["b"]), made("Sigmoid", ["a"], ["b"])
    assert numbered(first, second) != numbered(second, first)


def test_who_made_them_does_not_count():
    operator = made("Tanh", ["a"], ["b"], name="somebody's")
    operator.debug_info = "made in a file"
    assert numbered(operator) == numbered(made("Tanh", ["a"], ["b"]))


def test_what_they_fail_with_does_not_count():
    first, second = (made("Assert", ["same"], [], error_msg="'{}' is too wide".format(blob)) for blob in "ab")
    assert numbered(first) == numbered(second) == numbered(made("Assert", ["same"], []))


def test_they_stay_as_they_were():
    operator = made("Tanh", ["a"], ["b"], name="somebody's")
    before = operator.SerializeToString()
    numbered(operator)
    assert operator.SerializeToString() == before


def test_given_names_stay():
    numbering = Numbering({"a": "y"})
    (operator,) = operators_of(numbering.operators([made("Tanh", ["a"], ["b"])]))
    assert list(operator.input) == ["y"] == [numbering.blob("a")]
    assert list(operator.output) == [numbering.blob("b")] and numbering.blob("b") not in ("y", "b")


def test_the_engine_still_finds_what_it_names_after_others():
    numbering = Numbering()
    a, x = numbering.blob("a"), numbering.blob("x")
    assert numbering.blob("a_grad") == a + "_grad" and numbering.blob("a_grad_grad") == a + "_grad_grad"
    assert numbering.blob(ON_CPU.format("x_grad", "Relu")) == ON_CPU.format(x + "_grad", "Relu")
    # Whichever is met first.
    assert numbering.blob("z_grad") == numbering.blob("z") + "_grad"
    for kept in ("", "timestep", *CONVOLUTION_BUFFERS):
        assert numbering.blob(kept) == kept


def test_no_two_blobs_become_one():
    blobs = ["a", "b", "blob#0", "blob#1", "a_grad", "b_grad", "_grad", "", "timestep", ON_CPU.format("a", "Relu")]
    numbering = Numbering({"y": "y"})
    assert len({numbering.blob(blob) for blob in blobs}) == len(blobs)


def a_loop(scope, **arguments):
    inner = core.Net(scope + "step")
    inner.Proto().op.extend([made("Tanh", [scope + "x_t"], [scope + "h_t"], name=scope)])
    named = {"timestep": scope + "t", scope + "w_grad.rename": scope + "w_sum"}
    return made(
        "RecurrentNetwork",
        [scope + "x"],
        [scope + "y"],
        step_net=inner.Proto(),
        link_internal=[scope + "x_t"],
        **{**named, **arguments},
    )


def test_what_a_loop_says_of_its_step_does_not_tell_whose_it_is():
    first, second = numbered(a_loop("first/")), numbered(a_loop("second/", **{BACKWARD_PASS_OF: "second/z"}))
    assert first == second
    (loop,) = operators_of(first)
    assert not [name for name in names_of(loop) if "first" in name]
    assert string(loop, "timestep", "") != "timestep"
    step_net = net(loop, "step_net")
    assert list(step_net.op[0].input) == strings(loop, "link_internal")
    assert "first" not in str(loop)


def test_a_loop_that_does_not_say_how_the_number_of_the_step_is_called():
    loop = a_loop("first/")
    set_arguments(loop, {"step_net": caffe2_pb2.NetDef(op=[made("Copy", ["timestep"], ["number"])])})
    (loop,) = operators_of(numbered(loop))
    assert list(net(loop, "step_net").op[0].input) == ["timestep"]


def branch(name, blob):
    return caffe2_pb2.NetDef(name=name, op=[made("Tanh", [blob], ["z"])])


def test_nets_of_one_name_stay_nets_of_one_name():
    """The engine finds the nets of steps by their names."""
    both = [made("If", ["c"], ["z"], then_net=branch(name, "x")) for name in ("a", "b", "a")]
    first, second, third = (net(operator, "then_net").name for operator in operators_of(numbered(*both)))
    assert first == third != second and not {first, second} & {"a", "b"}


def test_what_is_done_in_another_workspace():
    """Its net has names of its own for blobs around it."""
    scopes = []
    for scope in ("first/", "second/"):
        inner = caffe2_pb2.NetDef(name=scope, op=[made("Tanh", [scope + "x"], [scope + "y"])])
        bound = {"inner_blobs": [scope + "x", scope + "y"], "outer_blobs_idx": [0, 1]}
        blobs = [scope + blob for blob in ("x", "scope")], [scope + blob for blob in ("z", "scope")]
        scopes.append(numbered(made("Do", *blobs, net=inner, **bound)))
    assert scopes[0] == scopes[1]
    (operator,) = operators_of(scopes[0])
    (inside,) = net(operator, "net").op
    assert strings(operator, "inner_blobs") == [*inside.input, *inside.output]


@contextlib.contextmanager
def running_numbered():
    """Nets with loops run by other names once; what they make is there by its own."""
    run, seen = workspace.RunNetOnce, []

    def run_numbered(proto):
        proto = proto if isinstance(proto, caffe2_pb2.NetDef) else proto.Proto()
        if all(operator.type != support.LOOP for operator in opened(proto.op, with_steps=False)):
            return run(proto)
        numbering = Numbering()
        operators = operators_of(numbering.operators(proto.op))
        for blob in read_before_written(proto.op):
            workspace.FeedBlob(numbering.blob(blob), workspace.FetchBlob(blob))
        result = run(caffe2_pb2.NetDef(name="numbered", op=operators))
        for blob in (blob for operator in proto.op for blob in operator.output):
            if workspace_blobs.shape(numbering.blob(blob)) is not None:
                workspace.FeedBlob(blob, workspace.FetchBlob(numbering.blob(blob)))
        seen.append(operators)
        return result

    workspace.RunNetOnce = run_numbered
    try:
        yield seen
    finally:
        workspace.RunNetOnce = run


@pytest.mark.parametrize("is_optimised", [False, True], ids=["as built", "optimised"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, is_optimised, backward_loops):
    with running_numbered() as seen:
        with support.optimising() if is_optimised else contextlib.nullcontext():
            cell.assert_right(executor=False)
    assert seen


@pytest.mark.parametrize("options", [{}, {"gradients": False}, {"memory_optimization": True}], ids=str)
def test_steps_that_are_written_out(options, unrolled_steps):
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    assert optimize(model, even_if_slower=True).counts["unrolled_steps"]
    with running_numbered() as seen:
        support.assert_same(support.run(model, blobs), expected)
    assert seen
