"""Results that are written whole or not at all, with an error that the user can do something about."""

import contextlib
from typing import Iterator

from caffe2_recurrent import files
from example_errors import WriteError


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """As `files.replacing`; raises `WriteError` where the file system fails."""
    try:
        with files.replacing(path) as part:
            yield part
    except OSError as error:
        raise WriteError("cannot write {}: {}".format(path, error.strerror)) from error


def write_bytes(path: str, content: bytes) -> None:
    with replacing(path) as part, open(part, "wb") as stream:
        stream.write(content)
