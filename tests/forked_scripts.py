"""Scripts in processes that begin where Caffe2 is imported: to import it takes as long as most of them."""

import multiprocessing
import os
import sys
import types

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PROCESSES = multiprocessing.get_context(METHOD)
PROCESSES.set_forkserver_preload(["caffe2.python.core", "caffe2.python.workspace"])


def _run(code, name, output, errors):
    for number, path in enumerate((output, errors), 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    # Not the one of who started this process.
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, name, "exec"), vars(sys.modules["__main__"]))


def run(code, name, folder):
    """Exit status, output and errors of a script, of which a traceback shows the name."""
    paths = [folder / ending for ending in ("output", "errors")]
    process = PROCESSES.Process(target=_run, args=(code, name, *paths))
    process.start()
    process.join()
    return (process.exitcode, *(path.read_text(encoding="utf-8") for path in paths))
