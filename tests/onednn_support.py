"""Nets with oneDNN's operators in tests: made without trials, and looked into."""

import contextlib

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting import net_pass
from caffe2_recurrent.rewriting.products import onednn, step_products, thread_numbers
from caffe2_recurrent.rewriting.products.product_ways import KEPT_FILTERS, NNPACK
from caffe2_recurrent.rewriting.rules import packed_products
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from workspace_contents import contents

FROM = onednn.FROM
# What a step runs there in the place of a product.
THERE = {onednn.INNER_PRODUCT: ["Scale", "FC", FROM], onednn.CONVOLUTION: ["ResizeLike", "Conv", FROM]}
# Likewise, if it is added to something.
ADDED_THERE = {way: [*there[:-1], "Add"] if onednn.adds(way) else there for way, there in THERE.items()}


def force(monkeypatch, way):
    """Have products of steps done in one way, without a trial; those with several matrices in theirs."""

    def fastest(kind, product, steps, is_added, ways, may_keep):
        return way if product.parts == 1 or way == NNPACK else onednn.CONVOLUTION

    monkeypatch.setattr(packed_products, "_fastest", fastest)


def promise_constant_threads(monkeypatch):
    """That numbers of threads stay, for all nets that are optimised."""
    may_be_kept = net_pass._what_may_be_kept
    monkeypatch.setattr(
        net_pass,
        "_what_may_be_kept",
        lambda loop, promises: may_be_kept(loop, promises._replace(constant_threads=True)),
    )


def numbers_matter(monkeypatch, is_so):
    """As on a processor where the order of filters depends on the number of threads, or as on one where not."""
    monkeypatch.setattr(thread_numbers, "matter", lambda: is_so)


def make_up(monkeypatch, as_it_is, transposed=None, **ways):
    """Have a trial of a product find `Seconds` as it is, `transposed`, and by `inner_product`, `convolution`,
    `kept_filters` and `nnpack`.

    Those that are not given are as it is.
    """
    found = {step_products.AS_IT_IS: as_it_is, step_products.TRANSPOSED: transposed or as_it_is}
    found.update(
        {way: ways.get(way.replace(" ", "_").lower(), as_it_is) for way in (*onednn.WAYS, KEPT_FILTERS, NNPACK)}
    )
    monkeypatch.setattr(step_products, "tried", lambda size, way: found[way])
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)


def make_up_gain(monkeypatch):
    """Have every trial of a product of a step find transposed weights faster, and oneDNN faster still."""
    make_up(
        monkeypatch,
        Seconds(0.0, 2.0),
        Seconds(0.0, 1.5),
        inner_product=Seconds(0.0, 1.0),
        convolution=Seconds(0.0, 0.5),
    )


def proto_of(net):
    return net if isinstance(net, caffe2_pb2.NetDef) else getattr(net, "net", net).Proto()


def inner_nets(net):
    """The nets of a net, and those in them, each with where it is: `(type of the operator, name of the argument)`."""
    for operator in proto_of(net).op:
        for given in operator.arg:
            if given.HasField("n"):
                yield (operator.type, given.name), given.n
                yield from inner_nets(given.n)


def in_ifs(net):
    """The operators that the outer net runs inside of Ifs."""
    return [operator for where, inner in inner_nets(net) if where == ("If", "then_net") for operator in inner.op]


def on_onednn(operators):
    """The types of those that are oneDNN's."""
    return [operator.type for operator in operators if is_on_onednn(operator)]


def assert_placed(net):
    """The outer net itself runs no operator of oneDNN's, which it would crash on with some types of nets."""
    assert on_onednn(proto_of(net).op) == []


def outputs_and_step(step, rules, **options):
    """Outputs and gradients of the loop, optimised if there are rules, and its step."""
    net = []

    def rewrite(finished):
        net.append(finished)
        if rules:
            support.Optimised(rules)(finished)

    found = comparing.run(recurrent_net, step, executor=False, rewrite=rewrite, **options)
    return found, list(support.step(net[0]).op)


@contextlib.contextmanager
def leaving_no_trace():
    """What runs inside leaves the workspace and which one it is as they were, and nothing in those it makes."""

    def state():
        return workspace.CurrentWorkspace(), contents(), set(workspace.C.nets())

    before = state()
    yield
    assert state() == before
    for name in set(workspace.Workspaces()) - {before[0]}:
        workspace.SwitchWorkspace(name)
        left = workspace.Blobs()
        workspace.SwitchWorkspace(before[0])
        assert left == [], name


VARIANTS = {
    "kept": lambda cell: cell.but(lengths=[3, 1], options={"outputs_with_grads": "auto"}),
    "recomputed": lambda cell: cell.remembering_nothing().but(rank=1),
}
NAMES = [cell.name for cell in CELLS]
EVERY_CELL = pytest.mark.parametrize("name, variant", [(name, variant) for name in NAMES for variant in VARIANTS])


def cell_of(name, variant):
    return VARIANTS[variant](CELLS[NAMES.index(name)])


def assert_cell(name, variant, rewrite):
    """A layer of the registry, rewritten, has the values and gradients of the numpy loop."""
    cell_of(name, variant).assert_right(executor=False, rewrite=rewrite)


def without_its_operators(monkeypatch):
    """Have operators of oneDNN's be of a type that there is not."""

    def missing(emitter, kind, inputs, outputs, **arguments):
        emitter.operators.append(core.CreateOperator("NotThere", inputs, outputs))
        return outputs[0]

    monkeypatch.setattr(onednn, "add", missing)
