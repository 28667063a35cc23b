"""Stopping on Ctrl-C without losing a batch."""

import signal


class Interruption:
    """While it is entered, a first Ctrl-C only sets `requested`; a second one stops the program at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interruption":
        self._previous = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _first(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
