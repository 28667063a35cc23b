"""Whether OpenMP may give a program fewer threads than it says it has, as its environment can ask for.

oneDNN plans a product for as many threads as OpenMP says there are. Run by fewer, the product is wrong, or does not
end.

Source: the environment variables of the OpenMP specification, chapter 6.
"""

from __future__ import annotations

import os
from typing import Mapping

DYNAMIC, LIMIT, THREADS = "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_NUM_THREADS"
# Libraries differ in what else than `true` they take for it.
YES = frozenset(["true", "t", "1", "yes", "y", "on", ".true."])


def that_withhold_threads(environment: Mapping[str, str] = os.environ, told: int | None = None) -> str | None:
    """The settings with which there may be fewer threads than there seem to be, as `NAME=value`; None without such.

    `told` is the number that OpenMP was told here later than by the environment, as `GlobalInit` does, if it is known:
    other threads go by the environment all the same.
    """
    dynamic = environment.get(DYNAMIC, "")
    if dynamic.strip().lower() in YES:
        return f"{DYNAMIC}={dynamic}"
    limit = _number(environment.get(LIMIT, ""))
    if limit is None:
        return None
    # The first of several numbers is that of the outermost parallel region.
    given = environment.get(THREADS, "").split(",")[0]
    threads = _number(given) or os.cpu_count() or 1
    if limit >= max(threads, told or 0):
        return None
    planned = f"{THREADS}={threads}" if _number(given) else f"{threads} processors"
    return f"{LIMIT}={limit}, with {planned if threads > limit else f'{told} threads'}"


def _number(text: str) -> int | None:
    """A number of threads, from 1 on; None for what OpenMP would pass over."""
    return int(text) if text.strip().isdecimal() and int(text) > 0 else None
