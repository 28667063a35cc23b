"""Splits of a backward step that need not be told what the forward step has put together."""

from typing import Dict, Iterable, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer, set_arguments
from caffe2_recurrent.operators import as_bytes
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before

# Positions of the sizes among the outputs of a Concat, and the inputs of a Split.
SIZES = 1


class FixedSplits(Rule):
    """step: Y, sizes = Concat(A, B)    backward step: dA, dB = Split(dY, sizes)

    =>  backward step: dA, dB = Split(dY), split=[a, b]

    It is for columns whose numbers are known. Sizes are whole numbers, which no buffer over all steps holds, and so a
    GRU whose steps kept them had no `backward_loop`.
    """

    name = "fixed_splits"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operator in [] if loop.gradient is None else loop.gradient.operators:
            if operator.type == "Split" and len(operator.input) > SIZES and _joining(loop, operator) is not None:
                yield Site("Split -> '{}'".format("', '".join(operator.output)), operator)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        splitting, joining = site.where, _joining(loop, site.where)
        assert joining is not None
        blob = splitting.input[SIZES]
        # The backward step may put the same together again.
        writing = (operator for step in loop.steps for operator in step if blob in operator.output)
        if len({as_bytes(operator, operator.input) for operator in writing}) > 1:
            return "several operators write '{}'".format(blob)
        if any(integer(operator, "axis", 1) != FEATURES for operator in (joining, splitting)):
            return "it is not about columns"
        unknown = [name for name, size in _columns(loop, joining, sizes).items() if size is None]
        if unknown:
            return "the size of '{}' is not known; give shapes".format("' and '".join(unknown))
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        splitting, joining = site.where, _joining(loop, site.where)
        assert joining is not None
        columns = _columns(loop, joining, sizes)
        del splitting.input[SIZES:]
        set_arguments(splitting, {"split": [columns[blob] for blob in joining.input]})


def _joining(loop: Loop, splitting: caffe2_pb2.OperatorDef) -> Optional[caffe2_pb2.OperatorDef]:
    """The operator whose sizes it reads."""
    sizes = splitting.input[SIZES]
    joining = (operator for operator in loop.operators if operator.type == "Concat")
    return next((operator for operator in joining if sizes in operator.output[SIZES:]), None)


def _columns(loop: Loop, joining: caffe2_pb2.OperatorDef, sizes: Sizes) -> Dict[str, Optional[int]]:
    """Of its inputs, if they are known."""
    position = next(index for index, operator in enumerate(loop.operators) if operator is joining)
    shapes = shapes_before(loop, sizes, loop.operators, position)
    return {blob: shapes[blob][FEATURES] if len(shapes.get(blob, ())) > FEATURES else None for blob in joining.input}
