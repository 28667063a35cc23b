"""Files that are either whole or as they were: written under another name, then renamed."""

import contextlib
import errno
import hashlib
import os
import shutil
from typing import Any, Iterator

from caffe2_recurrent.problems import Problems, given

# Bytes of a name. File systems take 255 or so.
LONGEST = 200


def read_path(path: Any, types: Problems) -> str:
    """The path as a string; notes what is none."""
    if isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str):
        return os.fspath(path)
    types.add("path must be a string or a pathlib.Path; got {}", given(path))
    return ""


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a temporary name beside `path`; what was written there takes the place of `path` at the end.

    If the body fails, the temporary file goes and `path` stays as it was. What a link leads to is replaced, and keeps
    who may read and write it. What is no file, as a device or a pipe, is refused, as renaming would put a file in its
    place. Errors of the file system pass through (`OSError`); one about a missing folder names that, and `path`.
    """
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    file = os.path.realpath(path) if os.path.islink(path) else path
    folder = os.path.dirname(file) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "the folder '{}' does not exist".format(folder), path)
    if os.path.isdir(file):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if os.path.exists(file) and not os.path.isfile(file):
        raise OSError(errno.EINVAL, "it is no regular file", path)
    part = os.path.join(folder, "{}.{}.part".format(_short(os.path.basename(file)), os.getpid()))
    try:
        yield part
        if os.path.isfile(file):
            shutil.copymode(file, part)
        _flush_to_disk(part)
        os.replace(part, file)
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


def _short(name: str) -> str:
    """The name, or of one behind which there may be no room for more another one."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= LONGEST else hashlib.sha1(encoded).hexdigest()


def write_bytes(path: str, content: bytes) -> None:
    with replacing(path) as part, open(part, "wb") as stream:
        stream.write(content)


def _flush_to_disk(path: str) -> None:
    # Renaming can reach the disk before the content does; a crash in between would leave an empty file.
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())
