"""Sums and products with a fixed blob of another shape, by ATen's operators; it is tried out."""

from typing import Iterable, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before

KINDS = (vectorised.ADD, vectorised.MULTIPLY)


class Broadcasts(Rule):
    """step: Y = Add(A, b), where A is the same in all steps, b smaller    =>    Y = ATen add(A, b),    and Mul likewise

    Also with the two in the other order, and where the backward step computes Y again. Caffe2's own operators take
    several times as long where one of them has to be repeated. ATen's output is a tensor of its own, so Y must be no
    linked blob. The attention of a decoder has such a sum over all positions of its encoder.
    """

    name = "broadcasts"

    def sites(self, loop: Loop) -> Iterable[Site]:
        references = loop.references
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                with_fixed = len(references.intersection(operator.input)) == 1
                if operator.type in KINDS and with_fixed and not is_on_onednn(operator):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        operators, position = site.where
        operator = operators[position]
        output = operator.output[0]
        if any(link.inner == output for link in loop.all_links):
            return "'{}' is linked to an outer blob".format(output)
        if output in operator.input:
            return "it works in place"
        if any(argument(operator, name) is not None for name in ("axis", "axis_str")):
            return "it says which axes belong together, which ATen cannot be told"
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        operator = operators[position]
        shapes = shapes_before(loop, sizes, operators, position)
        unknown = [blob for blob in operator.input if blob not in shapes]
        if unknown:
            return "the shape of '{}' is not known; give shapes".format(unknown[0])
        first, second = (shapes[blob] for blob in operator.input)
        if first == second:
            return "both are shaped alike"
        if not vectorised.aten_broadcasts_faster(operator.type, first, second):
            return "for {} and {} {} is faster".format(first, second, operator.type)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        kind = vectorised.aten_name(operator.type)
        operators[position] = new_operator(ATEN, operator.input, operator.output, operator, operator=kind)
