"""Weights laid out once per run, so that the product of every step is the fast one; which that is, is tried out."""

from typing import Iterable, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting import unchanged_weights
from caffe2_recurrent.rewriting.products.step_products import AS_IT_IS, FC, GAIN, TRANSPOSED, Size, seconds_of_step
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.unchanged_weights import seconds_of_comparing

# It must become faster by this factor where weights are transposed once for all runs, so that nothing can be lost but
# the error of a trial: 2% for one sequence.
GAIN_FOR_GOOD = 1.05


class TransposedWeights(Rule):
    """step: Y = FC(X, W, b)    =>    before the loop: Wt = Transpose(W);  step: Y = FCTransposed(X, Wt, b)

    Also where the backward step computes Y again. W `[M, K]` must be the same in all steps.
    """

    name = "transposed_weights"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if operator.type == FC and not is_on_onednn(operator):
                    yield Site("FC -> '{}'".format(operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        weights = operators[position].input[1]
        if not loop.is_reference(weights):
            return "its weights '{}' are not the same in all steps".format(weights)
        if integer(operators[position], "axis_w", 1) != 1:
            return "its weights '{}' are laid out in another way (axis_w)".format(weights)
        shape = sizes.shape(weights)
        if shape is not None and len(shape) != 2:
            return "its weights '{}' have {} dimensions".format(weights, len(shape))
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        batch, shape = sizes.batch(loop), sizes.shape(operators[position].input[1])
        if batch is None or shape is None:
            return "the sizes are not known, and transposing may cost more than it gains; give shapes"
        outer, inner = shape
        weights = operators[position].input[1]
        may_keep = Keeping.WEIGHTS if unchanged_weights.may_keep_of(loop, sizes, weights) else Keeping.NOTHING
        size = Size(FC, batch, inner, outer, has_bias=True, in_rows=True, may_keep=may_keep)
        steps = sizes.steps(loop)
        comparing = seconds_of_comparing(loop, weights, sizes) if may_keep is Keeping.WEIGHTS else 0.0
        transposed = seconds_of_step(size, TRANSPOSED, steps) + (comparing / steps if steps else 0.0)
        is_for_good = may_keep is Keeping.WEIGHTS and Keeping.FOR_GOOD in loop.may_keep
        gain = GAIN_FOR_GOOD if is_for_good else GAIN
        if gain * transposed > seconds_of_step(size, AS_IT_IS, None):
            return "for [{0}, {1}] x [{1}, {2}] it is not faster".format(batch, inner, outer)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        weights = operator.input[1]
        transposed = loop.add_before("Transpose", [weights], weights + "_transposed")
        loop.add_reference(transposed)
        operator.type = TRANSPOSED
        operator.input[1] = transposed
