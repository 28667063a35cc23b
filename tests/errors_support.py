"""Making a call that must be refused, and seeing that it left no trace."""

import pytest
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM, recurrent_net

CALLS = "recurrent_net: "


def multiply(cell, x, h):
    cell.Mul([x, h], "h_t")


class Loop:
    """A correct call of `recurrent_net`: h_t = x_t * h_prev, or what `build` adds to the step net."""

    def __init__(self, build=multiply):
        self.net = core.Net("outer")
        self.cell = core.Net("step")
        build(self.cell, *self.cell.AddExternalInput("x_t", "h_prev"))

    def call(self, **changes):
        arguments = {
            "net": self.net,
            "cell_net": self.cell,
            "inputs": [("x_t", "X")],
            "initial_cell_inputs": [("h_prev", "H")],
            "links": {"h_prev": "h_t"},
        }
        arguments.update(changes)
        return recurrent_net(**arguments)

    def refused(self, kind, **changes):
        """The text of the error, which is a `kind`; both nets are as they were, and `net` takes the next loop."""
        nets = (self.net, self.cell)
        before = [snapshot(net) for net in nets]
        with pytest.raises(kind) as caught:
            self.call(**changes)
        assert type(caught.value) is kind
        assert [snapshot(net) for net in nets] == before
        if not self.net.Proto().op and not self.net.Proto().external_input:
            # A leftover of the failed call would get the names of this one numbered.
            assert [str(blob) for blob in Loop.call(Loop.of(self.net))] == ["h_t_all", "h_t_last"]
            assert self.net.Proto().op[0].output[-1] == self.net.Name() + "/recurrent/step_workspaces"
        return str(caught.value)

    @classmethod
    def of(cls, net):
        loop = cls()
        loop.net = net
        return loop


def snapshot(net):
    """All that a failed call could change: the proto, what the net says is defined, the names it gives out next."""
    asked = ["X", "H", "h_t", "h_t_all", "h_t_last", "x_t", "h_prev", net.Name() + "/recurrent/step_workspaces"]
    asked += ["s/i2h", "s/i2h_w", "s/hidden_t_all", "s/initial_hidden_state"] + sorted(net.UsedBlobNames())
    defined = [blob for blob in asked if net.BlobIsDefined(blob)]
    # Older Caffe2 has only the first of these counters.
    counters = net._next_name_index, dict(net.__dict__.get("_next_blob_name_ids", {}))
    return net.Proto().SerializeToString(), defined, counters


def model_snapshot(model):
    lists = [list(getattr(model, name)) for name in ("params", "weights", "biases", "_computed_params")]
    return snapshot(model.net), snapshot(model.param_init_net), lists, dict(model._parameters_info)


def call_lstm(model, **changes):
    arguments = {
        "input_blob": "X",
        "seq_lengths": "lengths",
        "initial_states": ("H", "C"),
        "dim_in": 2,
        "dim_out": 3,
        "scope": "s",
    }
    arguments.update(changes)
    return LSTM(model, **arguments)


def lstm_refused(kind, model=None, **changes):
    """The text of the error, which is a `kind`; the model is as it was."""
    model = model or ModelHelper("model")
    before = model_snapshot(model)
    with pytest.raises(kind) as caught:
        call_lstm(model, **changes)
    assert type(caught.value) is kind
    assert model_snapshot(model) == before
    if not model.net.Proto().op and not model.net.Proto().external_input:
        outputs = [str(blob) for blob in call_lstm(model)]
        assert outputs == ["s/" + name for name in ("hidden_t_all", "hidden_t_last", "cell_t_all", "cell_t_last")]
        assert [str(blob) for blob in model.params] == ["s/i2h_w", "s/i2h_b", "s/gates_t_w", "s/gates_t_b"]
    return str(caught.value)


def listed(caller, *texts):
    """How one error shows several faults."""
    return "{}: {} problems:{}".format(caller, len(texts), "".join("\n  - " + text for text in texts))
