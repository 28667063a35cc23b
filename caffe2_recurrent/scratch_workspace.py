"""Workspaces for nets that must leave no trace in the caller's."""

import contextlib
from typing import Iterator, List

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

_entered: List[str] = []


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """The body runs in this workspace, which is made if there is none; the caller's is as it was, and current again.

    What is fed there is on the CPU, whatever device the caller is about to build for.
    """
    previous = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace(name, True)
    _entered.append(name)
    try:
        with core.DeviceScope(core.DeviceOption(caffe2_pb2.CPU)):
            yield
    finally:
        _entered.pop()
        workspace.SwitchWorkspace(previous)


def is_inside() -> bool:
    """Whether the current workspace is not the caller's."""
    return workspace.CurrentWorkspace() in _entered


@contextlib.contextmanager
def scratch_workspace(name: str) -> Iterator[None]:
    """The body runs in an empty workspace, which is emptied again."""
    with inside(name):
        try:
            workspace.ResetWorkspace()
            yield
        finally:
            # Caffe2 cannot take a workspace away, only what is in it.
            workspace.ResetWorkspace()
