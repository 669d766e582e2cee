"""Memory of this machine, as far as this process may have it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def usable_memory() -> int:
    """Bytes of the machine, or of the container if that has fewer."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup("memory.max")
    return whole if limit is None else min(whole, limit)


def available_memory() -> int:
    """Bytes that can be had without others being swapped out, as the kernel reckons."""
    free = usable_memory()
    lines = _MEMINFO.read_text(encoding="ascii").splitlines() if _MEMINFO.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup(name: str) -> int | None:
    """A number of the control group; None without one, or where it says `max`."""
    try:
        text = (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
