"""`memory_names`: nets of one loop whose steps keep, share and link other blobs run in one workspace, in any order."""

import itertools

import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import caffe2_recurrent
import rewriting_support as support
from caffe2_recurrent import GRU, LSTM, MILSTM, optimize, recurrent_net
from cells import CELLS
from test_rewriting_onednn import feed_parameters
from test_rewriting_rules import loop_of

LAYERS = {"lstm": (LSTM, ("h0", "c0")), "milstm": (MILSTM, ("h0", "c0")), "gru": (GRU, ("h0",))}


def built(name, **options):
    builder, initial = LAYERS[name]
    model = ModelHelper("layer")
    outputs = builder(model, "x", None, initial, support.DIM_IN, support.D, "layer", **options)
    found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    return model, [str(outputs[0]), *(str(found[blob]) for blob in model.params)]


def prepare(model):
    workspace.ResetWorkspace()
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    feed_parameters(model, 5)


def ways(name, memory_optimization):
    """The same layer as built and optimised: for its size, for a small one, and by some rules."""
    shapes = {"x": (support.T, support.N, support.DIM_IN)}
    choices = [
        lambda model: None,
        lambda model: optimize(model, even_if_slower=True, shapes=shapes),
        lambda model: optimize(model, shapes=shapes, trials=False),
        lambda model: optimize(model, ["parameter_gradients", "unread_blobs"], even_if_slower=True, shapes=shapes),
    ]
    for change in choices:
        model, blobs = built(name, memory_optimization=memory_optimization)
        change(model)
        yield model, blobs


@pytest.mark.parametrize("name", LAYERS)
def test_nets_run_after_each_other(name):
    nets = [*ways(name, memory_optimization=False), *ways(name, memory_optimization=True)]
    prepare(nets[0][0])
    expected = support.run(*nets[0])
    for first, second in itertools.permutations(nets, 2):
        prepare(nets[0][0])
        support.run(*first)
        support.assert_same(support.run(*second), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_an_installed_package_optimises_for_each_size(name):
    model, blobs = built(name)
    # A state of 256 sequences is worth rewriting.
    sizes = [(4, 256), (4, 1), (4, 256), (2, 3)]

    def values(size):
        support.feed(*size)
        return support.run(model, blobs)

    prepare(model)
    expected = [values(size) for size in sizes]
    prepare(model)
    with caffe2_recurrent.install(optimize=True, trials=False):
        for size, values_there in zip(sizes, expected):
            support.assert_same(values(size), values_there)


def kinds_of_memory(net):
    """Where a step has each blob, by name; the engine has no other ways."""
    loop = loop_of(net)
    found = {}
    # A step without a backward one needs nothing after it: it may find what others share.
    if loop.gradient is not None:
        found.update({blob: "shared" for operator in loop.gradient.operators for blob in operator.output})
        # What is computed again is shared only if it is said to be.
        found.update({blob: "kept" for operator in loop.operators for blob in operator.output})
        found.update(dict.fromkeys(set(loop.shared) & set(found), "shared"))
    for operators in loop.steps:
        for operator in operators:
            if operator.type in ("ATen", "Alias") and operator_argument(operator) in ("", "split_with_sizes"):
                found.update(dict.fromkeys(operator.output, "view"))
    found.update({link.inner: "linked" for link in loop.all_links})
    return found


def operator_argument(operator):
    return next((given.s.decode() for given in operator.arg if given.name == "operator"), "")


# Each changes a net in another way.
CHOICES = [
    lambda model: None,
    lambda model: optimize(model, even_if_slower=True),
    lambda model: optimize(model, trials=False),
    *(
        lambda model, rules=rules: optimize(model, rules, even_if_slower=True)
        for rules in (
            ["parameter_gradients"],
            ["outer_products"],
            ["lstm_unit", "gru_unit", "gradient_buffer"],
            ["lstm_unit", "scaled_weights", "sequence_bias", "gates_first"],
            ["sequence_in_place", "unread_blobs"],
        )
    ),
]


@pytest.mark.parametrize("memory", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_name_has_one_kind_of_memory(cell, memory):
    """In all nets of a layer, or memory that one has freed would be written to by another."""
    kinds = {}
    for change in CHOICES:
        for forward_only in (False, True):
            changed = cell.but(options={"forward_only": forward_only, "outputs_with_grads": "auto"})
            model, outputs = (changed.remembering_nothing() if memory else changed).build()
            if not forward_only:
                model.AddGradientOperators([model.net.SumElements(outputs[0], "loss")])
            workspace.RunNetOnce(model.param_init_net)
            changed.feed()
            change(model)
            for blob, kind in kinds_of_memory(model.net).items():
                kinds.setdefault(blob, set()).add(kind)
    assert {blob: found for blob, found in kinds.items() if len(found) > 1} == {}


def two_tanhs(**options):
    """y = tanh(h x), h = tanh(y); y is kept, or computed again."""
    net, step = core.Net("net"), core.Net("two_tanhs")
    x, h = step.AddExternalInputs("x_t", "h_prev")
    y = step.Tanh(step.Mul([x, h], "xh"), "y")
    outputs = recurrent_net(net, step, [(x, "X")], [(h, "H")], {h: step.Tanh(y, "h_t")}, scope="loop", **options)
    net.AddGradientOperators([outputs[0]])
    return net


def test_names_say_what_is_shared():
    net = two_tanhs(recompute_blobs_on_backward=["xh", "y"])
    optimize(net, ["forward_links"], even_if_slower=True)
    loop = loop_of(net)
    assert loop.shared == ["xh_shared", "y_shared"]
    assert [list(operator.output) for operator in loop.operators] == [["xh_shared"], ["y_shared"], ["h_t"]]
    assert [list(operator.output) for operator in loop.gradient.operators][:2] == [["xh_shared"], ["y_shared"]]
    before = net.Proto().SerializeToString()
    assert optimize(net, ["forward_links"], even_if_slower=True).total == 0
    assert net.Proto().SerializeToString() == before


def test_nothing_is_renamed_where_nothing_is_rewritten():
    net = two_tanhs(recompute_blobs_on_backward=["xh", "y"])
    before = net.Proto().SerializeToString()
    assert optimize(net, ["lstm_unit"]).total == 0
    assert net.Proto().SerializeToString() == before


def test_a_name_that_is_taken():
    net = two_tanhs(recompute_blobs_on_backward=["xh", "y"])
    net.AddExternalInput("y_shared")
    net.Copy("y_shared", "copied")
    optimize(net, ["forward_links"], even_if_slower=True)
    assert loop_of(net).shared == ["xh_shared", "y_shared_1"]


def test_what_was_shared_and_is_kept():
    """The gates, where the gradient of the sequence will be."""
    model, _ = support.lstm(memory_optimization=True)
    optimize(model, ["sequence_in_place", "gradient_buffer"], even_if_slower=True)
    loop = loop_of(model.net)
    assert loop.shared == [] and loop.link("layer/gates_t_shared_linked").outer == loop.gradient.sequence
    written = {blob for operators in loop.steps for operator in operators for blob in operator.output}
    assert "layer/gates_t_shared" not in written
