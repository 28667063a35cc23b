"""`processor`: what Linux says of it, and where nothing is said."""

import pytest

from caffe2_recurrent import processor

TWO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"


@pytest.fixture
def described(monkeypatch, tmp_path):
    """Returns a function that says what the processor says of itself."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPUINFO", str(path))
    return path.write_text


def test_the_first_of_several(described):
    described(TWO)
    assert processor.vendor() == "AuthenticAMD"
    assert processor.flags() == {"fpu", "sse", "avx2"}
    assert processor.may_have("avx2") and not processor.may_have("avx512f") and not processor.may_have("avx")


@pytest.mark.parametrize("text", ["", "Features : fp asimd\n", None], ids=["empty", "another kind", "no such file"])
def test_nothing_known(text, described):
    if text is not None:
        described(text)
    assert processor.vendor() == ""
    assert processor.flags() == frozenset()
    assert processor.may_have("avx512f")
