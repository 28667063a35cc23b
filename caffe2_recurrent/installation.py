"""Whether Caffe2 is there and loads, found out without needing it.

Caffe2 fails in several ways: the package is absent; its Python files are there without the compiled extension
(it then ends the interpreter); a package beside it is too new (with some of these a blob that is fed is the
first thing to fail, and numpy 2 then crashes the process). `require_caffe2` turns each of them into one
`ImportError` that says which it is, what was found and what to do.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
import os
import platform
import re
import sys
from types import FrameType

OLDEST_PYTHON = (3, 7)
NEWEST_PYTHON = (3, 9)
LAST_TORCH = (1, 10, 2)
# The first version of each package that the Caffe2 of PyTorch's wheels does not work with.
FIRST_TOO_NEW = {"numpy": (1, 24), "protobuf": (3, 21)}

DOCTOR = "caffe2_recurrent.doctor"


def require_caffe2() -> None:
    """Import Caffe2 with its compiled extension, or raise an `ImportError` that explains why not."""
    trouble = find_trouble()
    if trouble is not None:
        raise ImportError(f"{trouble}\nFound: {_found()}.\nTo do: {_advice()}", name="caffe2")


# Remembered, because an extension that failed half way gives a different error when it is tried again.
@functools.lru_cache(maxsize=None)
def find_trouble() -> str | None:
    """Try to load Caffe2; None if it loads, else a sentence that says whether it is missing or broken."""
    place = caffe2_place()
    numpy = distribution_version("numpy")
    # Before the import, which succeeds here: FeedBlob would fail later, or crash the process. A Caffe2 that
    # somebody built may have been made for a newer numpy, so it is only tried.
    if place is not None and in_torch_wheel(place) and not in_bounds("numpy", numpy):
        return f"Caffe2 is broken: it is in {place}, but does not work with numpy {numpy}."
    try:
        _load()
    # SystemExit: Caffe2 ends the interpreter where it finds no extension.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("caffe2", "caffe2.python"):
            return f"Caffe2 is missing: there is no package {error.name}."
        return f"Caffe2 is broken: it is in {place}, but does not load: {reason(error)}."
    return None


def _load() -> None:
    importlib.import_module("caffe2.python.core")
    importlib.import_module("caffe2.python.workspace")


def reason(error: BaseException) -> str:
    """Return in one line what lies behind `error`, following it back to the extension that did not load."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    causes = [cause for cause in chain if not isinstance(cause, SystemExit)]
    if not causes:
        return f"it ended the interpreter with status {error}"
    # Caffe2 tries its extensions in turn: one that is there and fails tells more than one that is absent.
    telling = [cause for cause in causes if not _is_absent_extension(cause)]
    if not telling:
        return "its compiled extension is not there"
    lines = str(telling[0]).strip().splitlines()
    return f"{type(telling[0]).__name__}: {lines[0].rstrip('.')}" if lines else type(telling[0]).__name__


def _is_absent_extension(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and "caffe2_pybind11_state" in (error.name or "")


def _found() -> str:
    packages = ("torch", "numpy", "protobuf")
    versions = [f"{name} {distribution_version(name) or '(none)'}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *versions])


def _advice() -> str:
    torch = distribution_version("torch")
    steps = []
    if not python_in_bounds():
        steps.append(f"PyTorch's wheels carry Caffe2 for {python_bound()} only, so use one of these.")
    if torch is not None and version_numbers(torch) > LAST_TORCH:
        last = ".".join(map(str, LAST_TORCH))
        steps.append(f"torch {torch} comes without a working Caffe2; the last that carries one is {last}.")
    for name in FIRST_TOO_NEW:
        version = distribution_version(name)
        if not in_bounds(name, version):
            steps.append(f"{name} {version} is too new for Caffe2 ({bound(name)}).")
    steps.append(f"With {python_bound()}, run  pip install 'caffe2_recurrent[caffe2]'")
    steps.append(f"(or put your own build of Caffe2 on the path); python -m {DOCTOR} examines the result.")
    return " ".join(steps)


def distribution_version(name: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed."""
    try:
        metadata = importlib.import_module("importlib.metadata")
    except ImportError:  # Python 3.7
        return _version_from_setuptools(name)
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _version_from_setuptools(name: str) -> str | None:
    try:
        resources = importlib.import_module("pkg_resources")
        return str(resources.get_distribution(name).version)
    # Whatever is wrong with setuptools or that distribution, we only wanted to name a version.
    except Exception:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: '1.10.2+cpu' gives (1, 10, 2)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def in_bounds(name: str, version: str | None) -> bool:
    """Whether the Caffe2 of PyTorch's wheels works with this version; what is absent counts as in bounds."""
    return version is None or version_numbers(version) < FIRST_TOO_NEW[name]


def bound(name: str) -> str:
    """Return the bound of a package as pip spells it, such as 'numpy<1.24'."""
    return f"{name}<{'.'.join(map(str, FIRST_TOO_NEW[name]))}"


def python_in_bounds() -> bool:
    """Whether there are wheels with Caffe2 for this Python."""
    return OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON


def python_bound() -> str:
    """Return the Pythons that there are wheels with Caffe2 for, in words."""
    return "Python {}.{} to {}.{}".format(*OLDEST_PYTHON, *NEWEST_PYTHON)


def caffe2_place() -> str | None:
    """Return the folder that `import caffe2` would load, without loading it."""
    spec = importlib.util.find_spec("caffe2")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return places[0] if places else None


def in_torch_wheel(place: str) -> bool:
    """Whether the Caffe2 in that folder was installed by a wheel of PyTorch."""
    return bool(glob.glob(os.path.join(glob.escape(os.path.dirname(place)), "torch-*.dist-info")))


def doctor_is_starting() -> bool:
    """Whether the package is being imported on the way to `python -m caffe2_recurrent.doctor`.

    Python imports a package before a module in it, and only runpy's frames know what it is about to run. The
    doctor must be able to start where Caffe2 is missing: that is when it is needed.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "runpy" and frame.f_locals.get("mod_name") == DOCTOR:
            return True
        frame = frame.f_back
    return False
