"""What products that are convolutions have around them, whoever convolves: filters of the rows, and a bias."""

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import ATEN, Emitter
from caffe2_recurrent.rewriting.products.product import Product


def like_filters(loop: Loop, product: Product) -> str:
    """An outer blob of the shape of the rows as filters, `[N, K, 1, 1]`."""
    key = ("like filters", product.inner)
    if key not in loop.made:
        rest = loop.add_before("GivenTensorInt64Fill", [], "filter", shape=[3], values=[product.inner, 1, 1])
        shape = loop.add_columns([loop.add_number_of_rows(), rest], "shape_of_filters")
        loop.made[key] = loop.add_before("ConstantFill", [shape], "like_filters", input_as_shape=1, value=0.0)
    return loop.made[key]


def result_of_convolution(emitter: Emitter, loop: Loop, product: Product) -> str:
    """The blob for the result; another one than that of the product where `add_bias` goes on from there."""
    # ATen's output is a tensor of its own, so it cannot be a linked blob.
    is_linked = any(link.inner == product.output for link in loop.all_links)
    by_aten = product.bias is not None and not is_linked and vectorised.aten_adds_faster(product.batch, product.outer)
    return emitter.blob("without_bias") if by_aten else product.output


def add_bias(emitter: Emitter, product: Product, result: str) -> None:
    """The product's bias, if it has one, added to the result as it has been shaped like the product."""
    if product.bias is None:
        return
    if result != product.output:
        emitter.add(ATEN, [result, product.bias], product.output, operator="add")
    else:
        emitter.add("Add", [result, product.bias], result, broadcast=1)
