"""How much memory this process may still take."""

import os
from pathlib import Path

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_memory() -> int:
    """Bytes that are free: of the machine, or what the container's limit leaves if less."""
    free = _machine_free()
    for limit_file, usage_file in _CGROUP_LIMITS:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def _machine_free() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
