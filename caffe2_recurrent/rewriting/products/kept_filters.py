"""Products of a step by oneDNN with filters that it lays out once and keeps, and rows and results where they lie.

Rows are an image whose channels come last, weights the filters of a convolution with kernels of 1 x 1:

    Y[n, m] = sum over k of X[n, k] W[m, k]     image [1, K, 1, N],  filters [M, K, 1, 1],  result [1, M, 1, N]

In memory that is `[N, K]` and `[N, M]`: oneDNN reads the rows as they lie, and leaves the results as the step wants
them. Filters it wants in an order that no operator tells. In its first run its convolution brings them into that order,
keeps what it has made, and would miss that weights change; filters that are in it already it reads where they are.

So they get memory in that order (`onednn_tensors.py`), into which weights are copied in each run, or when they have
changed (`unchanged_weights.py`), and the operators of steps outlive runs (`stay`). They would go on reading that memory
if there were another: its name says its sizes, and `are_right` tries all that with each. Weights `[K, M]` that change
in each run are transposed by oneDNN on the way (`turned_weights.py`).

With AVX-512 the order of filters depends on the number of OpenMP's threads, and no operator makes it. So there they are
left to the convolution, which is made anew for other weights: in each run, or when they have changed. For that
something else is put into the blob of the step workspaces of the loop, which no other loop has, and the engine makes
new ones. Weights `[K, M]` are laid out in less time where they are read as they lie (`filters_of_columns.py`). What is
planned for some sizes is remembered in each thread, without that number; what is made of the plan, in the process, with
it. So where a thread gets another number, or one of another number runs operators that stay, filters may be in another
order than they are read, and results go behind their memory. No operator tells that number, so that there only who says
that it is one, and stays, has such products (`constant_threads`). One change is not the caller's, but ATen's.
`thread_numbers.py` is about that.

Both tensors of oneDNN's, for rows and for results, are made in front of the loop, for as many rows as the run has;
where they stay, when that is another number than in the run before. Rows of another width are refused
(`row_widths.py`). The memory of each is that of a blob of the CPU's. Steps write rows to the one and read results from
the other; no operator of theirs writes that by its name. So until all else is done there is an operator in its place
that copies the results back.

Source: caffe2/ideep/operators/conv_op.cc; for a source whose channels come last, convolution_forward in ideep's
operators/conv.hpp asks for such a result, too.
"""

import contextlib
from typing import Collection, Iterable, List, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.operator_arguments import integer, nets_of, set_arguments
from caffe2_recurrent.operators import SUM, copied, is_on_onednn, new_operator
from caffe2_recurrent.rewriting import kept_results
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import (
    filters_of_columns,
    onednn,
    onednn_copies,
    onednn_tensors,
    row_widths,
    thread_numbers,
    turned_weights,
)
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.same_weights import EQUAL
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

KEPT_FILTERS = "kept filters"
# Step workspaces of both loops.
FORWARD, BACKWARD = "workspaces_of_a_run", "gradient_workspaces_of_a_run"
WORKSPACE = "caffe2_recurrent_kept_filters"
# Numbers of rows one after the other: more, fewer, and as many as fill the blocks of kernels, and do not.
ROWS = (3, 17, 16, 1, 33)

Operators = List[caffe2_pb2.OperatorDef]


def emit(emitter: Emitter, loop: Loop, product: Product) -> None:
    """The operators of the step in place of the product, and those before the loop."""
    # Another net of the workspace, as one that trains, may make its own in each run, under the names that it has.
    ending = "_stays" if tensors_stay(loop) else ""
    rows, results, seen = loop.new_blobs(
        "{}_{}x{}".format(product.output, product.outer, product.inner),
        ("_rows_there" + ending, "_there" + ending, "_rows_seen"),
    )
    in_front = Emitter(loop, loop.forward, product.output)
    number = thread_numbers.add_number_of_rows(loop)
    widths = product.widths or ()
    sizes = row_widths.add_sizes(loop, number, widths) if tensors_stay(loop) else number
    row_widths.check(in_front, widths)
    onednn_tensors.add_rows(in_front, rows, product.inner, number)
    onednn_tensors.add_rows(in_front, results, product.outer, number)
    workspaces = _workspaces(loop, emitter.beside)
    # Together with what is read: who cuts out of a net what makes its outputs leaves out what nothing reads.
    in_front.add("ConstantFill", [], workspaces, shape=[1], value=0.0)
    made = [rows, results, shown(rows), shown(results), workspaces]
    position = len(loop.before)
    inputs = [rows, _filters(loop, product, in_front, made, workspaces)]
    loop.before[position:position] = _when_other_rows(loop, sizes, seen, in_front, made)
    if product.bias is not None:
        inputs.append(onednn.laid_out_before(loop, "plain", product.bias, [product.outer], onednn.copied_there))
    for outer in (shown(rows), *inputs, results, shown(results)):
        loop.add_reference(outer)
    if product.widths is None:
        row_widths.check_in_step(emitter, product.input, product.inner)
    emitter.add("Copy", [product.input], shown(rows))
    onednn.add(emitter, "Conv", inputs, [results], kernel=1, training_mode=0)
    if product.sigmoid is not None:
        onednn.add(emitter, "Sigmoid", [results], [results])
    onednn.add(emitter, onednn.FROM, [results], [product.sigmoid or product.output])


def stay(loop: Loop) -> bool:
    """Whether what is laid out for steps stays where it is from run to run, and so may their operators."""
    return tensors_stay(loop) and (not thread_numbers.matter() or Keeping.WEIGHTS in loop.may_keep)


def tensors_stay(loop: Loop) -> bool:
    """Whether the tensors for rows and for results do, while there are as many rows."""
    return not loop.surroundings.net_frees and not kept_results.missing()


@trial.known
def are_right(inner: int, outer: int) -> bool:
    """Whether this Caffe2's oneDNN does with weights `[outer, inner]` as is said above, for any number of rows."""
    if onednn.is_missing():
        return False
    loop = trial.lone_loop(["x", "w", "b", "y"])
    emitter = Emitter(loop, loop.forward, "y")
    emit(emitter, loop, Product("x", None, "w", "b", "y", None, inner, outer))
    before = caffe2_pb2.NetDef(name="before", op=loop.before)
    step = caffe2_pb2.NetDef(name="step", op=in_place(loop, emitter.operators, ["y"]))
    random = np.random.default_rng(0)
    stays = stay(loop)
    with scratch_workspace(WORKSPACE), contextlib.suppress(RuntimeError):
        for run, count in enumerate([count for count in ROWS for _ in range(2)]):
            # Of whole numbers, so that products are exact whatever is added up first.
            shapes = {"x": (1, count, inner), "w": (outer, inner), "b": (outer,)}
            values = {blob: random.integers(-8, 9, shape).astype(np.float32) for blob, shape in shapes.items()}
            for blob, value in values.items():
                workspace.FeedBlob(blob, value)
            if run == 0:
                workspace.CreateNet(before)
            workspace.RunNet(before.name)
            # Where weights are others than before, operators are the same, if they may be.
            if run % 2 == 0 or not stays:
                workspace.CreateNet(step, overwrite=True)
            # The second time they find what they have made of the weights.
            workspace.RunNet(step.name, 2)
            if not np.array_equal(workspace.FetchBlob("y"), values["x"] @ values["w"].T + values["b"]):
                return False
        return True
    return False


def need_one_thread(operators: Sequence[caffe2_pb2.OperatorDef]) -> bool:
    """Whether steps of a net of `operators` keep filters for a number of threads that others of these have set."""
    return _have_some_inside(operators) and any(map(thread_numbers.sets, operators))


def _have_some_inside(operators: Iterable[caffe2_pb2.OperatorDef]) -> bool:
    """Whether nets of `operators` have some, which in a chain may be in nets of their own."""
    return any(are_in(net.op) or _have_some_inside(net.op) for operator in operators for net in nets_of(operator))


def are_made_anew(loop: Loop, operators: Iterable[caffe2_pb2.OperatorDef]) -> bool:
    """Whether `operators`, which run in front of the loop, have those of its steps that keep filters made anew."""
    return not stay(loop) and any(loop.made.get(FORWARD) in operator.output for operator in operators)


def backward_workspaces(loop: Loop) -> Optional[str]:
    """The blob of the step workspaces of its backward pass, if steps of that keep filters."""
    return loop.made.get(BACKWARD)


def keeps_filters(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "Conv" and is_on_onednn(operator) and not integer(operator, "training_mode", 0)


def are_in(operators: Iterable[caffe2_pb2.OperatorDef]) -> bool:
    return any(map(keeps_filters, operators))


def in_place(
    loop: Loop, operators: Sequence[caffe2_pb2.OperatorDef], needed: Collection[str] = (), keeps: bool = True
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
        number = keeping[0].output[0] + "_number"
        in_each_step = [] if thread_numbers.is_set_before(loop) else thread_numbers.set_at_once(number)
        made[:0] = thread_numbers.set_in_first_step(loop) or in_each_step
    return made


def result_itself(operators: Operators, blob: str) -> Optional[str]:
    """Let a step that finds in `blob` what the step before has left there find it where a product has left it.

    That is done where `blob` is a copy of the product's result, at most added to, and no more needed when the product
    is computed: `operators` are changed, and the blob that holds it now is given. Otherwise it is None.
    """
    touching = [index for index, operator in enumerate(operators) if blob in (*operator.input, *operator.output)]
    copying = [index for index in touching if operators[index].type == onednn.FROM]
    if len(copying) != 1:
        return None
    results = operators[copying[0]].input[0]
    making = [index for index, operator in enumerate(operators) if results in operator.output]
    reading = [index for index, operator in enumerate(operators) if results in operator.input and index not in making]
    others = [index for index in touching if index not in copying]
    if (
        not making
        or not keeps_filters(operators[making[0]])
        or reading != copying
        or any(making[0] <= index <= copying[0] for index in others)
        or any(blob in operators[index].output and operators[index].type != SUM for index in others)
    ):
        return None
    there = shown(results)
    for index in others:
        dataflow.rename(operators[index], blob, there)
        # Nets that run operators side by side would not know otherwise what has to wait.
        if index > copying[0]:
            operators[index].control_input.append(results)
        elif operators[index].output[0] not in operators[making[0]].control_input:
            operators[making[0]].control_input.append(operators[index].output[0])
    del operators[copying[0]]
    return there


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


def _when_other_rows(loop: Loop, sizes: str, seen: str, emitter: Emitter, made: Sequence[str]) -> Operators:
    """The operators for the outer net; where `made` stays, for runs of other `sizes` than were `seen` last."""
    operators = onednn.in_a_net(emitter.operators, made, loop)
    if not tensors_stay(loop):
        return operators
    return kept_results.when_changed(loop, {sizes: EQUAL}, {sizes: seen}, operators, made, core.DataType.INT64)


def _filters(loop: Loop, product: Product, in_front: Emitter, made: List[str], workspaces: str) -> str:
    """W as filters; where they are laid out in each run and stay, `in_front` has their memory `made`.

    Where operators stay that have laid out their own, it is together with W that `workspaces` are made anew.
    """
    shape = [product.outer, product.inner, 1, 1]
    others: List[str] = []
    # What is made of weights, so that it may stay while they do, must be made of nothing else.
    front = None if Keeping.WEIGHTS in loop.may_keep else in_front
    has_order = stay(loop) and not thread_numbers.matter()
    reads_columns = (
        front is not None
        and tensors_stay(loop)
        and not has_order
        and product.rows is None
        and filters_of_columns.are_right(product.inner, product.outer)
    )

    def lay_out(emitter: Emitter, weights: str) -> str:
        if has_order:
            return in_order(emitter, weights)
        if tensors_stay(loop):
            # Of the weights, so that nobody takes apart what has to be done together.
            emitter.add("Shape", [weights], workspaces)
            others.append(workspaces)
        if reads_columns:
            return where_columns_lie(emitter, weights)
        there = onednn.copied_there(emitter, weights)
        if product.rows is None:
            there = onednn.transposed(emitter, there)
        onednn_copies.reshape_there(emitter, there, shape)
        return there

    def in_order(emitter: Emitter, weights: str) -> str:
        if product.rows is not None:
            plain = emitter.new("Alias", [weights], "plain")
        elif front is not None and turned_weights.pay(product.inner, product.outer):
            there = emitter.blob("turned_{}x{}".format(product.outer, product.inner))
            turned_weights.add(front, there, product.inner, product.outer)
            made.extend([there, shown(there)])
            others.append(there)
            plain = turned_weights.turn(emitter, weights, there, product.inner, product.outer)
        else:
            plain = emitter.new("Transpose", [weights], "plain")
        emitter.reshape_in_place(plain, shape)
        filters = emitter.blob("filters_{}x{}".format(product.outer, product.inner))
        onednn_tensors.add_filters(front or emitter, filters, product.outer, product.inner)
        if front is not None:
            made.append(filters)
        return onednn_copies.copy_there(emitter, plain, filters)

    def where_columns_lie(emitter: Emitter, weights: str) -> str:
        filters = emitter.blob("columns_{}x{}".format(product.inner, product.outer))
        filters_of_columns.add(in_front, filters, product.inner, product.outer)
        made.extend([filters, shown(filters)])
        emitter.add("Copy", [weights], shown(filters))
        others.append(shown(filters))
        # They are so already: that they are given here lets others know what they are made of.
        onednn_copies.reshape_there(emitter, filters, shape)
        return filters

    if product.rows is not None:
        return onednn.laid_out_before(loop, "filters", product.rows, shape[:2], lay_out, others)
    return onednn.laid_out_before(loop, "filters, transposed", product.columns, shape[1::-1], lay_out, others)
