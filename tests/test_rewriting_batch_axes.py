"""Which axis is that of the batch: what is said of random operators against what the engine makes of parts."""

import copy
import random

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, utils, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings

import rewriting_support as support
from caffe2_recurrent import AttentionType, LSTMWithAttention
from caffe2_recurrent.loops.fitting_shapes import fit
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes, find_sizes
from caffe2_recurrent.rewriting.batch_parts import batch_axes
from caffe2_recurrent.rewriting.batch_parts.batch_axes import KINDS, Unknown, of_references
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.steps.rows import BINARY, ELEMENTWISE, UNITS
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before
from test_random_step_nets import seeds

N, D, S = 3, 4, 5
ROWS = {"layer/hidden_t_prev": (1, N, D), "layer/cell_t_prev": (1, N, D), "layer/input_t": (1, N, 4 * D)}
HIDDEN, CELL, GATES = ROWS
# Outer blobs that a step may read.
REFERENCES = {
    "square": (D, D),
    "wide": (4 * D, D),
    "numbers": (D,),
    "many": (4 * D,),
    "gates_of_gru": (1, N, 3 * D),
    "row": (1, D),
    "for_all": (1, 1, D),
    "encoded": (S, N, D),
    "transposed": (N, D, S),
    "like_rows": (1, N, D),
    "of_square_batch": (N, N, D),
    "for_each": (N,),
    "lengths": (N,),
    "layer/timestep": (1,),
}


def loop_over(*operators):
    """A loop of which only what steps read and do counts."""
    model, _ = support.lstm(gradients=False)
    (loop,) = read_loops(model.net.Proto()).values()
    loop.operators[:] = operators
    loop.inputs.extend(REFERENCES)
    shapes = {"layer/i2h": (9, N, 4 * D), "h0": (1, N, D), "c0": (1, N, D), **REFERENCES}
    # What there is one of stays so for parameters alone.
    return loop, Sizes(shapes, parameters=REFERENCES)


def found(kind, inputs, outputs=("y",), **arguments):
    return of_references(*loop_over(core.CreateOperator(kind, inputs, list(outputs), **arguments)))


# What is said.


@pytest.mark.parametrize(
    "kind, inputs, arguments, layouts",
    [
        ("FC", [HIDDEN, "wide", "numbers"], {"axis": 2}, {}),
        ("Sum", [HIDDEN, "like_rows"], {}, {"like_rows": Layout(3, 1)}),
        ("Add", ["encoded", HIDDEN], {}, {"encoded": Layout(3, 1)}),
        ("Add", [HIDDEN, "encoded"], {}, {"encoded": Layout(3, 1)}),
        ("Mul", [HIDDEN, "for_all"], {}, {}),
        ("Mul", [HIDDEN, "numbers"], {"broadcast": 1}, {}),
        ("Mul", [HIDDEN, "row"], {"broadcast": 1, "axis": 1}, {}),
        ("Mul", [HIDDEN, "for_each"], {"broadcast": 1, "axis": 1}, {"for_each": Layout(1, 0)}),
        ("Concat", [HIDDEN, "like_rows"], {"axis": 2}, {"like_rows": Layout(3, 1)}),
        ("Negative", ["numbers"], {}, {}),
        ("LSTMUnit", [HIDDEN, CELL, GATES, "layer/timestep"], {}, {}),
        ("LSTMUnit", [HIDDEN, CELL, GATES, "lengths", "layer/timestep"], {}, {"lengths": Layout(1, 0)}),
    ],
)
def test_layouts_of_references(kind, inputs, arguments, layouts):
    outputs = ["y", "z"] if kind in ("LSTMUnit", "Concat") else ["y"]
    assert found(kind, inputs, outputs, **arguments) == layouts


@pytest.mark.parametrize("kind", [AttentionType.Regular, AttentionType.Recurrent])
@pytest.mark.parametrize("lengths", [None, "lengths"])
def test_attention(kind, lengths):
    """What it knows of the encoder has its batch at different places."""
    model = ModelHelper("model")
    encoder = (D, "encoded", 6, D)
    LSTMWithAttention(model, "x", None, "h0", "c0", "w0", *encoder, "layer", kind, encoder_lengths=lengths)
    (loop,) = read_loops(model.net.Proto()).values()
    shapes = {"x": (9, N, 6), "encoded": (S, N, D), "lengths": (N,), **dict.fromkeys(["h0", "c0", "w0"], (1, N, D))}
    sizes = find_sizes(model.net.Proto(), model.param_init_net.Proto(), shapes)
    expected = {"layer/weighted_encoder_outputs": Layout(3, 1), "layer/encoder_outputs_transposed": Layout(3, 0)}
    if lengths is not None:
        expected[lengths] = Layout(1, 0)
    assert of_references(loop, sizes) == expected


# What is refused.


@pytest.mark.parametrize(
    "kind, inputs, arguments",
    [
        ("Unknown", [HIDDEN], {}),
        ("FC", [HIDDEN, "wide", "numbers"], {}),
        ("FC", [HIDDEN, HIDDEN, "numbers"], {"axis": 2}),
        ("Softmax", [HIDDEN], {}),
        ("Softmax", [HIDDEN], {"axis": -1}),
        ("Split", [HIDDEN], {"axis": 1}),
        ("Split", [HIDDEN], {"axis": -1}),
        ("Sum", [HIDDEN, "numbers"], {}),
        ("Add", [HIDDEN, "transposed"], {}),
        ("Add", [HIDDEN, "not_known"], {}),
        ("Mul", [HIDDEN, "numbers"], {"broadcast": 1, "axis": 1}),
        ("Mul", [HIDDEN, "numbers"], {"broadcast": 1, "axis_str": "C"}),
        ("Mul", ["encoded", HIDDEN], {"broadcast": 1, "axis": 0}),
        ("Concat", [HIDDEN, HIDDEN], {"axis": 1}),
        ("Concat", [HIDDEN, HIDDEN], {"axis": -1}),
        ("Concat", [HIDDEN, HIDDEN], {"axis": -2}),
        ("Concat", [HIDDEN, HIDDEN], {"axis": 2, "add_axis": 1}),
        ("Concat", [HIDDEN, "for_all"], {"axis": 2}),
        ("LSTMUnit", [HIDDEN, CELL, "for_all", "layer/timestep"], {}),
        ("LSTMUnit", [HIDDEN, CELL, GATES, "numbers", "layer/timestep"], {}),
        ("BatchMatMul", [HIDDEN, "square"], {}),
        ("BatchMatMul", [HIDDEN, "encoded"], {"trans_b": 1}),
        ("Squeeze", [HIDDEN], {"dims": [1]}),
        ("SequenceMask", [HIDDEN, "lengths"], {"axis": 1, "mode": "sequence"}),
        ("SequenceMask", [HIDDEN, "lengths"], {"axis": 2, "mode": "sequence"}),
        ("SequenceMask", [HIDDEN], {"axis": 1, "mode": "upper"}),
    ],
)
def test_what_is_not_known_to_take_sequences_one_by_one(kind, inputs, arguments):
    operator = caffe2_pb2.OperatorDef(type=kind, input=inputs, output=["y", "z"])
    operator.arg.extend(utils.MakeArgument(*given) for given in arguments.items())
    expected = "its steps have '{}', which is not known to take sequences one by one".format(kind)
    loop, sizes = loop_over(operator)
    loop.inputs.append("not_known")
    assert of_references(loop, sizes) == expected


def test_a_reference_that_is_the_same_for_all_and_is_not():
    shared = core.CreateOperator("Negative", ["like_rows"], ["y"])
    batched = core.CreateOperator("Sum", [HIDDEN, "like_rows"], ["z"])
    expected = "its steps read 'like_rows' in two ways: by sequences, and the same for all"
    assert of_references(*loop_over(shared, batched)) == expected
    assert of_references(*loop_over(batched, shared)) == {"like_rows": Layout(3, 1)}


@pytest.mark.parametrize(
    "operator",
    [
        core.CreateOperator("Negative", ["like_rows"], ["layer/hidden_t"]),
        core.CreateOperator("Transpose", [HIDDEN], ["layer/hidden_t"], axes=[1, 0, 2]),
    ],
    ids=["the same for all", "at another axis"],
)
def test_a_state_without_rows(operator):
    expected = "its steps make 'layer/hidden_t', which is not known to have a row for each sequence"
    assert of_references(*loop_over(operator)) == expected


def test_a_row_that_may_be_several():
    loop, _ = loop_over(core.CreateOperator("Add", [HIDDEN, "row"], ["y"]))
    shapes = {"layer/i2h": (9, N, 4 * D), "h0": (1, N, D), "c0": (1, N, D), "row": (1, D)}
    assert "which is not known to take sequences one by one" in of_references(loop, Sizes(shapes))
    assert of_references(loop, Sizes(shapes, parameters=["row"])) == {}


# Random operators.


def drawn(generator, step, known):
    """An operator of known blobs, of which more often than not one has a batch; they need not fit."""

    def blob():
        return generator.choice(sorted(step.axes.keys() & known if generator.random() < 0.6 else known))

    kind = generator.choice(sorted(KINDS - ELEMENTWISE | {"Sum", "Tanh"}))
    arguments = {"axis": generator.randrange(3)} if generator.random() < 0.9 else {}
    if kind in BINARY:
        repeated = {"broadcast": 1, **(arguments if generator.random() < 0.5 else {})}
        return kind, [blob(), blob()], repeated if generator.random() < 0.3 else {}
    if kind in ("FC", "FCTransposed"):
        return kind, [blob(), *generator.choice([("square", "numbers"), ("wide", "many"), (blob(), blob())])], arguments
    if kind == "ElementwiseLinear":
        return kind, [blob(), "numbers", "numbers"], arguments
    if kind == "BatchMatMul":
        turned = {name: generator.randrange(2) for name in ("trans_a", "trans_b")}
        return kind, generator.choice([[blob(), blob()], ["transposed", blob()]]), turned
    if kind == "SequenceMask":
        return kind, [blob(), "lengths"], {**arguments, "mode": "sequence", "fill_val": -1.0}
    if kind in UNITS:
        read = {"LSTMUnit": [HIDDEN, CELL, GATES], "GRUUnit": [HIDDEN, "gates_of_gru"]}[kind]
        lengths = generator.choice([[], ["lengths"]])
        read[generator.randrange(2)] = blob() if generator.random() < 0.3 else HIDDEN
        return kind, [*read, *lengths, "layer/timestep"], {"sequence_lengths": len(lengths)}
    if kind in ("Squeeze", "ExpandDims"):
        return kind, [blob()], {"dims": [generator.randrange(4)]}
    if kind == "Transpose":
        return kind, [blob()], {"axes": generator.sample(range(3), 3)} if generator.random() < 0.9 else {}
    return kind, [blob() for _ in range(2 if kind in ("Concat", "Sum") else 1)], arguments


def values(generator):
    """What is in the rows and in the references."""
    numbers = np.random.RandomState(generator.randrange(1000))
    given = {
        blob: numbers.uniform(0.5, 1.5, shape).astype(np.float32) for blob, shape in {**ROWS, **REFERENCES}.items()
    }
    given["lengths"] = numbers.randint(0, 4, N).astype(np.int32)
    given["layer/timestep"] = np.array([1], dtype=np.int32)
    return given


def made(operators, given):
    """What the operators make."""
    workspace.ResetWorkspace()
    for blob, value in given.items():
        workspace.FeedBlob(blob, value)
    for operator in operators:
        workspace.RunOperatorOnce(operator)
    return {blob: workspace.FetchBlob(blob) for operator in operators for blob in operator.output}


def runs(operator, given):
    """Whether the engine does; what it would read behind its inputs' ends it is not asked, nor to divide by 0."""
    shapes = [given[blob].shape for blob in operator.input]
    gates = {"LSTMUnit": [(1, N, D), (1, N, D), (1, N, 4 * D)], "GRUUnit": [(1, N, D), (1, N, 3 * D)]}
    expected = gates.get(operator.type, shapes)
    if operator.type == "BatchMatMul" and [len(shape) for shape in shapes] != [3, 3]:
        return False
    if operator.type == "Div" and given[operator.input[1]].dtype == np.int32:  # by 0 that ends the process
        return False
    try:
        return shapes[: len(expected)] == expected and fit(operator, shapes) and bool(made([operator], given))
    except RuntimeError:
        return False


def chain(generator, given):
    """Operators that the engine runs and that are known to take sequences one by one, and what is known behind them."""
    operators, known = [], dict(given)
    loop, sizes = loop_over()
    step = batch_axes._Step(loop, sizes)
    step.references = frozenset(REFERENCES)
    for number in range(300):
        kind, inputs, arguments = drawn(generator, step, known.keys())
        outputs = ["{}_{}".format(number, output) for output in range({"Concat": 2, "LSTMUnit": 2}.get(kind, 1))]
        if kind == "Split":
            outputs.append(outputs[0] + "_other")
        operator = core.CreateOperator(kind, inputs, outputs, **arguments)
        after = copy.deepcopy(step)
        loop.operators[:] = [*operators, operator]
        try:
            after.follow(operator, shapes_before(loop, sizes, loop.operators, len(operators)))
        except Unknown:
            continue
        if after.shared.isdisjoint(after.layouts) and runs(operator, {blob: known[blob] for blob in inputs}):
            operators.append(operator)
            known.update(made(operators, given))
            step = after
        if len(operators) == 12:
            break
    return operators, step


def assert_parts_are_right(operators, step, given):
    expected = made(operators, given)
    axes = {blob: layout.batch for blob, layout in step.layouts.items()}
    batched = {**dict.fromkeys(ROWS, 1), **axes}
    for part in (slice(0, 1), slice(1, N)):
        sliced = {blob: _part(value, batched.get(blob), part) for blob, value in given.items()}
        found = made(operators, sliced)
        for blob, value in found.items():
            of_part = _part(expected[blob], step.axes.get(blob), part)
            np.testing.assert_allclose(value, of_part, rtol=1e-5, atol=1e-6)


def _part(value, axis, part):
    return value if axis is None else np.ascontiguousarray(value[(slice(None),) * axis + (part,)])


@settings(max_examples=60)
@given(seeds)
def test_random_operators(seed):
    generator = random.Random(seed)
    given = values(generator)
    operators, step = chain(generator, given)
    assert operators
    assert_parts_are_right(operators, step, given)


def test_an_operator_that_looks_at_other_sequences_is_seen():
    """A softmax over the rows of a part is none over those of the batch."""
    generator = random.Random(0)
    given, (loop, sizes) = values(generator), loop_over()
    step = batch_axes._Step(loop, sizes)
    step.axes["y"] = 1
    with pytest.raises(AssertionError):
        assert_parts_are_right([core.CreateOperator("Softmax", [HIDDEN], ["y"], axis=1)], step, given)
