"""Ask how much host memory this process can still take: of the machine, and within its control group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, None where the system does not say.

    The least of what the machine has free or can drop, and of what the limits of its control groups leave.
    """
    found = [left for left in (_machine(root), *_groups(root)) if left is not None]
    return max(0, min(found)) if found else None


def _machine(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _groups(root: Path) -> Iterator[int | None]:
    """Yield what each control group above this process leaves: the limit less what cannot be dropped."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            folder, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):  # a container may see its own group as the root
            yield _left(folder.joinpath(*parts[:depth]), *names)


def _left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _NO_LIMIT_BYTES:
        return None
    cache = re.search(rf"^{cache_name} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return int(limit) - int(usage) + (int(cache.group(1)) if cache else 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
