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


def test_nothing_is_left_where_renaming_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no renaming")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no renaming"):
        files.write_bytes(str(tmp_path / "result"), b"new")
    assert os.listdir(tmp_path) == []


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "result").mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory: '.*result'$"):
        files.write_bytes(str(tmp_path / "result"), b"new")
    assert os.listdir(tmp_path) == ["result"]


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
def test_pipes_and_devices_stay_what_they_are(tmp_path, linked):
    path = tmp_path / "pipe"
    os.mkfifo(str(path))
    given = tmp_path / "link" if linked else path
    if linked:
        given.symlink_to(path)
    with pytest.raises(OSError, match="it is no regular file: '{}'$".format(given)):
        files.write_bytes(str(given), b"new")
    assert path.is_fifo()
    assert sorted(os.listdir(tmp_path)) == sorted({"pipe", given.name})


def test_no_name():
    with pytest.raises(FileNotFoundError, match="No such file or directory: ''$"):
        files.write_bytes("", b"new")


def test_a_folder_that_is_not_there(tmp_path):
    path = str(tmp_path / "none" / "result")
    with pytest.raises(FileNotFoundError) as caught:
        files.write_bytes(path, b"new")
    assert caught.value.filename == path
    assert caught.value.strerror == "the folder '{}' does not exist".format(tmp_path / "none")


def test_what_a_link_leads_to_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    file.write_bytes(b"old")
    link.symlink_to(os.path.join("elsewhere", "file"))
    files.write_bytes(str(link), b"new")
    assert link.is_symlink() and file.read_bytes() == b"new"
    assert os.listdir(tmp_path / "elsewhere") == ["file"]
    file.unlink()
    files.write_bytes(str(link), b"again")
    assert link.is_symlink() and file.read_bytes() == b"again"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_who_may_read_and_write_a_file_stays(tmp_path, mode):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    path.chmod(mode)
    files.write_bytes(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode


def test_a_name_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_bytes("result", b"new")
    assert os.listdir(tmp_path) == ["result"]


@pytest.mark.parametrize("name", ["x" * 255, "\N{HIRAGANA LETTER A}" * 85], ids=["ascii", "others"])
def test_the_longest_names(tmp_path, name):
    """There is no room for an ending."""
    files.write_bytes(str(tmp_path / name), b"new")
    assert os.listdir(tmp_path) == [name]
