"""Rules over one loop, and the operators that take the places of its own."""

import dataclasses
from typing import List, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import STEP_NET
from caffe2_recurrent.rewriting import backward_pass, chains, unrolled
from caffe2_recurrent.rewriting.products import kept_filters
from caffe2_recurrent.rewriting.report import Refusal, Rewrite
from caffe2_recurrent.rewriting.rule import Rule
from caffe2_recurrent.rewriting.steps import dead_operators

Operators = List[caffe2_pb2.OperatorDef]


def around_forward(loop: Loop) -> Operators:
    """What takes the place of the forward operator, as far as the loop has been rewritten."""
    if loop.unrolled is not None:
        return unrolled.around_forward(loop)
    return _in_place(loop).around_forward()


def around_gradient(loop: Loop) -> Operators:
    """What takes the place of the gradient operator; the loop's `after_gradient` comes last."""
    assert loop.gradient is not None
    if loop.unrolled is not None:
        return unrolled.around_gradient(loop)
    return _in_place(loop).around_gradient() if loop.gradient.turned is None else backward_pass.operators(loop)


def _in_place(loop: Loop) -> Loop:
    """The loop, whose steps read results of oneDNN where these lie."""
    linked, gradient = {link.inner for link in loop.all_links}, loop.gradient
    needed = {*linked, *loop.net.external_output}
    keeps = gradient is None or gradient.turned is not None
    if gradient is not None:
        needed.update(blob for operator in gradient.operators for blob in operator.input)
        own = {*linked, *gradient.net.external_output, *gradient.of_parameters}
        gradient = dataclasses.replace(gradient, operators=kept_filters.in_place(loop, gradient.operators, own, keeps))
    operators, links = kept_filters.in_place(loop, loop.operators, needed, keeps), loop.links
    if STEP_NET in loop.chained:
        operators = chains.chained(loop, STEP_NET, [*chains.linking(links, loop.timestep, loop), *operators])
        links = []
    return dataclasses.replace(loop, operators=operators, links=links, gradient=gradient)


def apply_all(
    rules: Sequence[Rule], loop: Loop, sizes: Sizes, even_if_slower: bool
) -> Tuple[List[Rewrite], List[Refusal]]:
    rewrites: List[Rewrite] = []
    dead_before = dead_operators.found(loop)
    while True:
        before = len(rewrites)
        refusals: List[Refusal] = []
        for rule in rules:
            made, left = apply(rule, loop, sizes, even_if_slower)
            rewrites += made
            refusals += left
        # Where there were some, a rule may have been in doubt about what they write.
        if len(rewrites) == before or not dead_operators.remove(loop, dead_before):
            return rewrites, refusals


def apply(rule: Rule, loop: Loop, sizes: Sizes, even_if_slower: bool = False) -> Tuple[List[Rewrite], List[Refusal]]:
    """Rewrite a loop wherever the rule can and had better: what was done, and what was not.

    What was refused in front of a site that is rewritten is asked about again when those behind it have been, and not
    after each rewrite.
    """
    rewrites: List[Rewrite] = []
    passed: Set[str] = set()
    while True:
        left: List[Refusal] = []
        for site in rule.sites(loop):
            if site.what in passed:
                continue
            reason = rule.refusal(loop, site, sizes)
            if reason is None and not even_if_slower:
                reason = rule.loss(loop, site, sizes)
            if reason is None:
                rule.rewrite(loop, site, sizes)
                rewrites.append(Rewrite(rule.name, loop.name, site.what))
                passed.update(refusal.what for refusal in left)
                break
            left.append(Refusal(rule.name, loop.name, site.what, reason))
        else:
            if not passed:
                return rewrites, list(dict.fromkeys(left))
            passed.clear()


def apply_chosen(rules: Sequence[Rule], loop: Loop, sizes: Sizes) -> None:
    """Rewrite a copy of a loop for a trial by those of `rules` that are to be applied to it later on."""
    for rule in rules:
        if rule.name in loop.rules:
            apply(rule, loop, sizes)
