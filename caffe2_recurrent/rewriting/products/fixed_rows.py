"""A product over all steps by oneDNN, for one number of rows, with filters that stay where weights do for good.

Rows, filters and results lie as those of steps do in `kept_filters.py`. Here they are the outer net's, whose operators
live as long as it does. So the convolution may keep what it has made of its filters in its first run, and memory for
the rows and for the results is made once:

    Y = FC(X, W, b)  =>  in the first run: filters F and biases c of W and b; R for the rows, P for the results
                         if X is [T, N, K]:  R = X;  P = the convolution of R with F and c;  Y = P
                         otherwise:          Y = FC(X, W, b)

R and P are oneDNN's names for memory that blobs of the CPU's have, too: X is copied to the one, Y shows the other.

Source: caffe2/ideep/operators/conv_op.cc.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn, onednn_copies, onednn_tensors, thread_numbers
from caffe2_recurrent.rewriting.products.net_products import PRODUCT
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.same_weights import is_one_of, net_of
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

WORKSPACE = "caffe2_recurrent_fixed_rows"
NET = "fixed_rows"
# As what a loop has, for a result, the blob that says whether X has those rows, and that of the CPU's that shows P.
HAS_ROWS, RESULTS = "has_rows", "results_of_rows"

Operators = List[caffe2_pb2.OperatorDef]


class Size(NamedTuple):
    """`[steps, batch, inner]` times weights `[outer, inner]`."""

    steps: int
    batch: int
    inner: int
    outer: int

    @property
    def rows(self) -> int:
        return self.steps * self.batch

    @property
    def of_rows(self) -> Shape:
        return self.steps, self.batch, self.inner


class Made(NamedTuple):
    """The operators to be run `once`, as long as weights and biases stay, and `each` time."""

    once: Operators
    each: Operators


def in_place_of(operator: caffe2_pb2.OperatorDef, loop: Loop, size: Size) -> Made:
    """The operators of the outer net in place of an FC."""
    x, weights, bias = operator.input
    (result,) = operator.output
    filters, laying_out = onednn.laid_out(loop, weights, [size.outer, size.inner], _as_filters)
    biases, copying = onednn.laid_out(loop, bias, [size.outer], onednn.copied_there)
    memory, rows, results = _memory(loop, result, size)
    wanted, equal, has_rows = (loop.new_blob(result + name) for name in ("_rows_wanted", "_are_equal", "_has_rows"))
    found = loop.new_blob(result + "_rows_found")
    filling = {"shape": [len(size.of_rows)], "values": list(size.of_rows)}
    once = [*laying_out, *copying, *memory, new_operator("GivenTensorInt64Fill", [], [wanted], operator, **filling)]
    emitter = Emitter(loop, operator, result)
    emitter.operators += thread_numbers.set_at_once(emitter.blob("number"))
    # Unlike Copy, it refuses what is not of floats, as the FC does.
    emitter.add("Scale", [x], shown(rows), scale=1.0)
    onednn.add(emitter, "Conv", [rows, filters, biases], [results], kernel=1, training_mode=0)
    emitter.add("Alias", [shown(results)], result)
    read = [rows, shown(rows), filters, biases, results, shown(results)]
    loop.made[(HAS_ROWS, result)], loop.made[(RESULTS, result)] = has_rows, shown(results)
    each = [
        new_operator("Shape", [x], [found], operator),
        new_operator("ATen", [found, wanted], [equal], operator, operator="equal"),
        is_one_of(loop, equal, 1, has_rows),
        # Nothing else has to do with what it writes but its result: to others that is made once, like weights.
        new_operator(
            "If",
            [has_rows, *operator.input, *read],
            [result],
            operator,
            then_net=net_of(NET, emitter.operators),
            else_net=net_of("other_rows", [operator]),
        ),
    ]
    return Made(once, each)


def memory_of(loop: Loop, result: str) -> Optional[Tuple[str, str]]:
    """The blob in which such a product has its result, `[T, N, M]`, and the one that says whether it is there."""
    if (RESULTS, result) not in loop.made:
        return None
    return loop.made[(RESULTS, result)], loop.made[(HAS_ROWS, result)]


def product(inputs: Sequence[str], result: str) -> caffe2_pb2.OperatorDef:
    """An FC over all steps."""
    return new_operator(PRODUCT, inputs, [result], caffe2_pb2.OperatorDef(), axis=FEATURES)


@trial.known
def are_right(size: Size) -> bool:
    """Whether this Caffe2's oneDNN does with rows of that size as is said above; what is no number stays in its row."""
    operator = product(["x", "w", "b"], "y")
    loop = trial.lone_loop([*operator.input, *operator.output])
    made = in_place_of(operator, loop, size)
    random = np.random.default_rng(0)

    def whole(*shape: int) -> np.ndarray:
        """Whole numbers, so that products are exact whatever is added up first."""
        return random.integers(-8, 9, shape).astype(np.float32)

    weights, bias = whole(size.outer, size.inner), whole(size.outer)
    with scratch_workspace(WORKSPACE):
        workspace.FeedBlob("w", weights)
        workspace.FeedBlob("b", bias)
        try:
            for run in range(3):
                x = whole(*size.of_rows)
                # Every other row, when what it keeps is there.
                x.reshape(-1, size.inner)[::2] = np.nan if run == 1 else 0
                workspace.FeedBlob("x", x)
                if run == 0:
                    workspace.RunNetOnce(caffe2_pb2.NetDef(name="once", op=made.once))
                    workspace.CreateNet(caffe2_pb2.NetDef(name="each", op=made.each))
                workspace.RunNet("each")
                are_numbers = slice(1, None, 2) if run == 1 else slice(None)
                found, right = (y.reshape(-1, size.outer) for y in (workspace.FetchBlob("y"), x @ weights.T + bias))
                if not np.array_equal(found[are_numbers], right[are_numbers]):
                    return False
        except RuntimeError:
            return False
    return True


def _as_filters(emitter: Emitter, weights: str) -> str:
    there = onednn.copied_there(emitter, weights)
    # As they are, and kernels of 1 x 1.
    onednn_copies.reshape_there(emitter, there, [0, 0, 1, 1])
    return there


def _memory(loop: Loop, result: str, size: Size) -> Tuple[Operators, str, str]:
    """Operators, and the blobs that they make for rows and for results; what shows these is of the result's shape."""
    emitter = Emitter(loop, loop.forward, result)
    number = emitter.new("GivenTensorInt64Fill", [], "number_of_rows", shape=[1], values=[size.rows])
    rows, results = (loop.new_blob(result + name) for name in ("_rows_there", "_there"))
    onednn_tensors.add_rows(emitter, rows, size.inner, number)
    onednn_tensors.add_rows(emitter, results, size.outer, number)
    emitter.reshape_in_place(shown(results), [size.steps, size.batch, size.outer])
    made = [rows, results, shown(rows), shown(results)]
    return onednn.in_a_net(emitter.operators, made, loop), rows, results
