"""Every Python block of the README and of docs/ is run as it stands there, and every public name is in one."""

import re
import subprocess
import sys

import pytest

import caffe2_recurrent
from caffe2_recurrent.rewriting.rules import RULES
from documents import DOCUMENTS, blocks

BLOCKS = [(path, position, code) for path in DOCUMENTS for position, code in enumerate(blocks(path, "python"))]
# Through standard input, with a name that a traceback can show.
RUNNER = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'))"


@pytest.mark.parametrize("path, position, code", BLOCKS, ids=["{}-{}".format(b[0].name, b[1]) for b in BLOCKS])
def test_block_runs(path, position, code):
    name = "{} block {}".format(path.name, position)
    result = subprocess.run([sys.executable, "-c", RUNNER, name], input=code, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_every_public_name_is_documented_and_shown():
    shown = "\n".join(code for _, _, code in BLOCKS)
    for name in caffe2_recurrent.__all__:
        assert getattr(caffe2_recurrent, name).__doc__, name
        assert name in shown, name


def test_every_rule_is_explained_in_their_order():
    (text,) = [path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name == "optimize.md"]
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == [rule.name for rule in RULES]
