"""The public names, of which tools are imported when they are asked for."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import caffe2_recurrent


def modules_behind(code):
    """Those of the package that a process has imported which ran `code`."""
    showing = "; import sys; print(*(name for name in sys.modules if name.startswith('caffe2_recurrent.')))"
    result = subprocess.run([sys.executable, "-c", code + showing], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name.split(".")[1] for name in result.stdout.split()}


def test_a_tool_is_imported_when_it_is_asked_for():
    tools = {module.split(".")[0] for module in caffe2_recurrent._TOOLS.values()}
    assert modules_behind("from caffe2_recurrent import LSTM, recurrent_net").isdisjoint(tools)
    # Of which the second imports others, but neither debugging nor what is for serving.
    for code in ("import caffe2_recurrent as package; package.describe", "from caffe2_recurrent import optimize"):
        found = modules_behind(code) & tools
        assert found and not found & {"debugging", "serving"}, code


def test_a_tool_is_what_its_module_has():
    for name, module in caffe2_recurrent._TOOLS.items():
        tool = getattr(importlib.import_module("caffe2_recurrent." + module), name)
        # Twice: the second time it is there.
        assert getattr(caffe2_recurrent, name) is tool is getattr(caffe2_recurrent, name)
    assert caffe2_recurrent._TOOLS.keys() < set(caffe2_recurrent.__all__) <= set(dir(caffe2_recurrent))


def test_who_checks_types_sees_the_same_tools():
    source = ast.parse(inspect.getsource(caffe2_recurrent))
    (for_types,) = [node for node in source.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING"]
    seen = {name.name: node.module for node in for_types.body for name in node.names}
    assert seen == {name: "caffe2_recurrent." + module for name, module in caffe2_recurrent._TOOLS.items()}


def test_what_is_no_public_name():
    with pytest.raises(AttributeError, match="^module 'caffe2_recurrent' has no attribute 'optimise'$"):
        caffe2_recurrent.optimise  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'optimise' from 'caffe2_recurrent'"):
        from caffe2_recurrent import optimise  # noqa: F401
