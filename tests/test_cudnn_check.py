"""`conformance/cudnn_cases.py` and `cudnn_check.py`: what goes to a machine with a GPU, and that errors in it are seen.

Here PyTorch computes on the CPU, and the flat weights are put together by hand.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

import cudnn_cases  # noqa: E402
import cudnn_check  # noqa: E402

NAME = "T4 N3 input 2 D3, 2 layers, 2 directions, forget_bias 1"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The file with the cases of one size."""
    path = str(tmp_path_factory.mktemp("cudnn") / "cases.npz")
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(cudnn_cases, "SIZES", ((4, 3, 2, 3),))
        cudnn_cases.main([path])
    return path


@pytest.fixture
def written(path):
    return cudnn_check.read(path)


@pytest.fixture
def without_gpu(monkeypatch):
    """`cudnn_check` with a stand-in for all that needs a GPU."""
    computed = cudnn_check.computed_by_module

    def flattened(case):
        arrays = cudnn_check.weights_of(case)
        kinds = ([name for name in arrays if kind in name] for kind in ("weight", "bias"))
        return np.concatenate([arrays[name].ravel() for names in kinds for name in names])

    def computed_from_flat(case):
        state, position = {}, 0
        for kind in ("weight", "bias"):
            for name, value in cudnn_check.weights_of(case).items():
                if kind in name:
                    state["weight/" + name] = case["flat"][position : position + value.size].reshape(value.shape)
                    position += value.size
        return {name: found for name, found in computed({**case, **state}, "cpu").items() if "/" not in name}

    monkeypatch.setattr(cudnn_check, "flattened", flattened)
    monkeypatch.setattr(cudnn_check, "computed_from_flat", computed_from_flat)
    monkeypatch.setattr(cudnn_check, "computed_by_module", lambda case, device: computed(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    # Which main() sets.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)


def test_all_that_was_written_is_as_expected(path, written, without_gpu, capsys):
    assert cudnn_check.main([path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "12 of 12 LSTMs as expected"
    assert [line.split(":")[0] for line in lines[1:-1]] == list(written)
    assert not any("DIFFER" in line for line in lines)


@pytest.mark.parametrize("key", ["flat", "weight/weight_hh_l1_reverse", "weight/bias_ih_l0"])
def test_a_single_bit_is_seen(written, without_gpu, key, capsys):
    case = written[NAME]
    case[key].view(np.int32).ravel()[-1] ^= 1
    assert not cudnn_check.check(NAME, case)
    assert "flat weights DIFFER" in capsys.readouterr().out


def test_gates_in_another_order_are_seen(written, without_gpu, capsys):
    """Input and forget gate of the first layer."""
    case = written[NAME]
    case["flat"] = np.concatenate([case["flat"][6:12], case["flat"][:6], case["flat"][12:]])
    assert not cudnn_check.check(NAME, case)
    assert "flat weights DIFFER, results from them DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key", ["hidden_all", "hidden_last", "cell_last", "gradient/x", "gradient/h0", "gradient/c3", "gradient/bias_hh_l1"]
)
def test_another_value_or_gradient_is_seen(written, without_gpu, key):
    case = written[NAME]
    assert cudnn_check.check(NAME, case)
    for added in (1e-4 * max(1.0, np.abs(case[key]).max()), np.nan):
        changed = case[key].copy()
        changed.ravel()[-1] += added
        assert not cudnn_check.check(NAME, {**case, key: changed})


def test_main_says_which_are_wrong(written, without_gpu, tmp_path, capsys):
    arrays = {"{}|{}".format(name, key): value for name, case in written.items() for key, value in case.items()}
    arrays[NAME + "|flat"] = arrays[NAME + "|flat"] + 1
    np.savez(str(tmp_path / "wrong.npz"), **arrays)
    assert cudnn_check.main([str(tmp_path / "wrong.npz")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "11 of 12 LSTMs as expected"


def test_what_is_said_of_calls_that_cannot_work(monkeypatch):
    with pytest.raises(SystemExit, match="^name the file to write, such as cases.npz$"):
        cudnn_cases.main([])
    with pytest.raises(SystemExit, match="^name the file to read, as cudnn_cases.py wrote it$"):
        cudnn_check.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^this PyTorch has no GPU to use$"):
        cudnn_check.main(["cases.npz"])
