"""`lstm_unit`: the forms of its operators, each wherever the rule goes, and which of them is taken."""

import re

import pytest
from caffe2.python import workspace

import rewriting_support as support
from caffe2_recurrent import MILSTM, optimize
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.elementwise.lstm_forms import (
    FORMS,
    ByHalves,
    ByKind,
    BySigmoid,
    ByTanh,
    WithoutCandidate,
)
from caffe2_recurrent.rewriting.emit import is_aten
from caffe2_recurrent.rewriting.rules import lstm_unit
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from onednn_support import assert_cell, leaving_no_trace

RULE = "lstm_unit"
WITH_UNIT = [cell.name for cell in CELLS if "lstm" in cell.name.lower()]


@pytest.fixture(params=[*FORMS, ByKind], ids=lambda form: form.__name__)
def form(request, monkeypatch):
    """The form that is taken, whatever is faster."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: request.param)
    return request.param


def kinds(net, step=support.step):
    """The operators of the step; ATen's by what they are told to run."""
    return [
        next((given.s.decode() for given in operator.arg if given.name == "operator"), operator.type).lower()
        for operator in step(net).op
    ]


OPTIONS = {
    "no lengths": {},
    "lengths": {"lengths": True},
    "zeros past the end": {"lengths": True, "drop_states": True},
    "forget bias": {"forget_bias": 1.5},
    "recomputed": {"lengths": True, "forget_bias": -0.5, **support.RECOMPUTED},
    "in the sequence": {"lengths": True, "forget_bias": -0.5, "memory_optimization": True},
    "forward only": {"gradients": False, "forward_only": True},
}


# The forward step computes them.
WITH_FACTORS = [OPTIONS[name] for name in ("no lengths", "lengths", "zeros past the end", "forget bias")]


@every_pair
@pytest.mark.parametrize("multiplies", [True, False], ids=["ATen's products", "Caffe2's products"])
@pytest.mark.parametrize("rules", [[RULE], None], ids=["by itself", "all rules"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_values_and_gradients(form, options, rules, multiplies, monkeypatch):
    monkeypatch.setattr(vectorised, "aten_multiplies_faster", lambda elements: multiplies)
    monkeypatch.setattr(vectorised, "sum_of_three_is_faster", lambda elements: not multiplies)
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    rewrite = support.Optimised(rules)
    rewrite(model)
    assert rewrite.report.counts[RULE] == 1
    assert ("sigmoid" in kinds(model.net)) == (not issubclass(form, ByTanh))
    of_aten = [operator.output[0] for operator in support.step(model.net).op if is_aten(operator, "mul")]
    in_halves = form is ByHalves and options not in WITH_FACTORS
    assert [blob.split("_")[2] for blob in of_aten] == (["kept", "added"] if multiplies and not in_halves else [])
    support.assert_same(support.run(model, blobs), expected)


WITHOUT_MEMORY = pytest.mark.parametrize(
    "options", [support.RECOMPUTED, {"memory_optimization": True}], ids=["recomputed", "in the sequence"]
)


def kept_gates(loop):
    """By the name that they have, since Caffe2 calls its states otherwise."""
    (kept,) = [blob for blob in loop.written if re.search("_kept_gates(_shared|_linked)?$", blob)]
    return kept


@WITHOUT_MEMORY
def test_gates_that_are_kept_in_the_memory_of_their_gradient(form, options):
    """All four, as they are after their nonlinearities; one of the cell state is left."""
    model, _ = support.lstm(**options)
    optimize(model, even_if_slower=True)
    (loop,) = read_loops(model.net.Proto()).values()
    kept = kept_gates(loop)
    assert loop.link(kept).outer == loop.gradient.sequence
    assert not any(kept in operator.output for operator in loop.gradient.operators)
    of_backward_step = kinds(model.net, support.backward_step)
    assert "sigmoid" not in of_backward_step and of_backward_step.count("tanh") == 1


@WITHOUT_MEMORY
def test_kept_gates_are_made_again_until_they_have_a_place(form, options):
    model, blobs = support.lstm(**options)
    expected = support.run(model, blobs)
    optimize(model, [RULE], even_if_slower=True)
    (loop,) = read_loops(model.net.Proto()).values()
    kept = kept_gates(loop)
    assert kept in loop.shared and loop.link(kept) is None
    assert any(kept in operator.output for operator in loop.gradient.operators)
    support.assert_same(support.run(model, blobs), expected)


def test_gates_whose_gradient_is_not_the_sequences_are_computed_again():
    """Then to keep them would take memory, or be for nothing."""
    model, _ = support.lstm(MILSTM, memory_optimization=True)
    optimize(model, even_if_slower=True)
    (loop,) = read_loops(model.net.Proto()).values()
    assert not any(blob.endswith("_kept_gates") for blob in loop.written)
    again = kinds(model.net, support.backward_step)
    assert again.count("sigmoid") + again.count("tanh") >= 2


@pytest.mark.parametrize("name", WITH_UNIT)
@pytest.mark.parametrize("variant", ["kept", "recomputed"])
def test_cells(form, name, variant):
    """Against the numpy loop."""
    rewrite = support.Optimised([RULE])
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE]


@pytest.mark.parametrize(
    "method, message, options",
    [
        ("opened", "output 0", {}),
        ("gate_factors", "output [4-9]", {}),
        ("opened_again", "output [0-9]", support.RECOMPUTED),
    ],
    ids=["opened", "gate_factors", "opened_again"],
)
def test_a_wrong_form_is_seen(form, method, message, options, monkeypatch):
    """What the tests above compare would not pass over a thousandth."""
    form = form.of_training or form
    right = getattr(form, method)

    def wrong(self, emitter, *blobs):
        result = right(self, emitter, *blobs)
        blob = result if isinstance(result, str) else result.candidate
        emitter.add("Scale", [blob], blob, scale=1.001)
        return result

    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    monkeypatch.setattr(form, method, wrong)
    assert optimize(model, [RULE], even_if_slower=True).counts == {RULE: 1}
    with pytest.raises(AssertionError, match=message):
        support.assert_same(support.run(model, blobs), expected)


# Which form is taken.


@pytest.mark.parametrize("faster", FORMS)
def test_the_faster_form_is_taken(faster, monkeypatch):
    seen = []

    def tried(*size):
        seen.append(size)
        return {form: Seconds(0.0, 1.0 if form is faster else 2.0) for form in FORMS}

    monkeypatch.setattr(lstm_unit, "_tried", tried)
    model, _ = support.lstm()
    optimize(model, [RULE], even_if_slower=True)
    assert ("sigmoid" in kinds(model.net)) == (not issubclass(faster, ByTanh))
    assert seen == [(support.D, support.N, True)]


def test_a_batch_size_that_is_not_known():
    """Nothing can be tried."""
    assert lstm_unit._form(4, None, True, None) is ByTanh


@pytest.mark.parametrize("trains", [True, False])
def test_forms_are_tried(trains):
    """Without the candidate there is nothing to train with."""
    with leaving_no_trace():
        found = lstm_unit._tried.__wrapped__(5, 3, trains)
    assert set(found) == ({ByTanh, BySigmoid} if trains else set(FORMS))
    assert all(seconds.step > 0 for seconds in found.values())


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_candidate_as_a_sum(is_faster, monkeypatch):
    """Twice the sigmoid and -1; where the number of elements is not known it is ATen's."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: BySigmoid)
    monkeypatch.setattr(vectorised, "sum_of_three_is_faster", lambda elements: is_faster)
    model, _ = support.lstm()
    optimize(model, [RULE], even_if_slower=True)
    (making,) = [operator for operator in support.step(model.net).op if operator.output[0] == "layer/cell_t_g_shared"]
    assert making.type == ("Sum" if is_faster else "ATen")
    assert (making.input[-1] == "layer/lstm_minus_ones") == is_faster
    assert any("lstm_minus_one" in operator.output[0] for operator in model.net.Proto().op)
    assert not vectorised.prefers_sum_of_three(None)


@pytest.mark.parametrize("options, there", [(OPTIONS["forward only"], False), (OPTIONS["no lengths"], True)], ids=str)
@pytest.mark.parametrize("multiplies", [True, False], ids=["ATen's products", "Caffe2's products"])
def test_gates_are_not_opened(options, there, multiplies, monkeypatch):
    """Where no backward step asks for their factors: they are in what makes the new states."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByHalves)
    monkeypatch.setattr(vectorised, "aten_multiplies_faster", lambda elements: multiplies)
    model, _ = support.lstm(**options)
    optimize(model, [RULE], even_if_slower=True)
    operators = [operator for operator in support.step(model.net).op if operator.type != "ATen"]
    making = {operator.output[0]: operator.type for operator in operators}
    hidden = "Mul" if there else "Scale" if multiplies else "WeightedSum"
    assert (making["layer/cell_t"], making["layer/hidden_t"]) == ("WeightedSum", hidden)
    # One scales what is added up.
    assert kinds(model.net).count("addcmul") == 1 + (1 if there else 3 * multiplies)


@pytest.mark.parametrize("options, there", [(OPTIONS["forward only"], False), (OPTIONS["no lengths"], True)], ids=str)
def test_the_candidate_is_not_there(options, there, monkeypatch):
    """Where no backward step asks for its factors."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: WithoutCandidate)
    monkeypatch.setattr(vectorised, "sum_of_three_is_faster", lambda elements: False)
    model, _ = support.lstm(**options)
    optimize(model, [RULE], even_if_slower=True)
    assert ("add" in kinds(model.net), "weightedsum" in kinds(model.net)) == (there, not there)
