"""Products of a step by oneDNN with filters that it lays out once and keeps, and rows and results where they lie.

Rows are an image whose channels come last, weights the filters of a convolution with kernels of 1 x 1:

    Y[n, m] = sum over k of X[n, k] W[m, k]     image [1, K, 1, N],  filters [M, K, 1, 1],  result [1, M, 1, N]

In memory that is `[N, K]` and `[N, M]`: oneDNN reads the rows as they lie, and leaves the results as the step wants
them. Filters it lays out in an order that no operator gives away. Its convolution keeps what it has made of them in its
first run, and would miss that weights change. So operators are made anew whenever weights are laid out for them, which
is in each run, or when they have changed (`unchanged_weights.py`): something else is put into the blob of the step
workspaces of the loop, which no other loop has, and the engine makes new ones.

That is not enough with AVX-512, where the order of filters depends on the number of OpenMP's threads. A run may be in
another thread than the one before, with another number: each has new operators there. And what is planned for some
sizes is remembered in each thread, without that number; what is made of the plan, in the process, with it. So where a
thread gets another number a later run may have filters in another order than they are read, and write behind its
memory. No operator tells that number, so that there only who says that it stays has such products
(`constant_threads`). One change is not the caller's, but ATen's. Therefore steps begin with what `thread_numbers.py` is
about.

Both tensors of oneDNN's are made in front of the loop, for as many rows as the run has. The memory of each is that of a
blob of the CPU's. Steps write rows to the one and read results from the other; no operator of theirs writes that by its
name. So until all else is done there is an operator in its place that copies the results back.

Source: caffe2/ideep/operators/conv_op.cc, utility_ops.cc, operator_fallback_ideep.h; for a source whose channels come
last, convolution_forward in ideep's operators/conv.hpp asks for such a result, too.
"""

import contextlib
import functools
from typing import Collection, Iterable, List, Mapping, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer, set_arguments
from caffe2_recurrent.operators import SUM, copied, is_on_onednn, new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.engine_blobs import ON_CPU
from caffe2_recurrent.rewriting.products import onednn, onednn_copies, thread_numbers
from caffe2_recurrent.rewriting.products.convolved import number_of_rows
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

KEPT_FILTERS = "kept filters"
# Step workspaces of both loops.
FORWARD, BACKWARD = "workspaces_of_a_run", "gradient_workspaces_of_a_run"
# The operator of the CPU whose result lies where oneDNN has its own.
SHOWING = "Scale"
WORKSPACE = "caffe2_recurrent_kept_filters"
# Numbers of rows one after the other: more, fewer, and as many as fill the blocks of kernels, and do not.
ROWS = (3, 17, 16, 1, 33)

Operators = List[caffe2_pb2.OperatorDef]


def emit(emitter: Emitter, loop: Loop, product: Product) -> None:
    """The operators of the step in place of the product, and those before the loop."""
    rows, results = (loop.new_blob(product.output + name) for name in ("_rows_there", "_there"))
    workspaces = _workspaces(loop, emitter.beside)
    in_each_run = thread_numbers.matter()
    widths = {rows: product.inner, results: product.outer}
    _make_tensors(loop, product.output, widths, [workspaces] if in_each_run else [])
    inputs = [rows, _filters(loop, product, [] if in_each_run else [workspaces])]
    if product.bias is not None:
        inputs.append(onednn.laid_out_before(loop, "plain", product.bias, [product.outer], _copy_there))
    for outer in (shown(rows), *inputs, results, shown(results)):
        loop.add_reference(outer)
    emitter.add("Copy", [product.input], shown(rows))
    onednn.add(emitter, "Conv", inputs, [results], kernel=1, training_mode=0)
    if product.sigmoid is not None:
        onednn.add(emitter, "Sigmoid", [results], [results])
    onednn.add(emitter, onednn.FROM, [results], [product.sigmoid or product.output])


@functools.lru_cache(maxsize=None)
def are_right(inner: int, outer: int) -> bool:
    """Whether this Caffe2's oneDNN does with weights `[outer, inner]` as is said above, for any number of rows."""
    if onednn.is_missing():
        return False
    loop = trial.lone_loop(["x", "w", "b", "y"])
    emitter = Emitter(loop, loop.forward, "y")
    emit(emitter, loop, Product("x", None, "w", "b", "y", None, inner, outer))
    before = caffe2_pb2.NetDef(name="before", op=loop.before)
    step = caffe2_pb2.NetDef(name="step", op=in_place(emitter.operators, ["y"]))
    random = np.random.default_rng(0)
    with scratch_workspace(WORKSPACE), contextlib.suppress(RuntimeError):
        for _ in range(2):
            # Of whole numbers, so that products are exact whatever is added up first.
            weights, bias = (random.integers(-8, 9, shape).astype(np.float32) for shape in ((outer, inner), (outer,)))
            for turn, count in enumerate(ROWS):
                rows = random.integers(-8, 9, (1, count, inner)).astype(np.float32)
                for blob, value in (("x", rows), ("w", weights), ("b", bias)):
                    workspace.FeedBlob(blob, value)
                workspace.CreateNet(before, overwrite=True)
                workspace.RunNet(before.name)
                if turn == 0:
                    # Its operators are new ones.
                    workspace.CreateNet(step, overwrite=True)
                workspace.RunNet(step.name)
                if not np.array_equal(workspace.FetchBlob("y"), rows @ weights.T + bias):
                    return False
        return True
    return False


def shown(there: str) -> str:
    """The blob of the CPU's that has the memory of oneDNN's."""
    return ON_CPU.format(there, SHOWING)


def are_made_anew(loop: Loop, operators: Iterable[caffe2_pb2.OperatorDef]) -> bool:
    """Whether `operators`, which run in front of the loop, have those of its steps that keep filters made anew."""
    return any(loop.made.get(FORWARD) in operator.output for operator in operators)


def backward_workspaces(loop: Loop) -> Optional[str]:
    """The blob of the step workspaces of its backward pass, if steps of that keep filters."""
    return loop.made.get(BACKWARD)


def keeps_filters(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "Conv" and is_on_onednn(operator) and not integer(operator, "training_mode", 0)


def are_in(operators: Iterable[caffe2_pb2.OperatorDef]) -> bool:
    return any(map(keeps_filters, operators))


def in_place(
    operators: Sequence[caffe2_pb2.OperatorDef], needed: Collection[str] = (), keeps: bool = True
) -> Operators:
    """`operators` of a step that read the results where they lie, in place of copies; if not `keeps`, filters are laid
    out in each step.

    To be done when no rule looks at them any more. Blobs that are `needed` under their name are copied, and so are
    those that operators change in a way that their memory would not stand.
    """
    made = [copied(operator) for operator in operators]
    keeping = [operator for operator in made if keeps_filters(operator)]
    for operator in keeping:
        set_arguments(operator, {"training_mode": int(not keeps)})
        # Nets that run operators side by side would not know otherwise what it has to wait for.
        operator.control_input.append(shown(operator.input[0]))
        _make_rows_there(made, shown(operator.input[0]), needed)
    results = {operator.output[0] for operator in keeping}
    for copying in [operator for operator in made if operator.type == onednn.FROM and operator.input[0] in results]:
        (source,), (copy,) = copying.input, copying.output
        if copy in needed or not _may_be_shown(made, copy):
            copying.CopyFrom(new_operator("Copy", [shown(source)], [copy], caffe2_pb2.OperatorDef()))
        else:
            made.remove(copying)
            for operator in made:
                dataflow.rename(operator, copy, shown(source))
        for operator in made:
            if shown(source) in operator.input:
                # Likewise.
                operator.control_input.append(source)
    if keeps and keeping:
        made[:0] = thread_numbers.set_at_once(keeping[0].output[0] + "_number")
    return made


def _make_rows_there(operators: Operators, there: str, needed: Collection[str]) -> None:
    """Where rows are nothing but put beside each other for the product, do that where it reads them."""
    (copying,) = (operator for operator in operators if there in operator.output)
    rows = copying.input[0]
    touching = [operator for operator in operators if rows in (*operator.input, *operator.output)]
    if rows not in needed and [operator.type for operator in touching] == ["Concat", "Copy"]:
        touching[0].output[0] = there
        operators.remove(copying)


def _may_be_shown(operators: Operators, copy: str) -> bool:
    """Whether `copy` is one blob throughout, at most added to, and never of another shape or in other memory."""
    touching = [operator for operator in operators if copy in (*operator.input, *operator.output)]
    first, *others = touching
    return first.type == onednn.FROM and all(other.type == SUM for other in others if copy in other.output)


def _like(loop: Loop, channels: int) -> str:
    """An outer blob of zeros, `[1, channels, 1, N]`."""
    leading = loop.add_before("GivenTensorInt64Fill", [], "channels", shape=[3], values=[1, channels, 1])
    shape = loop.add_columns([leading, number_of_rows(loop)], "image_shape")
    return loop.add_before("ConstantFill", [shape], "like_image", input_as_shape=1, value=0.0)


def _workspaces(loop: Loop, operator: caffe2_pb2.OperatorDef) -> str:
    """The blob of the step workspaces of the loop, or of its backward pass, that `operator` belongs to.

    Of its own: the RNN executor of another loop may have operators in those that were there.
    """
    is_forward = loop.gradient is None or not any(operator is other for other in loop.gradient.operators)
    key = FORWARD if is_forward else BACKWARD
    if key not in loop.made:
        loop.made[key] = loop.new_blob(key)
        if is_forward:
            loop.outputs[-1] = loop.made[key]
    return loop.made[key]


def _make_tensors(loop: Loop, name: str, widths: Mapping[str, int], emptied: Sequence[str]) -> None:
    """oneDNN's tensors, by their names, and for each a blob of the CPU's with its memory, `[1, N, width]`.

    Blobs that are `emptied` lose their step workspaces.
    """
    one = loop.add_before("GivenTensorInt64Fill", [], "one", shape=[1], values=[1])
    emitter = Emitter(loop, loop.forward, name)
    for there, number in widths.items():
        like = _like(loop, number)
        width = loop.add_before("GivenTensorInt64Fill", [], "width", shape=[1], values=[number])
        shape = loop.add_columns([one, number_of_rows(loop), width], "shape_of_rows")
        first = onednn.add(emitter, onednn.TO, [like], [emitter.blob("channels_first")])
        onednn.add(emitter, onednn.CHANNELS_LAST, [first], [there])
        # By name, the first to write it is an operator that others see.
        emitter.add("ConstantFill", [shape], shown(there), input_as_shape=1, value=0.0)
        onednn.add(emitter, SHOWING, [like], [there], scale=1.0)
        emitter.reshape_in_place_like(shown(there), shape)
    _empty(emitter, emptied)
    loop.before += onednn.in_a_net(emitter.operators, [*widths, *map(shown, widths), *emptied], loop)


def _empty(emitter: Emitter, workspaces: Iterable[str]) -> None:
    """Together with what is read: who cuts out of a net what makes its outputs leaves out what nothing reads."""
    for blob in workspaces:
        emitter.add("ConstantFill", [], blob, shape=[1], value=0.0)


def _copy_there(emitter: Emitter, blob: str) -> str:
    return onednn_copies.copy_there(emitter, blob, emitter.blob("for_onednn"))


def _filters(loop: Loop, product: Product, emptied: Sequence[str]) -> str:
    """W as filters; blobs that are `emptied` lose their step workspaces when it is laid out."""

    def lay_out(emitter: Emitter, weights: str) -> str:
        _empty(emitter, emptied)
        there = _copy_there(emitter, weights)
        if product.rows is None:
            there = onednn.transposed(emitter, there)
        onednn_copies.reshape_there(emitter, there, [product.outer, product.inner, 1, 1])
        return there

    weights, layout, shape = product.rows, "filters", [product.outer, product.inner]
    if weights is None:
        weights, layout, shape = product.columns, "filters, transposed", shape[::-1]
    return onednn.laid_out_before(loop, ", ".join([layout, *emptied]), weights, shape, lay_out, emptied)
