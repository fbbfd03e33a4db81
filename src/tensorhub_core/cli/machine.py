"""Find out what a machine offers the data plane: network cards, RDMA, UCX, reading other processes, limits.

Every finding is a plain record that `doctor` prints or writes as JSON. Nothing here raises: what cannot be found out
says why in its `reason`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorhub_core.checkpoint.room import available_memory_bytes
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.nics import (
    SYSFS,
    Interface,
    RdmaDevice,
    read_interfaces,
    read_rdma,
    text_of,
)
from tensorhub_core.transport.nics import RdmaPort as RdmaPort
from tensorhub_core.transport.process_memory import ProcessMemory
from tensorhub_core.transport.tcp_addresses import interface_addresses

_PROBE_TIMEOUT_S = 20.0
_UCX_RESOURCE = re.compile(r"resource\s+\d+\s*:.*-- (\S+)/(\S+)")


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface; `speed_mbit` is None where the driver does not say, `rail` the RDMA device of the same NIC.

    `address` is the first IPv4 one of all `addresses`.
    """

    name: str
    state: str
    address: str | None
    mtu: int | None
    speed_mbit: int | None
    addresses: tuple[str, ...] = ()
    numa_node: int | None = None
    rail: str | None = None


@dataclass(frozen=True, slots=True)
class Ucx:
    """The UCX inside NIXL: its version and `transport/device` pairs."""

    version: str | None
    devices: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cma:
    """Whether one process may read another's memory, which is the fast way between two of one machine."""

    works: bool
    ptrace_scope: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the process may use; None = unlimited or unknown."""

    open_files: int | None
    open_files_hard: int | None
    locked_memory_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    available_memory_bytes: int | None


def network_cards(root: Path = SYSFS / "class/net", rdma: Sequence[RdmaDevice] = ()) -> tuple[Nic, ...]:
    """List the network interfaces; `rdma` are the machine's RDMA devices."""
    try:
        known = interface_addresses()
    except TransportError:
        known = []
    cards = read_interfaces(root)
    return tuple(_nic(card, [each.address for each in known if each.interface == card.name], rdma) for card in cards)


def _nic(each: Interface, addresses: list[str], rdma: Sequence[RdmaDevice]) -> Nic:
    first = next((address for address in addresses if ":" not in address), None)
    rail = next((device.name for device in rdma if each.name in device.interfaces), None)
    node = each.slot.numa_node
    return Nic(each.name, each.state, first, each.mtu, each.speed_mbit, tuple(addresses), node, rail)


def rdma_ports(root: Path = SYSFS / "class/infiniband") -> tuple[RdmaPort, ...]:
    """List the ports of the RDMA devices."""
    return tuple(port for device in read_rdma(root) for port in device.ports)


def limits() -> Limits:
    """Return the limits of this process and the memory of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    total = free = None
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        total, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    return Limits(_finite(soft), _finite(hard), _finite(locked), total, free, available_memory_bytes())


_READ_PARENT = """
import ctypes, sys
class Run(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(8)
here, there = Run(ctypes.addressof(buffer), 8), Run(int(sys.argv[2]), 8)
libc.process_vm_readv.restype = ctypes.c_ssize_t
count = libc.process_vm_readv(
    int(sys.argv[1]), ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0)
)
print(buffer.raw.hex() if count == 8 else "errno %d" % ctypes.get_errno())
"""


def cross_memory() -> Cma:
    """Let a child process read 8 bytes of this one; the child is no ancestor, as peers are not."""
    with contextlib.suppress(TransportError):
        ProcessMemory().allow_neighbours()  # as whoever serves memory does
    text = text_of(Path("/proc/sys/kernel/yama/ptrace_scope"))
    scope = int(text) if text is not None and text.isdigit() else None
    secret = ctypes.create_string_buffer(os.urandom(8), 8)
    answer, error = _run([sys.executable, "-c", _READ_PARENT, str(os.getpid()), str(ctypes.addressof(secret))])
    if answer.strip() == secret.raw.hex():
        return Cma(True, scope)
    reason = error
    if answer.startswith("errno "):
        reason = f"the kernel refuses: {os.strerror(int(answer.split()[1]))}"
        if scope:
            reason += f" (kernel.yama.ptrace_scope is {scope}; 0 and 1 allow it)"
    return Cma(False, scope, reason or "the kernel does not know process_vm_readv")


_LIST_UCX = """
import ctypes, sys
ucp, libc = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)
major, minor, patch = (ctypes.c_uint() for _ in range(3))
ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(patch))
print(f"version {major.value}.{minor.value}.{patch.value}", flush=True)
class Parameters(ctypes.Structure):
    _fields_ = [("mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 32)]
config, context = ctypes.c_void_p(), ctypes.c_void_p()
if ucp.ucp_config_read(None, None, ctypes.byref(config)):
    sys.exit("UCX cannot read its configuration")
if ucp.ucp_init_version(major, minor, ctypes.byref(Parameters(1, 2)), config, ctypes.byref(context)):
    sys.exit("UCX does not start")
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
ucp.ucp_context_print_info(context, stream)
libc.fflush(stream)
"""


def ucx() -> Ucx:
    """List the devices of the UCX that the NIXL wheel carries, in a process of its own."""
    library = _ucx_library()
    if library is None:
        return Ucx(None, (), "no NIXL wheel with UCX in it is installed")
    answer, error = _run([sys.executable, "-c", _LIST_UCX, str(library)])
    version = re.search(r"^version (\S+)$", answer, re.MULTILINE)
    devices = tuple(f"{transport}/{device}" for transport, device in _UCX_RESOURCE.findall(answer))
    return Ucx(version.group(1) if version else None, devices, "" if devices else error or "UCX lists no device")


def _ucx_library() -> Path | None:
    """Return libucp of the NIXL wheel that Python would import."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    wheel = "nixl_cu13.libs" if _torch_is_cuda_13() else "nixl_cu12.libs"
    found = [*site.glob(f"{wheel}/libucp-*.so*"), *site.glob("nixl*.libs/libucp-*.so*")]
    return found[0] if found else None


def _torch_is_cuda_13() -> bool:
    torch = sys.modules.get("torch")
    return str(getattr(getattr(torch, "version", None), "cuda", "")).startswith("13")


def _run(command: list[str]) -> tuple[str, str]:
    """Return what a child process printed, and the last line of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PROBE_TIMEOUT_S:g} s"
    except OSError as error:
        return "", str(error.strerror)
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        lines.append(f"the probe died of signal {-done.returncode}")
    return done.stdout, lines[-1] if lines else ""


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
