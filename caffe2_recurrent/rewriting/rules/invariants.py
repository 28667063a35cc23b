"""Operators whose result no step changes, run once before the loop."""

from typing import Iterable, List, Optional, Set, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.recompute import RANDOM_OPERATORS
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import copied
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import versions
from caffe2_recurrent.rewriting.steps.repeatable import REPEATABLE


class Invariants(Rule):
    """step: Y = operator(A, B, ..);  Z = other(Y, ..)    =>    before the loop: Y' = operator(A, B, ..)
                                                                step: Z = other(Y', ..)

    A, B, .. must be the same in all steps: blobs of the outer net, or what the rule has moved there. The operators of
    the backward step read Y' too, and move as well if they are of this kind. The gradient operator of a moved operator
    stays: the engine adds up over the steps what it computes.
    """

    name = "invariants"

    def sites(self, loop: Loop) -> Iterable[Site]:
        unchanging = _unchanging(loop)
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                # What the backward step computes again goes with the operator of the forward step.
                again = operators is not loop.operators and operator in loop.operators
                if unchanging.issuperset(operator.input) and operator.output and not again:
                    blobs = ", ".join("'{}'".format(blob) for blob in operator.output)
                    yield Site("{} -> {}".format(operator.type, blobs), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        operator = operators[position]
        if operator.type in RANDOM_OPERATORS:
            return "it draws other numbers in each step"
        if operator.type not in REPEATABLE:
            return "it is not known to give the same each time it runs"
        for blob in operator.output:
            if blob in _linked(loop):
                return "'{}' is a slice of an outer blob, which each step has to fill".format(blob)
            if blob in _exported(loop):
                return "'{}' is an output of the step".format(blob)
            version = _version(loop, operators, position, blob)
            if isinstance(version, str):
                return version
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        moved = copied(operator)
        moved.output[:] = [loop.new_blob(blob + "_of_all_steps") for blob in operator.output]
        loop.before.append(moved)
        spent = [operator]
        found = [_version(loop, operators, position, blob) for blob in operator.output]
        for blob, outer, version in zip(operator.output, moved.output, found):
            assert isinstance(version, versions.Version)
            versions.rename(version, blob, outer)
            spent += [version.copy] if version.copy is not None else []
            if version.readers:
                loop.add_reference(outer)
        for step in loop.steps:
            versions.remove(step, spent)
        written = {blob for step in loop.steps for other in step for blob in other.output}
        loop.shared[:] = [blob for blob in loop.shared if blob not in operator.output or blob in written]


def _unchanging(loop: Loop) -> Set[str]:
    """The inputs of the loop that all steps read by their own name and none writes."""
    written = {blob for operators in loop.steps for operator in operators for blob in operator.output}
    states = {state.outer_states for state in loop.states}
    return set(loop.inputs) - written - states - _linked(loop) - {loop.timestep}


def _linked(loop: Loop) -> Set[str]:
    return {link.inner for link in loop.all_links}


def _exported(loop: Loop) -> Set[str]:
    """What the steps show outside, or the engine adds up."""
    exported = set(loop.net.external_output)
    if loop.gradient is not None:
        exported.update(loop.gradient.net.external_output)
        exported.update(parameter.inner_gradient for parameter in loop.gradient.parameters)
    return exported


def _version(
    loop: Loop, operators: List[caffe2_pb2.OperatorDef], position: int, blob: str
) -> Union[versions.Version, str]:
    of = versions.of_step if operators is loop.operators else versions.of_backward_step
    return of(loop, position, blob)
