"""What is otherwise in the body of a `with`, in this thread alone."""

import contextlib
from contextvars import ContextVar
from typing import Iterator, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def switched(variable: "ContextVar[T]", value: T) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
