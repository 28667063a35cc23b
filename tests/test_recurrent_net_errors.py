"""What `recurrent_net` refuses: the whole text of each error, its type, and that nothing was changed."""

import warnings

import numpy as np
import pytest
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import recurrent_net
from errors_support import CALLS, Loop, listed, snapshot


def two_states(cell, x, h):
    (c,) = cell.AddScopedExternalInputs("c_prev")
    cell.Mul([x, h], "h_t")
    cell.Mul([x, c], "c_t")


BOTH = [("h_prev", "H"), ("c_prev", "C")]
PAIRS = "(step-net blob, outer blob) pairs"
POSITIONS = "outputs_with_grads takes positions of outputs, like (0, 2), or 'auto'; got "

WRONG_TYPES = {
    "inputs missing": ({"inputs": None}, "inputs must be a list of " + PAIRS + "; got None of type NoneType"),
    "inputs an array without dimensions": (
        {"inputs": np.array(1)},
        "inputs must be a list of " + PAIRS + "; got array(1) of type ndarray",
    ),
    "inputs a name": ({"inputs": "x_t"}, "inputs must be a list of " + PAIRS + "; got 'x_t' of type str"),
    "inputs bytes": ({"inputs": b"x_t"}, "inputs must be a list of " + PAIRS + "; got b'x_t' of type bytes"),
    # Walking a dict gives its keys alone.
    "inputs a dict": (
        {"inputs": {"x_t": "X"}},
        "inputs must be a list of " + PAIRS + "; got {'x_t': 'X'} of type dict",
    ),
    "inputs a blob": (
        {"inputs": core.BlobReference("x_t")},
        "inputs must be a list of " + PAIRS + '; got BlobReference("x_t") of type BlobReference',
    ),
    # A string of two characters must not pass for a pair.
    "pair a name": ({"inputs": ["xy"]}, "inputs takes " + PAIRS + "; got 'xy' of type str"),
    "pair of bytes": ({"inputs": [(b"x_t", "X")]}, "inputs takes " + PAIRS + "; got (b'x_t', 'X') of type tuple"),
    "pair too long": ({"inputs": [("x_t", "X", 3)]}, "inputs takes " + PAIRS + "; got ('x_t', 'X', 3) of type tuple"),
    "pair too short": ({"inputs": [("x_t",)]}, "inputs takes " + PAIRS + "; got ('x_t',) of type tuple"),
    "pair with None": ({"inputs": [("x_t", None)]}, "inputs takes " + PAIRS + "; got ('x_t', None) of type tuple"),
    "pair an array": (
        {"inputs": np.array([["x_t", "X"]])},
        "inputs takes " + PAIRS + "; got array(['x_t', 'X'], dtype='<U3') of type ndarray",
    ),
    "initial a dict": (
        {"initial_cell_inputs": {"h_prev": "H"}},
        "initial_cell_inputs must be a list of " + PAIRS + "; got {'h_prev': 'H'} of type dict",
    ),
    "initial with a value": (
        {"initial_cell_inputs": [("h_prev", 0.0)]},
        "initial_cell_inputs takes " + PAIRS + "; got ('h_prev', 0.0) of type tuple",
    ),
    "links missing": (
        {"links": None},
        "links must map state inputs of the step to its outputs; got None of type NoneType",
    ),
    "links a list": (
        {"links": [("h_prev", "h_t")]},
        "links must map state inputs of the step to its outputs; got [('h_prev', 'h_t')] of type list",
    ),
    "link to None": (
        {"links": {"h_prev": None}},
        "links takes blobs or their names; got 'h_prev' of type str: None of type NoneType",
    ),
    "link of a number": (
        {"links": {0: "h_t", "h_prev": "h_t"}},
        "links takes blobs or their names; got 0 of type int: 'h_t' of type str",
    ),
    "timestep a number": ({"timestep": 0}, "timestep must be a blob or its name; got 0 of type int"),
    "timestep bytes": ({"timestep": b"t"}, "timestep must be a blob or its name; got b't' of type bytes"),
    "scope a number": ({"scope": 3}, "scope must be a string; got 3 of type int"),
    "positions missing": ({"outputs_with_grads": None}, POSITIONS + "None of type NoneType"),
    "positions a number": ({"outputs_with_grads": 0}, POSITIONS + "0 of type int"),
    "positions a digit": ({"outputs_with_grads": "0"}, POSITIONS + "'0' of type str"),
    "positions bytes": ({"outputs_with_grads": b"auto"}, POSITIONS + "b'auto' of type bytes"),
    "positions AUTO": ({"outputs_with_grads": "AUTO"}, POSITIONS + "'AUTO' of type str"),
    "position a float": (
        {"outputs_with_grads": [0.0]},
        "outputs_with_grads takes whole numbers; got 0.0 of type float",
    ),
    # True is 1 to Python, but nobody who writes it means the output at position 1.
    "position a bool": (
        {"outputs_with_grads": [True]},
        "outputs_with_grads takes whole numbers; got True of type bool",
    ),
    "position a flag of numpy": (
        {"outputs_with_grads": [np.bool_(True)]},
        "outputs_with_grads takes whole numbers; got True of type bool_",
    ),
    "position a float of numpy": (
        {"outputs_with_grads": np.array([0.0])},
        "outputs_with_grads takes whole numbers; got 0.0 of type float64",
    ),
    # Arrays of one element have __index__.
    "position an array": (
        {"outputs_with_grads": np.array([[1]])},
        "outputs_with_grads takes whole numbers; got array([1]) of type ndarray",
    ),
    "position a blob": (
        {"outputs_with_grads": ["h_t_all"]},
        "outputs_with_grads takes whole numbers; got 'h_t_all' of type str",
    ),
    "recompute a name": (
        {"recompute_blobs_on_backward": "h_t"},
        "recompute_blobs_on_backward must be a list of step-net blobs; got 'h_t' of type str",
    ),
    "recompute a dict": (
        {"recompute_blobs_on_backward": {"h_t": 1}},
        "recompute_blobs_on_backward must be a list of step-net blobs; got {'h_t': 1} of type dict",
    ),
    "recompute bytes": (
        {"recompute_blobs_on_backward": [b"h_t"]},
        "recompute_blobs_on_backward takes blobs or their names; got b'h_t' of type bytes",
    ),
    "recompute nested": (
        {"recompute_blobs_on_backward": [["h_t"]]},
        "recompute_blobs_on_backward takes blobs or their names; got ['h_t'] of type list",
    ),
    "forward_only missing": ({"forward_only": None}, "forward_only must be True or False; got None of type NoneType"),
    # Any text is true to Python.
    "forward_only a text": ({"forward_only": "no"}, "forward_only must be True or False; got 'no' of type str"),
    "forward_only a number": ({"forward_only": 2}, "forward_only must be True or False; got 2 of type int"),
    "forward_only a float": ({"forward_only": 1.0}, "forward_only must be True or False; got 1.0 of type float"),
    "forward_only an array": (
        {"forward_only": np.array([1])},
        "forward_only must be True or False; got array([1]) of type ndarray",
    ),
    "forward_only two flags": (
        {"forward_only": np.array([0, 1])},
        "forward_only must be True or False; got array([0, 1]) of type ndarray",
    ),
}


@pytest.mark.parametrize("changes, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_argument_of_the_wrong_type(changes, text):
    assert Loop().refused(TypeError, **changes) == CALLS + text


def test_pair_instead_of_a_list_of_pairs():
    assert Loop().refused(TypeError, inputs=("x_t", "X")) == listed(
        "recurrent_net",
        "inputs takes (step-net blob, outer blob) pairs; got 'x_t' of type str",
        "inputs takes (step-net blob, outer blob) pairs; got 'X' of type str",
    )


def test_long_value_is_shown_shortened():
    shown = repr(["x"] * 40)[:57] + "..."
    text = Loop().refused(TypeError, links=["x"] * 40)
    assert text == CALLS + "links must map state inputs of the step to its outputs; got " + shown + " of type list"


@pytest.mark.parametrize("role", ["net", "cell_net"])
def test_not_a_net(role):
    text = Loop().refused(TypeError, **{role: "outer"})
    assert text == CALLS + role + " must be a core.Net; got 'outer' of type str"


@pytest.mark.parametrize("role", ["net", "cell_net"])
def test_model_instead_of_its_net(role):
    text = Loop().refused(TypeError, **{role: ModelHelper("model")})
    assert text.startswith(CALLS + role + " must be a core.Net; got <caffe2.python.model_helper.ModelHelper object")
    assert text.endswith(" of type ModelHelper; pass its .net")


@pytest.mark.parametrize("role", ["net", "cell_net"])
def test_proto_instead_of_a_net(role):
    text = Loop().refused(TypeError, **{role: core.Net("other").Proto()})
    assert text.startswith(CALLS + role + ' must be a core.Net; got name: "other') and text.endswith(" of type NetDef")


def test_all_wrong_types_in_one_error():
    text = Loop().refused(
        TypeError,
        net=None,
        inputs=None,
        initial_cell_inputs=[3],
        links=[],
        timestep=1,
        scope=2,
        outputs_with_grads=[0.5],
        recompute_blobs_on_backward=3,
        forward_only="x",
    )
    assert text == listed(
        "recurrent_net",
        "net must be a core.Net; got None of type NoneType",
        "inputs must be a list of (step-net blob, outer blob) pairs; got None of type NoneType",
        "initial_cell_inputs takes (step-net blob, outer blob) pairs; got 3 of type int",
        "links must map state inputs of the step to its outputs; got [] of type list",
        "timestep must be a blob or its name; got 1 of type int",
        "scope must be a string; got 2 of type int",
        "outputs_with_grads takes whole numbers; got 0.5 of type float",
        "recompute_blobs_on_backward must be a list of step-net blobs; got 3 of type int",
        "forward_only must be True or False; got 'x' of type str",
    )


WRONG_ROLES = {
    "no state": (
        {"initial_cell_inputs": [], "links": {}, "outputs_with_grads": ()},
        "initial_cell_inputs is empty; the outputs are those of the states, so at least one is needed",
    ),
    "no state with 'auto'": (
        {"initial_cell_inputs": [], "links": {}, "outputs_with_grads": "auto"},
        "initial_cell_inputs is empty; the outputs are those of the states, so at least one is needed",
    ),
    "sequence with an empty name outside": (
        {"inputs": [("x_t", "")]},
        "inputs or initial_cell_inputs has an outer blob with an empty name",
    ),
    "state with an empty name outside": (
        {"initial_cell_inputs": [("h_prev", core.BlobReference(""))]},
        "inputs or initial_cell_inputs has an outer blob with an empty name",
    ),
    "no sequence": (
        {"inputs": []},
        "inputs is empty; the number of steps comes from a sequence, so at least one is needed",
    ),
    "unknown sequence": (
        {"inputs": [("y_t", "X")]},
        "sequence 'y_t' is no external input of the step net, which has 'x_t', 'h_prev'; "
        "declare it with AddExternalInput",
    ),
    "sequence that the step computes": (
        {"inputs": [("x_t", "X"), ("h_t", "Y")]},
        "sequence 'h_t' is no external input of the step net, which has 'x_t', 'h_prev'; "
        "declare it with AddExternalInput",
    ),
    "unknown timestep": (
        {"timestep": "clock"},
        "timestep 'clock' is no external input of the step net, which has 'x_t', 'h_prev'; "
        "declare it with AddExternalInput",
    ),
    "sequence twice": ({"inputs": [("x_t", "X"), ("x_t", "Y")]}, "sequence 'x_t' is given twice"),
    # The same text is not repeated.
    "sequence thrice": ({"inputs": [("x_t", "X")] * 3}, "sequence 'x_t' is given twice"),
    "state twice": ({"initial_cell_inputs": [("h_prev", "H"), ("h_prev", "I")]}, "state 'h_prev' is given twice"),
    "sequence and state": (
        {"inputs": [("x_t", "X"), ("h_prev", "Y")]},
        "'h_prev' is given as sequence and as state; it can be one of them",
    ),
    "sequence and timestep": (
        {"timestep": "x_t"},
        "'x_t' is given as sequence and as timestep; it can be one of them",
    ),
    "link of an unknown state": (
        {"links": {"h_prev": "h_t", "c_prev": "c_t"}},
        "links names 'c_prev', which has no initial value; initial_cell_inputs has 'h_prev'",
    ),
    "state without a link": (
        {"links": {}},
        "state 'h_prev' has no link to the step output that becomes its next value",
    ),
    "link to an unknown blob": (
        {"links": {"h_prev": "z_t"}},
        "state 'h_prev' is linked to 'z_t', which no step operator writes; the step writes 'h_t'",
    ),
    "link to an input": (
        {"links": {"h_prev": "x_t"}},
        "state 'h_prev' is linked to 'x_t', which no step operator writes; the step writes 'h_t'",
    ),
    "link to an empty name": (
        {"links": {"h_prev": ""}},
        "state 'h_prev' is linked to an empty name; name the step output that becomes its next value",
    ),
    "link to itself": (
        {"links": {"h_prev": "h_prev"}},
        "state 'h_prev' is linked to itself; write its next value to a blob of its own",
    ),
    "position too high": (
        {"outputs_with_grads": [2]},
        "outputs_with_grads has position 2, but the outputs are 0 'h_t_all', 1 'h_t_last'",
    ),
    "position below zero": (
        {"outputs_with_grads": [-1]},
        "outputs_with_grads has position -1, but the outputs are 0 'h_t_all', 1 'h_t_last'",
    ),
    "position twice": ({"outputs_with_grads": [1, 0, 1]}, "outputs_with_grads has position 1 ('h_t_last') twice"),
    "unknown blob to recompute": (
        {"recompute_blobs_on_backward": ["z", "h_t", "x_t"]},
        "recompute_blobs_on_backward names 'z', 'x_t', which the step does not compute; it computes 'h_t'",
    ),
    # Names are never taken for templates.
    "braces in a name": (
        {"links": {"h_prev": "h_{0}"}},
        "state 'h_prev' is linked to 'h_{0}', which no step operator writes; the step writes 'h_t'",
    ),
    "letters of any language": (
        {"links": {"h_prev": "h_später"}},
        "state 'h_prev' is linked to 'h_später', which no step operator writes; the step writes 'h_t'",
    ),
}


@pytest.mark.parametrize("changes, text", WRONG_ROLES.values(), ids=list(WRONG_ROLES))
def test_role_that_does_not_fit_the_step_net(changes, text):
    assert Loop().refused(ValueError, **changes) == CALLS + text


@pytest.mark.parametrize("changes", [{"inputs": [("x_t", "")]}, {"initial_cell_inputs": [("h_prev", "")]}], ids=str)
def test_empty_names_outside_are_empty_under_a_name_scope_too(changes):
    loop = Loop()
    with core.NameScope("outside"), pytest.raises(ValueError) as caught:
        loop.call(**changes)
    assert str(caught.value) == CALLS + "inputs or initial_cell_inputs has an outer blob with an empty name"
    assert not loop.net.Proto().op


def test_link_of_a_state_that_no_pair_names():
    text = Loop(two_states).refused(ValueError, initial_cell_inputs=BOTH, links={"h_prev": "h_t"})
    assert text == CALLS + "state 'c_prev' has no link to the step output that becomes its next value"


def test_swapped_pairs():
    swapped = "is no external input of the step net, but '{}' is; pairs are (step-net blob, outer blob), and these {}"
    text = Loop().refused(ValueError, inputs=[("X", "x_t")], initial_cell_inputs=[("H", "h_prev")], links={"H": "h_t"})
    assert text == listed(
        "recurrent_net",
        "sequence 'X' " + swapped.format("x_t", "look swapped"),
        "state 'H' " + swapped.format("h_prev", "look swapped"),
    )


def test_state_that_the_step_net_does_not_declare():
    text = Loop().refused(ValueError, initial_cell_inputs=BOTH, links={"h_prev": "h_t", "c_prev": "c_t"})
    assert text == listed(
        "recurrent_net",
        "state 'c_prev' is no external input of the step net, which has 'x_t', 'h_prev'; "
        "declare it with AddExternalInput",
        "state 'c_prev' is linked to 'c_t', which no step operator writes; the step writes 'h_t'",
    )


@pytest.mark.parametrize("kind, options", [("Alias", {}), ("AliasWithName", {}), ("ATen", {"operator": "tanh"})])
def test_state_output_in_memory_of_its_own(kind, options):
    def step(cell, x, h):
        getattr(cell, kind)([cell.Mul([x, h], "z")], ["h_t"], **options)

    text = Loop(step).refused(ValueError, forward_only=True)
    assert text == CALLS + (
        "step operator 1 ({}) writes state output 'h_t' to memory of its own, where the engine does not look; "
        "write to another blob, and link a Copy of that".format(kind)
    )


def test_two_states_on_one_output():
    links = {"h_prev": "h_t", "c_prev": "h_t"}
    text = Loop(two_states).refused(ValueError, initial_cell_inputs=BOTH, links=links)
    assert text == CALLS + "states 'h_prev', 'c_prev' are linked to the same output 'h_t'; each needs its own"


def test_one_state_under_two_names():
    """Under a NameScope the short and the full name mean the same blob; only one link can hold."""
    with core.NameScope("a"):
        cell = core.Net("step")
        x, h = cell.AddScopedExternalInputs("x_t", "h_prev")
        for output in ("g_t", "h_t"):
            cell.Mul([x, h], output)
        loop = Loop()
        loop.cell = cell
        before = snapshot(loop.net), snapshot(cell)
        with pytest.raises(TypeError) as caught:
            loop.call(links={"h_prev": "h_t", "a/h_prev": "g_t"})
    assert str(caught.value) == CALLS + "links names state 'a/h_prev' twice"
    assert (snapshot(loop.net), snapshot(cell)) == before


def test_names_under_another_scope_than_the_step_nets():
    with core.NameScope("a"):
        cell = core.Net("step")
        cell.Mul(list(cell.AddScopedExternalInputs("x_t", "h_prev")), "h_t")
    loop = Loop()
    loop.cell = cell
    declared = "is no external input of the step net, which has 'a/x_t', 'a/h_prev'; declare it with AddExternalInput"
    assert loop.refused(ValueError) == listed(
        "recurrent_net",
        "sequence 'x_t' " + declared,
        "state 'h_prev' " + declared,
        "state 'h_prev' is linked to 'h_t', which no step operator writes; the step writes 'a/h_t'",
    )


def test_link_to_an_external_input_that_the_step_overwrites():
    def overwrite(cell, x, h):
        cell.Mul([x, h], x)

    text = Loop(overwrite).refused(ValueError, links={"h_prev": "x_t"})
    assert text == CALLS + (
        "state 'h_prev' is linked to 'x_t', which is an external input of the step; write to a blob of its own"
    )


@pytest.mark.parametrize("name", ["timestep", "clock"])
def test_operator_that_writes_the_timestep(name):
    def count(cell, x, h):
        (clock,) = cell.AddScopedExternalInputs(name)
        cell.Mul([x, h], "h_t")
        cell.Copy("h_t", clock)

    text = Loop(count).refused(ValueError, timestep=None if name == "timestep" else name)
    assert text == CALLS + "step operator 1 (Copy) writes the timestep '{}', which the engine sets".format(name)


def append(cell, kind, inputs, outputs):
    """Add an operator as a step net loaded from a file would have it, its inputs undeclared."""
    cell.Proto().op.extend([core.CreateOperator(kind, inputs, outputs)])


def test_operator_that_reads_unknown_blobs():
    def build(cell, x, h):
        append(cell, "Sum", ["x_t", "nowhere", "h_prev", "elsewhere"], ["h_t"])

    assert Loop(build).refused(ValueError) == CALLS + (
        "step operator 0 (Sum) reads 'nowhere', 'elsewhere', neither written before it nor an external input of the "
        "step net"
    )


def test_operators_in_the_wrong_order():
    def build(cell, x, h):
        append(cell, "Mul", ["z", "h_prev"], ["h_t"])
        append(cell, "Tanh", ["x_t"], ["z"])

    assert Loop(build).refused(ValueError) == CALLS + (
        "step operator 0 (Mul) reads 'z', neither written before it nor an external input of the step net"
    )


def test_declared_outputs_that_nobody_writes():
    def build(cell, x, h):
        cell.Mul([x, h], "h_t")
        cell.Proto().external_output.extend(["h_t", "ghost", "shadow"])

    text = Loop(build).refused(ValueError)
    assert text == CALLS + (
        "the step net declares external outputs that no operator writes: 'ghost', 'shadow'; write or remove them"
    )


def test_step_net_without_operators():
    text = Loop(lambda cell, x, h: None).refused(ValueError)
    assert text == CALLS + ("state 'h_prev' is linked to 'h_t', which no step operator writes; the step writes nothing")


SHARED = "the step net computes or receives {}, of which net '{}' has a blob of the same name; "
SHARED += "all steps would share that one: rename it in the step net"


@pytest.mark.parametrize("names", [["x_t"], ["h_prev"], ["h_t"], ["h_prev", "h_t", "x_t"]], ids=",".join)
def test_step_net_and_net_have_a_blob_of_one_name(names):
    loop = Loop()
    loop.net.AddExternalInput(*names)
    shown = ", ".join("'{}'".format(name) for name in names)
    assert loop.refused(ValueError) == CALLS + SHARED.format(shown, loop.net.Name())


def test_sequence_with_one_name_inside_and_outside():
    """The outer blob is not in the net yet, but this very call would put it there."""
    loop = Loop()
    assert loop.refused(ValueError, inputs=[("x_t", "x_t")]) == CALLS + SHARED.format("'x_t'", loop.net.Name())


OUTSIDE = "the step net has {}, names that the loop needs outside; rename them in the step net"
INSIDE = "the step net has {}, names that its backward step needs for gradients; rename them"


def with_inner(*names):
    """A step whose blobs between x and the product with h have these names."""

    def build(cell, x, h):
        blob = x
        for name in names:
            blob = cell.Tanh(blob, name)
        cell.Mul([blob, h], "h_t")

    return build


def with_reference(name):
    def build(cell, x, h):
        cell.Mul([cell.Mul([x, cell.AddExternalInput(name)], "xr"), h], "h_t")

    return build


@pytest.mark.parametrize(
    "name",
    [
        "h_t_all",
        "h_t_last",
        "loop/h_prev_states",
        "loop/h_prev_states_grad",
        "loop/step_workspaces",
        "X_grad",
        "H_grad",
    ],
)
def test_step_blob_with_a_name_that_the_loop_makes_outside(name):
    loop = Loop(with_inner(name))
    assert loop.refused(ValueError, scope="loop") == CALLS + OUTSIDE.format("'{}'".format(name))


def test_step_blob_with_a_generated_name():
    """Without `scope`, the names outside begin with the name of the net."""
    loop = Loop()
    name = loop.net.Name() + "/recurrent/h_prev_states"
    loop.cell = Loop(with_inner(name)).cell
    assert loop.refused(ValueError) == CALLS + OUTSIDE.format("'{}'".format(name))


def test_all_step_blobs_with_names_from_outside():
    text = Loop(with_inner("X_grad", "free", "h_t_last")).refused(ValueError)
    assert text == CALLS + OUTSIDE.format("'h_t_last', 'X_grad'")


def test_step_blob_with_the_name_of_a_numbered_output():
    """The first loop took the plain names; only the second, whose names are numbered, meets the blob."""
    loop = Loop(with_inner("h_t_all_1"))
    Loop.of(loop.net).call()
    before = snapshot(loop.net)
    assert loop.refused(ValueError) == CALLS + OUTSIDE.format("'h_t_all_1'")
    assert snapshot(loop.net) == before


def test_output_of_one_state_named_like_that_of_another():
    """The visible output of state output `h` would be `h_all`."""

    def build(cell, x, h):
        (c,) = cell.AddScopedExternalInputs("c_prev")
        cell.Mul([x, h], "h")
        cell.Mul([x, c], "h_all")

    text = Loop(build).refused(ValueError, initial_cell_inputs=BOTH, links={"h_prev": "h", "c_prev": "h_all"})
    assert text == CALLS + OUTSIDE.format("'h_all'")


@pytest.mark.parametrize("build", [with_inner, with_reference], ids=["inner", "reference"])
@pytest.mark.parametrize("name", ["h_t_grad", "h_prev_grad", "x_t_grad"])
def test_step_blob_with_the_name_of_a_gradient(name, build):
    assert Loop(build(name)).refused(ValueError) == CALLS + INSIDE.format("'{}'".format(name))


def test_step_blob_with_the_name_of_a_gradient_that_is_added_up():
    """a_t gets a gradient from outside and one from b_t, which waits in `a_t_grad_accum`."""

    def build(cell, x, a):
        (b,) = cell.AddScopedExternalInputs("b_prev")
        a_t = cell.Mul([a, x], "a_t")
        cell.Mul([cell.Mul([a_t, b], "ab"), cell.Tanh(x, "a_t_grad_accum")], "b_t")

    loop = Loop(build)
    changes = {
        "initial_cell_inputs": [("h_prev", "H"), ("b_prev", "B")],
        "links": {"h_prev": "a_t", "b_prev": "b_t"},
    }
    assert loop.refused(ValueError, **changes) == CALLS + INSIDE.format("'a_t_grad_accum'")
    # No gradients, no names for them.
    assert len(loop.call(forward_only=True, **changes)) == 4


READS = "the loop reads '{}' and would make a blob of that name; give it a Copy of the blob"


@pytest.mark.parametrize("name", ["h_t_all", "h_t_last", "loop/h_prev_states", "loop/step_workspaces"])
@pytest.mark.parametrize("role", ["sequence", "state", "reference"])
def test_reading_a_blob_that_the_loop_would_make(role, name):
    changes = {"sequence": {"inputs": [("x_t", name)]}, "state": {"initial_cell_inputs": [("h_prev", name)]}}
    loop = Loop(with_reference(name)) if role == "reference" else Loop()
    assert loop.refused(ValueError, scope="loop", **changes.get(role, {})) == CALLS + READS.format(name)


def test_reading_an_output_of_the_loop_before():
    """The net knows that blob, so the new loop's outputs are numbered."""
    loop = Loop()
    outputs = loop.call()
    assert [str(blob) for blob in loop.call(inputs=[("x_t", outputs[0])])] == ["h_t_all_1", "h_t_last_1"]


OVERWRITES = "step operator {} ({}) overwrites '{}', which other steps and the backward pass read as it was; "
OVERWRITES += "write to another blob"


@pytest.mark.parametrize("forward_only", [False, True], ids=["both passes", "forward_only"])
@pytest.mark.parametrize("blob", ["h_prev", "w"])
def test_step_that_overwrites_what_other_steps_read(blob, forward_only):
    def build(cell, x, h):
        cell.AddExternalInput("w")
        cell.Tanh(x, "tx")
        cell.Sigmoid(blob, blob)
        cell.Mul([cell.Mul(["tx", "w"], "xw"), h], "h_t")

    text = Loop(build).refused(ValueError, forward_only=forward_only)
    assert text == CALLS + OVERWRITES.format(1, "Sigmoid", blob)


def test_each_overwritten_input_is_named():
    def build(cell, x, h):
        w, clock = cell.AddExternalInput("w", "timestep")
        for blob in (w, h, clock, w):
            cell.Negative(blob, blob)
        cell.Mul([w, h], "h_t")

    assert Loop(build).refused(ValueError) == listed(
        "recurrent_net",
        "step operator 2 (Negative) writes the timestep 'timestep', which the engine sets",
        OVERWRITES.format(1, "Negative", "h_prev"),
        OVERWRITES.format(0, "Negative", "w"),
    )


def test_blob_of_the_net_named_like_the_timestep():
    loop = Loop()
    loop.net.AddExternalInput("timestep")
    assert loop.refused(ValueError) == CALLS + SHARED.format("'timestep'", loop.net.Name())


@pytest.mark.parametrize(
    "changes", [{"inputs": [("x_t", "timestep")]}, {"initial_cell_inputs": [("h_prev", "timestep")]}]
)
def test_outer_blob_named_like_the_timestep(changes):
    loop = Loop()
    assert loop.refused(ValueError, **changes) == CALLS + SHARED.format("'timestep'", loop.net.Name())


def test_timestep_of_another_name_leaves_the_outer_one_alone():
    def build(cell, x, h):
        cell.AddExternalInput("clock")
        cell.Mul([x, h], "h_t")

    assert len(Loop(build).call(timestep="clock", inputs=[("x_t", "timestep")])) == 2


def test_default_timestep_under_a_name_scope():
    """The step net declares it with its scope: it is no reference that would have to be fed."""
    with core.NameScope("a"):
        cell = core.Net("step")
        x, h, _ = cell.AddScopedExternalInputs("x_t", "h_prev", "timestep")
        cell.Mul([x, h], "h_t")
        loop = Loop()
        loop.cell = cell
        loop.call()
    operator = loop.net.Proto().op[0]
    assert list(operator.input) == ["a/X", "a/H"]
    assert [argument.s for argument in operator.arg if argument.name == "timestep"] == [b"a/timestep"]


def test_no_state_and_a_position():
    text = Loop().refused(ValueError, initial_cell_inputs=[], links={})
    assert text == listed(
        "recurrent_net",
        "initial_cell_inputs is empty; the outputs are those of the states, so at least one is needed",
        "outputs_with_grads has position 0, but the outputs are none",
    )


def test_position_of_a_state_without_a_link():
    text = Loop().refused(ValueError, links={}, outputs_with_grads=[5])
    assert text == listed(
        "recurrent_net",
        "state 'h_prev' has no link to the step output that becomes its next value",
        "outputs_with_grads has position 5, but the outputs are 0 '<output of h_prev>_all', "
        "1 '<output of h_prev>_last'",
    )


@pytest.mark.parametrize("count, more", [(12, ""), (13, " and 1 more"), (30, " and 18 more")])
def test_only_a_dozen_names_are_shown(count, more):
    def build(cell, x, h):
        append(cell, "Sum", ["n{}".format(number) for number in range(count)], ["h_t"])

    shown = ", ".join("'n{}'".format(number) for number in range(12)) + more
    assert Loop(build).refused(ValueError) == CALLS + (
        "step operator 0 (Sum) reads {}, neither written before it nor an external input of the step net".format(shown)
    )


def test_same_net_twice():
    loop = Loop()
    text = loop.refused(ValueError, net=loop.cell)
    shown = "net and cell_net are the same net '{}'; build the step in a net of its own"
    assert text == CALLS + shown.format(loop.cell.Name())


def test_five_different_faults_in_one_error():
    def build(cell, x, h):
        cell.AddExternalInput("c_prev")
        append(cell, "Mul", ["x_t", "nowhere"], ["h_t"])

    text = Loop(build).refused(
        ValueError,
        inputs=[],
        initial_cell_inputs=BOTH,
        links={"h_prev": "h_t", "c_prev": "h_t", "g_prev": "h_t"},
        timestep="clock",
        outputs_with_grads=[7],
    )
    assert text == listed(
        "recurrent_net",
        "inputs is empty; the number of steps comes from a sequence, so at least one is needed",
        "timestep 'clock' is no external input of the step net, which has 'x_t', 'h_prev', 'c_prev'; "
        "declare it with AddExternalInput",
        "links names 'g_prev', which has no initial value; initial_cell_inputs has 'h_prev', 'c_prev'",
        "states 'h_prev', 'c_prev' are linked to the same output 'h_t'; each needs its own",
        "outputs_with_grads has position 7, but the outputs are 0 'h_t_all', 1 'h_t_last', 2 'h_t_all', 3 'h_t_last'",
        "step operator 0 (Mul) reads 'nowhere', neither written before it nor an external input of the step net",
    )


def test_net_that_has_a_loop_already_keeps_it():
    loop = Loop()
    loop.call(inputs=[("x_t", "X")], scope="first")
    before = snapshot(loop.net)
    loop.refused(ValueError, links={})
    loop.refused(TypeError, links=None)
    assert snapshot(loop.net) == before
    assert [str(blob) for blob in loop.call()] == ["h_t_all_1", "h_t_last_1"]


# Made anew for each use, since a generator can be walked once.
CORRECT = {
    "generators": lambda: {"inputs": (pair for pair in [("x_t", "X")]), "outputs_with_grads": (at for at in [0])},
    "zip": lambda: {"inputs": zip(["x_t"], ["X"]), "initial_cell_inputs": zip(["h_prev"], ["H"])},
    "items": lambda: {"inputs": {"x_t": "X"}.items()},
    "lists for pairs": lambda: {"inputs": [["x_t", "X"]], "initial_cell_inputs": (["h_prev", "H"],)},
    "positions of numpy": lambda: {"outputs_with_grads": np.array([1, 0])},
    "a position of numpy": lambda: {"outputs_with_grads": [np.int64(1)]},
    "a set": lambda: {"recompute_blobs_on_backward": {"h_t"}},
    "positions in small numbers of numpy": lambda: {"outputs_with_grads": np.array([1], dtype=np.uint8)},
    "a range": lambda: {"outputs_with_grads": range(2)},
    "a flag of numpy": lambda: {"forward_only": np.bool_(True)},
    "a flag as a number": lambda: {"forward_only": 1},
    "a flag as a number of numpy": lambda: {"forward_only": np.int64(0)},
    "blobs": lambda: {"links": {core.BlobReference("h_prev"): core.BlobReference("h_t")}},
    "a blob for a scope": lambda: {"scope": core.BlobReference("s")},
    "a blob of another net": lambda: {"inputs": [("x_t", core.BlobReference("X", core.Net("another")))]},
    "one blob for sequence and state": lambda: {"initial_cell_inputs": [("h_prev", "X")]},
}


@pytest.mark.parametrize("changes", CORRECT.values(), ids=list(CORRECT))
def test_unusual_but_correct(changes):
    assert [str(blob) for blob in Loop().call(**changes())] == ["h_t_all", "h_t_last"]


def test_external_input_declared_twice():
    def build(cell, x, h):
        cell.Mul([cell.Mul([x, h], "xh"), cell.AddExternalInput("w")], "h_t")
        cell.Proto().external_input.extend(["w", "x_t"])

    loop = Loop(build)
    loop.call()
    assert list(loop.net.Proto().op[0].input) == ["X", "H", "w"]


def test_step_operator_without_outputs():
    def build(cell, x, h):
        cell.Mul([x, h], "h_t")
        cell.Print(["h_t"], [])

    assert [str(blob) for blob in Loop(build).call()] == ["h_t_all", "h_t_last"]


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"scratch_sizes": [3]}, "scratch_sizes"),
        ({"scratch_sizes": []}, "scratch_sizes"),
        (
            {"initial_cell_inputs": [("h_prev", "H", 3)]},
            "a size as the third element of an initial_cell_inputs entry",
        ),
    ],
    ids=["scratch_sizes", "empty scratch_sizes", "third element"],
)
def test_arguments_of_2016_are_ignored_with_a_warning(changes, what):
    loop = Loop()
    with pytest.warns(DeprecationWarning) as caught:
        # Not through Loop.call: the warning must point to the line that calls recurrent_net.
        recurrent_net(
            net=loop.net,
            cell_net=loop.cell,
            inputs=[("x_t", "X")],
            links={"h_prev": "h_t"},
            **dict({"initial_cell_inputs": [("h_prev", "H")]}, **changes),
        )
    (warning,) = caught
    assert str(warning.message) == "recurrent_net ignores {}: the engine finds sizes by itself".format(what)
    assert warning.filename == __file__
    assert list(loop.net.Proto().op[0].input) == ["X", "H"]


def test_no_warning_without_arguments_of_2016():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loop().call()


@pytest.mark.parametrize("name", ["xh_grad", "h_t_grad", "x_t_grad", "h_prev_grad"])
def test_net_has_a_blob_named_like_a_gradient_of_the_step(name):
    loop = Loop(lambda cell, x, h: cell.Tanh(cell.Mul([x, h], "xh"), "h_t"))
    loop.net.AddExternalInput(name)
    text = loop.refused(ValueError)
    assert text == (
        "recurrent_net: the step net computes or receives '{}', of which net '{}' has a blob of the same name; "
        "all steps would share that one: rename it in the step net".format(name, loop.net.Name())
    )


@pytest.mark.parametrize("name", ["X_grad", "H_grad", "s/h_prev_states_grad"])
def test_reference_named_like_a_gradient_that_the_loop_makes(name):
    def build(cell, x, h):
        return cell.Mul([cell.Mul([x, cell.AddExternalInputs(name)], "xg"), h], "h_t")

    text = Loop(build).refused(ValueError, scope="s")
    assert text == (
        "recurrent_net: the loop reads '{}' and would make a blob of that name; give it a Copy of the blob".format(name)
    )
