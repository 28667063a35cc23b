"""Draws the pictures of the documents, docs/pictures/*.svg, or the same in another folder: draw_docs.py [FOLDER]."""

import sys
from pathlib import Path
from typing import List

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM, draw, recurrent_net

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def elman() -> core.Net:
    """The step of docs/backward_step.md, with a gradient for all its outputs over the steps."""
    step = core.Net("elman_step")
    x_t, h_prev, w, b = step.AddExternalInputs("x_t", "h_prev", "w", "b")
    h_t = step.Tanh(step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("elman")
    h_all, _ = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t})
    net.AddGradientOperators({h_all: net.AddExternalInput("h_t_all_grad")})
    return net


def lstm() -> ModelHelper:
    """The layer of docs/viewing.md."""
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, ("h0", "c0"), 40, 800, scope="lstm")
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    return model


def main(arguments: List[str]) -> None:
    folder = Path(arguments[0]) if arguments else PICTURES
    print(draw(elman(), folder / "elman.svg"))
    print(draw(lstm(), folder / "lstm.svg", shapes={"x": (20, 32, 40), "h0": (32, 800), "c0": (32, 800)}))


if __name__ == "__main__":
    main(sys.argv[1:])
