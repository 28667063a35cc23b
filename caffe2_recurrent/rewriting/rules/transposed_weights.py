"""Weights laid out once per run, so that the product of every step is the fast one."""

from typing import Iterable, Optional

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.processor import made_by_intel
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

# On Intel's processors the transposition costs about as much as it gains in three or four steps. On one of AMD's, where
# MKL has other products, the two were equally fast from 8 sequences on, and it never gained enough before.
FEWEST_STEPS = 8


class TransposedWeights(Rule):
    """step: Y = FC(X, W, b)    =>    before the loop: Wt = Transpose(W);  step: Y = FCTransposed(X, Wt, b)

    Also where the backward step computes Y again. W `[M, K]` must be the same in all steps.
    """

    name = "transposed_weights"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if operator.type == "FC" and not is_on_onednn(operator):
                    yield Site("FC -> '{}'".format(operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        weights = operators[position].input[1]
        if weights not in loop.references:
            return "its weights '{}' are not the same in all steps".format(weights)
        if integer(operators[position], "axis_w", 1) != 1:
            return "its weights '{}' are laid out in another way (axis_w)".format(weights)
        shape = sizes.shape(weights)
        if shape is not None and len(shape) != 2:
            return "its weights '{}' have {} dimensions".format(weights, len(shape))
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if not made_by_intel():
            return "products with transposed weights are faster on Intel's processors only, which this one is not"
        steps = sizes.steps(loop)
        if steps is not None and steps < FEWEST_STEPS:
            return "with {} steps it costs more than it gains".format(steps)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        weights = operator.input[1]
        transposed = loop.add_before("Transpose", [weights], weights + "_transposed")
        loop.add_reference(transposed)
        operator.type = "FCTransposed"
        operator.input[1] = transposed
