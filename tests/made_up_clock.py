"""Trials in tests by a clock that is made up."""

import contextlib

from caffe2_recurrent.rewriting.trials import trial


def make_up_clock(monkeypatch, seconds, asked=None):
    """Have each turn of a subject take the `Seconds` that `seconds(subject)` says, and run nothing.

    To `asked`, if given, goes how long a step was to take at most to be of interest.
    """

    @contextlib.contextmanager
    def prepared(subject):
        def timer(of_interest):
            if asked is not None:
                asked.append(of_interest)
            return seconds(subject)

        yield timer

    monkeypatch.setattr(trial, "prepared", prepared)
