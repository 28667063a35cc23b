"""What the processor is, as far as it decides what pays."""

import functools
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.lru_cache(maxsize=None)
def made_by_intel() -> bool:
    """Whether MKL uses its fastest products here; on other makers' processors it takes slower ones."""
    try:
        found = re.search(r"^vendor_id\s*:\s*(\S+)", CPUINFO.read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    maker = found.group(1) if found is not None else platform.processor()
    return "Intel" in maker
