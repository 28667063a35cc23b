"""Nets optimised on their way to the engine, for `install(optimize=True)`.

    workspace.CreateNet(net)    =>    workspace.CreateNet(optimised copy of net)

The net itself stays as it was built: scripts inspect theirs, clone them and add gradients to them after they have run
them once. What we run ourselves goes as it is, in workspaces of our own: trials, and what is timed or checked.
"""

import functools
import inspect
from typing import Any, Callable, NamedTuple, Optional, Sequence, Set

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.loops.loop import has_backward_step
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR
from caffe2_recurrent.optimized_once import Optimizer
from caffe2_recurrent.rewriting import Report
from caffe2_recurrent.scratch_workspace import is_inside

# Functions of caffe2.python.workspace that take a net, or a plan with nets in it, and hand it to the engine.
NAMES = ("CreateNet", "RunNetOnce", "RunPlan")


class Settings(NamedTuple):
    """What optimises nets, and who gets the reports."""

    optimizer: Optimizer
    on_report: Optional[Callable[[Report], Any]]


class Runner:
    """One of Caffe2's functions, given an optimised copy of the net that it is called with."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self.settings = settings
        self._function = function
        # How callers who name it call the net, or the plan.
        self._role = next(iter(inspect.signature(function).parameters))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if is_inside():
            return self._function(*arguments, **named)
        if arguments:
            arguments = (self._optimized(arguments[0]), *arguments[1:])
        elif self._role in named:
            named[self._role] = self._optimized(named[self._role])
        return self._function(*arguments, **named)

    def _optimized(self, what: Any) -> Any:
        if isinstance(what, core.ExecutionStep):
            # As RunPlan does.
            what = core.Plan(what)
        proto = what.Proto() if isinstance(what, (core.Net, core.Plan)) else what
        if not isinstance(proto, (caffe2_pb2.NetDef, caffe2_pb2.PlanDef)):
            return what
        copy = type(proto)()
        copy.CopyFrom(proto)
        nets = [copy] if isinstance(copy, caffe2_pb2.NetDef) else list(copy.network)
        found = False
        for net in nets:
            found = self._optimize(net, [other for other in nets if other is not net]) or found
        return copy if found else what

    def _optimize(self, net: caffe2_pb2.NetDef, others: Sequence[caffe2_pb2.NetDef]) -> bool:
        """Optimise `net`, but for what the `others` may read; whether there was something to do."""
        if not _is_whole(net):
            return False
        declared = list(net.external_output)
        read = {name for other in others for name in _read_from_outside(other)}
        written = dict.fromkeys(blob for operator in net.op for blob in operator.output)
        net.external_output.extend(blob for blob in written if blob in read and blob not in declared)
        report = self.settings.optimizer.optimize(net)
        net.external_output[:] = declared
        if self.settings.on_report is not None:
            self.settings.on_report(report)
        return report.total > 0


def _read_from_outside(net: caffe2_pb2.NetDef) -> Set[str]:
    """Whatever may be the name of a blob that `net` reads and has not written before."""
    read: Set[str] = set()
    written: Set[str] = set()
    for operator in net.op:
        mentioned = {*names_of(operator)} - {*operator.output}
        read |= (mentioned | {*operator.input}) - written
        written.update(operator.output)
    return read


def _is_whole(net: caffe2_pb2.NetDef) -> bool:
    """Whether there are loops, and none whose gradient operator is elsewhere and wants the steps as they are."""
    loops = [operator for operator in net.op if operator.type == OPERATOR]
    differentiated = {operator.input[-1] for operator in net.op if operator.type == GRADIENT_OPERATOR}
    return bool(loops) and all(
        operator.output[-1] in differentiated or not has_backward_step(operator) for operator in loops
    )
