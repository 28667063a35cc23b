"""What the steps of an LSTM's pass do beside the products, with the fewest of Caffe2's operators: the other limit.

Each is timed by itself, the fastest one that there is of its kind. A net that runs one operator after the other takes
more than all of them and the products alone together: a step also has links, and mostly copies, and takes its gates
apart. What may come with a product, its bias, the slice of a sequence and the gradient of the output, is not counted,
nor is what a forward step computes for the backward step.

    forward     s = sigmoid(gates), of all four at once     c = f c' + i g     h = o tanh(c)
    backward    dc = dc' + dh k     dgates = [dc, dc, dh, dc] times factors, all four at once     dc' = dc f

`LSTMUnit` and its gradient do either in one operator. The rest may be two Mul and a Sum, or a Mul and ATen's addcmul.
"""

from typing import Dict, List, NamedTuple, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from layers import TRAINING, Shape, drawn
from products import GATES
from timed_operators import FastestWays, Step, Task, Way, copied, has_onednn

WORKSPACE = "benchmark_step_operators"
SQUASHED, TANH = "nonlinearity of the gates", "tanh of the state"
MULTIPLIED, ADDED, MULTIPLIED_AND_ADDED = "product of states", "sum of states", "sum of a state and a product"
GATES_MULTIPLIED = "product of gates"
UNIT, UNIT_GRADIENT = "LSTMUnit", "LSTMUnitGradient"

# How often a step does what.
Form = Dict[str, int]
FORWARD_FORMS: Tuple[Form, ...] = (
    {UNIT: 1},
    {SQUASHED: 1, TANH: 1, MULTIPLIED: 3, ADDED: 1},
    {SQUASHED: 1, TANH: 1, MULTIPLIED: 2, MULTIPLIED_AND_ADDED: 1},
)
BACKWARD_FORMS: Tuple[Form, ...] = (
    {UNIT_GRADIENT: 1},
    {MULTIPLIED: 2, ADDED: 1, GATES_MULTIPLIED: 1},
    {MULTIPLIED: 1, MULTIPLIED_AND_ADDED: 1, GATES_MULTIPLIED: 1},
)


def parts(pass_: str) -> List[Tuple[Form, ...]]:
    """The forms of each part of a pass."""
    return [FORWARD_FORMS] + ([BACKWARD_FORMS] if pass_ == TRAINING else [])


def ways(task: str) -> List[Way]:
    """Those that this Caffe2 has. Operands named after gates are `[1, N, 4 D]`, those after a state `[1, N, D]`."""
    found = {
        SQUASHED: [_plain(kind, "gates") for kind in ("Sigmoid", "Tanh")]
        + [_aten(kind, "gates") for kind in ("sigmoid", "tanh")]
        + ([_sigmoid_of_onednn()] if has_onednn() else []),
        TANH: [_plain("Tanh", "state"), _aten("tanh", "state")],
        MULTIPLIED: [_plain("Mul", "state", "state 1"), _aten("mul", "state", "state 1")],
        ADDED: [_plain("Sum", "state", "state 1"), _aten("add", "state", "state 1")],
        MULTIPLIED_AND_ADDED: [_aten("addcmul", "state", "state 1", "state 2")],
        GATES_MULTIPLIED: [_plain("Mul", "gates", "gates 1"), _aten("mul", "gates", "gates 1")],
        UNIT: [_unit(UNIT, (), ("new hidden", "new cell"))],
        UNIT_GRADIENT: [
            _unit(
                UNIT_GRADIENT,
                ("state 2", "state 3", "state 4", "state 5"),
                ("gradient of hidden", "gradient of cell", "gradient of gates"),
            )
        ],
    }[task]
    return [way for way in found if core.IsOperator(way.timed.operator)]


def _plain(operator: str, *operands: str) -> Way:
    return Way(operator, Step(operator, operands, ("result",)))


def _aten(kind: str, *operands: str) -> Way:
    return Way("ATen " + kind, Step("ATen", operands, ("result of ATen",), {"operator": kind}))


def _sigmoid_of_onednn() -> Way:
    there = copied("gates")
    return Way("oneDNN Sigmoid", Step("Sigmoid", there.results, ("result there",), device=caffe2_pb2.IDEEP), (there,))


def _unit(operator: str, more: Tuple[str, ...], results: Tuple[str, ...]) -> Way:
    arguments = {"sequence_lengths": False, "forget_bias": 0.0, "drop_states": False}
    operands = ("state", "state 1", "gates", "timestep", *more)
    return Way(operator, Step(operator, operands, results, arguments))


def value(shape: Shape, operand: str) -> np.ndarray:
    if operand == "timestep":
        return np.zeros(1, np.int32)
    width = shape.dim * (GATES if operand.startswith("gates") else 1)
    return drawn(operand, (1, shape.batch, width), 1.0)


class Chosen(NamedTuple):
    """The forms of the parts of a pass, and the seconds that they take together."""

    forms: List[Form]
    seconds: float


def fastest(pass_: str, seconds: Dict[str, float]) -> Chosen:
    """`seconds` are those of each task, once in each step."""

    def cost(form: Form) -> float:
        return sum(times * seconds[task] for task, times in form.items())

    # A form may need an operator that this Caffe2 does not have.
    there = [[form for form in forms if form.keys() <= seconds.keys()] for forms in parts(pass_)]
    chosen = [min(forms, key=cost) for forms in there]
    return Chosen(chosen, sum(map(cost, chosen)))


class StepOperators:
    """The operators of all steps of a pass, until `close`; `run` is the sum of the fastest."""

    def __init__(self, shape: Shape, pass_: str) -> None:
        self._pass = pass_
        names = dict.fromkeys(task for forms in parts(pass_) for form in forms for task in form)
        tasks = [Task(name, shape.steps, ways(name), lambda operand: value(shape, operand)) for name in names]
        self._ways = FastestWays(WORKSPACE, [task for task in tasks if task.ways])

    def run(self, repeats: int) -> float:
        return fastest(self._pass, self._ways.time(repeats)).seconds

    def best(self) -> Dict[str, Tuple[str, float]]:
        """What the fastest forms do, each in its fastest way, and the seconds of all its repetitions in a pass."""
        found = self._ways.best()
        chosen = fastest(self._pass, {task: seconds for task, (_, seconds) in found.items()})
        total: Dict[str, Tuple[str, float]] = {}
        for form in chosen.forms:
            for task, times in form.items():
                way, seconds = found[task]
                total[task] = (way, total.get(task, (way, 0.0))[1] + times * seconds)
        return total

    def close(self) -> None:
        self._ways.close()
