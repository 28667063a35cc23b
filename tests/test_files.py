"""Files that are replaced whole or stay as they were."""

import os

import pytest

from caffe2_recurrent import files


def test_a_new_file_takes_the_old_one_s_place(tmp_path):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    files.write_bytes(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["result"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, interruption):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with pytest.raises(interruption), files.replacing(str(path)) as part:
        with open(part, "wb") as stream:
            stream.write(b"half")
        raise interruption
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["result"]


def test_nothing_is_left_where_renaming_fails(tmp_path):
    (tmp_path / "result").mkdir()
    with pytest.raises(OSError, match="result"):
        files.write_bytes(str(tmp_path / "result"), b"new")
    assert os.listdir(tmp_path) == ["result"]
