"""Operators that are timed by themselves, each task in several ways, in a workspace of their own.

All ways are tried, and the fastest are timed again in every round. What a way reads stays in the caches as far as it
goes.
"""

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from measuring import Subject, measure
from other_interpreter import clocked, first_line

# After a first look: the second fastest may be the fastest yet.
KEPT = 2
# Seconds, of one way and of all.
LOOK_MINIMUM = 0.002
LOOKS_ENOUGH = 0.1


class Step(NamedTuple):
    """An operator over operands that are there or made by other steps; its first result is what counts."""

    operator: str
    operands: Tuple[str, ...]
    results: Tuple[str, ...]
    arguments: Dict[str, Any] = {}
    device: int = caffe2_pb2.CPU
    engine: str = ""


class Way(NamedTuple):
    """One way to do something: what is timed, and what makes its operands once before."""

    name: str
    timed: Step
    prepared: Tuple[Step, ...] = ()

    @property
    def fed(self) -> List[str]:
        """The operands that no step makes."""
        made = {result for step in self.prepared for result in step.results}
        read = (operand for step in (*self.prepared, self.timed) for operand in step.operands)
        return [operand for operand in read if operand not in made]


class Task(NamedTuple):
    """What is to be done `times` times, one after the other; `value` gives the operands that are fed."""

    name: str
    times: int
    ways: Sequence[Way]
    value: Callable[[str], np.ndarray]


def copied(operand: str) -> Step:
    """The operand in oneDNN's memory."""
    return Step("CopyCPUToIDEEP", (operand,), (operand + " in oneDNN",), device=caffe2_pb2.IDEEP)


@functools.lru_cache(maxsize=None)
def has_onednn() -> bool:
    """Whether this Caffe2 was built with oneDNN, and can run it here."""
    if not getattr(workspace.C, "use_mkldnn", False):
        return False
    outer = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace("benchmark_onednn", True)
    try:
        workspace.FeedBlob("trial", np.zeros(1, np.float32))
        workspace.RunOperatorOnce(created(copied("trial"), str))
    except RuntimeError:
        return False
    finally:
        workspace.ResetWorkspace()
        workspace.SwitchWorkspace(outer)
    return True


def created(step: Step, blob: Callable[[str], str]) -> caffe2_pb2.OperatorDef:
    """The operator of a step; `blob` is how what it reads and writes is called."""
    operands, results = ([blob(name) for name in names] for names in (step.operands, step.results))
    device = core.DeviceOption(step.device)
    arguments = dict(step.arguments, engine=step.engine or None)
    return core.CreateOperator(step.operator, operands, results, device_option=device, **arguments)


class FastestWays:
    """Tasks, each in its fastest ways, in the workspace `name` until `close`."""

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self._name, self._outer = name, workspace.CurrentWorkspace()
        self._seconds: Dict[str, Dict[str, List[float]]] = {}
        self._clocked: Dict[str, Dict[str, Callable[[int], float]]] = {}
        try:
            # What all ways together need is much memory, and is gone before the fastest are made again.
            fastest = [(task, self._fastest(task)) for task in tasks]
            for task, ways in fastest:
                nets, _ = self._created(task, ways)
                self._clocked[task.name] = {way: clocked(self._runner(net)) for way, net in nets.items()}
                self._seconds[task.name] = {way.name: [] for way in ways}
        except BaseException:
            self.close()
            raise

    def _fastest(self, task: Task) -> List[Way]:
        found = {way.name: way for way in task.ways}
        nets, failures = self._created(task, list(found.values()))
        subjects = [Subject(name, clocked(self._runner(net))) for name, net in nets.items()]
        measured = measure(subjects, 1, LOOKS_ENOUGH, LOOK_MINIMUM)
        self.close()
        if not measured.seconds:
            failures.update(measured.failures)
            raise RuntimeError("{}: {}".format(task.name, "; ".join(sorted(set(failures.values())))))
        order = sorted(measured.seconds, key=lambda name: min(measured.seconds[name]))
        return [found[name] for name in order[:KEPT]]

    def _created(self, task: Task, wanted: Sequence[Way]) -> Tuple[Dict[str, str], Dict[str, str]]:
        """The nets of ways, and what went wrong with those that have none; by way."""

        def feed() -> None:
            for operand in {operand for way in wanted for operand in way.fed}:
                workspace.FeedBlob(_blob(task, operand), np.ascontiguousarray(task.value(operand)))

        self._in_workspace(feed)
        nets, failures = {}, {}
        for way in wanted:
            try:
                nets[way.name] = self._net(task, way)
            except Exception as error:
                failures[way.name] = first_line(error)
        return nets, failures

    def _net(self, task: Task, way: Way) -> str:
        blob = functools.partial(_blob, task)

        def prepare() -> None:
            for step in way.prepared:
                workspace.RunOperatorOnce(created(step, blob))
            workspace.CreateNet(net)

        net = core.Net("task")
        operator = created(way.timed, blob)
        net.AddExternalInput(*operator.input)
        net.Proto().op.extend([operator] * task.times)
        self._in_workspace(prepare)
        return str(net.Name())

    def _runner(self, net: str) -> Callable[[int], None]:
        return lambda repeats: self._in_workspace(lambda: workspace.RunNet(net, repeats))

    def _in_workspace(self, action: Callable[[], object]) -> None:
        workspace.SwitchWorkspace(self._name, True)
        try:
            action()
        finally:
            workspace.SwitchWorkspace(self._outer)

    def time(self, repeats: int) -> Dict[str, float]:
        """The seconds that `repeats` repetitions of each task take, in the way that is the fastest this time."""
        found = {}
        for task, ways in self._clocked.items():
            times = {way: run(repeats) for way, run in ways.items()}
            for way, seconds in times.items():
                self._seconds[task][way].append(seconds / repeats)
            found[task] = min(times.values())
        return found

    def best(self) -> Dict[str, Tuple[str, float]]:
        """For each task its fastest way, and the seconds it takes at best."""
        found = {}
        for task, ways in self._seconds.items():
            way = min(ways, key=lambda name: min(ways[name]))
            found[task] = (way, min(ways[way]))
        return found

    def close(self) -> None:
        self._in_workspace(workspace.ResetWorkspace)


def _blob(task: Task, operand: str) -> str:
    return "{}: {}".format(task.name, operand)
