"""The registry of step nets that the cross-cutting tests run over.

`AS_CAFFE2` holds those for which Caffe2's own builder is right, so that our operator must be the same; `MENDED`
those that it gets wrong or refuses. T = 3 steps, N = 2 sequences, D = 3 features.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from caffe2.python import core

T, N, D = 3, 2, 3


def scoped(*names):
    return [core.ScopedName(name) for name in names]


@dataclass
class StepNet:
    """A step net, how `recurrent_net` is to use it, and values for the outer blobs."""

    cell: core.Net
    inputs: List[Tuple[Any, str]]
    initial: List[Tuple[Any, str]]
    links: Dict[Any, Any]
    outer: Dict[str, np.ndarray]
    timestep: Optional[Any] = None
    options: Dict[str, Any] = field(default_factory=dict)
    # Blobs through which no gradient goes, whatever a numerical one would say.
    stopped: Tuple[str, ...] = ()

    @property
    def floats(self):
        return [name for name, value in self.outer.items() if value.dtype == np.float32]


class Maker:
    """Collects what a `StepNet` needs while its operators are added."""

    def __init__(self, seed=0):
        self.cell = core.Net("step")
        self.random = np.random.RandomState(seed)
        self.inputs, self.initial, self.links, self.outer = [], [], {}, {}

    def value(self, name, *shape):
        self.outer[name] = (self.random.rand(*shape) * 1.6 - 0.8).astype(np.float32)
        return name

    def sequence(self, name="x_t", size=D):
        (inner,) = self.cell.AddScopedExternalInputs(name)
        self.inputs.append((inner, self.value(name.replace("_t", "").upper(), T, N, size)))
        return inner

    def state(self, name="h", size=D, shape=None):
        (inner,) = self.cell.AddScopedExternalInputs(name + "_prev")
        self.initial.append((inner, self.value(name + "_initial", *(shape or (N, size)))))
        return inner

    def reference(self, name, *shape):
        (inner,) = self.cell.AddScopedExternalInputs(name)
        self.value(str(inner), *shape)
        return inner

    def fc(self, x, output, dim_in=D, dim_out=D):
        weights = self.reference(str(output).split("/")[-1] + "_w", dim_out, dim_in)
        biases = self.reference(str(output).split("/")[-1] + "_b", dim_out)
        return self.cell.FC([x, weights, biases], output, axis=2)

    def link(self, state, output):
        self.cell.AddExternalOutputs(output)
        self.links[state] = output

    def done(self, timestep=None, **options):
        return StepNet(self.cell, self.inputs, self.initial, self.links, self.outer, timestep, options)


def lstm(**options):
    make = Maker()
    timestep = make.cell.AddScopedExternalInputs("timestep")[0]
    gates_in, hidden, cell = make.sequence("gates_in_t", 4 * D), make.state("hidden"), make.state("cell")
    gates = make.fc(hidden, "gates", D, 4 * D)
    make.cell.Sum([gates, gates_in], [gates])
    lengths = make.cell.AddScopedExternalInputs("lengths")[0]
    make.outer[str(lengths)] = np.array([T, 1][:N], dtype=np.int32)
    outputs = make.cell.LSTMUnit([hidden, cell, gates, lengths, timestep], ["hidden_t", "cell_t"], forget_bias=0.5)
    make.link(hidden, outputs[0])
    make.link(cell, outputs[1])
    return make.done(timestep, **options)


def lstm_recomputed():
    return lstm(recompute_blobs_on_backward=scoped("gates"))


def lstm_forward_only():
    return lstm(forward_only=True)


def lstm_all_gradients():
    return lstm(outputs_with_grads=(0, 1, 2, 3))


def multiplicative():
    """Gates as in MILSTM: products of input and state part, each scaled by parameters."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.fc(h, "u")
    alpha, beta1, beta2, b = [make.reference(name, 1, N, D) for name in ("alpha", "beta1", "beta2", "b")]
    xu = make.cell.Mul([make.cell.Mul([u, x], "xu"), alpha], "alpha_xu")
    gates = make.cell.Sum([xu, make.cell.Mul([u, beta1], "beta1_u"), make.cell.Mul([x, beta2], "beta2_x")], "gates")
    biased = make.cell.Sum([gates, make.cell.Mul([b, b], "bb")], "biased")
    make.link(h, make.cell.Tanh(biased, "h_t"))
    return make.done(recompute_blobs_on_backward=scoped("gates", "u"))


def sum_first():
    """Caffe2's own example: the state's gradient is the gradient of the sum."""
    make = Maker()
    x, h = make.sequence(), make.state()
    total = make.cell.Sum([x, h], "total")
    make.link(h, make.cell.Mul([x, total], "h_t"))
    return make.done()


def product():
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Mul([x, h], "h_t"))
    return make.done()


def two_states():
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b", size=2)
    make.link(a, make.cell.Tanh(make.cell.Sum([make.fc(a, "ua"), x], "za"), "a_t"))
    make.link(b, make.cell.Sigmoid(make.fc(b, "ub", 2, 2), "b_t"))
    return make.done(outputs_with_grads=(3, 0))


def state_read_by_another():
    """b sees the new a: a's gradient comes from outside, from the next step and from b."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    a_t = make.cell.Tanh(make.cell.Mul([a, x], "ax"), "a_t")
    make.link(a, a_t)
    make.link(b, make.cell.Mul([make.fc(a_t, "ua"), make.cell.Sigmoid(b, "sb")], "b_t"))
    return make.done(outputs_with_grads=(0, 2))


def state_read_twice_by_others():
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    a_t = make.cell.Tanh(make.cell.Mul([a, x], "ax"), "a_t")
    make.link(a, a_t)
    make.link(b, make.cell.Mul([make.fc(a_t, "ua"), make.cell.Mul([a_t, b], "ab")], "b_t"))
    return make.done(outputs_with_grads=(0, 1, 2, 3))


def chain_of_states():
    """Each state reads the one before: several gradients meet one from outside."""
    make = Maker()
    x, states = make.sequence(), [make.state(name) for name in "abc"]
    value = x
    for state, name in zip(states, "abc"):
        value = make.cell.Tanh(make.cell.Mul([make.fc(state, "u" + name), value], "m" + name), name + "_t")
        make.link(state, value)
    return make.done(outputs_with_grads=(0, 2, 5))


def in_place():
    make = Maker()
    x, h = make.sequence(), make.state()
    z = make.fc(h, "z")
    make.cell.Sum([z, x], [z])
    make.cell.Sigmoid(z, z)
    y = make.cell.Mul([z, h], "h_t")
    make.cell.Tanh(y, y)
    make.link(h, y)
    return make.done()


def reference_read_twice():
    make = Maker()
    x, h = make.sequence(), make.state()
    w, b = make.reference("w", D, D), make.reference("b", D)
    first = make.cell.Tanh(make.cell.FC([h, w, b], "u", axis=2), "first")
    second = make.cell.FC([first, w, b], "v", axis=2)
    make.link(h, make.cell.Mul([second, x], "h_t"))
    return make.done()


def several_parameters():
    make = Maker()
    x, h = make.sequence(), make.state()
    u, v = make.fc(h, "u"), make.fc(x, "v")
    gate = make.cell.Sigmoid(make.fc(u, "gate"), "gated")
    make.link(h, make.cell.Tanh(make.cell.Mul([gate, v], "gv"), "h_t"))
    return make.done(recompute_blobs_on_backward=scoped("gated", "u"))


def custom_timestep():
    step_net = lstm()
    proto = step_net.cell.Proto()
    for blobs in [proto.external_input] + [operator.input for operator in proto.op]:
        for index, blob in enumerate(blobs):
            if blob == step_net.timestep:
                blobs[index] = "step_number"
    step_net.cell = core.Net(proto)
    step_net.timestep = "step_number"
    return step_net


def undifferentiated_reference():
    make = Maker()
    x, h = make.sequence(), make.state()
    mask = make.cell.StopGradient(make.reference("mask", 1, N, D), "stopped")
    make.link(h, make.cell.Mul([make.cell.Tanh(make.cell.Mul([x, h], "xh"), "th"), mask], "h_t"))
    step_net = make.done()
    step_net.stopped = ("mask",)
    return step_net


def initial_state_compared_in_the_step():
    """It is a reference as well, but one without a gradient."""
    make = Maker()
    x, h = make.sequence(), make.state(shape=(1, N, D))
    make.cell.AddExternalInputs("h_initial")
    whole = make.cell.Cast(make.cell.Cast("h_initial", "whole", to=core.DataType.INT64), "fixed", to=1)
    fixed = make.cell.StopGradient(whole, whole)
    make.link(h, make.cell.Tanh(make.cell.Sum([make.cell.Mul([x, h], "xh"), fixed], "total"), "h_t"))
    return make.done()


AS_CAFFE2 = [
    lstm,
    lstm_recomputed,
    lstm_forward_only,
    lstm_all_gradients,
    multiplicative,
    sum_first,
    product,
    two_states,
    state_read_by_another,
    state_read_twice_by_others,
    chain_of_states,
    in_place,
    reference_read_twice,
    several_parameters,
    custom_timestep,
    undifferentiated_reference,
    initial_state_compared_in_the_step,
]


def state_passed_through():
    """h_t = h + x: h_t's, h's and x's gradients are one blob for Caffe2, linked to three places."""
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Sum([h, x], "h_t"))
    return make.done()


def sum_of_both_inputs():
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.Sum([x, h], "total"), "h_t"))
    return make.done(outputs_with_grads=(0, 1))


def reference_summed_with_state():
    make = Maker()
    x, h = make.sequence(), make.state()
    w = make.reference("w", 1, N, D)
    make.link(h, make.cell.Mul([x, make.cell.Sum([h, w], "hw")], "h_t"))
    return make.done()


def references_added_last():
    make = Maker()
    x, h = make.sequence(), make.state()
    v, w = make.reference("v", 1, N, D), make.reference("w", 1, N, D)
    make.link(h, make.cell.Sum([make.cell.Mul([x, h], "xh"), v, w], "h_t"))
    return make.done()


def scaled_in_place_before_sum():
    """The gradient of Scale overwrites the blob that also stands for x's gradient."""
    make = Maker()
    x, h = make.sequence(), make.state()
    y = make.cell.Mul([h, h], "y")
    make.cell.Scale(y, y, scale=2.0)
    make.cell.Sum([y, x], [y])
    make.link(h, make.cell.Tanh(y, "h_t"))
    return make.done()


def scaled_before_gradients_are_added():
    """Caffe2 adds up x's gradients at its first reader, be it one without a gradient, and Scale's comes before that."""
    make = Maker()
    x, h = make.sequence(), make.state()
    make.cell.Sigmoid(x, "unread")
    y = make.cell.Mul([h, h], "y")
    make.cell.Scale(y, y, scale=2.0)
    make.cell.Sum([y, x], [y])
    make.link(h, make.cell.Tanh(make.cell.Mul([y, x], "yx"), "h_t"))
    return make.done()


def squared_before_sum():
    """The gradient of Sqr changes the blob that also stands for the gradient of another addend."""
    make = Maker()
    x, h = make.sequence(), make.state()
    a = make.cell.Tanh(x, "a")
    squared = make.cell.Sqr(make.cell.Tanh(h, "bounded"), "squared")
    make.link(h, make.cell.Sum([a, squared], "h_t"))
    return make.done()


def state_summed_into_another():
    """b_t = a_t + b: a_t's gradient from outside was replaced by b_t's instead of added to it."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    a_t = make.cell.Tanh(make.cell.Mul([a, x], "ax"), "a_t")
    make.link(a, a_t)
    make.link(b, make.cell.Sum([a_t, b], "b_t"))
    return make.done(outputs_with_grads=(0, 1, 2, 3))


def two_states_read_by_one_operator():
    """Both gradients of one operator meet a gradient from outside."""
    make = Maker()
    x, a, b, c = make.sequence(), make.state("a"), make.state("b"), make.state("c")
    a_t = make.cell.Tanh(make.cell.Mul([a, x], "ax"), "a_t")
    b_t = make.cell.Sigmoid(make.cell.Mul([b, x], "bx"), "b_t")
    make.link(a, a_t)
    make.link(b, b_t)
    make.link(c, make.cell.Mul([make.cell.Mul([a_t, b_t], "ab"), c], "c_t"))
    return make.done(outputs_with_grads=(0, 3, 4))


def value_read_before_it_is_added_to():
    """y is read, then added to in place: `y_grad` would stand for the gradients of both values."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    y = make.cell.Scale(make.cell.Mul([a, x], "ax"), "y", scale=0.5)
    make.link(a, make.cell.Tanh(make.cell.Sum([b, y], "by"), "a_t"))
    make.cell.Sum([y, make.fc(x, "u")], [y])
    make.link(b, y)
    return make.done(outputs_with_grads=(0, 2))


def unused_previous_state():
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.fc(x, "u"), "h_t"))
    return make.done()


def sequence_without_gradient():
    """The sequence holds row numbers of a table."""
    make = Maker()
    x, h = make.sequence("index_t", 1), make.state()
    make.outer["INDEX"] = np.array([[0, 2], [1, 1], [3, 0]], dtype=np.float32)[:, :N].reshape(T, N, 1)
    table = make.reference("table", 4, D)
    indices = make.cell.Cast(make.cell.Squeeze(x, "flat", dims=[0, 2]), "indices", to=core.DataType.INT64)
    rows = make.cell.ExpandDims(make.cell.Gather([table, indices], "rows"), "rows_t", dims=[0])
    make.link(h, make.cell.Tanh(make.cell.Mul([rows, h], "rh"), "h_t"))
    step_net = make.done()
    step_net.stopped = ("INDEX",)
    return step_net


def sparse_and_twice():
    """A table read at two places: its gradient is a GradientSlice of joined indices."""
    make = Maker()
    x, h = make.sequence(), make.state()
    table = make.reference("table", 4, D)
    rows = []
    for name, numbers in (("first", [1, 1]), ("second", [3, 0])):
        indices = make.cell.AddScopedExternalInputs(name)[0]
        make.outer[str(indices)] = np.array(numbers[:N], dtype=np.int64)
        gathered = make.cell.Gather([table, indices], name + "_rows")
        rows.append(make.cell.ExpandDims(gathered, name + "_rows_t", dims=[0]))
    make.link(h, make.cell.Mul([make.cell.Mul([rows[0], h], "a"), make.cell.Mul([rows[1], x], "b")], "h_t"))
    return make.done()


def several_sequences():
    make = Maker()
    x, y, z, h = make.sequence("x_t"), make.sequence("y_t"), make.sequence("z_t", 2), make.state()
    both = make.cell.Mul([make.cell.Tanh(x, "tx"), y], "both")
    make.link(h, make.cell.Tanh(make.cell.Sum([both, make.fc(z, "v", 2), make.fc(h, "u")], "total"), "h_t"))
    return make.done(outputs_with_grads=(0, 1))


def several_sequences_auto():
    step_net = several_sequences()
    step_net.options["outputs_with_grads"] = "auto"
    return step_net


def initial_state_read_in_the_step():
    """The outer blob of the initial state is a reference as well."""
    make = Maker()
    x, h = make.sequence(), make.state(shape=(1, N, D))
    make.cell.AddExternalInputs("h_initial")
    make.link(h, make.cell.Tanh(make.cell.Mul([make.cell.Mul([x, h], "xh"), "h_initial"], "xhi"), "h_t"))
    return make.done()


def sequence_read_whole():
    """The sequence that a step sees a slice of is a reference as well."""
    make = Maker()
    x, h = make.sequence(), make.state()
    make.cell.AddExternalInputs("X")
    whole = make.cell.ReduceFrontSum("X", "whole")
    both = make.cell.Mul([make.cell.Mul([x, h], "xh"), make.cell.ExpandDims(whole, "whole_t", dims=[0])], "both")
    make.link(h, make.cell.Tanh(both, "h_t"))
    return make.done(outputs_with_grads="auto")


def gradients_written_in_turn():
    """Those of Sqrt and Pow are made by two or three operators; what these read is read elsewhere too."""
    make = Maker()
    x, h = make.sequence(), make.state()
    opened, squared = make.cell.Sigmoid(x, "opened"), make.cell.Pow(x, "squared", exponent=2.0)
    cubed, root = make.cell.Pow(x, "cubed", exponent=3.0), make.cell.Sqrt(opened, "root")
    parts = make.cell.Sum([root, opened, squared, cubed], "parts")
    make.link(h, make.cell.Tanh(make.cell.Mul([parts, make.cell.Sum([x, h], "xh")], "both"), "h_t"))
    return make.done()


def read_twice_by_one_operator():
    """Two gradients that are added up, each of its own operators; that of Pow is made by several in turn besides."""
    make = Maker()
    x, h = make.sequence(), make.state()
    opened = make.cell.Sigmoid(x, "opened")
    gram = make.cell.BatchMatMul([opened, opened], "gram", trans_b=1)
    parts = [make.cell.BatchMatMul([gram, opened], "mixed"), make.cell.Pow([opened, opened], "power")]
    make.link(h, make.cell.Tanh(make.cell.Sum([*parts, make.fc(h, "u")], "total"), "h_t"))
    return make.done()


def written_twice_before_it_is_read():
    """The RNN executor would run the three in any order, as nothing reads the first two results."""
    make = Maker()
    x, h = make.sequence("x_t", 2 * D), make.state()
    first, _ = make.cell.Split(x, ["first", "again"], axis=2)
    bounded = make.cell.Tanh(h, "bounded")
    make.cell.Sigmoid(bounded, "again")
    make.cell.Mul([make.cell.Sigmoid(first, "opened"), first], "again")
    make.link(h, make.cell.Tanh(make.cell.Sum(["again", bounded], "total"), "h_t"))
    return make.done()


def overwritten_before_their_gradients():
    """Gradients that are made of what their operators have read, and written over."""
    make = Maker()
    x, h = make.sequence(), make.state()
    squared, cubed = make.cell.Mul([x, h], "squared"), make.cell.Scale(x, "cubed", scale=2.0)
    make.cell.Sqr(squared, squared)
    make.cell.Pow(cubed, cubed, exponent=3.0)
    opened = make.cell.Sigmoid(make.cell.Sum([x, cubed], "xc"), "opened")
    logarithm = make.cell.Scale(opened, "logarithm", scale=2.0)
    make.cell.Log(logarithm, logarithm)
    make.cell.Mul([logarithm, squared], logarithm)
    make.cell.Mul([logarithm, opened], logarithm)
    make.link(h, make.cell.Tanh(make.cell.Sum([logarithm, make.fc(h, "u")], "total"), "h_t"))
    return make.done(recompute_blobs_on_backward=scoped("squared", "xc"))


def state_multiplied_in_place():
    """a_t_grad comes from outside for the product; what is made of it under that name is not to be added to it."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    a_t = make.cell.Tanh(make.fc(a, "u"), "before")
    a_t = make.cell.Scale(a_t, "a_t", scale=0.5)
    make.cell.Mul([a_t, x], a_t)
    make.link(a, a_t)
    # A second one, which the step reads as well.
    b_t = make.cell.Sum([make.cell.Scale(b, "halved", scale=0.5), a_t], "b_t")
    make.cell.Sqr(b_t, b_t)
    make.link(b, b_t)
    return make.done(outputs_with_grads=(0, 1, 2, 3))


def state_output_written_twice():
    """Its name is that of something else before, of which it is made; and of something that is read elsewhere."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    first = make.cell.Sum([a, x], "a_t")
    halved = make.cell.Scale(first, "halved", scale=0.5)
    second = make.cell.Scale(b, "b_t", scale=0.25)
    read = make.cell.Sum([second, x], "read")
    make.link(a, make.cell.Tanh(halved, first))
    make.link(b, make.cell.Mul([read, first], second))
    return make.done(outputs_with_grads=(0, 1, 2, 3))


def state_output_named_as_something_smaller():
    """It is a view of a slice, which an operator that makes half of it would take from it."""
    make = Maker()
    x, h = make.sequence("x_t", 2 * D), make.state()
    first, second = make.cell.Split(x, ["h_t", "second"], axis=2)
    scaled = make.cell.Mul([make.cell.Concat([first, second], ["both", "sizes"], axis=2)[0], x], "scaled")
    half, other = make.cell.Split(scaled, ["half", "other"], axis=2)
    wide = make.cell.Concat([half, other], ["h_t", "h_t_sizes"], axis=2)[0]
    parts = make.cell.Split(make.cell.Tanh(wide, "wide"), ["one", "two"], axis=2)
    make.link(h, make.cell.Tanh(make.cell.Sum([make.cell.Mul([parts[0], h], "oh"), parts[1]], "total"), "h_t"))
    return make.done()


def state_output_that_is_no_longer_differentiated():
    """What it was called before has a gradient, and it has none itself."""
    make = Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    before = make.cell.Sum([x, a], "b_t")
    make.link(a, make.cell.Tanh(make.cell.Negative(before, "negative"), "a_t"))
    make.link(b, make.cell.ConstantFill([x], "b_t", value=0.5))
    return make.done(outputs_with_grads=(0, 1, 2, 3))


def part_of_a_split_changed_in_place():
    """No gradient reaches that part; the zeros in its place need nothing but its shape."""
    make = Maker()
    x, h = make.sequence("x_t", 2 * D), make.state()
    first, second = make.cell.Split(x, ["first", "second"], axis=2)
    make.cell.StopGradient(second, second)
    whole = make.cell.Cast(make.cell.Cast(second, "whole", to=core.DataType.INT64), "fixed", to=1)
    fixed = make.cell.StopGradient(whole, whole)
    make.link(h, make.cell.Tanh(make.cell.Sum([make.cell.Mul([first, h], "xh"), fixed], "total"), "h_t"))
    return make.done()


def exported_blob_that_is_no_state():
    """Something to look at with `retrieve_step_blobs`: nothing outside gives it a gradient."""
    make = Maker()
    x, h = make.sequence(), make.state()
    xh = make.cell.Mul([x, h], "xh")
    make.cell.AddExternalOutputs(make.cell.Sigmoid(xh, "watched"))
    make.link(h, make.cell.Tanh(xh, "h_t"))
    return make.done()


def recomputed_state_output():
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.Mul([x, h], "xh"), "h_t"))
    return make.done(recompute_blobs_on_backward=scoped("h_t", "xh"))


MENDED = [
    state_passed_through,
    sum_of_both_inputs,
    reference_summed_with_state,
    references_added_last,
    scaled_in_place_before_sum,
    scaled_before_gradients_are_added,
    squared_before_sum,
    state_summed_into_another,
    two_states_read_by_one_operator,
    value_read_before_it_is_added_to,
    unused_previous_state,
    sequence_without_gradient,
    sparse_and_twice,
    several_sequences,
    several_sequences_auto,
    initial_state_read_in_the_step,
    sequence_read_whole,
    gradients_written_in_turn,
    read_twice_by_one_operator,
    written_twice_before_it_is_read,
    overwritten_before_their_gradients,
    state_multiplied_in_place,
    state_output_written_twice,
    state_output_named_as_something_smaller,
    state_output_that_is_no_longer_differentiated,
    part_of_a_split_changed_in_place,
    exported_blob_that_is_no_state,
    recomputed_state_output,
]
