"""Running a program of examples/, in this process and as one of its own; makes the modules there importable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from caffe2.python import workspace

from workspace_contents import exact

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import example_checkpoint  # noqa: E402

WITHOUT_PICTURES = pytest.mark.usefixtures("no_pictures")


def leave_out_pictures(monkeypatch: pytest.MonkeyPatch, *drawing: ModuleType) -> None:
    """For the fixture `no_pictures`, of runs whose pictures nobody looks at: to draw takes longer than they do.

    A file says what would be drawn instead.
    """
    for module in drawing:
        monkeypatch.setattr(module, "draw", lambda *shown: repr(shown).encode())


class Program:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def error_of(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        """Exit status and standard error of the program, which must have nothing else to say."""
        try:
            status = self._module.main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        assert said.out == ""
        return status, said.err

    def contents(self, checkpoint: Path) -> dict[str, object]:
        """Everything in a checkpoint, arrays as (type, shape, bytes)."""
        notes = example_checkpoint.read_notes(str(checkpoint), self._module.PROGRAM)
        example_checkpoint.restore(str(checkpoint), notes)
        return {"notes": notes, **{blob: exact(workspace.FetchBlob(blob)) for blob in notes["blobs"]}}

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, self._module.__file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            env=dict(os.environ, PYTHONPATH=path, PYTHONIOENCODING="utf-8"),
            **options,
        )


class StopAfter:
    """Stands in for an Interruption: asks for an end once so many batches are done."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0
