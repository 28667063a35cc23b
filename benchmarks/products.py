"""The matrix products of an LSTM's pass and nothing else, each in the layout that is fastest: the limit.

A product C = A B can be had in many ways. A and B may be stored as they are or transposed, C may come out transposed
(C' = B' A'), and MatMul, FC and BatchMatMul do not lead to the same kernel. All are tried, and the fastest are timed
again in every round. An operand that a pass has in another layout than the fastest one counts as if it had it: there is
no time here for transposing, and the operands stay in the caches as far as they go.
"""

from typing import Callable, Dict, List, NamedTuple, Tuple

import numpy as np
from caffe2.python import core, workspace

from layers import TRAINING, Shape, drawn
from measuring import Subject, clocked, measure
from other_interpreter import first_line

WORKSPACE = "benchmark_products"
# After a first look: the second fastest may be the fastest yet.
KEPT = 2
# Seconds, of one layout and of all.
LOOK_MINIMUM = 0.002
LOOKS_ENOUGH = 0.1
GATES = 4


class Product(NamedTuple):
    """`times` times, one after the other: [rows, inner] times [inner, columns]."""

    name: str
    times: int
    rows: int
    inner: int
    columns: int


class Layout(NamedTuple):
    """One way to have a product: an operator over operands that are stored in some way."""

    name: str
    operator: str
    operands: Tuple[str, ...]
    arguments: Dict[str, int]


# How operands may be stored; in 4: one matrix for each gate.
STORED: Dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "A": lambda a, b: a,
    "A'": lambda a, b: a.T,
    "B": lambda a, b: b,
    "B'": lambda a, b: b.T,
    "B in 4": lambda a, b: _in_gates(b),
    "B' in 4": lambda a, b: _in_gates(b).transpose(0, 2, 1),
    "bias": lambda a, b: np.zeros(b.shape[1], np.float32),
}


def _in_gates(b: np.ndarray) -> np.ndarray:
    inner, columns = b.shape
    return b.reshape(inner, GATES, columns // GATES).transpose(1, 0, 2)


def products(shape: Shape, pass_: str) -> List[Product]:
    """Of forward, and for training of backward to all parameters and the input."""
    steps, batch, dim_in, dim = shape
    gates, rows = GATES * dim, steps * batch
    forward = [
        Product("input", 1, rows, dim_in, gates),
        Product("recurrent", steps, batch, dim, gates),
    ]
    backward = [
        Product("gradient of the state", steps, batch, gates, dim),
        Product("gradient of the recurrent weights", 1, gates, rows, dim),
        Product("gradient of the input weights", 1, gates, rows, dim_in),
        Product("gradient of the input", 1, rows, gates, dim_in),
    ]
    return forward + (backward if pass_ == TRAINING else [])


def layouts(product: Product) -> List[Layout]:
    found = [
        Layout("FC(A, B')", "FC", ("A", "B'", "bias"), {}),
        Layout("FCTransposed(A, B)", "FCTransposed", ("A", "B", "bias"), {}),
    ]
    for a, a_transposed in (("A", 0), ("A'", 1)):
        for b, b_transposed in (("B", 0), ("B'", 1)):
            found += [
                Layout(
                    "MatMul({}, {})".format(a, b),
                    "MatMul",
                    (a, b),
                    {"trans_a": a_transposed, "trans_b": b_transposed},
                ),
                Layout(
                    "MatMul({}, {}) for C'".format(b, a),
                    "MatMul",
                    (b, a),
                    {"trans_a": 1 - b_transposed, "trans_b": 1 - a_transposed},
                ),
            ]
    if product.columns % GATES == 0:
        found += [
            Layout("BatchMatMul(A, B in 4)", "BatchMatMul", ("A", "B in 4"), {"broadcast": 1}),
            Layout("BatchMatMul(A, B' in 4)", "BatchMatMul", ("A", "B' in 4"), {"broadcast": 1, "trans_b": 1}),
        ]
    return found


class Products:
    """The products of a pass, in a workspace of their own until `close`; `run` is the sum of the fastest of each."""

    def __init__(self, shape: Shape, pass_: str) -> None:
        self._outer = workspace.CurrentWorkspace()
        self.seconds: Dict[str, Dict[str, List[float]]] = {}
        self._nets: Dict[str, Dict[str, str]] = {}
        try:
            for product in products(shape, pass_):
                self._nets[product.name] = self._fastest(product)
                self.seconds[product.name] = {layout: [] for layout in self._nets[product.name]}
        except BaseException:
            self.close()
            raise

    def _fastest(self, product: Product) -> Dict[str, str]:
        """The nets of the fastest layouts, by layout."""
        self._feed(product)
        candidates, failure = {}, "no layout"
        for layout in layouts(product):
            try:
                candidates[layout.name] = self._net(product, layout)
            except Exception as error:
                failure = first_line(error)
        subjects = [Subject(name, clocked(self._runner(net))) for name, net in candidates.items()]
        measured = measure(subjects, 1, LOOKS_ENOUGH, LOOK_MINIMUM)
        if not measured.seconds:
            raise RuntimeError("{}: {}".format(product.name, "; ".join(set(measured.failures.values())) or failure))
        order = sorted(measured.seconds, key=lambda name: min(measured.seconds[name]))
        return {name: candidates[name] for name in order[:KEPT]}

    def _feed(self, product: Product) -> None:
        a = drawn("a", (product.rows, product.inner), 1.0)
        b = drawn("b", (product.inner, product.columns), 1.0)
        needed = {operand for layout in layouts(product) for operand in layout.operands}

        def feed() -> None:
            for operand in needed:
                workspace.FeedBlob(_blob(product, operand), np.ascontiguousarray(STORED[operand](a, b)))

        self._in_workspace(feed)

    def _net(self, product: Product, layout: Layout) -> str:
        net = core.Net("products")
        operands = [_blob(product, operand) for operand in layout.operands]
        net.AddExternalInput(*operands)
        operator = core.CreateOperator(layout.operator, operands, [_blob(product, "C")], **layout.arguments)
        net.Proto().op.extend([operator] * product.times)
        self._in_workspace(lambda: workspace.CreateNet(net))
        return str(net.Name())

    def _runner(self, net: str) -> Callable[[int], None]:
        return lambda repeats: self._in_workspace(lambda: workspace.RunNet(net, repeats))

    def _in_workspace(self, action: Callable[[], object]) -> None:
        workspace.SwitchWorkspace(WORKSPACE, True)
        try:
            action()
        finally:
            workspace.SwitchWorkspace(self._outer)

    def run(self, repeats: int) -> float:
        total = 0.0
        for product, nets in self._nets.items():
            times = {layout: clocked(self._runner(net))(repeats) for layout, net in nets.items()}
            for layout, seconds in times.items():
                self.seconds[product][layout].append(seconds / repeats)
            total += min(times.values())
        return total

    def best(self) -> Dict[str, Tuple[str, float]]:
        """For each product its fastest layout, and the seconds of all its repetitions in a pass."""
        found = {}
        for product, layouts_ in self.seconds.items():
            layout = min(layouts_, key=lambda name: min(layouts_[name]))
            found[product] = (layout, min(layouts_[layout]))
        return found

    def close(self) -> None:
        self._in_workspace(workspace.ResetWorkspace)


def _blob(product: Product, operand: str) -> str:
    return "{}: {}".format(product.name, operand)
