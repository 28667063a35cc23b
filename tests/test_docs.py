"""Every Python block of the README and of docs/ is run as it stands there, and every public name is in one."""

import re

import pytest

import caffe2_recurrent
import forked_scripts
from caffe2_recurrent.rewriting.rules import RULES
from documents import DOCUMENTS, blocks

BLOCKS = [(path, position, code) for path in DOCUMENTS for position, code in enumerate(blocks(path, "python"))]


@pytest.mark.parametrize("path, position, code", BLOCKS, ids=["{}-{}".format(b[0].name, b[1]) for b in BLOCKS])
def test_block_runs(path, position, code, tmp_path):
    status, output, errors = forked_scripts.run(code, "{} block {}".format(path.name, position), tmp_path)
    assert status == 0, errors
    assert output.strip()


def test_a_block_that_fails_is_seen(tmp_path):
    status, output, errors = forked_scripts.run("print(__name__, flush=True)\n1 / 0", "a block", tmp_path)
    assert (status, output) == (1, "__main__\n")
    assert '"a block", line 2' in errors and errors.endswith("ZeroDivisionError: division by zero\n")


def test_every_public_name_is_documented_and_shown():
    shown = "\n".join(code for _, _, code in BLOCKS)
    for name in caffe2_recurrent.__all__:
        assert getattr(caffe2_recurrent, name).__doc__, name
        assert name in shown, name


def test_every_rule_is_explained_in_their_order():
    (text,) = [path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name == "optimize.md"]
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == [rule.name for rule in RULES]
