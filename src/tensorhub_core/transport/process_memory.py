"""Read memory of another process of this machine by one system call for many runs.

An array u64 [runs, 2] of addresses and lengths is an array of `struct iovec` where pointers have 64 bits, so that no
Python loop goes over the runs. ctypes gives the interpreter lock up during a call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError

MOST_RUNS = 1024
"""IOV_MAX of Linux: runs of one call."""
_IOVEC_BYTES = 16
_SET_PTRACER = 0x59616D61
_ANY_PROCESS = 2**64 - 1
_ONLY_CHILDREN = "1"


class ProcessMemory:
    """The system call `process_vm_readv`."""

    def __init__(self) -> None:
        """Find the call and try it on this very process; raises TransportError where it does not work."""
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise TransportError("the cma transport needs Linux on a 64-bit processor: use transport='tcp'")
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._readv = self._libc.process_vm_readv
        except AttributeError:
            raise TransportError("the C library has no process_vm_readv: use transport='tcp'") from None
        self._readv.restype = ctypes.c_ssize_t
        pointer, count = ctypes.c_void_p, ctypes.c_ulong
        self._readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, ctypes.c_ulong]
        truth, copy = np.frombuffer(os.urandom(16), np.uint8), np.zeros(16, np.uint8)
        code = self.read(os.getpid(), iovecs(1, copy), iovecs(1, truth))
        if code or not np.array_equal(copy, truth):
            reason = os.strerror(code) if code else "wrong bytes"
            raise TransportError(
                f"process_vm_readv does not work here ({reason}): a container's seccomp profile may forbid it; "
                "use transport='tcp'"
            )

    def read(self, pid: int, here: NDArray[np.uint64], there: NDArray[np.uint64]) -> int:
        """Copy the memory `there` of a process into `here`, both u64 [runs, 2] with equal lengths; return an errno.

        At most MOST_RUNS runs, copied in their order. The arrays are used up when the kernel copies less than asked
        for. 0 = all of it has arrived.
        """
        first, count = 0, len(here)
        left = int(there[:, 1].sum())
        while left:
            skip = first * _IOVEC_BYTES
            base, far = address_of(here) + skip, address_of(there) + skip
            copied = int(self._readv(pid, base, count - first, far, count - first, 0))
            if copied < 0:
                return ctypes.get_errno()
            if copied == 0:
                return errno.EFAULT
            left -= copied
            if left:
                first = _advance(here, there, first, copied)
        return 0

    def allow_neighbours(self, scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> None:
        """Let processes of the same user read this one where Yama would let only its parents."""
        try:
            restricted = scope.read_text(encoding="ascii").strip() == _ONLY_CHILDREN
        except (OSError, UnicodeDecodeError):
            return
        if restricted:
            self._libc.prctl(_SET_PTRACER, ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)


def iovecs(count: int, last: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return u64 [count, 2] of which the last run is the memory of `last`."""
    runs = np.empty((count, 2), np.uint64)
    runs[-1] = address_of(last), last.nbytes
    return runs


def address_of(array: NDArray[np.uint8] | NDArray[np.uint64]) -> int:
    """Return where an array lies; four times as fast as `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


def _advance(here: NDArray[np.uint64], there: NDArray[np.uint64], first: int, copied: int) -> int:
    """Cut what was copied off the runs from `first` on; return the first one that is not whole yet."""
    ends = np.cumsum(there[first:, 1])
    whole = int(np.searchsorted(ends, copied, side="right"))
    part = np.uint64(copied - (int(ends[whole - 1]) if whole else 0))
    for runs in (here, there):
        runs[first + whole, 0] += part
        runs[first + whole, 1] -= part
    return first + whole
