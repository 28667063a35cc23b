"""Checkpoints: blobs and a page of notes in one file, through Caffe2's own Save and Load operators."""

import hashlib
import json
import os
import struct
from typing import Any, Dict, List

from caffe2.python import core, workspace

from example_errors import CheckpointError, WriteError
from example_files import replacing

NOTES_BLOB = "checkpoint/notes"  # the SHA-256, in hex, of a JSON text, a line feed, the text
FORMAT = "caffe2_recurrent {} 1"  # with the name of the program


def save(path: str, program: str, blobs: List[str], notes: Dict[str, Any]) -> None:
    """Writes `blobs` and `notes` (anything JSON can hold) to `path`, or leaves an older file there whole."""
    own = {"format": FORMAT.format(program), "blobs": blobs, "fingerprint": fingerprint(blobs)}
    page = json.dumps({**notes, **own}).encode("utf-8")
    workspace.FeedBlob(NOTES_BLOB, sha256(page) + b"\n" + page)
    with replacing(path) as part:
        try:
            run_on_file("Save", blobs + [NOTES_BLOB], [], part)
        except RuntimeError as error:
            raise WriteError("cannot write {}: {}".format(path, first_line(error))) from error


def read_notes(path: str, program: str) -> Dict[str, Any]:
    """The notes of the checkpoint `path` of `program`. Of the workspace's blobs only the one for notes changes."""
    require_records(path)
    load(path, [NOTES_BLOB])
    checksum, _, page = workspace.FetchBlob(NOTES_BLOB).partition(b"\n")
    if checksum != sha256(page):
        raise CheckpointError("checkpoint {} is damaged: its notes are not what was saved".format(path))
    notes = json.loads(page.decode("utf-8"))
    expected = FORMAT.format(program)
    if notes["format"] != expected:
        raise CheckpointError(
            "checkpoint {} is of another program or version: expected format {!r}, got {!r}".format(
                path, expected, notes["format"]
            )
        )
    return notes


def restore(path: str, notes: Dict[str, Any]) -> None:
    """Loads the blobs of the checkpoint `path` with these notes: to the last bit what was saved."""
    load(path, notes["blobs"])
    if notes["fingerprint"] != fingerprint(notes["blobs"]):
        raise CheckpointError("checkpoint {} is damaged: its content is not what was saved".format(path))


def fingerprint(blobs: List[str]) -> str:
    """SHA-256, in hex, over the names, types, shapes and bytes of the blobs."""
    digest = hashlib.sha256()
    for name in blobs:
        value = workspace.FetchBlob(name)
        digest.update("{} {} {}\n".format(name, value.dtype.str, value.shape).encode("utf-8"))
        digest.update(value.tobytes())
    return digest.hexdigest()


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode("ascii")


def load(path: str, blobs: List[str]) -> None:
    try:
        run_on_file("Load", [], blobs, path)
    except RuntimeError as error:
        raise CheckpointError("checkpoint {} is damaged: {}".format(path, first_line(error))) from error


def run_on_file(operator: str, inputs: List[str], outputs: List[str], path: str) -> None:
    workspace.RunOperatorOnce(
        core.CreateOperator(operator, inputs, outputs, db=os.path.abspath(path), db_type="minidb", absolute_path=1)
    )


def require_records(path: str) -> None:
    """Refuses a file that is not a chain of minidb records: two lengths (int32), a key and a value so long.

    The engine trusts these lengths: in any other file it takes four arbitrary bytes for one, and allocates
    that much.
    """
    lengths = struct.Struct("=ii")
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as stream:
            while stream.tell() < size:
                head = stream.read(lengths.size)
                key, value = lengths.unpack(head) if len(head) == lengths.size else (-1, -1)
                if min(key, value) < 0 or stream.tell() + key + value > size:
                    raise CheckpointError("checkpoint {} is damaged, or not a checkpoint at all".format(path))
                stream.seek(key + value, os.SEEK_CUR)
    except OSError as error:
        raise CheckpointError("cannot read checkpoint {}: {}".format(path, error.strerror)) from error


def first_line(error: RuntimeError) -> str:
    """What the engine says, without the operator and the C++ frames it lists after that."""
    return str(error).split(" (Error from operator")[0].strip().split("\n")[0].rstrip()
