"""Say where this process runs, as far as that decides which ways lead to a peer."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_START_FIELD = 19
"""Of /proc/PID/stat, counted behind the command's name, which may contain anything: field 22 in proc(5)."""


class Host(msgspec.Struct, frozen=True, array_like=True):
    """A machine since it was booted, and what of it a process sees: who shares all three is a neighbour."""

    boot_id: str
    pid_namespace: int
    net_namespace: int


def this_host(proc: Path = Path("/proc")) -> Host | None:
    """Return where this process runs; None where the kernel does not say."""
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Host(boot_id, os.stat(proc / "self/ns/pid").st_ino, os.stat(proc / "self/ns/net").st_ino)
    except (OSError, UnicodeDecodeError):
        return None


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it is not seen here."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        return int(stat.rpartition(b")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return None


def rdma_devices(root: Path = Path("/sys/class/infiniband"), nodes: Path = Path("/dev/infiniband")) -> tuple[str, ...]:
    """Return the names of the RDMA devices with an active port, if this process may open any.

    A container sees the devices of its machine in `root`, and in `nodes` those it was given.
    """
    try:
        active = {port.parts[-4] for port in root.glob("*/ports/*/state") if "ACTIVE" in port.read_text("ascii")}
        return tuple(sorted(active)) if any(nodes.iterdir()) else ()
    except (OSError, UnicodeDecodeError):
        return ()
