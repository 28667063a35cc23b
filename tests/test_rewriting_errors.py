"""Every error that `optimize` and `install` raise about their arguments, with its text; the net stays as it was."""

import re
import warnings

import numpy as np
import pytest
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import describe, install, optimize
from errors_support import listed, snapshot

RULES = ", ".join("'{}'".format(name) for name in support.NAMES)
SIZES = "must be whole numbers from 1 on, like (20, 128, 40)"


def refused(error=TypeError, **arguments):
    """The text of the error; the net is as it was and can be optimised afterwards."""
    model, _ = support.lstm()
    before = snapshot(model.net)
    with pytest.raises(error) as caught:
        optimize(model, **arguments)
    assert snapshot(model.net) == before
    assert optimize(model, even_if_slower=True).total
    return str(caught.value)


@pytest.mark.parametrize("value", [None, "net", 3, [core.Net("a")]], ids=type)
def test_what_is_no_net(value):
    with pytest.raises(TypeError) as caught:
        optimize(value)
    expected = "optimize: model_or_net must be a ModelHelper, a core.Net or a NetDef; got {!r} of type {}"
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    assert str(caught.value) == expected.replace("{!r}", "{}").format(shown, type(value).__name__)


@pytest.mark.parametrize("argument", ["rules", "without"])
@pytest.mark.parametrize("value", ["lstm_unit", b"lstm_unit", 3, True], ids=repr)
def test_rules_that_are_no_list(argument, value):
    expected = "optimize: {} must be a list of names; got {!r} of type {}".format(argument, value, type(value).__name__)
    assert refused(**{argument: value}) == expected


@pytest.mark.parametrize("argument", ["rules", "without"])
@pytest.mark.parametrize("value", [3, None], ids=repr)
def test_rules_without_a_name(argument, value):
    shown = "{} must be a list of names; it has {!r} of type {}".format(argument, value, type(value).__name__)
    assert refused(**{argument: ["lstm_unit", value, "lstm_units"]}) == "optimize: " + shown


@pytest.mark.parametrize("value, alike", [("lstm_units", "'lstm_unit'"), ("backward_loops", "'backward_loop'")])
def test_a_name_that_is_nearly_that_of_a_rule(value, alike):
    expected = "optimize: '{}' is not a rule; did you mean {}?".format(value, alike)
    assert refused(ValueError, rules=["lstm_unit", value]) == expected
    assert refused(ValueError, without=["lstm_unit", value]) == expected


def test_a_name_that_is_like_that_of_no_rule():
    expected = "optimize: 'fastest' is not a rule; the rules are {}".format(RULES)
    assert refused(ValueError, rules=["lstm_unit", "fastest"]) == expected


def test_shapes_of_blobs_that_the_net_does_not_have():
    read = "'x', 'layer/i2h_w', 'layer/i2h_b', 'h0', 'c0', 'layer/gates_t_w', 'layer/gates_t_b', 'dh'"
    found = refused(ValueError, shapes={"X": (9, 3, 2), "h0": (3, 4), "c1": (4,)}, rules=["fastest"])
    assert found == listed(
        "optimize",
        "'fastest' is not a rule; the rules are {}".format(RULES),
        "shapes has 'X', 'c1', which no operator reads or writes; the net reads {}".format(read),
    )


TOO_FEW = "shapes['{}'] must have {} dimensions or more, as FC makes 'layer/i2h' of it; got {}"
UNFIT = "shapes: 'x' {} and 'layer/i2h_w' {}, of which FC makes 'layer/i2h', do not fit: {} and {} columns"
IMPOSSIBLE = {
    "a sequence without an axis": ({"x": (9, 2)}, TOO_FEW.format("x", 3, (9, 2))),
    "weights without an axis": ({"layer/i2h_w": (16,)}, TOO_FEW.format("layer/i2h_w", 2, (16,))),
    "a sequence of other elements": ({"x": (9, 3, 5)}, UNFIT.format((9, 3, 5), (16, 2), 5, 2)),
    "weights of others": ({"layer/i2h_w": (16, 4)}, UNFIT.format((9, 3, 2), (16, 4), 2, 4)),
    "what the loop runs over": (
        {"layer/i2h": (16,)},
        "shapes['layer/i2h'] must be [T, N, ...], as loop 'layer/hidden_t_all' runs over it; got (16,)",
    ),
}


@pytest.mark.parametrize("shapes, expected", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_shapes_that_the_net_cannot_read(shapes, expected):
    assert refused(ValueError, shapes=shapes) == "optimize: " + expected
    model, _ = support.lstm()
    with pytest.raises(ValueError) as caught:
        describe(model, shapes=shapes)
    assert str(caught.value) == "describe: " + expected


def test_all_shapes_that_the_net_cannot_read():
    found = refused(ValueError, shapes={"x": (9,), "layer/i2h_w": (16,), "layer/i2h": (9,)})
    assert found == listed(
        "optimize",
        TOO_FEW.format("x", 3, (9,)),
        TOO_FEW.format("layer/i2h_w", 2, (16,)),
        "shapes['layer/i2h'] must be [T, N, ...], as loop 'layer/hidden_t_all' runs over it; got (9,)",
    )


def test_shapes_beside_what_another_net_has_left():
    """Parameters that the net has yet to make are what counts."""
    model, _ = support.lstm()
    workspace.FeedBlob("layer/i2h_w", np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        optimize(support.as_read_from_a_file(model.net), shapes={"x": (9, 3, 2)})
    assert optimize(model, shapes={"x": (9, 3, 2)}, even_if_slower=True).total


def test_shapes_beside_weights_that_have_an_axis_too_few():
    """Which is not for `shapes` to mend."""
    model, _ = support.lstm()
    workspace.FeedBlob("layer/i2h_w", np.ones(3, np.float32))
    assert optimize(support.as_read_from_a_file(model.net), ["sequence_bias"], {"x": (9, 3, 2)}, dry_run=True)


def test_shapes_of_a_product_over_several_axes():
    net = core.Net("net")
    net.FC(["x", "w", "b"], "y", axis=1)
    net.FC(["x", "w_of_rows", "b"], "z", axis=-1)
    shapes = {"x": (9, 3, 2), "w": (4, 6), "w_of_rows": (4, 2)}
    assert optimize(net, shapes=shapes).total == 0
    with pytest.raises(ValueError, match="'y', do not fit: 6 and 8 columns(.|\n)*'z', do not fit: 2 and 4 columns"):
        optimize(net, shapes={**shapes, "w": (4, 8), "w_of_rows": (4, 4)})


def test_shapes_of_what_only_steps_see():
    model, _ = support.lstm()
    assert optimize(model, shapes={"layer/hidden_t": (1, 3, 4)}, even_if_slower=True).total


def test_a_net_that_the_engine_has_already():
    model, _ = support.lstm()
    workspace.CreateNet(model.net)
    expected = (
        "optimize: the engine has a net '{}' already, which stays as it was created; create it anew, as by "
        "workspace.CreateNet(net, overwrite=True)".format(model.net.Name())
    )
    with pytest.warns(UserWarning, match="^" + re.escape(expected) + "$"):
        assert optimize(model, even_if_slower=True).total


def test_a_warning_that_is_an_error_leaves_the_net_as_it_was():
    model, _ = support.lstm()
    workspace.CreateNet(model.net)
    before = snapshot(model.net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="has a net '{}' already".format(model.net.Name())):
            optimize(model, even_if_slower=True)
    assert snapshot(model.net) == before


@pytest.mark.parametrize("options", [{"dry_run": True}, {"rules": []}], ids=["dry run", "nothing to do"])
def test_a_net_that_stays_as_the_engine_has_it(options):
    model, _ = support.lstm()
    workspace.CreateNet(model.net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(model, even_if_slower=True, **options)


def test_shapes_of_which_an_iterator_tells():
    assert refused(ValueError, shapes={"x": iter((9, 2))}) == "optimize: " + TOO_FEW.format("x", 3, (9, 2))


@pytest.mark.parametrize("value", [[("x", (1, 2))], "x", 3], ids=repr)
def test_shapes_that_are_no_mapping(value):
    expected = "optimize: shapes must map blobs to their dimensions, like {{'x': (20, 128, 40)}}; got {!r} of type {}"
    assert refused(shapes=value) == expected.format(value, type(value).__name__)


@pytest.mark.parametrize("value", [(1, 0), (-1,), (1.0, 2), ("2",), "23", b"23", 3, None, (True, 2)], ids=repr)
def test_shapes_of_the_wrong_kind(value):
    expected = "optimize: shapes['x'] {}; got {!r} of type {}".format(SIZES, value, type(value).__name__)
    assert refused(shapes={"x": value}) == expected


def test_shapes_with_an_array_among_them():
    assert refused(shapes={"x": (5, np.array([2, 2]), 3)}).startswith("optimize: shapes['x'] {}; got".format(SIZES))


def test_shapes_of_what_is_no_blob():
    assert refused(shapes={3: (1, 2)}) == "optimize: shapes maps blobs or their names; got 3 of type int"


@pytest.mark.parametrize("flag", ["dry_run", "even_if_slower", "trials", "constant_threads", "constant_weights"])
@pytest.mark.parametrize("value", ["no", 2, None, 1.0], ids=repr)
def test_flags(flag, value):
    expected = "optimize: {} must be True or False; got {!r} of type {}".format(flag, value, type(value).__name__)
    assert refused(**{flag: value}) == expected


def test_everything_at_once():
    model, _ = support.lstm()
    before = snapshot(model.net)
    with pytest.raises(TypeError) as caught:
        optimize(3, rules="all", shapes={3: (1,), "x": 0}, dry_run="no", even_if_slower="no", trials="no")
    assert snapshot(model.net) == before
    assert str(caught.value) == listed(
        "optimize",
        "model_or_net must be a ModelHelper, a core.Net or a NetDef; got 3 of type int",
        "shapes maps blobs or their names; got 3 of type int",
        "shapes['x'] {}; got 0 of type int".format(SIZES),
        "dry_run must be True or False; got 'no' of type str",
        "even_if_slower must be True or False; got 'no' of type str",
        "trials must be True or False; got 'no' of type str",
        "rules must be a list of names; got 'all' of type str",
    )


def test_shapes_of_every_right_kind():
    model, _ = support.lstm()
    shapes = {core.BlobReference("x"): np.array([9, 3, 2]), "h0": [3, 4], "c0": (np.int64(4),)}
    assert optimize(model, shapes=shapes, even_if_slower=1, dry_run=np.bool_(True)).total


@pytest.mark.parametrize("flag", ["optimize", "even_if_slower", "trials"])
def test_flags_of_install(flag):
    with pytest.raises(TypeError) as caught:
        install(**{flag: "yes"})
    assert str(caught.value) == "install: {} must be True or False; got 'yes' of type str".format(flag)


def test_a_receiver_of_reports_that_is_none():
    with pytest.raises(TypeError) as caught:
        install(optimize="yes", on_report=3)
    assert str(caught.value) == listed(
        "install",
        "optimize must be True or False; got 'yes' of type str",
        "on_report must be a function that takes a Report; got 3 of type int",
    )


def test_rules_of_install_that_are_none():
    with pytest.raises(TypeError) as caught:
        install(
            optimize=True,
            rules=["lstm_unit", 3],
            even_if_slower="yes",
            trials="no",
            constant_threads="no",
            constant_weights="no",
            without="lstm_unit",
            batch_parts=2.5,
        )
    assert str(caught.value) == listed(
        "install",
        "even_if_slower must be True or False; got 'yes' of type str",
        "trials must be True or False; got 'no' of type str",
        "constant_threads must be True or False; got 'no' of type str",
        "constant_weights must be True or False; got 'no' of type str",
        "batch_parts must be a whole number; got 2.5 of type float",
        "without must be a list of names; got 'lstm_unit' of type str",
        "rules must be a list of names; it has 3 of type int",
    )


def test_rules_of_install_that_there_are_not():
    with pytest.raises(ValueError) as caught:
        install(optimize=True, rules=["lstm_unit", "fastest"])
    assert str(caught.value) == "install: 'fastest' is not a rule; the rules are {}".format(RULES)
