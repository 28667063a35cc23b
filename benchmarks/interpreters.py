"""Other interpreters: our end of the line to `other_interpreter.py`."""

import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

import other_interpreter
from layers import FORWARD, TRAINING, Shape, lstm_values

SCRIPT = Path(__file__).resolve().parent / "other_interpreter.py"
TORCH, ONNXRUNTIME = "torch", "onnxruntime"
PASSES = {TORCH: (TRAINING, FORWARD), ONNXRUNTIME: (FORWARD,)}
PATIENCE = 600.0  # seconds for one answer


class Other(NamedTuple):
    """As given on the command line: `NAME=PYTHON` or `NAME=PYTHON:KIND`."""

    name: str
    python: str
    kind: str


class InterpreterError(Exception):
    pass


def read_other(text: str) -> Other:
    name, separator, python = text.partition("=")
    kind = TORCH
    head, _, tail = python.rpartition(":")
    if head and os.sep not in tail:
        python, kind = head, tail
    if not (name.strip() and separator and python):
        raise ValueError("{!r} is not NAME=PYTHON or NAME=PYTHON:KIND".format(text))
    if kind not in PASSES:
        raise ValueError("{!r} is no kind of interpreter; there are {}".format(kind, " and ".join(PASSES)))
    return Other(name.strip(), os.path.expanduser(python), kind)


class Interpreter:
    """Another interpreter at the other end of a line, until `close`."""

    def __init__(self, other: Other, script: Path = SCRIPT, patience: float = PATIENCE) -> None:
        self.other, self._script, self._patience = other, script, patience
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._unread = b""
        self._errors: Any = None
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def versions(self) -> Dict[str, str]:
        versions: Dict[str, str] = self._ask({"do": "hello"})["versions"]
        return versions

    def prepare(self, shape: Shape, pass_: str, threads: int) -> None:
        path = os.path.join(self._folder.name, "values")
        values = lstm_values(shape)
        with open(path, "wb") as file:
            for name in other_interpreter.value_shapes(*shape):
                file.write(values[name].tobytes())
        self._ask(
            {
                "do": "prepare",
                "shape": list(shape),
                "training": pass_ == TRAINING,
                "threads": threads,
                "values": path,
            }
        )

    def run(self, repeats: int) -> float:
        return float(self._ask({"do": "run", "repeats": repeats})["seconds"])

    def results(self) -> Dict[str, np.ndarray]:
        path = os.path.join(self._folder.name, "results")
        shapes: Dict[str, List[int]] = self._ask({"do": "results", "file": path})["shapes"]
        numbers = np.fromfile(path, np.float32)
        ends = np.cumsum([int(np.prod(dims)) for dims in shapes.values()])
        parts = np.split(numbers, ends[:-1])
        return {name: part.reshape(dims) for (name, dims), part in zip(shapes.items(), parts)}

    def close(self) -> None:
        if self._process is not None:
            self._stop(self._process)
        self._folder.cleanup()

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            # It may have gone already.
            process.communicate(b'{"do": "quit"}\n', timeout=5)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
        self._process = None

    def _ask(self, request: Dict[str, Any]) -> Dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # what it died of is read below
        answer: Dict[str, Any] = json.loads(self._line(process).decode())
        if "error" in answer:
            raise InterpreterError(answer["error"])
        return answer

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._unread = b""
            self._errors = tempfile.TemporaryFile()
            # -E: what is set for this Python's modules is not for the other's.
            command = [self.other.python, "-E", str(self._script), self.other.kind]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
                )
            except OSError as error:
                raise InterpreterError("it cannot be started: {}".format(os.strerror(error.errno))) from None
        return self._process

    def _line(self, process: "subprocess.Popen[bytes]") -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([process.stdout], [], [], self._patience)
            if not ready:
                process.kill()
                self._stop(process)
                raise InterpreterError("no answer for {:.0f} seconds".format(self._patience))
            received = os.read(process.stdout.fileno(), 65536)
            if not received:
                # The next request starts another one.
                message = self._last_words(process)
                self._stop(process)
                raise InterpreterError(message)
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self, process: "subprocess.Popen[bytes]") -> str:
        status = process.wait()
        self._errors.seek(0)
        said: Sequence[str] = self._errors.read().decode(errors="replace").strip().splitlines()
        message = "it ended with status {}".format(status)
        return other_interpreter.without_folders("{}: {}".format(message, said[-1]) if said else message)
