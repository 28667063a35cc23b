"""`threads`: what the libraries say of the threads that trials run with."""

import pytest

from caffe2_recurrent.rewriting.trials import threads


def missing(*_):
    raise OSError("cannot open shared object file")


@pytest.fixture
def openmp():
    """The function that sets OpenMP's number; it is as before behind the test."""
    set_number, before = threads.library().omp_set_num_threads, threads.of_openmp()
    yield set_number
    set_number(before)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_openmps_number(number, openmp):
    openmp(number)
    assert threads.of_openmp() == number
    assert threads.settings()[threads.ASKED.index(threads.OPENMP)] == number


@pytest.fixture
def without_library():
    threads.library.cache_clear()
    yield
    threads.library.cache_clear()


@pytest.mark.parametrize(
    "patched", [("EXTENSIONS", ["no_such_module"]), ("ctypes.CDLL", missing)], ids=["no module", "no library"]
)
def test_where_nothing_can_be_asked(patched, without_library, monkeypatch):
    name, value = patched
    monkeypatch.setattr("caffe2_recurrent.rewriting.trials.threads." + name, value)
    assert threads.library() is None and threads.of_openmp() is None
    assert threads.settings() == (None, None, None)


def test_where_a_function_is_missing(monkeypatch):
    monkeypatch.setattr(threads, "ASKED", (threads.OPENMP, "no_such_function"))
    assert threads.settings() == (threads.of_openmp(), None)
