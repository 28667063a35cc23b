"""What the processor can do, as Linux describes it."""

from __future__ import annotations

import functools
import re

CPUINFO = "/proc/cpuinfo"


def vendor() -> str:
    """As the processor names it, like `GenuineIntel`; empty where that is not known."""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", _description(CPUINFO), re.MULTILINE)
    return found.group(1) if found else ""


def flags() -> frozenset[str]:
    """The instructions and features that it has, like `avx2`; none where they are not known."""
    found = re.search(r"^flags\s*:\s*(.*)", _description(CPUINFO), re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def may_have(flag: str) -> bool:
    """Whether it has that, or nothing is known of it."""
    known = flags()
    return not known or flag in known


# Of many processors it takes the system a while to describe all.
@functools.lru_cache(maxsize=None)
def _description(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
