"""Sums of products that oneDNN makes with something else, taken where the product is.

oneDNN's Add leaves sums with a tensor of the CPU to the operator of the CPU, and its result there. That reads the
result of an inner product where it lies, so that nothing is copied back. It would copy what a convolution has made,
which lies in blocks.

Source: caffe2/ideep/operators/elementwise_sum_op.cc, operator_fallback_ideep.h.
"""

from typing import Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import SUM, is_on_onednn
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.steps.sole_readers import Operators, drop_reader, sole_reader


def with_sum(way: str, loop: Loop, operators: Operators, position: int, product: Product) -> Product:
    """The product at `position`, that the step gets in one of these ways, with its sum if it can be taken there.

    The operator that takes it so far is gone then.
    """
    found = sum_of(loop, operators, position)
    if found is None or not onednn.adds(way):
        return product
    reader = drop_reader(loop, operators, position, found)
    (addend,) = (blob for blob in reader.input if blob != product.output)
    return product._replace(addend=addend, output=reader.output[0])


def sum_of(loop: Loop, operators: Operators, position: int) -> Optional[int]:
    """Where the result at `position` is added to one other blob, if that is all that happens to it."""
    found = sole_reader(loop, operators, position)
    if found is None or operators[found].type != SUM or is_on_onednn(operators[found]):
        return None
    result, reader = operators[position].output[0], operators[found]
    others = [blob for blob in reader.input if blob != result]
    # What is added must still be there when the sum is: it may not be summed up in the place of the addend.
    if len(reader.input) != 2 or len(others) != 1 or others[0] in reader.output:
        return None
    return found
