"""Trials in tests by a clock that is made up."""

import contextlib

from caffe2_recurrent.rewriting import trial


def make_up_clock(monkeypatch, seconds):
    """Have each turn of a subject take the `Seconds` that `seconds(subject)` says, and run nothing."""

    @contextlib.contextmanager
    def prepared(subject):
        yield lambda: seconds(subject)

    monkeypatch.setattr(trial, "prepared", prepared)
