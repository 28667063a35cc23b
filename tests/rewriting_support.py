"""Optimising nets in tests: before they are run, without running them, and with something planted in them."""

import contextlib
from collections import Counter

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper

import caffe2_recurrent
from caffe2_recurrent import LSTM, optimize
from caffe2_recurrent.operators import is_written_next
from caffe2_recurrent.rewriting.rules import RULES

NAMES = [rule.name for rule in RULES]
LOOP, GRADIENT = "RecurrentNetwork", "RecurrentNetworkGradient"
TOLERANCE = 2e-5
T, N, DIM_IN, D = 9, 3, 2, 4
# Options of `lstm` for one that computes its gates again in the backward step; ours keeps them in the sequence.
RECOMPUTED = {"builder": rnn_cell.LSTM, "memory_optimization": True}
LSTMS = {
    "as built": {},
    "lengths": {"lengths": True},
    "recomputed": RECOMPUTED,
    "in the sequence": {"memory_optimization": True},
}
EVERY_LSTM = pytest.mark.parametrize("options", LSTMS.values(), ids=list(LSTMS))


class Lines:
    """Reports of the nets that were optimised, and what they say together."""

    def __init__(self):
        self.reports = []

    @property
    def counts(self):
        return {name: sum(report.counts.get(name, 0) for report in self.reports) for name in NAMES}

    @property
    def reasons(self):
        return {(refusal.rule, refusal.reason) for report in self.reports for refusal in report.refusals}


@contextlib.contextmanager
def optimising(rules=None, even_if_slower=True, trials=True, **promises):
    """Optimise each net with loops, in place, before it is run once; that it is done at once is checked each time."""
    lines, run = Lines(), workspace.RunNetOnce

    def run_optimised(net):
        operators = (net if isinstance(net, caffe2_pb2.NetDef) else net.Proto()).op
        if any(operator.type == LOOP for operator in operators):
            lines.reports.append(optimize(net, rules, even_if_slower=even_if_slower, trials=trials, **promises))
            assert_done(net, rules, even_if_slower, trials, **promises)
        return run(net)

    workspace.RunNetOnce = run_optimised
    try:
        yield lines
    finally:
        workspace.RunNetOnce = run


def assert_right_forwards(cell, lengths, **changed):
    """A cell that is not trained, without lengths and with these."""
    for given in (None, lengths):
        workspace.ResetWorkspace()
        forward = cell.but(lengths=given, options={**cell.options, "forward_only": True}, **changed)
        forward.assert_right(executor=False)


def fired_on(cell, rules, *names):
    """How often each of `names` fired on two variants of a cell, both of which are right; and what rules refused."""
    fired, reasons = Counter(), set()
    for variant in (cell.but(lengths=None), cell.remembering_nothing().but(lengths=[cell.steps, 1])):
        workspace.ResetWorkspace()
        with optimising(rules) as lines:
            variant.assert_right(executor=False)
        fired.update(lines.counts)
        reasons |= lines.reasons
    return (*(fired[name] for name in names), reasons)


class Optimised:
    """To be called with a finished net or model: optimises it, and keeps it and the report."""

    def __init__(self, rules=None, even_if_slower=True):
        self._rules = rules
        self._even_if_slower = even_if_slower

    def __call__(self, net):
        self.net = net.net if isinstance(net, ModelHelper) else net
        self.report = optimize(net, self._rules, even_if_slower=self._even_if_slower)
        assert_done(self.net, self._rules, self._even_if_slower)


def assert_done(net, rules=None, even_if_slower=True, trials=True, **promises):
    """A second call finds nothing to do and changes nothing; the loops say what they wait for."""
    proto = net if isinstance(net, caffe2_pb2.NetDef) else net.Proto()
    before = proto.SerializeToString()
    again = optimize(net, rules, even_if_slower=even_if_slower, trials=trials, **promises)
    assert again.total == 0, str(again)
    assert proto.SerializeToString() == before
    assert undeclared(proto) == []
    assert unordered(proto) == []


def unordered(proto):
    """Blobs of steps that an operator writes and the next one that has to do with them writes anew.

    The RNN executor lets those two run at once.
    """
    found = []
    for operator in proto.op:
        arguments = {given.name: given for given in operator.arg}
        if "enable_rnn_executor" in arguments and arguments["enable_rnn_executor"].i:
            for name in ("step_net", "backward_step_net"):
                step = arguments[name].n.op if name in arguments else ()
                for position, step_operator in enumerate(step):
                    # What an operator reads it writes in time.
                    written = set(step_operator.output).difference(step_operator.input)
                    found += [blob for blob in written if is_written_next(step[position + 1 :], blob)]
    return found


def undeclared(proto):
    """Blobs of the net that steps read and their operator does not name: a net of type dag would not wait for them."""
    written = {blob for operator in proto.op for blob in operator.output}
    found = []
    for operator in proto.op:
        names = {LOOP: "step_net", GRADIENT: "backward_step_net"}
        for given in operator.arg:
            if given.name == names.get(operator.type):
                own = {blob for step_operator in given.n.op for blob in step_operator.output}
                read = {blob for step_operator in given.n.op for blob in step_operator.input}
                linked = {
                    blob.decode() for other in operator.arg if "link_internal" in other.name for blob in other.strings
                }
                found += sorted((read & written) - own - linked - set(operator.input))
    return found


def difference(found, expected):
    """The largest difference in proportion to the largest element; NaN and inf must be where they are expected."""
    if found.shape != expected.shape or not np.array_equal(np.isfinite(found), np.isfinite(expected)):
        return np.inf
    found, expected = (np.where(np.isfinite(expected), values, 0) for values in (found, expected))
    return np.abs(found - expected).max(initial=0) / (1e-2 + np.abs(expected).max(initial=0))


def assert_same(found, expected):
    """Outputs (a list) and gradients (by name), as `comparing.run` and `Cell.run` give them."""
    for index, (ours, theirs) in enumerate(zip(found[0], expected[0])):
        assert difference(ours, theirs) < TOLERANCE, "output {}".format(index)
    assert set(found[1]) == set(expected[1])
    for name, gradient in expected[1].items():
        assert difference(found[1][name], gradient) < TOLERANCE, "gradient of {}".format(name)


def feed(steps=T, batch=N, size=D, seed=0):
    """Values for the net of `lstm`."""
    random = np.random.RandomState(seed)
    shapes = {"x": (steps, batch, DIM_IN), "h0": (1, batch, size), "c0": (1, batch, size), "dh": (steps, batch, size)}
    for name, shape in shapes.items():
        workspace.FeedBlob(name, random.uniform(-1, 1, shape).astype(np.float32))
    workspace.FeedBlob("lengths", random.randint(0, steps + 1, batch).astype(np.int32))


def lstm(builder=LSTM, lengths=False, gradients=True, name="model", **options):
    """A model of one LSTM, values for it, and the blobs that it must leave as they would be."""
    model = ModelHelper(name)
    outputs = builder(model, "x", "lengths" if lengths else None, ("h0", "c0"), DIM_IN, D, "layer", **options)
    found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")}) if gradients else {}
    feed()
    random = np.random.RandomState(1)
    shapes = {"i2h_w": (4 * D, DIM_IN), "i2h_b": (4 * D,), "gates_t_w": (4 * D, D), "gates_t_b": (4 * D,)}
    for parameter, shape in shapes.items():
        workspace.FeedBlob("layer/" + parameter, random.uniform(-1, 1, shape).astype(np.float32))
    visible = [str(blob) for blob in outputs]
    visible += [str(found[blob]) for blob in ("x", "h0", "c0", *map(str, model.params)) if blob in found]
    return model, visible


def values(blobs):
    return [workspace.FetchBlob(blob) for blob in blobs], {}


def runs_of_other_sizes(change, sizes=((T, N), (2, 1), (14, 17), (1, 2), (14, 5), (3, 7)), **options):
    """What the LSTM, after `change`, gives in several runs with other numbers of steps and sequences."""
    workspace.ResetWorkspace()
    model, blobs = lstm(**options)
    change(model)
    workspace.CreateNet(model.net)
    found = []
    for seed, (steps, batch) in enumerate(sizes):
        feed(steps, batch, seed=seed)
        workspace.RunNet(model.net)
        found += values(blobs)[0]
    return found, {}


def run_without_steps(change):
    """What the LSTM gives for a sequence of no steps."""
    workspace.ResetWorkspace()
    model, blobs = lstm()
    change(model)
    feed(steps=0)
    return run(model, blobs[4:])


def kept(options, rules):
    """An LSTM optimised by `rules` gives what it gave; the net and the report."""
    expected = run(*lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = lstm(**options)
    rewrite = Optimised(rules)
    rewrite(model)
    assert_same(run(model, blobs), expected)
    return model.net, rewrite.report


def run(model, blobs):
    workspace.RunNetOnce(model.net)
    return values(blobs)


def operator(net, kind=LOOP):
    """The one operator of this kind."""
    (found,) = [operator for operator in net.Proto().op if operator.type == kind]
    return found


def argument(of, name):
    (found,) = [given for given in of.arg if given.name == name]
    return found


def without_executor(model):
    """The RNN executor off in all loops: with it the engine's messages from steps are in the log alone."""
    for operator in model.net.Proto().op:
        for given in operator.arg:
            if given.name == "enable_rnn_executor":
                given.i = 0
    return model


def step(net):
    return argument(operator(net), "step_net").n


def backward_step(net):
    return argument(operator(net, GRADIENT), "backward_step_net").n


def rule(name):
    (found,) = [rule for rule in RULES if rule.name == name]
    return found


def reasons(net, rule, **options):
    """Why a rule leaves alone what it does, without changing the net."""
    before = (net.Proto() if hasattr(net, "Proto") else net).SerializeToString()
    report = optimize(net, [rule], dry_run=True, **{"even_if_slower": True, **options})
    assert (net.Proto() if hasattr(net, "Proto") else net).SerializeToString() == before
    return [refusal.reason for refusal in report.refusals]


def as_read_from_a_file(net):
    """The same net from its bytes."""
    return caffe2_pb2.NetDef.FromString(net.Proto().SerializeToString())


def without_aten(monkeypatch):
    for module in [*vars(caffe2_recurrent.rewriting.rules).values(), caffe2_recurrent.rewriting.sequences.state_slices]:
        if hasattr(module, "aten_is_missing"):
            monkeypatch.setattr(module, "aten_is_missing", lambda: True)
