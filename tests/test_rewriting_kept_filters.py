"""`packed_products` with filters that oneDNN keeps from run to run: right in each run, whatever has changed since."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from caffe2.python.predictor import predictor_exporter

import comparing
import onednn_support
import rewriting_support as support
import step_nets
from caffe2_recurrent import (
    LSTM,
    MILSTM,
    describe,
    draw,
    optimize,
    prediction_net,
    recurrent_net,
    save_predictor,
    step_times,
)
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting import kept_results, unchanged_weights
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import (
    kept_filters,
    onednn,
    onednn_tensors,
    product_ways,
    step_products,
    thread_numbers,
    turned_weights,
)
from caffe2_recurrent.rewriting.products.kept_filters import KEPT_FILTERS, in_place, keeps_filters
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.products.step_subject import subject_of
from caffe2_recurrent.rewriting.rules import packed_products
from caffe2_recurrent.rewriting.rules import unchanged_weights as unchanged_weights_rule
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.steps import step_counts
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from numpy_lstm import Case
from onednn_support import assert_cell, assert_placed, force, in_ifs, inner_nets, leaving_no_trace, make_up, on_onednn
from test_rewriting_onednn import adam, trained
from test_rewriting_packed_products import assert_rows_stay_apart
from test_rewriting_unchanged_weights import (
    LAYERS,
    as_built,
    assert_failure_leaves_nothing,
    change,
    parameters,
    two_layers,
)

RULE = "packed_products"
BOTH = [RULE, unchanged_weights.RULE]
# Of several matrices there is one of another kind.
ALL = [name for name in support.NAMES if name != "gates_first"]
THERE = ["Conv"]
WEIGHTS = "layer/gates_t_w"
BESIDE = core.CreateOperator("Copy", ["a"], ["b"])
FORWARD = {"gradients": False, "forward_only": True}
EVERY_CELL_THAT_TRAINS = onednn_support.EVERY_CELL
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
EVERY_STEP_NET = pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
RULES = pytest.mark.parametrize("rules", [BOTH, ALL], ids=["both", "all rules"])

sites_of_unrolled_steps = UnrolledSteps.sites
# Where this Caffe2's oneDNN does not do as it should, nothing is made that way, and there is nothing to be seen.
IS_RIGHT = kept_filters.are_right(4, 16)


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Products are made that way wherever that may be."""
    force(monkeypatch, KEPT_FILTERS)

    def fastest(kind, product, steps, is_added, ways, may_keep):
        return KEPT_FILTERS if KEPT_FILTERS in ways else ways[0]

    monkeypatch.setattr(packed_products, "_fastest", fastest)


@pytest.fixture(autouse=True)
def constant_threads(monkeypatch, request):
    """Their numbers stay. Filters are as where these matter, or, where a test has a parameter for that, do not."""
    onednn_support.promise_constant_threads(monkeypatch)
    onednn_support.numbers_matter(monkeypatch, getattr(request, "param", True))


# Where they do matter nothing is to be had as if they did not, unless oneDNN is told to do without AVX-512.
ISA = "DNNL_MAX_CPU_ISA"
MATTERS = [True, False] if not thread_numbers.matter() or os.environ.get(ISA) == "AVX2" else [True]
IDS = ["numbers_matter", "they_stay"]
NUMBERS = pytest.mark.parametrize("constant_threads", MATTERS, indirect=True, ids=IDS[: len(MATTERS)])


def they_stay(test):
    """To be run where they do not matter; elsewhere it is no test of this process, but of another one."""
    return pytest.mark.parametrize("constant_threads", [False], indirect=True, ids=IDS[1:])(test)


if False not in MATTERS:

    def they_stay(test):  # noqa: F811
        return None

    def test_they_stay_without_avx512():
        """oneDNN lays out filters there as it does on other processors."""
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", IDS[1], __file__]
        done = subprocess.run(command, env={**os.environ, ISA: "AVX2"}, stdout=subprocess.PIPE, check=False)
        assert done.returncode == 0, done.stdout.decode()


def kept(rules=BOTH, builder=LSTM, kind="simple", **options):
    """An LSTM that keeps its filters, and its results."""
    model, blobs = support.lstm(builder=builder, **{**FORWARD, **options})
    model.net.Proto().type = kind
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[unchanged_weights.RULE] == 1 and has_kept(model.net) == IS_RIGHT, report
    return model, blobs


def has_kept(net):
    return kept_filters.are_in(support.step(net).op)


def emptying(net, workspaces):
    """The nets that take away the step workspaces of a run before."""
    return [inner for _, inner in inner_nets(net) if any(list(made.output) == [workspaces] for made in inner.op)]


# --------------------------------------------------------------------------------------------------------------- values


@every_pair
@EVERY_CELL
@RULES
@NUMBERS
def test_cells_have_the_values_of_a_numpy_loop(cell, rules):
    with support.optimising(rules) as lines:
        for lengths in (None, [cell.steps, 1]):
            workspace.ResetWorkspace()
            forward = cell.but(lengths=lengths, options={**cell.options, "forward_only": True})
            forward.assert_right(executor=False)
    assert lines.counts[unchanged_weights.RULE] == 2, lines.reasons


@every_pair
@NUMBERS
@EVERY_STEP_NET
@RULES
@pytest.mark.parametrize("executor", [False, True])
def test_step_nets_have_the_values_of_a_numpy_loop(make, rules, executor):
    """Also where the RNN executor is switched on again for all loops that have a setting of it."""
    step_net = make()
    with support.optimising(rules):
        outputs, _ = comparing.run(recurrent_net, step_net, executor, forward_only=True)
    comparing.assert_outputs_and_gradients(step_net, outputs, {}, forward_only=True)


@pytest.mark.parametrize("rules", [BOTH, ["transposed_weights", *BOTH]], ids=["rows", "columns"])
@NUMBERS
@pytest.mark.parametrize("batch, size", [(1, 1), (1, 5), (1, 16), (2, 40), (17, 5), (17, 33)])
def test_sizes_of_products(batch, size, rules):
    case = Case(steps=4, batch=batch, dim_in=3, dim=size, options={"forward_only": True})
    model, outputs = case.build()
    rewrite = support.Optimised(rules)
    found, *_ = comparing.run_layer(case, model, outputs, False, rewrite)
    assert rewrite.report.counts[RULE] == 1
    for index, expected in enumerate(case.reference()):
        comparing.assert_close(found[index], expected, index)


@NUMBERS
def test_rows_that_are_no_numbers():
    model, blobs = kept()
    assert_rows_stay_apart(model, blobs, as_built(blobs))


# ------------------------------------------------------------------------------------------------------ from run to run


@every_pair
@RULES
@NUMBERS
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change(rules, kind, lengths):
    """Of a weight, of what the weights are applied to, and of the numbers of steps and sequences."""
    model, blobs = kept(rules, lengths=lengths, kind=kind)
    support.without_executor(model)
    workspace.CreateNet(model.net)
    sizes = iter([(2, 1), (14, 17), (1, 2), (14, 5), (1, 2), (3, 7)])
    for seed, blob in enumerate([None, None, *parameters(), "x", "sizes", "sizes", *parameters(), *["sizes"] * 4]):
        if blob == "sizes":
            support.feed(*next(sizes), seed=seed)
            if seed % 2:
                change(WEIGHTS, seed)
        elif blob is not None:
            change(blob, seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs, lengths=lengths))


@LAYERS
@NUMBERS
def test_two_layers(layer):
    assert two_layers(layer).counts[RULE] >= 2 or not IS_RIGHT


def test_it_would_show_if_filters_were_kept_for_good():
    model, blobs = kept()
    workspaces = model.net.Proto().op[-1].output[-1]
    # For other weights, and for other numbers of rows.
    assert len(emptying(model.net, workspaces)) == 2 * IS_RIGHT
    for inner in emptying(model.net, workspaces):
        left = [made for made in inner.op if list(made.output) != [workspaces]]
        assert len(left) == len(inner.op) - 1
        del inner.op[:]
        inner.op.extend(left)
        inner.external_output.remove(workspaces)
    assert_filters_are_kept_for_good(model, blobs)


def assert_filters_are_kept_for_good(model, blobs):
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), as_built(blobs))
    change(WEIGHTS, 7)
    workspace.RunNet(model.net)
    is_same = support.difference(workspace.FetchBlob(blobs[0]), as_built(blobs)[0][0]) < support.TOLERANCE
    assert is_same != IS_RIGHT


def test_operators_stay_until_weights_change():
    """They have their own filters: what these were made of is not looked at again."""
    model, blobs = kept()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    workspace.FeedBlob("zeros", np.zeros((4 * support.D, support.D, 1, 1), np.float32))
    for filters in filters_of(model.net):
        workspace.RunOperatorOnce(onednn.on_onednn(operator(onednn.TO, ["zeros"], [filters])))
    change("x", 3)
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), as_built(blobs))
    change(WEIGHTS, 4)
    workspace.RunNet(model.net, 2)
    support.assert_same(support.values(blobs), as_built(blobs))


@they_stay
def test_it_would_show_if_filters_were_in_other_memory():
    model, blobs = kept()
    for filters in filters_of(model.net):
        (laying_out,) = [
            inner for _, inner in inner_nets(model.net) if into(inner, filters) and "If" not in types(inner)
        ]
        position = [list(made.output) for made in laying_out.op].index([filters])
        left = list(laying_out.op)
        assert left[position].type == "ConvGradient" and left[position + 1].type == onednn.TO
        left.insert(position, operator("ConstantFill", [], [filters]))
        del laying_out.op[:]
        laying_out.op.extend(left)
    assert_filters_are_kept_for_good(model, blobs)


def filters_of(net):
    return [made.input[1] for made in support.step(net).op if keeps_filters(made)]


def into(net, blob):
    return any(blob in made.output for made in net.op)


def types(net):
    return [made.type for made in net.op]


@NUMBERS
def test_tensors_stay_until_the_number_of_sequences_changes():
    assert_tensors_stay(*support.lstm(**FORWARD), False)


@NUMBERS
def test_tensors_of_a_loop_that_is_trained_stay_until_then(two_loops):
    assert_tensors_stay(*support.lstm(), True)


def assert_tensors_stay(model, blobs, trained):
    optimize(model, ALL, even_if_slower=True)
    workspace.CreateNet(model.net)
    # Of tensors for each product and for the sequence's gradient, and of weights where these may stay.
    are_made = [made.output[0] for made in model.net.Proto().op if "is_old" in "".join(made.output[:1])]
    assert len(are_made) == 2 * IS_RIGHT + trained + (not trained) * (not IS_RIGHT)
    batches = [3, 3, 3, 5, 5, 3, 3]
    for seed, batch in enumerate(batches):
        support.feed(batch=batch, seed=seed)
        change(WEIGHTS, seed)
        workspace.RunNet(model.net)
        found = sum(bool(workspace.FetchBlob(blob)) for blob in are_made)
        is_other = seed == 0 or batch != batches[seed - 1]
        assert found == (2 + trained if is_other else 0 if trained else 1) or not IS_RIGHT


def of_size(dim, trained, optimised):
    """An LSTM whose blobs are called the same whatever its size, its case, and its results."""
    case = Case(dim_in=3, dim=dim, options={} if trained else {"forward_only": True})
    model, outputs = case.build(model=ModelHelper("{}_{}".format(dim, optimised)))
    results = [str(output) for output in outputs]
    if trained:
        found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
        results += [str(found[case.full_name(name)]) for name in case.values()]
    case.feed()
    if optimised:
        optimize(model, ALL, even_if_slower=True)
    return case, model, results


@NUMBERS
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize("trained", [False, True])
def test_nets_of_other_sizes_under_the_same_names(trained):
    """What one has laid out is not what another reads, whichever ran last, and with how many sequences."""
    nets = {dim: of_size(dim, trained, True) for dim in (5, 8, 16)}
    batches = iter([2, 3, 3, 2, 2, 3, 2, 4, 3, 4])
    for seed, dim in enumerate((5, 8, 16, 5, 5, 8, 5, 16, 16, 8)):
        case, model, results = nets[dim]
        case = replace(case, batch=next(batches), seed=seed)
        case.feed()
        workspace.FeedBlob("dh", case.output_gradients()[0].astype(np.float32))
        assert set(kept_by(model.net)) == {IS_RIGHT}
        if seed < len(nets):
            workspace.CreateNet(model.net)
        workspace.RunNet(model.net)
        found = support.values(results)
        _, built, _ = of_size(dim, trained, False)
        case.feed()
        workspace.RunNetOnce(built.net)
        support.assert_same(found, support.values(results))


@they_stay
def test_what_belongs_together_is_called_alike():
    """Two nets of which one has a name already would have a number of rows between them otherwise."""

    found = []
    for taken in ("layer/other", "layer/gates_t_16x4_there_stays"):
        model, blobs = support.lstm(name=taken, **FORWARD)
        model.net.ConstantFill([], taken, shape=[1])
        optimize(model, BOTH, even_if_slower=True)
        support.assert_same(support.run(model, blobs), as_built(blobs))
        convolutions = filter(keeps_filters, support.step(model.net).op)
        seen = {blob for made in model.net.Proto().op for blob in made.output if blob.endswith("_rows_seen")}
        found.append([[made.input[0], *made.output, *seen] for made in convolutions])
    endings = ("_rows_there_stays", "_there_stays", "_rows_seen")
    expected = [[["layer/gates_t_16x4" + number + ending for ending in endings]] for number in ("", "_1")]
    assert found == expected or not IS_RIGHT


def renamed(model, name):
    """The model's net, with other names for the outputs of its loop."""
    proto = model.net.Proto()
    proto.name = name
    (loop,) = [operator for operator in proto.op if operator.type == "RecurrentNetwork"]
    names = {blob: "{}_{}".format(blob, name) for blob in loop.output}
    loop.output[:] = [names[blob] for blob in loop.output]
    for given in loop.arg:
        if given.name == "alias_dst":
            given.strings[:] = [names[blob.decode()].encode() for blob in given.strings]
    return names


@NUMBERS
def test_nets_that_share_weights_and_not_their_steps():
    """One sees that the weights have changed, and the other must not take that for done."""
    nets = []
    for name in ("one", "other"):
        model, blobs = support.lstm(name=name, **FORWARD)
        names = renamed(model, name)
        optimize(model, BOTH, even_if_slower=True)
        workspace.CreateNet(model.net)
        nets.append((model.net, [names[blob] for blob in blobs]))
    for seed in range(5):
        for net, found in nets[:: (-1) ** seed]:
            workspace.RunNet(net)
            support.assert_same(support.values(found), as_built(blobs))
        change(WEIGHTS, seed)


@NUMBERS
def test_nets_that_share_their_steps_and_not_what_is_laid_out():
    models = []
    for number, rules in enumerate([BOTH, ALL, ["scaled_weights", "lstm_unit", *BOTH]]):
        model, blobs = kept(rules, name="model_{}".format(number))
        models.append(model)
        workspace.CreateNet(model.net)
    for seed in range(4):
        change(WEIGHTS, seed)
        for model in [*models, *models]:
            if seed % 2:
                change("x", seed)
            workspace.RunNet(model.net)
            support.assert_same(support.values(blobs), as_built(blobs))


@NUMBERS
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize(
    "other", [{}, {"gradients": True, "forward_only": False}, {"kind": "simple_refcount"}], ids=str
)
def test_nets_for_other_numbers_of_sequences(other):
    """Where one makes all in each run, as one that trains may, and the other does not, too."""
    models = []
    for name, options in (("many", {}), ("few", other)):
        options = {**FORWARD, **options}
        kind = options.pop("kind", "simple")
        model, blobs = support.lstm(name=name, **options)
        model.net.Proto().type = kind
        model.net.Proto().external_output.extend(blobs)
        optimize(model, ALL, even_if_slower=True)
        assert set(kept_by(model.net)) == {IS_RIGHT}
        blobs = blobs[:4]
        models.append(model)
        workspace.CreateNet(model.net)
    for seed in range(6):
        for model, batch in zip(models, (17, 2)):
            support.feed(batch=batch, seed=seed)
            workspace.RunNet(model.net)
            support.assert_same(support.values(blobs), as_built(blobs))


@NUMBERS
def test_a_net_that_is_created_anew():
    model, blobs = kept()
    for seed in range(3):
        workspace.CreateNet(model.net, overwrite=True)
        change(WEIGHTS, seed)
        workspace.RunNet(model.net, 2)
        support.assert_same(support.values(blobs), as_built(blobs))


@pytest.mark.usefixtures("executor_in_created_nets")
@pytest.mark.parametrize("trained", [False, True])
@NUMBERS
def test_the_rnn_executor_of_another_net_keeps_its_workspaces(trained):
    model, blobs = kept(ALL)
    other, _ = support.lstm(name="other", **({} if trained else FORWARD))
    for net in (other.net, model.net):
        workspace.CreateNet(net)
    for seed in range(4):
        for net in (model.net, other.net):
            workspace.RunNet(net)
            support.assert_same(support.values(blobs), as_built(blobs))
        change(WEIGHTS, seed)


IN_THREADS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from caffe2.python import core, workspace
threads, steps, batch, dim_in, dim, rules, flags, layer = map(json.loads, sys.argv[1:])
core.GlobalInit(["test", *flags])
from caffe2.python.model_helper import ModelHelper
import caffe2_recurrent
from caffe2_recurrent.rewriting.products import kept_filters
from caffe2_recurrent.rewriting.rules import backward_loop, packed_products

def fastest(kind, product, steps, is_added, ways, may_keep):
    return "kept filters" if "kept filters" in ways else ways[0]

packed_products._fastest = fastest
random = np.random.RandomState(0)
models = []
for name in ("optimised", "built"):
    model = ModelHelper(name, init_params=name == "optimised")
    build, states = getattr(caffe2_recurrent, layer), ("h0", "c0")[: 1 if layer == "GRU" else 2]
    models.append((model, build(model, "x", None, states, dim_in, dim, "layer", forward_only=True)[0]))
for blob, shape in {"x": (steps, batch, dim_in), "h0": (1, batch, dim), "c0": (1, batch, dim)}.items():
    workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
workspace.RunNetOnce(models[0][0].param_init_net)
promised = {"constant_threads": True}
caffe2_recurrent.optimize(models[0][0], rules, even_if_slower=True, trials=False, **promised)
for model, _ in models:
    workspace.CreateNet(model.net)
workspace.FeedBlob("many", np.zeros(100000, np.float32))
large = core.Net("large")
large.ATen(["many", "many"], "others", operator="equal")
workspace.CreateNet(large)
workers = {name: ThreadPoolExecutor(1) for name in "ab"}
for who in threads:
    if who == "s":
        workers["b"].submit(caffe2_recurrent.step_times, models[0][0].net, runs=1).result()
        continue
    worker = None if who in "mM" else workers.get(who.lower()) or ThreadPoolExecutor(1)
    run = workspace.RunNet if worker is None else lambda net: worker.submit(workspace.RunNet, net).result()
    if who.isupper():
        run(large)
    found = []
    for model, hidden in models:
        run(model.net)
        found.append(workspace.FetchBlob(hidden))
    assert np.abs(found[0] - found[1]).max() < 1e-5, np.abs(found[0] - found[1]).max()
    # Operators are made anew for others.
    weights = next(str(blob) for blob in models[0][0].params if "gate" in str(blob) and str(blob).endswith("_w"))
    workspace.FeedBlob(weights, random.permutation(workspace.FetchBlob(weights)))
"""


def run_in_threads(threads, sizes, rules, flags=(), layer="LSTM", **environment):
    """In the main thread, `m`, in one of two others, `a` and `b`, or in a new one, `t`, each time; `s` looks in `b`
    how long steps take.

    In capitals, an operator of ATen's has had something for several threads to do there before.
    """
    arguments = [json.dumps(given) for given in (threads, *sizes, rules, flags, layer)]
    command = [sys.executable, "-c", IN_THREADS, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("threads", ["ttmm", "tmtm", "mmtt"])
def test_runs_in_other_threads(threads):
    """With one thread of OpenMP in this one and two in others oneDNN plans otherwise in each."""
    flags = ["--caffe2_omp_num_threads=1", "--caffe2_mkl_num_threads=1"]
    rules = ["lstm_unit", "scaled_weights", "sequence_bias", "joined_sequence", *BOTH]
    done = run_in_threads(threads, (6, 11, 20, 150), rules, flags, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr.decode()


FOUR_AND_ONE = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "1"}
THREADS_SET_LATE = {
    "by the step": {"threads": "ttmt", "sizes": (6, 32, 128, 256), "rules": None, **FOUR_AND_ONE},
    "before another thread": {"threads": "aAM", "sizes": (3, 12, 20, 128), "rules": BOTH, **FOUR_AND_ONE},
    "before another run": {"threads": "aMA", "sizes": (3, 12, 20, 128), "rules": BOTH, **FOUR_AND_ONE},
    "after `optimize`": {"threads": "aMAb", "sizes": (3, 3, 20, 128), "rules": None, "layer": "GRU", **FOUR_AND_ONE},
    "by who looks at steps": {"threads": "asBba", "sizes": (3, 12, 20, 128), "rules": BOTH, **FOUR_AND_ONE},
    "in each": {"threads": "abmABMbam", "sizes": (3, 17, 20, 150), "rules": BOTH, **FOUR_AND_ONE},
}


@pytest.mark.parametrize("given", THREADS_SET_LATE.values(), ids=list(THREADS_SET_LATE))
def test_aten_sets_the_number_of_threads_before_a_convolution_is_planned(given):
    """It does so in each thread when it first has enough to do; till then there are as many as OpenMP starts with."""
    done = run_in_threads(**given)
    assert done.returncode == 0, done.stderr.decode()


def setting_numbers(operators):
    """The operators of ATen's that have the number of threads set."""
    return [made for made in operators if thread_numbers.sets(made)]


@pytest.mark.parametrize("rules", [BOTH, ["lstm_unit", "scaled_weights", *BOTH]], ids=["without more", "with more"])
@pytest.mark.parametrize("kind", ["dag", "async_scheduling"])
def test_steps_begin_with_an_operator_of_atens_that_sets_the_number_of_threads(rules, kind):
    model, blobs = kept(rules, kind=kind)
    first, second, *others = support.step(model.net).op
    if IS_RIGHT:
        assert first.type == "ConstantFill" and setting_numbers([second]) == [second]
        assert list(second.input) == list(first.output) and "Conv" in [operator.type for operator in others]
    assert setting_numbers(model.net.Proto().op) == []
    support.assert_same(support.run(model, blobs), as_built(blobs))


@pytest.mark.parametrize("kind", ["", "simple", "simple_refcount"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.usefixtures("two_loops")
def test_it_is_in_front_of_the_loop_where_all_runs_in_one_thread(kind, trained):
    """Tensors for oneDNN are made of what comes of it, so that it is there wherever they are."""
    model, blobs = support.lstm(**({} if trained else FORWARD))
    model.net.Proto().type = kind
    model.net.Proto().external_output.extend(blobs)
    expected = support.run(model, blobs)
    optimize(model, ALL, even_if_slower=True)
    setting = setting_numbers(model.net.Proto().op)
    steps = [inner for (kind, _), inner in inner_nets(model.net) if kind == "RecurrentNetwork"]
    assert len(setting) == IS_RIGHT and not any(setting_numbers(step.op) for step in steps)
    model.net.Proto().name = "optimised"
    support.assert_same(support.run(model, blobs), expected)
    operators = model.net.Proto().op
    for made in setting:
        (number,) = [reading for reading in operators if made.output[0] in reading.input]
        assert number.type == "Shape"
        reading = {operator.type for operator in operators if number.output[0] in operator.input}
        # Together with other sizes, where it is seen whether these have changed.
        together = {"Concat", "If"} if trained else {"Concat"}
        assert reading == ({"If"} if kind == "simple_refcount" else together)


@pytest.mark.parametrize("matters", [False, True])
@pytest.mark.parametrize("promised", [False, True])
def test_it_takes_a_promise_where_numbers_of_threads_matter(monkeypatch, promised, matters):
    monkeypatch.undo()
    onednn_support.numbers_matter(monkeypatch, matters)
    make_up(monkeypatch, Seconds(0.0, 2.0), inner_product=Seconds(0.0, 1.5), kept_filters=Seconds(0.0, 1.0))
    model, blobs = support.lstm(**FORWARD)
    optimize(model, BOTH, constant_threads=promised)
    assert has_kept(model.net) == ((promised or not matters) and IS_RIGHT)
    support.assert_same(support.run(model, blobs), as_built(blobs))


@NUMBERS
def test_a_net_that_is_as_it_was_built_runs_beside():
    model, blobs = kept(ALL)
    workspace.CreateNet(model.net)
    other, _ = support.lstm(name="other", **FORWARD)
    workspace.CreateNet(other.net)
    for seed in range(3):
        for net in (model.net, other.net, model.net):
            workspace.RunNet(net)
            support.assert_same(support.values(blobs), as_built(blobs))
        change(WEIGHTS, seed)


@pytest.mark.parametrize("runs_before", [0, 2])
@NUMBERS
def test_a_run_that_fails_leaves_nothing_behind(runs_before):
    assert_failure_leaves_nothing(*kept(ALL), runs_before)


@NUMBERS
def test_no_steps():
    model, blobs = kept()
    workspace.CreateNet(model.net)
    for steps in (3, 0, 3):
        support.feed(steps=steps)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs[1::2]), as_built(blobs[1::2]))


# ----------------------------------------------------------------------------------------------------- loops that train


@pytest.fixture
def two_loops(backward_loops, monkeypatch):
    """Backward passes are loops of their own, of however few steps."""
    monkeypatch.setattr(step_counts, "few", lambda *_: 0)


def kept_by(net):
    """Whether the steps of each loop of the net keep filters."""
    return [kept_filters.are_in(inner.op) for (_, name), inner in inner_nets(net) if name == "step_net"]


@NUMBERS
@EVERY_CELL_THAT_TRAINS
@pytest.mark.usefixtures("two_loops")
def test_cells_that_train(name, variant):
    rewrite = support.Optimised(ALL)
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE] or not IS_RIGHT


@every_pair
@NUMBERS
@EVERY_STEP_NET
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize("executor", [False, True])
def test_step_nets_that_train(make, executor):
    step_net = make()
    outputs, gradients = comparing.run(recurrent_net, step_net, executor, support.Optimised(ALL))
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)


@pytest.mark.usefixtures("two_loops")
@NUMBERS
@pytest.mark.parametrize("memory", [False, True], ids=["kept", "recomputed"])
def test_both_loops_keep_filters(memory):
    options = {"memory_optimization": memory}
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    support.Optimised(ALL)(model)
    assert kept_by(model.net) == [IS_RIGHT, IS_RIGHT]
    assert_placed(model.net)
    workspace.CreateNet(model.net)
    for _ in range(3):
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), expected)


@they_stay
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize("most", [turned_weights.MOST, 0], ids=["turned", "by the CPU"])
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_weights_of_the_backward_pass_are_transposed_by_onednn(monkeypatch, most, kind):
    """Through memory that is made anew for other numbers of sequences."""
    monkeypatch.setattr(turned_weights, "MOST", most)
    expected = support.runs_of_other_sizes(lambda model: None)
    rewrite = support.Optimised(ALL)

    def change(model):
        model.net.Proto().type = kind
        rewrite(model)

    support.assert_same(support.runs_of_other_sizes(change), expected)
    inside = in_ifs(rewrite.net)
    turned = [made for made in inside if made.type == onednn.TO and "_turned_" in made.output[0]]
    transposed = [made for made in inside if made.type == "Transpose" and made.input[0] == WEIGHTS]
    assert (len(turned), len(transposed)) == ((IS_RIGHT, 0) if most else (0, IS_RIGHT))


@every_pair
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize("builder", [LSTM, MILSTM], ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@NUMBERS
def test_training_gives_the_same_parameters(builder, kind):
    rewrite = support.Optimised(ALL)
    found = trained(rewrite, kind, builder, adam, runs=25)
    expected = trained(lambda model: None, kind, builder, adam, runs=25)
    assert kept_by(rewrite.net) == [IS_RIGHT, IS_RIGHT]
    for ours, theirs in zip(found[0], expected[0]):
        # Adam divides small gradients by their size, and so magnifies what rounding leaves of them.
        assert support.difference(ours, theirs) < 1e-3


@NUMBERS
@pytest.mark.usefixtures("two_loops")
@pytest.mark.parametrize("memory", [False, True], ids=["kept", "recomputed"])
def test_other_numbers_of_steps_and_sequences_that_train(memory):
    options = {"lengths": True, "memory_optimization": memory}
    expected = support.runs_of_other_sizes(lambda model: None, **options)
    support.assert_same(support.runs_of_other_sizes(support.Optimised(ALL), **options), expected)


@NUMBERS
@pytest.mark.usefixtures("two_loops")
def test_a_wrong_filter_of_the_backward_step_is_seen(monkeypatch):
    emit = product_ways.emit

    def emit_wrongly(way, loop, product, beside):
        is_backward = loop.gradient is not None and any(beside is other for other in loop.gradient.operators)
        if is_backward:
            product = product._replace(columns=product.rows, rows=product.columns)
        return emit(way, loop, product, beside)

    monkeypatch.setattr(product_ways, "emit", emit_wrongly)
    step_net = step_nets.reference_read_twice()
    outputs, gradients = comparing.run(recurrent_net, step_net, False, support.Optimised(ALL))
    with pytest.raises(AssertionError):
        comparing.assert_outputs_and_gradients(step_net, outputs, gradients)


@EVERY_STEP_NET
def test_a_loop_that_does_not_become_two_lays_them_out_in_each_step(monkeypatch, make):
    """There are as many step workspaces as steps; such a loop is not to be chosen, and right if it is."""
    monkeypatch.setattr(packed_products, "_becomes_two", lambda loop, sizes: True)
    step_net, rewrite = make(), support.Optimised([*ALL])
    outputs, gradients = comparing.run(recurrent_net, step_net, False, rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    assert not any(kept_by(rewrite.net)) or make is step_nets.lstm_forward_only


# ------------------------------------------------------------------------------------------------ what others see of it


@NUMBERS
def test_the_step():
    model, _ = kept()
    assert_placed(model.net)
    assert (on_onednn(support.step(model.net).op) == THERE) == IS_RIGHT
    expected = 2 if thread_numbers.matter() else 1
    assert len(emptying(model.net, model.net.Proto().op[-1].output[-1])) == expected * IS_RIGHT


@NUMBERS
def test_what_has_been_transposed_and_joined_is_not_transposed_for_filters():
    joining = ["transposed_weights", "sequence_bias", "joined_sequence"]
    model, blobs = support.lstm(**FORWARD)
    report = optimize(model, [*joining, *BOTH], even_if_slower=True)
    assert [report.counts[rule] for rule in joining] == [1, 1, 1]
    kinds = {
        made.type for net in (model.net.Proto(), *(inner for _, inner in inner_nets(model.net))) for made in net.op
    }
    assert "Concat" in kinds and "Transpose" not in kinds or not IS_RIGHT
    support.assert_same(support.run(model, blobs), as_built(blobs))


def test_the_rnn_executor_has_no_setting_any_more():
    model, _ = kept()
    (loop,) = [operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork"]
    assert any(given.name == "enable_rnn_executor" for given in loop.arg) != IS_RIGHT


@NUMBERS
def test_steps_that_keep_filters_are_not_written_out(monkeypatch):
    monkeypatch.setattr(UnrolledSteps, "sites", sites_of_unrolled_steps)
    model, blobs = support.lstm(**FORWARD)
    report = optimize(model, ALL, even_if_slower=True)
    reasons = [refusal.reason for refusal in report.refusals if refusal.rule == "unrolled_steps"]
    assert reasons == ["operators of its steps keep what they have made of weights"] or not IS_RIGHT
    support.assert_same(support.run(model, blobs), as_built(blobs))


def test_a_second_call_leaves_it_alone():
    model, blobs = kept()
    before = model.net.Proto().SerializeToString()
    again = optimize(model, even_if_slower=True)
    assert model.net.Proto().SerializeToString() == before or not IS_RIGHT
    expected = ["an earlier `optimize` has made its products, whose results it reads where oneDNN leaves them"]
    assert [refusal.reason for refusal in again.refusals] == expected or not IS_RIGHT
    support.assert_same(support.run(model, blobs), as_built(blobs))


@pytest.mark.parametrize("cut", ["before", "after"])
@NUMBERS
def test_a_predictor(cut):
    model, blobs = support.lstm(**FORWARD)
    if cut == "after":
        optimize(model, ALL, even_if_slower=True)
    net, found = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    if cut == "before":
        optimize(net, ALL, even_if_slower=True)
    assert has_kept(net) == IS_RIGHT and sorted(map(str, found)) == sorted(parameters())
    workspace.CreateNet(net)
    for seed in range(3):
        change(WEIGHTS, seed)
        workspace.RunNet(net, 2)
        support.assert_same(support.values(blobs[:1]), as_built(blobs[:1]))


@NUMBERS
def test_a_predictor_from_a_file(tmp_path):
    model, blobs = kept(ALL)
    workspace.RunNetOnce(model.net)
    expected = support.values(blobs[:1])
    path = str(tmp_path / "model.minidb")
    save_predictor(path, exported(model, blobs[:1]))
    workspace.ResetWorkspace()
    loaded = predictor_exporter.prepare_prediction_net(path, "minidb")
    support.feed()
    for _ in range(2):
        workspace.RunNet(loaded)
        support.assert_same(support.values(blobs[:1]), expected)


def exported(model, blobs, kind=None):
    return predictor_exporter.PredictorExportMeta(
        predict_net=model.net.Proto(), parameters=parameters(), inputs=["x", "h0", "c0"], outputs=blobs, net_type=kind
    )


@pytest.mark.parametrize("kind", ["dag", "async_scheduling"])
def test_a_predictor_of_another_type_than_it_was_optimised_for(tmp_path, kind):
    """Steps would be in threads in which nothing has set their number."""
    model, blobs = kept(ALL)
    workspace.RunNetOnce(model.net)
    if IS_RIGHT:
        with pytest.raises(ValueError) as caught:
            save_predictor(tmp_path / "model.minidb", exported(model, blobs[:1], kind))
        assert str(caught.value) == (
            "save_predictor: a net of type {} runs its loops in threads of its own, and their steps were optimised for "
            "the one that calls it; give the net its type before `optimize`".format(kind)
        )
    other, _ = kept(ALL, name="other", kind=kind)
    save_predictor(tmp_path / "model.minidb", exported(other, blobs[:1], kind))
    save_predictor(tmp_path / "model.minidb", exported(model, blobs[:1], "simple"))


@NUMBERS
@pytest.mark.usefixtures("two_loops")
def test_a_predictor_cut_out_of_a_net_that_trains():
    model, blobs = support.lstm()
    optimize(model, ALL, even_if_slower=True)
    net, _ = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    assert kept_by(net) == [IS_RIGHT]
    workspace.CreateNet(net)
    for seed, batch in enumerate([3, 3, 5, 3]):
        support.feed(batch=batch, seed=seed)
        change(WEIGHTS, seed)
        workspace.RunNet(net, 2)
        support.assert_same(support.values(blobs[:1]), as_built(blobs[:1]))


@NUMBERS
def test_tools_know_such_steps(tmp_path):
    model, blobs = kept(ALL)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 2)
    assert "step 0" in str(step_times(model.net, runs=1))
    assert "Conv (oneDNN)" in str(describe(model.net)) or not IS_RIGHT
    draw(model, str(tmp_path / "loop.dot"))
    assert "Conv" in (tmp_path / "loop.dot").read_text() or not IS_RIGHT


@pytest.mark.parametrize("way", [*product_ways.ways_of(1, may_keep=True)])
def test_weights_of_another_shape_with_as_many_numbers(monkeypatch, way):
    """Laid out they would be taken for those that were there."""
    monkeypatch.undo()
    force(monkeypatch, way)
    model, _ = support.lstm(**FORWARD)
    optimize(model, BOTH, even_if_slower=True)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    workspace.FeedBlob(WEIGHTS, workspace.FetchBlob(WEIGHTS).T.copy())
    said = "'{}' is not [{}, {}], for which the net has been optimised".format(WEIGHTS, 4 * support.D, support.D)
    with pytest.raises(RuntimeError, match=re.escape(said) if product_ways.is_by_onednn(way) else None):
        workspace.RunNet(model.net)


def test_a_bias_that_the_step_computes(monkeypatch):
    """What would lay it out before the loop is left out."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    w, g = make.reference("w", step_nets.D, step_nets.D), make.reference("g", step_nets.D)
    product = make.cell.FC([h, w, make.cell.Scale(g, "b_t", scale=2.0)], "u", axis=2)
    make.link(h, make.cell.Tanh(make.cell.Sum([product, x], "total"), "h_t"))
    step_net = make.done(forward_only=True)
    net, _ = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    offered = ways(monkeypatch, net)
    assert all(found.isdisjoint([KEPT_FILTERS, onednn.INNER_PRODUCT]) for found in offered)


# ------------------------------------------------------------------------------------------------- where it may be done


def ways(monkeypatch, model, rules=BOTH):
    """The ways that are offered for the products of the step."""
    offered = []

    def fastest(kind, product, steps, is_added, ways, may_keep):
        offered.append(set(ways))
        return ways[0]

    monkeypatch.setattr(packed_products, "_fastest", fastest)
    optimize(model, rules, even_if_slower=True)
    return offered


def is_offered(monkeypatch, model, rules=BOTH):
    offered = ways(monkeypatch, model, rules)
    assert offered
    return any(KEPT_FILTERS in found for found in offered)


def test_it_is_offered(monkeypatch):
    assert is_offered(monkeypatch, support.lstm(**FORWARD)[0]) == IS_RIGHT


@pytest.mark.parametrize(
    "rules, options",
    [(BOTH, {}), (BOTH, {"gradients": False})],
    ids=["trained", "may be trained"],
)
def test_it_is_not_offered(monkeypatch, rules, options):
    assert not is_offered(monkeypatch, support.lstm(**options)[0], rules)


def test_weights_that_the_net_makes():
    """They may be others in each run, and so have to be laid out in each."""
    model, blobs = support.lstm(**FORWARD)
    operators = [core.CreateOperator("Scale", ["made_w"], [WEIGHTS], scale=1.0), *model.net.Proto().op]
    workspace.FeedBlob(model.net.AddExternalInput("made_w"), workspace.FetchBlob(WEIGHTS))
    del model.net.Proto().op[:]
    model.net.Proto().op.extend(operators)
    optimize(model, BOTH, even_if_slower=True)
    assert has_kept(model.net) == IS_RIGHT
    workspace.CreateNet(model.net)
    for seed in range(3):
        change("made_w", seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


@they_stay
@pytest.mark.parametrize("kind", ["AccumulateHistogram", "IsMemberOf"])
def test_without_what_they_take_to_stay_they_are_made_in_each_run(monkeypatch, kind):
    is_operator = core.IsOperator
    monkeypatch.setattr(kept_results.core, "IsOperator", lambda name: name != kind and is_operator(name))
    model, blobs = support.lstm(**FORWARD)
    optimize(model, ALL, even_if_slower=True)
    assert has_kept(model.net) == IS_RIGHT
    assert not any(made.type == kind for made in model.net.Proto().op)
    workspace.CreateNet(model.net)
    for seed in range(3):
        support.feed(batch=2 + seed, seed=seed)
        change(WEIGHTS, seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


@NUMBERS
@pytest.mark.parametrize("rules, kind", [([RULE], "simple"), (BOTH, "simple_refcount")])
def test_weights_of_which_nothing_else_is_kept(rules, kind):
    """Whether the rule is not to be applied, or the net lets go of its blobs."""
    model, blobs = support.lstm(**FORWARD)
    model.net.Proto().type = kind
    model.net.Proto().external_output.extend(blobs)
    report = optimize(model, rules, even_if_slower=True)
    assert (report.counts[RULE], report.counts.get(unchanged_weights.RULE, 0)) == (1, 0)
    assert has_kept(model.net) == IS_RIGHT
    workspace.CreateNet(model.net)
    for seed in range(3):
        change(WEIGHTS, seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


def test_it_is_not_offered_where_others_read_the_step_workspaces(monkeypatch):
    """They would have another name."""
    model, blobs = support.lstm(**FORWARD)
    model.net.Proto().external_output.append(model.net.Proto().op[-1].output[-1])
    assert not is_offered(monkeypatch, model)
    support.assert_same(support.run(model, blobs), as_built(blobs))


def test_it_is_not_offered_for_steps_that_run_in_any_order(monkeypatch):
    model, _ = support.lstm(**FORWARD)
    support.step(model.net).type = "dag"
    assert not is_offered(monkeypatch, model)


def test_it_is_not_offered_for_several_matrices():
    assert KEPT_FILTERS in product_ways.ways_of(1, may_keep=True)
    assert KEPT_FILTERS not in product_ways.ways_of(3, may_keep=True)
    assert KEPT_FILTERS not in product_ways.ways_of(1)


def test_it_is_not_offered_where_onednn_does_otherwise(monkeypatch):
    monkeypatch.setattr(kept_filters, "are_right", lambda inner, outer: False)
    assert not is_offered(monkeypatch, support.lstm(**FORWARD)[0])


@NUMBERS
@pytest.mark.parametrize("may_keep", [Keeping.FILTERS, Keeping.FILTERS | Keeping.WEIGHTS])
def test_a_trial_makes_operators_anew_where_runs_do(may_keep):
    shapes = {"x": (1, 3, 4), "w": (16, 4), "b": (16,)}
    loop = trial.lone_loop([*shapes, "y"], ["w", "b"], may_keep)
    emitter = Emitter(loop, loop.forward, "y")
    kept_filters.emit(emitter, loop, Product("x", None, "w", "b", "y", 3, 4, 16))
    subject = subject_of(loop, emitter.operators, shapes)
    are_made_anew = thread_numbers.matter() and Keeping.WEIGHTS not in may_keep
    assert subject.anew == are_made_anew


def test_a_trial_decides(monkeypatch):
    monkeypatch.undo()
    make_up(monkeypatch, Seconds(0.0, 2.0), kept_filters=Seconds(0.0, 1.0))
    model, _ = support.lstm(**FORWARD)
    optimize(model, BOTH, constant_threads=True)
    assert has_kept(model.net) == IS_RIGHT
    make_up(monkeypatch, Seconds(0.0, 2.0), inner_product=Seconds(0.0, 1.0), kept_filters=Seconds(0.0, 1.1))
    model, _ = support.lstm(name="other", **FORWARD)
    optimize(model, BOTH, constant_threads=True)
    assert not has_kept(model.net)


def test_what_is_made_once_counts_for_each_step(monkeypatch):
    make_up(monkeypatch, Seconds(0.0, 3.0), kept_filters=Seconds(2.0, 1.0))
    size = step_products.Size("FC", 3, 4, 16, True, True, may_keep=Keeping.FILTERS)
    assert step_products.seconds_of_step(size, KEPT_FILTERS, 4) == 1.5
    assert step_products.seconds_of_step(size, KEPT_FILTERS, None) == 1.0


@NUMBERS
def test_what_a_chain_would_gain_counts_where_there_is_none(monkeypatch):
    make_up(monkeypatch, Seconds(0.0, 3.0), kept_filters=Seconds(2.0, 1.0))
    monkeypatch.setattr(step_products.calling_thread, "runs_chains", lambda: True)
    size = step_products.Size("FC", 3, 4, 16, True, True, may_keep=Keeping.FILTERS)
    more = step_products.LINES if thread_numbers.matter() else 0.0
    assert step_products.seconds_of_step(size, KEPT_FILTERS, 4) == 1.5 + more
    assert step_products.seconds_of_step(size, KEPT_FILTERS, None) == 1.0 + more
    assert step_products.seconds_of_step(size, onednn.CONVOLUTION, 4) == 3.0
    stays = size._replace(may_keep=Keeping.FILTERS | Keeping.WEIGHTS)
    assert step_products.seconds_of_step(stays, KEPT_FILTERS, 4) == 1.5


@NUMBERS
def test_where_operators_are_made_anew_with_them_weights_are_always_compared(monkeypatch):
    """No trial sees how long that takes."""
    make_up(monkeypatch, Seconds(0.0, 2.0), kept_filters=Seconds(0.0, 1.0))
    asked = []
    monkeypatch.setattr(unchanged_weights_rule, "seconds", lambda *_: asked.append(None))
    model, blobs = support.lstm(**FORWARD)
    report = optimize(model, BOTH)
    fires = thread_numbers.matter() and IS_RIGHT
    assert (report.counts[unchanged_weights.RULE], len(asked)) == ((1, 0) if fires else (0, 1))
    support.assert_same(support.run(model, blobs), as_built(blobs))


# -------------------------------------------------------------------------------------------------- are_right, in_place


@pytest.fixture
def asked_anew():
    trial.forget()
    yield
    trial.forget()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("inner, outer", [(1, 1), (1, 4), (4, 1), (3, 16), (16, 16), (100, 33), (193, 512)])
def test_what_is_said_of_sizes_is_so(inner, outer):
    """With other numbers of rows and other weights than it was tried with."""
    with leaving_no_trace():
        is_right = kept_filters.are_right(inner, outer)
    if not is_right:
        return
    random = np.random.RandomState(0)
    loop = trial.lone_loop(["x", "w", "b", "y"])
    emitter = Emitter(loop, loop.forward, "y")
    kept_filters.emit(emitter, loop, Product("x", None, "w", "b", "y", None, inner, outer))
    for rows in (4, 7, 20):
        given = {"x": (1, rows, inner), "w": (outer, inner), "b": (outer,)}
        for blob, shape in given.items():
            workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
        workspace.RunOperatorsOnce([*loop.before, *in_place(loop, emitter.operators, ["y"])])
        x, w, b = (workspace.FetchBlob(blob).astype(np.float64) for blob in "xwb")
        assert support.difference(workspace.FetchBlob("y"), x @ w.T + b) < support.TOLERANCE


def other_layout(emit):
    """Tensors of oneDNN's as they come, whose channels come first."""

    def changed(emitter, kind, inputs, outputs, **arguments):
        return emit(emitter, "Copy" if kind == onednn.CHANNELS_LAST else kind, inputs, outputs, **arguments)

    return changed


@pytest.mark.usefixtures("asked_anew")
def test_another_order_is_found(monkeypatch):
    monkeypatch.setattr(onednn, "add", other_layout(onednn.add))
    with leaving_no_trace():
        assert not kept_filters.are_right(3, 16)


@they_stay
@pytest.mark.usefixtures("asked_anew")
def test_filters_of_which_steps_have_copies_are_found(monkeypatch):
    """They would be those of the first run for good."""

    def add_plain(emitter, there, outer, inner):
        made = emitter.new("ConstantFill", [], "like", shape=[outer, inner, 1, 1], value=0.0)
        onednn.add(emitter, onednn.TO, [made], [there])

    assert kept_filters.are_right(3, 16) == IS_RIGHT
    trial.forget()
    monkeypatch.setattr(onednn_tensors, "add_filters", add_plain)
    with leaving_no_trace():
        assert not kept_filters.are_right(3, 16)


@pytest.mark.usefixtures("asked_anew")
def test_results_elsewhere_are_found(monkeypatch):
    monkeypatch.setattr(kept_filters, "shown", lambda results: results + "_elsewhere")
    with leaving_no_trace():
        assert not kept_filters.are_right(3, 16)


@pytest.mark.usefixtures("asked_anew")
def test_without_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert not kept_filters.are_right(3, 16)


def operator(kind, inputs, outputs):
    return new_operator(kind, inputs, outputs, BESIDE)


def convolved(*others, rows=()):
    """What makes rows `x`, a convolution of these that keeps its filters, a copy `y` of its result, and others."""
    convolution = onednn.on_onednn(operator("Conv", ["r", "w"], ["there"]))
    copied = onednn.on_onednn(operator(onednn.FROM, ["there"], ["y"]))
    return [*rows, operator("Copy", ["x"], [ROWS_THERE]), convolution, copied, *others]


def short(operators):
    return ["{} {} -> {}".format(made.type, " ".join(made.input), " ".join(made.output)) for made in operators]


LONE = trial.lone_loop(["x", "y"])
THERE_NOW, ROWS_THERE = shown("there"), shown("r")
CONVOLVED = ["Copy x -> " + ROWS_THERE, "Conv r w -> there"]


def placed(operators, needed=()):
    """What `in_place` makes of them, but for what it puts in front of steps that keep filters."""
    number, of_atens, *made = in_place(LONE, operators, needed)
    assert short([number, of_atens]) == ["ConstantFill  -> there_number", "ATen there_number -> there_number_alone"]
    return made


def test_readers_read_where_results_lie():
    made = placed(convolved(operator("Sum", ["y", "a"], ["y"]), operator("Tanh", ["y"], ["t"])))
    assert short(made) == [
        *CONVOLVED,
        "Sum {0} a -> {0}".format(THERE_NOW),
        "Tanh {} -> t".format(THERE_NOW),
    ]
    assert [list(found.control_input) for found in made] == [[], [ROWS_THERE], ["there"], ["there"]]


BESIDE_EACH_OTHER = operator("Concat", ["h", "a"], ["x", "sizes"])


def test_rows_are_put_beside_each_other_where_they_are_read():
    made = placed(convolved(operator("Tanh", ["y"], ["t"]), rows=[BESIDE_EACH_OTHER]))
    assert short(made) == [
        "Concat h a -> {} sizes".format(ROWS_THERE),
        "Conv r w -> there",
        "Tanh {} -> t".format(THERE_NOW),
    ]
    assert list(made[1].control_input) == [ROWS_THERE]


@pytest.mark.parametrize(
    "rows, others, needed",
    [
        ([BESIDE_EACH_OTHER], [operator("Tanh", ["x"], ["t"])], []),
        ([BESIDE_EACH_OTHER], [], ["x"]),
        ([BESIDE_EACH_OTHER, operator("Tanh", ["x"], ["x"])], [], []),
        ([operator("Tanh", ["h"], ["x"])], [], []),
    ],
    ids=["read beside", "needed", "written twice", "of another kind"],
)
def test_rows_are_copied_all_the_same(rows, others, needed):
    made = placed(convolved(*others, rows=rows), needed)
    assert short(made)[: len(rows) + 2] == [*short(rows), *CONVOLVED]


COPIED = {
    "of another shape": [operator("Reshape", ["y"], ["y", "old"])],
    "of other memory": [operator("ATen", ["y"], ["y"])],
    "written anew": [operator("Tanh", ["y"], ["t"]), operator("Copy", ["t"], ["y"])],
}


@pytest.mark.parametrize("others", COPIED.values(), ids=list(COPIED))
def test_copied_all_the_same(others):
    made = placed(convolved(*others))
    assert short(made) == [*CONVOLVED, "Copy {} -> y".format(THERE_NOW), *short(others)]
    assert list(made[2].control_input) == ["there"]


def test_copied_where_the_name_is_needed_or_older():
    assert short(placed(convolved(), ["y"])) == [*CONVOLVED, "Copy {} -> y".format(THERE_NOW)]
    older = [operator("Copy", ["a"], ["y"]), operator("Tanh", ["y"], ["t"]), *convolved()]
    assert short(in_place(LONE, older))[-1] == "Copy {} -> y".format(THERE_NOW)


def test_others_stay_as_they_are():
    in_each_step = onednn.on_onednn(new_operator("Conv", ["r", "w"], ["there"], BESIDE, training_mode=1))
    given = [in_each_step, onednn.on_onednn(operator(onednn.FROM, ["there"], ["y"]))]
    assert not kept_filters.are_in(given)
    assert in_place(LONE, given) == given and in_place(LONE, given)[0] is not given[0]
    assert keeps_filters(convolved()[1]) and not keeps_filters(operator("Conv", ["r", "w"], ["y"]))


def test_of_what_may_be_kept():
    model, _ = support.lstm(**FORWARD)
    (loop,) = read_loops(model.net.Proto()).values()
    sizes = find_sizes(model.net.Proto(), model.param_init_net.Proto(), {})
    assert not unchanged_weights.may_keep_of(loop, sizes, WEIGHTS)
    loop.may_keep = Keeping.WEIGHTS
    assert unchanged_weights.may_keep_of(loop, sizes, WEIGHTS)
    assert not any(unchanged_weights.may_keep_of(loop, sizes, blob) for blob in ("x", "h0"))
