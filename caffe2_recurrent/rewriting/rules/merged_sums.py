"""Sums of sums as one sum."""

from typing import Iterable, List, Optional, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import SUM, is_written_next, read_before_written
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow

Operators = List[caffe2_pb2.OperatorDef]


class MergedSums(Rule):
    """S = Sum(A, B);  Y = Sum(S, C)    =>    Y = Sum(A, B, C)

    In the step and in the backward step. S may take the place of A, or Y that of S. Nothing else may read S.
    """

    name = "merged_sums"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators, others in _steps(loop):
            for position, operator in enumerate(operators):
                if operator.type == SUM:
                    for reading in dataflow.readers(operators, operator.output[0], position):
                        if operators[reading].type == SUM:
                            what = "Sum '{}' -> Sum '{}'".format(operator.output[0], operators[reading].output[0])
                            yield Site(what, (operators, others, position, reading))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, others, first, second = site.where
        part, total = operators[first].output[0], operators[second].output[0]
        if dataflow.readers(operators, part, first) != [second]:
            return "'{}' is read elsewhere too".format(part)
        if list(operators[second].input).count(part) > 1:
            return "'{}' is added more than once".format(part)
        if part != total and part in _needed(loop, operators, others):
            return "'{}' is needed outside of the step".format(part)
        overwritten = _overwritten(loop, operators, first, second)
        if overwritten is not None:
            return "'{}' is overwritten between the two".format(overwritten)
        addends = _addends(operators, first, second)
        if total not in addends and is_written_next(operators[second + 1 :], total):
            # The RNN executor runs who writes next in order with who reads, and nobody would read it.
            return "'{}' is overwritten before anything reads it".format(total)
        if addends.count(total) > 1:
            return "'{}' is added more than once, and the sum takes its place".format(total)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, others, first, second = site.where
        part, total = operators[first].output[0], operators[second].output[0]
        # The engine's Sum can take the place of its first input only.
        addends = sorted(_addends(operators, first, second), key=lambda blob: blob != total)
        operators[second].input[:] = addends
        del operators[first]
        if not dataflow.writers([*operators, *others], part):
            loop.shared[:] = [blob for blob in loop.shared if blob != part]


def _steps(loop: Loop) -> List[Tuple[Operators, Operators]]:
    """The operators of either step beside those of the other."""
    steps = loop.steps
    others: List[Operators] = [*reversed(steps)] if len(steps) > 1 else [[]]
    return list(zip(steps, others))


def _addends(operators: Operators, first: int, second: int) -> List[str]:
    part = operators[first].output[0]
    addends: List[str] = []
    for blob in operators[second].input:
        addends += operators[first].input if blob == part else [blob]
    return addends


def _needed(loop: Loop, operators: Operators, others: Operators) -> Set[str]:
    """Blobs of the step with `operators` whose values something reads when it has run."""
    needed = {link.inner for link in loop.all_links}.union(loop.net.external_output)
    if loop.gradient is not None:
        needed.update(loop.gradient.net.external_output)
        needed |= loop.gradient.of_parameters
    return needed.union(read_before_written(others))


def _overwritten(loop: Loop, operators: Operators, first: int, second: int) -> Optional[str]:
    """What the Sum at `first` adds and an operator between the two changes; two names may be linked to one slice."""
    slices = {link.inner: (link.outer, link.offset) for link in loop.all_links}
    changed = {slices.get(blob, blob) for operator in operators[first + 1 : second] for blob in operator.output}
    return next((blob for blob in operators[first].input if slices.get(blob, blob) in changed), None)
