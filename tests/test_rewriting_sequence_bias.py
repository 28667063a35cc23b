"""`sequence_bias`: a step's bias, and what it scales with, in the product that makes the loop's sequence."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import rewriting_support as support
from caffe2_recurrent import LSTM, optimize, recurrent_net, step_values
from caffe2_recurrent.loops.parts import Parameter, State
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.rules import RULES, lstm_unit
from caffe2_recurrent.wiring import Link
from every_pair import every_pair
from onednn_support import EVERY_CELL, assert_cell
from step_nets import D, Maker, N, T
from test_rewriting_rules import EXECUTOR, loop_of, lstm_loop, made, named, reasons_in, set_argument, why

RULE = "sequence_bias"
SEQUENCE, NEW = "loop/X", "loop/X_with_bias"
PLAIN, SCALED = [RULE], ["parameter_gradients", "lstm_unit", "scaled_weights", RULE]
# An LSTM's Sum as it is, and after the rules that leave an addcmul in its place.
FORMS = {
    "plain": PLAIN,
    "transposed": ["transposed_weights", *PLAIN],
    "scaled": SCALED,
    "scaled, transposed": ["transposed_weights", *SCALED],
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
# All but the one that goes on from there, and leaves nothing of what is looked at here.
ALL = [rule.name for rule in RULES if rule.name != "joined_sequence"]
WITH_ALL = pytest.mark.parametrize("rules", [PLAIN, SCALED, ALL], ids=["plain", "scaled", "all rules"])


# Steps: what h_t is, of the slice of X and of the state.


def plain(make, x, h):
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x], "total"), "h_t")


def in_place(make, x, h):
    u = make.fc(h, "u")
    make.cell.Sum([u, x], [u])
    return make.cell.Tanh(u, "h_t")


def slice_first(make, x, h):
    return make.cell.Tanh(make.cell.Sum([x, make.fc(h, "u")], "total"), "h_t")


def more_addends(make, x, h):
    return make.cell.Tanh(make.cell.Sum([h, x, make.fc(h, "u"), make.cell.Sigmoid(h, "v")], "total"), "h_t")


def linked_sum(make, x, h):
    """The sum is a slice of the states."""
    return make.cell.Sum([make.fc(h, "u"), x], "h_t")


def same_bias(make, x, h):
    """That of the product that makes the sequence."""
    make.cell.AddExternalInputs("b")
    u = make.cell.FC([h, make.reference("u_w", D, D), "b"], "u", axis=2)
    return make.cell.Tanh(make.cell.Sum([u, x], "total"), "h_t")


def name_before(make, x, h):
    """The sum's name holds something else until the product is there."""
    v = make.cell.Tanh(make.cell.Scale(h, "total", scale=0.5), "v")
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, v], ["total"]), "h_t")


def name_in_between(make, x, h):
    """The sum's name holds something else when the product is there."""
    u = make.fc(h, "u")
    v = make.cell.Tanh(make.cell.Scale(h, "total", scale=0.5), "v")
    return make.cell.Tanh(make.cell.Sum([u, x, v], ["total"]), "h_t")


def read_in_between(make, x, h):
    """The sum's name is read when the product is there."""
    total = make.cell.Scale(h, "total", scale=0.5)
    u = make.fc(h, "u")
    return make.cell.Tanh(make.cell.Sum([u, x, make.cell.Tanh(total, "v")], ["total"]), "h_t")


def scaled(make, x, h):
    """Caffe2 has no gradient of it."""
    total = make.cell.ATen([make.fc(h, "u"), x, make.reference("s", D)], "total", operator="addcmul")
    return make.cell.Tanh(total, "h_t")


# Each with the blob that the product is left to write.
STEPS = {
    plain: "total",
    in_place: "u",
    slice_first: "total",
    more_addends: "total",
    linked_sum: "h_t",
    same_bias: "total",
    name_before: "total",
    name_in_between: "u",
    read_in_between: "u",
}
EVERY_STEP = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)


class Net:
    """X = FC(x, w, b), and a loop over it of which `step(make, x_t, h)` makes a step; values for its inputs.

    `change` gets the finished net. `gradients` are those of X, by whatever name, and of the inputs that have one.
    """

    def __init__(self, step=plain, shape=(T, N, 4), sequence=SEQUENCE, change=lambda net: None, **options):
        workspace.ResetWorkspace()
        self.net = core.Net("net")
        self.net.AddExternalInput("other")
        self.shapes = {"x": shape, "w": (D, int(np.prod(shape[2:]))), "b": (D,), "seed": (T, N, D), "other": (D,)}
        self.net.FC(["x", "w", "b"], sequence, axis=2)
        self.outputs = self.add_loop(step, sequence, "loop", **options)
        self.gradients = {}
        if not options.get("forward_only"):
            found = self.net.AddGradientOperators({self.outputs[0]: self.net.AddExternalInput("seed")})
            kept = [sequence, *self.shapes]
            self.gradients = {str(blob): str(gradient) for blob, gradient in found.items() if str(blob) in kept}
        change(self)
        self.feed({})

    def feed(self, shapes):
        """Values for the inputs; always the same for the same `shapes` of those that are to have others."""
        random = np.random.RandomState(1)
        for blob, size in {**self.shapes, **shapes}.items():
            workspace.FeedBlob(blob, random.uniform(-1, 1, size).astype(np.float32))

    def add_loop(self, step, sequence, scope, **options):
        make = Maker()
        (x,) = make.cell.AddScopedExternalInputs("x_t")
        make.inputs.append((x, sequence))
        state = make.state("h")
        make.link(state, step(make, x, state))
        self.shapes.update({name: value.shape for name, value in make.outer.items()})
        return comparing.build(recurrent_net, make.done(), self.net, scope=scope, **options)[1]

    def model(self, parameters):
        """A model with the net, that says of which blobs it makes parameters."""
        model = ModelHelper("model")
        model.net = self.net
        for parameter in parameters:
            model.param_init_net.ConstantFill([], parameter, shape=self.shapes[parameter])
        return model

    def insert(self, position, *operator, **arguments):
        operators = list(self.net.Proto().op)
        operators.insert(position, made(*operator, **arguments))
        self.reorder(operators)

    def reorder(self, operators):
        del self.net.Proto().op[:]
        self.net.Proto().op.extend(operators)

    def values(self, executor=True):
        """Outputs, and gradients by name, after a run."""
        comparing.configure(self.net, executor)
        workspace.RunNetOnce(self.net)
        gradients = {blob: workspace.FetchBlob(gradient) for blob, gradient in self.gradients.items()}
        return [workspace.FetchBlob(output) for output in self.outputs], gradients


def mentioned(operator):
    """The outer blobs that an operator names."""
    linked = [blob.decode() for given in operator.arg if "link_external" in given.name for blob in given.strings]
    return {*operator.input, *operator.output, *linked}


def products(net):
    return [operator for operator in support.step(net).op if operator.type in ("FC", "FCTransposed", "BatchMatMul")]


def assert_fired(report):
    """In one place, and there is no other that it would leave alone."""
    assert report.counts[RULE] == 1 and reasons_in(report, RULE) == [], str(report)


def assert_gone(net, sequence=SEQUENCE, suffix=""):
    """No operator names the old sequence; who reads the new one stands behind what makes it; the operators that do.

    `suffix`: of the name of what another rule has put in the place of the old one before.
    """
    operators = list(net.Proto().op)
    assert [operator for operator in operators if sequence in mentioned(operator)] == []
    new = sequence + suffix + "_with_bias"
    makes, *reads = [operator for operator in operators if new in mentioned(operator)]
    # oneDNN's results may stay beside it.
    assert [blob for blob in makes.output if "_results_" not in blob] == [new] and new not in makes.input
    return makes, reads


def assert_moved(net, sequence=SEQUENCE, weights="w", bias="loop/b_with_bias", x="x", suffix=""):
    """An FC with that bias makes the new sequence, and a step has no bias left; the types of what reads it.

    Of whom the shape is enough does not count.
    """
    makes, reads = assert_gone(net, sequence, suffix)
    assert (makes.type, list(makes.input)) == ("FC", [x, weights, bias])
    assert [operator.type for operator in net.Proto().op].count("FC") == 1
    (product,) = products(net)
    assert product.type == "BatchMatMul" and len(product.input) == 2
    written = {blob for operator in support.step(net).op for blob in operator.output}
    shared = support.argument(support.operator(net), "recompute_blobs_on_backward").strings
    assert written.issuperset(blob.decode() for blob in shared)
    return [operator.type for operator in reads if operator.type != "Shape"]


def assert_kept(rules=PLAIN, executor=True, scaled=False, **options):
    """A net optimised twice gives what it gave; the net."""
    expected = Net(**options).values(executor)
    net = Net(**options)
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    assert_fired(rewrite.report)
    readers = assert_moved(net.net, weights="loop/w_scaled" if scaled else "w")
    assert readers == [operator.type for operator in net.net.Proto().op if operator.type.startswith(support.LOOP)]
    support.assert_same(net.values(executor), expected)
    return net


# It fires, and what it leaves.


@EVERY_STEP
@EXECUTOR
@pytest.mark.parametrize("options", [{}, {"outputs_with_grads": "auto"}, {"forward_only": True}], ids=str)
def test_steps(step, executor, options):
    net = assert_kept(step=step, executor=executor, **options).net
    (product,) = products(net)
    assert list(product.output) == [STEPS[step]]
    (adding,) = [operator for operator in support.step(net).op if operator.type == "Sum"]
    assert list(adding.input)[:2] == [STEPS[step], "loop/x_t_with_bias"] and "x_t" not in adding.input


def test_several_addends_stay():
    (adding,) = [operator for operator in support.step(assert_kept(step=more_addends).net).op if operator.type == "Sum"]
    assert list(adding.input) == ["total", "loop/x_t_with_bias", "h_prev", "v"]


@EXECUTOR
def test_a_scale(executor):
    net = assert_kept(step=scaled, executor=executor, scaled=True, forward_only=True).net
    (adding,) = [operator for operator in support.step(net).op if operator.type == "Sum"]
    assert list(adding.input) == ["total", "loop/x_t_with_bias"]


@pytest.mark.parametrize("shape", [(T, N, 1), (T, N, 2, 2), (T, N, 17)], ids=str)
def test_shapes_of_what_the_sequence_is_made_of(shape):
    assert_kept(shape=shape)


@pytest.mark.parametrize("rules", [PLAIN, ["transposed_weights", RULE]], ids=["FC", "FCTransposed"])
def test_the_layout_of_the_weights(rules):
    (product,) = products(assert_kept(rules).net)
    found = {given.name: given.i for given in product.arg}
    assert found == ({"broadcast": 1, "trans_b": 1} if rules == PLAIN else {"broadcast": 1})


def test_the_gradient_of_the_sequence_keeps_its_name():
    before, after = Net(), assert_kept()
    assert after.gradients[SEQUENCE] == before.gradients[SEQUENCE]
    gradients = [support.operator(net.net, support.GRADIENT) for net in (before, after)]
    assert gradients[0].output == gradients[1].output


@pytest.mark.parametrize("rules", [PLAIN, None], ids=["alone", "all rules"])
def test_a_dry_run_leaves_the_net(rules):
    net = Net().net
    before = net.Proto().SerializeToString()
    assert optimize(net, rules, dry_run=True, even_if_slower=True).counts[RULE] == 1
    assert net.Proto().SerializeToString() == before


def lstm(**options):
    """An LSTM, with the gradient of its sequence among what must stay."""
    model, blobs = support.lstm(**options)
    return model, blobs + (["layer/i2h_grad"] if options.get("gradients", True) else [])


def assert_lstm_kept(rules, executor=True, **options):
    """An LSTM optimised twice gives what it gave; the model."""
    model, blobs = lstm(**options)
    comparing.configure(model.net, executor)
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = lstm(**options)
    rewrite = support.Optimised(rules)
    rewrite(model)
    assert_fired(rewrite.report)
    comparing.configure(model.net, executor)
    support.assert_same(support.run(model, blobs), expected)
    return model


OPTIONS = [
    {},
    {"lengths": True},
    {"lengths": True, "drop_states": True},
    {"lengths": True, "gradients": False},
    {"lengths": True, "gradients": False, "forward_only": True},
    {"outputs_with_grads": "auto", "forget_bias": 1.25},
]


@every_pair
@EVERY_FORM
@EXECUTOR
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_lstm(form, executor, options):
    """With `lstm_unit` and lengths, what the sequence is made of has been cut before."""
    model = assert_lstm_kept(FORMS[form], executor, **options)
    is_scaled = "scaled" in form
    names = ["layer/i2h", "layer/i2h_w_scaled" if is_scaled else "layer/i2h_w", "layer/i2h_b_with_bias"]
    names += ["layer/x_inside", "_inside"] if is_scaled and options.get("lengths") else []
    reads = assert_moved(model.net, *names)
    assert reads == [support.LOOP] + [support.GRADIENT] * options.get("gradients", True)


@EXECUTOR
def test_masks_of_the_sequence(executor):
    """Where it has not been cut: what makes them of its shape reads the new one, and stands behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lstm_unit, "cut_if_possible", lambda *_: None)
        model = assert_lstm_kept(SCALED, executor, lengths=True)
    reads = assert_moved(model.net, "layer/i2h", "layer/i2h_w_scaled", "layer/i2h_b_with_bias")
    assert reads == ["Slice", support.LOOP, support.GRADIENT]


@EXECUTOR
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_lstm_with_all_rules(executor, options):
    rules = [rule for rule in ALL if rule != "gates_first"]
    assert_gone(
        assert_lstm_kept(rules, executor, **options).net, "layer/i2h", "_until_end" if options.get("lengths") else ""
    )


@WITH_ALL
def test_an_lstm_that_caffe2_has_built(rules):
    model = assert_lstm_kept(rules, builder=rnn_cell.LSTM, lengths=True)
    suffixes = {id(PLAIN): "", id(SCALED): "_inside", id(ALL): "_until_end"}
    assert_gone(model.net, "layer/i2h", suffixes[id(rules)])


@WITH_ALL
@EVERY_CELL
def test_cells(name, variant, rules):
    """It is for LSTMs, with attention or without, that do not compute their gates again: those add the slice itself.

    Of all rules, `gradient_buffer` comes first, with which nothing is computed again.
    """
    rewrite = support.Optimised(rules)
    assert_cell(name, variant, rewrite)
    fires = (variant == "kept" or rules is ALL) and (name == "lstm" or name.startswith("attention"))
    assert rewrite.report.counts[RULE] == fires


@WITH_ALL
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "no lengths"])
def test_other_numbers_of_steps_and_sequences(rules, lengths):
    expected = support.runs_of_other_sizes(lambda model: None, lengths=lengths)
    rewrite = support.Optimised(rules)
    support.assert_same(support.runs_of_other_sizes(rewrite, lengths=lengths), expected)
    assert rewrite.report.counts[RULE] == 1


@WITH_ALL
def test_no_steps(rules):
    rewrite = support.Optimised(rules)
    support.assert_same(support.run_without_steps(rewrite), support.run_without_steps(lambda model: None))
    assert rewrite.report.counts[RULE] == 1


def layers(kind, change=lambda model: None):
    """Two LSTMs, one on the other, in a net of this type: values."""
    workspace.ResetWorkspace()
    model = ModelHelper("layers")
    (output, *_) = LSTM(model, "x", "lengths", None, support.DIM_IN, [D, 5], "layers", outputs_with_grads="auto")
    model.AddGradientOperators([model.net.SumElements(model.net.Tanh(output), "loss")])
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(4)
    for blob in sorted(map(str, model.params)):
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
    change(model)
    model.net.Proto().type, model.net.Proto().num_workers = kind, 3
    return support.run(model, ["loss", *(model.param_to_grad[blob] for blob in model.params)])


@WITH_ALL
@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_layers(kind, rules):
    """Each has its sequence, and in a net of type dag all wait for what they need."""
    rewrite = support.Optimised(rules)
    support.assert_same(layers(kind, rewrite), layers(kind))
    assert rewrite.report.counts[RULE] == 2


@pytest.mark.parametrize("rules", FORMS.values(), ids=FORMS)
def test_step_values(rules):
    """The slice has another name than the one that it is not any more."""
    model, _ = lstm(lengths=True)
    workspace.RunNetOnce(model.net)
    expected = step_values(model)
    optimize(model, rules, even_if_slower=True)
    workspace.RunNetOnce(model.net)
    found = step_values(model)
    common = set(found) & set(expected)
    assert common > {"layer/hidden_t", "layer/cell_t", "layer/hidden_t_prev", "layer/cell_t_prev"}
    assert "layer/input_t" in expected and "layer/input_t" not in found
    assert any(blob.startswith("layer/input_t") and blob.endswith("_with_bias") for blob in found)
    for blob in common:
        assert support.difference(found[blob], expected[blob]) < support.TOLERANCE, blob


# A planted error is seen.


def writer(net, blob):
    (found,) = [operator for operator in net.Proto().op if blob in operator.output]
    return found


def read(position, blob, by=NEW):
    def change(net):
        writer(net, by).input[position] = blob

    return change


def along_the_other_axis(net):
    set_argument(writer(net, "loop/w_scaled"), axis=1)


def weights_the_other_way_round(net):
    step = support.step(net)
    set_argument(next(operator for operator in step.op if operator.type == "BatchMatMul"), trans_b=0)


WRONG = {
    "no bias of the step": (plain, read(2, "b")),
    "no bias of the sequence": (plain, read(0, "other", "loop/b_with_bias")),
    "weights of the step as they lie": (plain, weights_the_other_way_round),
    "weights as they were": (scaled, read(1, "w")),
    "biases as they were": (scaled, read(2, "b")),
    "another scale of the weights": (scaled, read(1, "other", "loop/w_scaled")),
    "another scale of the bias": (scaled, read(2, "other", "loop/b_with_bias")),
    "columns scaled": (scaled, along_the_other_axis),
}


@pytest.mark.parametrize("step, change", WRONG.values(), ids=WRONG)
def test_a_wrong_sequence_is_seen(step, change):
    """What the tests above compare would not pass over it."""
    options = {"step": step, "shape": (T, N, D), "forward_only": step is scaled}
    expected = Net(**options).values()
    net = Net(**options)
    assert optimize(net.net, [RULE], even_if_slower=True).total == 1
    change(net.net)
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(net.values(), expected)


def test_a_wrong_gradient_is_seen():
    expected = Net().values()
    net = Net()
    assert optimize(net.net, [RULE], even_if_slower=True).total == 1
    support.operator(net.net, "FCGradient").input[2] = "seed"
    with pytest.raises(AssertionError, match="gradient of [bwx]"):
        support.assert_same(net.values(), expected)


# Sequences that something else needs, or that cannot be made later.


def inserted(*arguments, **named_arguments):
    return lambda net: net.insert(*arguments, **named_arguments)


def read_in_an_if(net):
    inner = caffe2_pb2.NetDef(op=[made("Copy", [SEQUENCE], ["again"])])
    net.insert(2, "If", ["condition"], [], then_net=inner)


def exported(blob):
    return lambda net: net.net.Proto().external_output.append(blob)


def read_by_a_second_loop(net):
    net.add_loop(lambda make, x, h: make.cell.Mul([x, h], "other_t"), SEQUENCE, "second", forward_only=True)


def made_behind_the_loop(net):
    makes, *others = net.net.Proto().op
    net.reorder([*others, makes])


# The FC is the first operator, the loop the second.
NOT_ALONE = {
    "read before the loop": inserted(1, "Copy", [SEQUENCE], ["again"]),
    "read behind the loop": inserted(2, "Copy", [SEQUENCE], ["again"]),
    "read in an If": read_in_an_if,
    "read by a second loop": read_by_a_second_loop,
    "written before": inserted(0, "Copy", ["seed"], [SEQUENCE]),
    "an external output": exported(SEQUENCE),
    "another input": inserted(1, "Copy", ["other"], ["x"]),
    "other weights": inserted(1, "Copy", ["other"], ["w"]),
    "another bias": inserted(1, "Copy", ["other"], ["b"]),
    "made behind the loop": made_behind_the_loop,
}
REFUSED = "'loop/X' is not made by an FC for this loop alone"


@pytest.mark.parametrize("change", NOT_ALONE.values(), ids=NOT_ALONE)
def test_a_sequence_that_is_not_for_the_loop_alone(change):
    assert support.reasons(Net(change=change).net, RULE) == [REFUSED]


NEAR_MISSES = {
    "written before the FC": inserted(0, "Copy", ["other"], ["b"]),
    "written behind the loop": inserted(2, "Copy", ["other"], ["b"]),
    "read before the FC": inserted(0, "Copy", ["b"], ["again"]),
    "read before the loop": inserted(1, "Copy", ["b"], ["again"]),
    "another external output": exported("loop/X_grad"),
}


@pytest.mark.parametrize("change", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_does_not_keep_a_sequence_from_being_made_later(change):
    assert_kept(change=change)


def test_a_sequence_that_no_fc_makes():
    net = Net(change=lambda net: net.reorder(list(net.net.Proto().op)[1:]))
    assert support.reasons(net.net, RULE) == [REFUSED]
    net = Net()
    net.net.Proto().op[0].type = "FCTransposed"
    assert support.reasons(net.net, RULE) == [REFUSED]


def test_a_sequence_of_another_scope():
    for sequence in ("X", "looped/X"):
        expected = "'{}' is not of the loop's own scope, so somebody may want to see it".format(sequence)
        assert support.reasons(Net(sequence=sequence).net, RULE) == [expected]


def test_a_loop_whose_scope_is_not_known():
    loop = loop_of(Net().net)
    loop.forward.output[-1] = "workspaces"
    assert why(RULE, loop, {}) == ["'loop/X' is not of the loop's own scope, so somebody may want to see it"]


# Refusals for what is in the step.


def adding(loop):
    """The operator that adds the slice, and the product that it adds it to."""
    product, adds = loop.operators[:2]
    return adds, product


def refusals():
    no_product = "no addend is a product with weights, the same in all steps, that nothing else reads"
    elsewhere, behind = "'x_t' is needed elsewhere in the step too", "'x_t' is needed behind the step too"
    rows = "'{}' is not known to have one row for each sequence"

    def layout_of_the_source(loop):
        set_argument(loop.surroundings.products[0][0], axis_w=2)
        return "the weights that make 'loop/X' are laid out in another way (axis_w)"

    def linked_twice(loop):
        loop.links.append(Link("again", SEQUENCE, 0))
        return "'loop/X' is linked more than once"

    def slice_read(loop):
        loop.operators.append(made("Tanh", ["x_t"], ["again"]))
        return elsewhere

    def slice_read_before(loop):
        loop.operators.insert(0, made("Tanh", ["x_t"], ["again"]))
        return elsewhere

    def slice_written(loop):
        loop.operators.append(made("Tanh", ["h_t"], ["x_t"]))
        return elsewhere

    def slice_read_backward(loop):
        loop.gradient.operators.append(made("Tanh", ["x_t"], ["again"]))
        return behind

    def slice_written_backward(loop):
        loop.gradient.operators.insert(0, made("Copy", ["h_t"], ["x_t"]))
        return behind

    def slice_exported(loop):
        loop.net.external_output.append("x_t")
        return behind

    def another_operator(loop):
        loop.operators[0].type = "FC_Dev"
        return no_product

    def product_read(loop):
        loop.operators.append(made("Tanh", ["u"], ["again"]))
        return no_product

    def product_read_backward(loop):
        loop.gradient.operators.append(made("Tanh", ["u"], ["again"]))
        return no_product

    def product_exported(loop):
        loop.net.external_output.append("u")
        return no_product

    def product_linked(loop):
        loop.links.append(Link("u", "loop/others", 0))
        return no_product

    def product_changed(loop):
        loop.operators.insert(1, made("Tanh", ["u"], ["u"]))
        return no_product

    def product_of_onednn(loop):
        loop.operators[0].device_option.CopyFrom(core.DeviceOption(caffe2_pb2.IDEEP))
        return no_product

    def layout_of_the_weights(loop):
        set_argument(loop.operators[0], axis_w=2)
        return no_product

    def weights_of_the_step(loop):
        loop.operators.append(made("Copy", ["w"], ["u_w"]))
        return no_product

    def bias_of_the_step(loop):
        loop.operators.append(made("Copy", ["b"], ["u_b"]))
        return no_product

    def another_axis(loop):
        set_argument(loop.operators[0], axis=1)
        return rows.format("h_prev")

    def no_axis(loop):
        del loop.operators[0].arg[:]
        return rows.format("h_prev")

    def no_rows(loop):
        loop.operators[0].input[0] = "turned"
        loop.operators.append(made("Transpose", ["h_t"], ["turned"]))
        return rows.format("turned")

    return [value for value in locals().values() if callable(value)]


@named(refusals())
def test_refusals(plant):
    loop = loop_of(Net().net)
    assert why(RULE, loop, {}) == [None]
    expected = plant(loop)
    assert why(RULE, loop, {}) == [expected]


def test_rows_are_not_those_of_more_dimensions():
    loop = loop_of(Net().net)
    shapes = {"loop/h_prev_states": (T + 1, N, 2, 2)}
    assert why(RULE, loop, shapes) == ["'h_prev' is not known to have one row for each sequence"]
    loop.known.rows.add("h_prev")
    assert why(RULE, loop, shapes) == [None]


@pytest.mark.parametrize("transposed", [[], ["transposed_weights"]], ids=["FC", "FCTransposed"])
def test_a_scale_or_bias_that_steps_change(transposed, monkeypatch):
    # What is made for as many sequences as there are asks for the shape of this one, in a net that is read again.
    monkeypatch.setattr(vectorised, "sum_of_three_is_faster", lambda elements: False)

    def scaled_loop():
        model, _ = support.lstm()
        optimize(model, [*transposed, *SCALED[:-1]], even_if_slower=True)
        loop = loop_of(model.net)
        assert why(RULE, loop, {}) == [None]
        return loop, next(operator for operator in loop.operators if operator.type == "ATen")

    expected = "what it is scaled with is not the same in all steps"
    loop, adds = scaled_loop()
    adds.input[2] = "layer/cell_t_prev"
    assert why(RULE, loop, {}) == [expected]
    loop, adds = scaled_loop()
    loop.operators.append(made("Copy", ["layer/hidden_t"], ["layer/gates_t_b_scaled"]))
    no_product = "no addend is a product with weights, the same in all steps, that nothing else reads"
    assert why(RULE, loop, {}) == [expected if transposed else no_product]


def test_gates_that_are_computed_again():
    model, _ = support.lstm(**support.RECOMPUTED)
    report = optimize(model, PLAIN, even_if_slower=True)
    assert report.counts[RULE] == 0
    assert reasons_in(report, RULE) == ["'input_t' is needed behind the step too"]


@pytest.mark.parametrize("rules", [["gradient_buffer", *PLAIN], ALL], ids=["alone", "all rules"])
def test_gates_that_are_kept_in_the_memory_of_their_gradient(rules):
    """In one call: what computed them again is gone by then."""
    assert_lstm_kept(rules, **support.RECOMPUTED)


@pytest.mark.parametrize("rules", [["sequence_in_place", "gradient_buffer", *PLAIN], ALL], ids=["alone", "all rules"])
def test_gates_that_were_kept_in_the_sequence(rules):
    assert_lstm_kept(rules, memory_optimization=True)


# Nets that it refuses, or rewrites as they have to be: values say which.


def assert_right(step, rules=PLAIN, **options):
    """Whether it fires or not; the report."""
    expected = Net(step, **options).values()
    net = Net(step, **options)
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    support.assert_same(net.values(), expected)
    return rewrite.report


@pytest.mark.parametrize("rules", [PLAIN, ["transposed_weights", *PLAIN]], ids=["FC", "FCTransposed"])
def test_a_slice_of_one_column_that_is_added_to_all(rules):
    def change(net):
        net.shapes.update(w=(1, 4), b=(1,))

    report = assert_right(scaled, rules, forward_only=True, change=change)
    assert reasons_in(report, RULE) == [
        "'x_t' is 1 wide and the product {}, so that ATen adds it to all columns".format(D)
    ]


def tanh_of_slice(make, x, h):
    v = make.fc(make.cell.Tanh(x, "tx"), "v")
    return make.cell.Tanh(make.cell.Mul([make.cell.Sum([make.fc(h, "u"), x], "total"), v], "tv"), "h_t")


def product_of_slice(make, x, h):
    total = make.cell.Sum([make.fc(h, "u"), x], "total")
    return make.cell.Tanh(make.cell.Mul([total, make.fc(x, "v")], "tv"), "h_t")


AS_A_WHOLE = "'loop/X' is needed as a whole too"


@pytest.mark.parametrize("step", [tanh_of_slice, product_of_slice])
@pytest.mark.parametrize("options", [{}, {"forward_only": True}], ids=str)
def test_values_of_the_sequence_that_are_read_in_front_of_the_loop(step, options):
    """By what another rule has moved there."""
    for rules in (["sequence_operators", *PLAIN], ["sequence_operators", "parameter_gradients", *PLAIN], None):
        report = assert_right(step, rules, **options)
        assert report.counts["sequence_operators"] and reasons_in(report, RULE) == [AS_A_WHOLE]


def test_values_of_the_sequence_that_are_read_behind_the_loop():
    loop = loop_of(Net().net)
    loop.after_gradient.append(made("Tanh", [SEQUENCE], ["again"]))
    assert why(RULE, loop, {}) == [AS_A_WHOLE]
    loop.known.of_shape.add("again")
    assert why(RULE, loop, {}) == [None]


def whole_sequence(make, x, h):
    make.cell.AddExternalInputs(SEQUENCE)
    first = make.cell.Slice([SEQUENCE], "first", starts=[0, 0, 0], ends=[1, -1, -1])
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, make.cell.StopGradient(first, "stopped")], "total"), "h_t")


@pytest.mark.parametrize("options", [{}, {"forward_only": True}], ids=str)
def test_a_step_that_reads_the_whole_sequence(options):
    assert reasons_in(assert_right(whole_sequence, **options), RULE) == [AS_A_WHOLE]


def test_a_sequence_that_the_loop_has_for_something_else_too():
    for plant in (
        lambda loop: loop.inputs.append(SEQUENCE),
        lambda loop: loop.states.append(State("loop/others", SEQUENCE)),
        lambda loop: loop.gradient.parameters.append(Parameter(SEQUENCE, "grad", "outer_grad")),
    ):
        loop = loop_of(Net().net)
        plant(loop)
        assert why(RULE, loop, {}) == [AS_A_WHOLE]


def product_twice(make, x, h):
    u = make.fc(h, "u")
    return make.cell.Tanh(make.cell.Sum([u, u, x], "total"), "h_t")


def two_products(make, x, h):
    v = make.fc(make.cell.Tanh(h, "th"), "v")
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), v, x], "total"), "h_t")


def test_several_products():
    assert reasons_in(assert_right(two_products), RULE) == ["it adds several products"]
    (reason,) = reasons_in(assert_right(product_twice), RULE)
    assert reason.endswith("that nothing else reads")


def sum_in_the_place_of_the_input(make, x, h):
    y = make.cell.Tanh(h, "y")
    make.cell.Sum([make.fc(y, "u"), x], [y])
    return make.cell.Tanh(y, "h_t")


def sum_in_the_place_of_another_addend(make, x, h):
    q = make.cell.Tanh(h, "q")
    make.cell.Sum([q, make.fc(h, "u"), x], [q])
    return make.cell.Tanh(q, "h_t")


def sum_in_the_place_of_a_later_addend(make, x, h):
    u = make.fc(h, "u")
    q = make.cell.Tanh(h, "q")
    make.cell.Sum([q, u, x], [q])
    return make.cell.Tanh(q, "h_t")


@named([sum_in_the_place_of_the_input, sum_in_the_place_of_another_addend, sum_in_the_place_of_a_later_addend])
def test_sums_in_another_place(plant):
    """The product keeps its own name."""
    assert_fired(assert_right(plant, forward_only=True))


def weights_of_three_dimensions(make, x, h):
    for name, shape in {"u_w": (D, D, 1), "u_b": (D,)}.items():
        make.value(name, *shape)
        make.cell.AddExternalInputs(name)
    return make.cell.Tanh(make.cell.Sum([make.cell.FC([h, "u_w", "u_b"], "u", axis=2), x], "total"), "h_t")


def test_weights_of_three_dimensions():
    """FC has a matrix made of them, BatchMatMul has not."""
    assert reasons_in(assert_right(weights_of_three_dimensions), RULE) == ["'u_w' has 3 dimensions"]


@pytest.mark.parametrize("shape", [(N, D), (1, N, D), (1, D), (1, 1, D), (N, 1), (1, 1, 1)], ids=str)
def test_scales_of_other_shapes(shape):
    def scaled_by_them(make, x, h):
        total = make.cell.ATen([make.fc(h, "u"), x, make.reference("s", *shape)], "total", operator="addcmul")
        return make.cell.Tanh(total, "h_t")

    report = assert_right(scaled_by_them, forward_only=True)
    assert reasons_in(report, RULE) == ["'s' has {} dimensions".format(len(shape))]


# What is no place for it.


def slice_twice(make, x, h):
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, x], "total"), "h_t")


def no_sum(make, x, h):
    return make.cell.Tanh(make.cell.Mul([make.fc(h, "u"), x], "total"), "h_t")


def second_sequence(make, x, h):
    return plain(make, make.sequence("y_t"), make.cell.Mul([x, h], "xh"))


@named([slice_twice, no_sum, second_sequence])
def test_no_places(plant):
    report = optimize(Net(plant).net, [RULE], even_if_slower=True)
    assert report.total == 0 and report.refusals == ()


def test_what_addcmul_adds():
    """Its second input, times its third, and nothing else."""

    def said(*inputs, kind="addcmul", **arguments):
        loop = loop_of(Net(scaled, forward_only=True).net)
        loop.operators[1] = made("ATen", inputs, ["total"], **dict(arguments, operator=kind))
        return why(RULE, loop, {})

    assert said("u", "x_t", "s") == [None]
    for inputs in (("u", "s", "x_t"), ("x_t", "u", "s"), ("x_t", "x_t", "s")):
        assert said(*inputs) == []
    assert said("u", "x_t", "s", value=2.0) == said("u", "x_t", "s", kind="addcdiv") == []
    # x_t times the product is no product plus x_t times something.
    assert said("s", "x_t", "u") == ["what it is scaled with is not the same in all steps"]


# What had better stay.


@pytest.mark.parametrize("shapes", [{}, {SEQUENCE: (500,)}, {"h_initial": (500, D)}], ids=["none", "steps", "batch"])
def test_a_loss_where_the_number_of_rows_is_not_known(shapes):
    loop = loop_of(Net().net)
    assert why(RULE, loop, shapes, loss=True) == ["the numbers of steps and sequences are not known; give shapes"]


@pytest.mark.parametrize("steps, batch, fires", [(127, 1, False), (1, 127, False), (128, 1, True), (2, 64, True)])
def test_a_loss_for_few_rows(steps, batch, fires):
    loop = loop_of(Net().net)
    slower = "with 127 rows in the sequence it costs as much as it gains"
    expected = None if fires else slower
    assert why(RULE, loop, {SEQUENCE: (steps, batch, D)}, loss=True) == [expected]
    report = optimize(Net().net, [RULE], shapes={"x": (steps, batch, 4)})
    assert report.total == fires
    assert reasons_in(report, RULE) == ([] if fires else [slower])


@pytest.mark.parametrize(
    "weights, expected",
    [
        ((D, 200), None),
        ((D, 20, 10), None),
        ((D, 201), "with 200 rows in the sequence, weights of 201 columns cost more to scale"),
        ((D, 20, 11), "with 200 rows in the sequence, weights of 220 columns cost more to scale"),
        (None, "the size of the weights 'w' is not known; give shapes"),
    ],
    ids=str,
)
def test_a_loss_for_wide_weights_that_are_scaled(weights, expected):
    shapes = {SEQUENCE: (100, 2, D), **({} if weights is None else {"w": weights})}
    assert why(RULE, loop_of(Net(scaled, forward_only=True).net), shapes, loss=True) == [expected]
    # Without a scale there is nothing to be done to them.
    assert why(RULE, loop_of(Net().net), shapes, loss=True) == [None]


# What it is made of.


def rewrite(loop, shapes=()):
    """Has the rule change a loop; the sizes that are known then."""
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    (site,) = rule.sites(loop)
    sizes = Sizes(dict(shapes))
    rule.rewrite(loop, site, sizes)
    return sizes


def test_sources_of_a_loop():
    """By their positions, in the net and in `around`."""
    loop = loop_of(Net().net)
    assert loop.surroundings.sources == {SEQUENCE: 0} and list(loop.surroundings.products[0][0].output) == [SEQUENCE]
    assert lstm_loop().surroundings.sources == {"layer/i2h": 0}
    assert loop_of(Net(change=inserted(0, "Copy", ["other"], ["again"])).net).surroundings.sources == {SEQUENCE: 1}


def test_sources_of_several_sequences():
    """In training, what makes the second one's gradient reads it too."""

    def sources(**options):
        change = inserted(0, "FC", ["x", "w", "b"], ["Y"], axis=2)
        return loop_of(Net(second_sequence, change=change, **options).net).surroundings.sources

    assert sources(forward_only=True) == {"Y": 0, SEQUENCE: 1}
    assert sources() == {SEQUENCE: 1}


def test_the_first_sequence_is_replaced():
    loop = lstm_loop()
    old, gradient = "layer/i2h", loop.gradient.sequence
    for operators in (loop.before, loop.after_gradient):
        operators += [
            made("Copy", ["x"], ["a"]),
            made("Tanh", [old], ["b"]),
            made("Copy", ["b"], ["c"]),
            made("Copy", ["a"], ["d"]),
        ]
    others = [link for link in loop.links if link.outer != old]
    loop.replace_first_sequence("new", "new_t", made("FC", ["x", "v", "c"], ["new"]))
    assert [list(operator.output) for operator in loop.before] == [["a"], ["d"], ["new"], ["b"], ["c"]]
    assert list(loop.before[3].input) == ["new"] and list(loop.after_gradient[1].input) == ["new"]
    assert loop.inputs[0] == "new" and old not in loop.inputs
    assert loop.links == [*others, Link("new_t", "new", 0)]
    assert [link for link in loop.gradient.links if link.outer == old] == []
    renamed = {given.name: given.s.decode() for given in loop.gradient.operator.arg if given.name.endswith(".rename")}
    assert loop.gradient.sequence == renamed["new_grad.rename"] == gradient
    assert loop.gradient.like == "new" and "layer/i2h_grad.rename" not in renamed
    loop.replace_first_sequence("other", "other_t", like="of the shape")
    assert [list(operator.output) for operator in loop.before] == [["a"], ["d"], ["new"], ["b"], ["c"]]
    assert loop.inputs[0] == "other" and loop.links == [*others, Link("other_t", "other", 0)]
    (changed,) = [operator for operator in loop.around_gradient() if operator.type == support.GRADIENT]
    assert list(changed.input[1:3]) == ["of the shape", *loop.inputs[1:2]] and "other" not in changed.input
    assert support.argument(changed, "of the shape_grad.rename").s.decode() == gradient


def test_the_product_does_not_take_a_name_that_is_written_in_between():
    """Not run: the executor takes such operators for independent of each other as they are."""
    loop = loop_of(Net().net)
    loop.operators.insert(1, made("Scale", ["h_prev"], ["total"]))
    rewrite(loop)
    assert list(loop.operators[0].output) == ["u"] and list(loop.operators[2].input)[0] == "u"


@pytest.mark.parametrize("step, expected", [(plain, ["h_t"]), (in_place, ["u", "h_t"])], ids=["gone", "still there"])
def test_blobs_that_all_steps_share(step, expected):
    """The product's own is none of them where the product writes the sum."""
    loop = loop_of(Net(step).net)
    loop.shared[:] = ["u", "h_t"]
    rewrite(loop)
    assert loop.shared == expected


def test_the_new_sequence_has_the_size_of_the_old_one():
    """For the rules that follow."""
    loop = loop_of(Net().net)
    sizes = rewrite(loop, {SEQUENCE: (T, N, D)})
    assert loop.inputs[0] == NEW and (sizes.steps(loop), sizes.batch(loop)) == (T, N)


def test_the_first_sequence_of_a_loop_without_a_gradient_is_replaced():
    loop = lstm_loop(gradients=False, forward_only=True)
    loop.replace_first_sequence("new", "new_t", made("FC", ["x", "v", "c"], ["new"]))
    assert loop.inputs[0] == "new" and loop.link("new_t") == Link("new_t", "new", 0)
    assert [operator.type for operator in loop.before] == ["FC"] and loop.after_gradient == []


def test_sizes_of_a_blob_that_a_rule_adds():
    sizes = Sizes({"x": (3, 2, 4)})
    sizes.add("y", "x")
    sizes.add("z", "nobody")
    assert sizes.shape("y") == (3, 2, 4) and sizes.shape("z") is None
    given = {"x": (3, 2, 4)}
    Sizes(given).add("y", "x")
    assert given == {"x": (3, 2, 4)}
