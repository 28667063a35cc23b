"""Run a script that was written for `caffe2.python.recurrent` with ours in its place, unmodified.

The script runs as if Python had been given it: its name, arguments, folder, exit status and tracebacks are its own.
"""

import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys
from types import ModuleType, TracebackType
from typing import List, Optional, Sequence, Type

from caffe2_recurrent import drop_in

USAGE = """\
usage: python -m caffe2_recurrent SCRIPT [ARGS]
       python -m caffe2_recurrent -m MODULE [ARGS]

Runs a script or a module in which caffe2.python.recurrent is caffe2_recurrent.
python -m caffe2_recurrent.doctor says what this installation can do."""
COULD_NOT_RUN = 2


def main(arguments: Sequence[str]) -> int:
    """Run what `arguments` name; returns the exit status where that does not exit by itself."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    is_module = list(arguments[:1]) == ["-m"]
    target = list(arguments[1:] if is_module else arguments)
    if not target or target[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return COULD_NOT_RUN
    # Left installed: threads and exit handlers of the script may outlive its last line.
    drop_in.install()
    sys.argv[:] = target
    try:
        trouble = _run_module(target[0]) if is_module else _run_script(target[0])
    except BaseException:
        _hide_our_frames()
        raise
    if trouble is None:
        return 0
    print("caffe2_recurrent cannot run '{}': {}".format(target[0], trouble), file=sys.stderr)
    return COULD_NOT_RUN


def _run_script(path: str) -> Optional[str]:
    """Run a file, or a folder or zip file with a `__main__.py`; returns why there is nothing to run, if so."""
    place = os.path.abspath(path) if sys.version_info >= (3, 9) else path
    if pkgutil.get_importer(path) is not None:
        return _run_main_in(place)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        return error.strerror
    _change_first_folder([os.path.dirname(os.path.realpath(path))])
    _run_file(content, place)
    return None


def _run_main_in(place: str) -> Optional[str]:
    spec = importlib.machinery.PathFinder.find_spec("__main__", [place])
    if spec is None or spec.loader is None:
        return "it holds no __main__.py"
    _change_first_folder([])
    # Also where Python is isolated.
    sys.path.insert(0, place)
    # Not by runpy, which takes both back with the last line, and changes sys.argv[0].
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = module
    exec(spec.loader.get_code("__main__"), vars(module))  # type: ignore[attr-defined]
    return None


def _change_first_folder(folders: List[str]) -> None:
    # An isolated Python has put no folder before those of the installation.
    if not sys.flags.isolated:
        sys.path[:1] = folders


def _run_file(content: bytes, path: str) -> None:
    """A script, or one that has been compiled."""
    module = ModuleType("__main__")
    is_compiled = content.startswith(importlib.util.MAGIC_NUMBER)
    kind = importlib.machinery.SourcelessFileLoader if is_compiled else importlib.machinery.SourceFileLoader
    loader = kind("__main__", path)
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = module
    code = loader.get_code("__main__") if is_compiled else compile(content, path, "exec", dont_inherit=True)
    exec(code, vars(module))  # type: ignore[arg-type]


def _run_module(name: str) -> Optional[str]:
    """Run a module, or the `__main__` of a package; returns that there is none, if so."""
    if name.endswith(".py") and os.path.isfile(name):
        # To look for it would run the file, as the package that the module is in.
        return "it is a file; leave out the -m"
    if not _is_there(name):
        return "there is no module of that name"
    if not _can_run(name):
        return "it is a package without a __main__"
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return None


def _is_there(name: str) -> bool:
    if name.startswith("."):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # The package that it is said to be in, or that is none; any other name is missed by that package.
        if error.name is not None and (name + ".").startswith(error.name + "."):
            return False
        raise


def _can_run(name: str) -> bool:
    """Whether a module that is there is none of a package's, or has a `__main__`."""
    spec = importlib.util.find_spec(name)
    return spec is not None and (spec.submodule_search_locations is None or _is_there(name + ".__main__"))


def _hide_our_frames() -> None:
    """Let the traceback that ends the process begin where the script does, whoever prints it."""
    show = sys.excepthook
    ours = {main.__code__.co_filename, runpy.run_path.__code__.co_filename}

    def show_the_script(kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        # Python prints the traceback that the error holds.
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_the_script


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
