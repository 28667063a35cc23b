"""Blob names without the scope that they have in common."""

import os
from collections import Counter
from typing import Collection, Dict, Iterable, List


def short_names(blobs: Iterable[str], scopes: Collection[str], scopes_of_loops: Iterable[str]) -> Dict[str, str]:
    """A name for each blob: without its scope, if that is in `scopes`, unless two blobs would then be called the same.

    The scope may stand behind the `_` that Caffe2 puts before parts of sums. A loop's own blobs have its scope twice
    where that is in the name of what they belong to; there it counts once.
    """
    blobs = list(dict.fromkeys(blobs))
    doubled = [once + once for once in scopes_of_loops if once]
    shortened = {blob: _without(_once(blob, doubled), scopes) for blob in blobs}
    taken = Counter(shortened.values())
    # What keeps its name may stand in the way of another one that would get it.
    taken.update(blob for blob in blobs if shortened[blob] != blob)
    return {blob: short if taken[short] == 1 else blob for blob, short in shortened.items()}


def common_scope(blobs: Iterable[str]) -> str:
    """The scope in which all blobs are, with the `/` at its end; empty if there is none."""
    folders: List[str] = [blob.rpartition("/")[0] for blob in blobs]
    common = os.path.commonprefix([folder.split("/") for folder in folders]) if folders else []
    return "/".join([*common, ""]) if any(common) else ""


def _once(blob: str, doubled: Iterable[str]) -> str:
    return next((blob[len(twice) // 2 :] for twice in doubled if blob.startswith(twice)), blob)


def _without(blob: str, scopes: Iterable[str]) -> str:
    for scope in scopes:
        for mark in ("", "_"):
            if scope and blob.startswith(mark + scope) and len(blob) > len(mark + scope):
                return mark + blob[len(mark + scope) :]
    return blob
