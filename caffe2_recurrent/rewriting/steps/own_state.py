"""Operators of a step with a state of their own, which no blob holds.

The engine makes an operator for each step, or for each of the few workspaces in which steps take turns. One that draws
random numbers begins with its seed, and one that counts with 0: what they compute depends on how many there are, and
rules change that.

Source: CPUContext in caffe2/core/context.h.
"""

from typing import Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting import kept_results
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.steps.repeatable import REPEATABLE
from caffe2_recurrent.rewriting.steps.rows import UNITS

# They draw nothing, or ATen's from a generator of the process.
DRAWS_NOTHING = REPEATABLE | UNITS | frozenset([ATEN])


def found(loop: Loop) -> Optional[str]:
    """What such an operator does, if there is one."""
    nets = [loop.net] if loop.gradient is None else [loop.net, loop.gradient.net]
    for net, operators in zip(nets, loop.steps):
        for operator in operators:
            if kept_results.tells_runs_apart(operator):
                return "its step has {} count its own runs".format(operator.type)
            # What the operator does not say, the net says for it.
            of = operator if operator.HasField("device_option") else net
            if of.device_option.HasField("random_seed") and _may_draw(operator):
                return "its step may have {} draw numbers from a seed of its own".format(operator.type)
    return None


def _may_draw(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type not in DRAWS_NOTHING and not operator.type.endswith("Gradient")
