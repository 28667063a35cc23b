"""`get_external_blob_names`: what a net takes from outside and leaves there."""

import numpy as np
import pytest
from caffe2.python import control_ops_util, core, workspace
from hypothesis import assume, given
from hypothesis import strategies as st

from caffe2_recurrent import get_external_blob_names

NOBODY_HAS = (
    "get_external_blob_names: net '{}' reads {} before it writes them, but neither the lexical scope nor the net's "
    "external inputs have them"
)


def net_of(*operators, inputs=(), outputs=(), name="branch"):
    """A net of `Sum` operators, given as (inputs, outputs), that declares just what it is told to."""
    net = core.Net(name)
    for read, written in operators:
        net.Proto().op.extend(
            [core.CreateOperator("Sum", list(map(core.BlobReference, read)), list(map(core.BlobReference, written)))]
        )
    net.Proto().external_input.extend(inputs)
    net.Proto().external_output.extend(outputs)
    return net


CHAIN = [("ab", "c"), ("ca", "d"), ("d", "e")]


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset, dict.fromkeys, iter], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("blob", [str, core.BlobReference], ids=["names", "references"])
def test_any_collection_is_a_scope(kind, blob):
    found = get_external_blob_names(net_of(*CHAIN), kind([blob(name) for name in "abd"]))
    assert found == ({"a", "b"}, {"d"})
    assert all(type(name) is str for names in found for name in names)


def test_net_def():
    assert get_external_blob_names(net_of(*CHAIN).Proto(), "a b c".split()) == ({"a", "b"}, {"c"})


CASES = {
    "no operators": ([], {}, "ab", (set(), set())),
    "declared inputs count": ([("a", "b")], {"inputs": "xa"}, "", ({"a", "x"}, set())),
    "declared outputs count": ([("a", "b")], {"inputs": "a", "outputs": "bz"}, "", ({"a"}, {"b", "z"})),
    "what it writes is its own": ([("a", "b")], {}, "a", ({"a"}, set())),
    "unless the scope sees it": ([("a", "b")], {}, "ab", ({"a"}, {"b"})),
    "in place": ([("a", "a")], {}, "a", ({"a"}, {"a"})),
    "written, then read": ([("a", "b"), ("b", "c")], {}, "abc", ({"a"}, {"b", "c"})),
    "read, then written": ([("b", "c"), ("a", "b")], {}, "ab", ({"a", "b"}, {"b"})),
    "written twice": ([("a", "b"), ("b", "b")], {}, "ab", ({"a"}, {"b"})),
    "several outputs": ([("a", "bc"), ("bc", "d")], {}, "acd", ({"a"}, {"c", "d"})),
    "declared but computed": ([("a", "b"), ("b", "c")], {"inputs": "ab"}, "", ({"a", "b"}, set())),
}


@pytest.mark.parametrize("operators, declared, scope, expected", CASES.values(), ids=list(CASES))
def test_names(operators, declared, scope, expected):
    net = net_of(*operators, **{role: list(names) for role, names in declared.items()})
    before = net.Proto().SerializeToString()
    assert get_external_blob_names(net, list(scope)) == expected
    assert net.Proto().SerializeToString() == before


BLOBS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True)
OPERATORS = st.lists(st.tuples(BLOBS, BLOBS), max_size=6)


@given(OPERATORS, st.frozensets(st.sampled_from("abcdef")))
def test_caffe2s_own_agrees(operators, scope):
    """Where a net declares nothing: it does not look at declarations."""
    net = net_of(*operators)
    try:
        expected = control_ops_util.get_external_blob_names(net, scope)
    except AssertionError:
        expected = None
    if expected is None:
        with pytest.raises(ValueError, match="neither the lexical scope nor the net's external inputs have them"):
            get_external_blob_names(net, scope)
    else:
        assert get_external_blob_names(net, scope) == expected


@given(OPERATORS)
def test_a_net_as_core_builds_it_needs_no_scope(operators):
    """`core.Net` declares by itself whatever its operators read first."""
    net = core.Net("built")
    for read, written in operators:
        net.Sum(list(map(core.BlobReference, read)), list(map(core.BlobReference, written)))
    inputs, outputs = get_external_blob_names(net, set())
    assert inputs == set(net.Proto().external_input)
    assert outputs == set()
    assume(operators)
    assert inputs == control_ops_util.get_external_blob_names(net, "abcdef")[0]


def test_in_an_if_operator():
    """The names are those that an `If` has to list for its branch to run on outer blobs."""
    branch = core.Net("branch")
    branch.Add(["x", branch.Mul(["x", "y"], "inner")], "result")
    inputs, outputs = get_external_blob_names(branch, ["x", "y", "result", "condition"])
    assert (inputs, outputs) == ({"x", "y"}, {"result"})
    for name, value in {"x": 2.0, "y": 3.0, "result": 0.0}.items():
        workspace.FeedBlob(name, np.float32([value]))
    workspace.FeedBlob("condition", np.array(True))
    net = core.Net("outer")
    reads = [core.BlobReference(name) for name in ["condition", *sorted(inputs)]]
    net.If(reads, [core.BlobReference(name) for name in sorted(outputs)], then_net=branch.Proto())
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("result").tolist() == [8.0]


# Errors.


def test_unknown_blobs_are_all_named():
    net = net_of(("zb", "c"), ("ca", "d"), inputs=["b"])
    with pytest.raises(ValueError) as caught:
        get_external_blob_names(net, ["d"])
    assert str(caught.value) == NOBODY_HAS.format(net.Name(), "'a', 'z'")


def test_a_blob_that_the_net_writes_too_late():
    net = net_of(("b", "c"), ("a", "b"))
    with pytest.raises(ValueError) as caught:
        get_external_blob_names(net, {"a"})
    assert str(caught.value) == NOBODY_HAS.format(net.Name(), "'b'")


SCOPE = "get_external_blob_names: lexical_scope "
WRONG_TYPES = {
    "no net": (None, [], "get_external_blob_names: net must be a core.Net or a NetDef; got None of type NoneType"),
    # Would pass for the blobs 'a' and 'b'.
    "scope a name": (core.Net("net"), "ab", SCOPE + "must be a set, list or dict of blobs; got 'ab' of type str"),
    "scope a number": (core.Net("net"), 3, SCOPE + "must be a set, list or dict of blobs; got 3 of type int"),
    "scope of numbers": (core.Net("net"), ["a", 3], SCOPE + "takes blobs or their names; got 3 of type int"),
    "both": (
        "net",
        [b"a"],
        "get_external_blob_names: 2 problems:\n  - net must be a core.Net or a NetDef; got 'net' of type str\n"
        "  - lexical_scope takes blobs or their names; got b'a' of type bytes",
    ),
}


@pytest.mark.parametrize("net, scope, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_argument_of_the_wrong_type(net, scope, text):
    with pytest.raises(TypeError) as caught:
        get_external_blob_names(net, scope)
    assert str(caught.value) == text
