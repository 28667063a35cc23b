"""Who made the processor."""

import platform

import pytest

from caffe2_recurrent.rewriting import processor


@pytest.fixture(autouse=True)
def asked_anew():
    processor.made_by_intel.cache_clear()
    yield
    processor.made_by_intel.cache_clear()


@pytest.mark.parametrize("maker, intel", [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_linux_names_the_maker(monkeypatch, tmp_path, maker, intel):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: {}\nmodel name\t: A processor of Intel's kind\n".format(maker))
    monkeypatch.setattr(processor, "CPUINFO", path)
    assert processor.made_by_intel() is intel


@pytest.mark.parametrize("name, intel", [("Intel64 Family 6, GenuineIntel", True), ("arm", False), ("", False)])
def test_elsewhere_python_is_asked(monkeypatch, tmp_path, name, intel):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: name)
    assert processor.made_by_intel() is intel
