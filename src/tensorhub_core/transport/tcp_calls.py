"""Send and receive many runs of memory by one system call, without a Python object for each.

An array u64 [runs, 2] of addresses and lengths is an array of `struct iovec` where pointers have 64 bits. `sendmsg` and
`recvmsg` of the standard library want a buffer object for each run instead: for small tensors, making them takes longer
than moving the bytes. ctypes gives the interpreter lock up during a call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.transport.process_memory import address_of

_IOVECS, _COUNT = 2, 3
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class VectoredCalls:
    """The system calls `sendmsg` and `recvmsg`; one thread at a time."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._send, self._receive = libc.sendmsg, libc.recvmsg
        for call in (self._send, self._receive):
            call.argtypes, call.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int], ctypes.c_ssize_t
        # struct msghdr: name, its length, iovecs, their number, control data, its length, flags; a word each.
        self._message: NDArray[np.uint64] = np.zeros(7, np.uint64)
        self._at = address_of(self._message)

    def send(self, socket_number: int, runs: NDArray[np.uint64]) -> int:
        """Send runs [runs, 2] and return how many bytes went; raises OSError, BlockingIOError after SO_SNDTIMEO."""
        return self._call(self._send, socket_number, runs, _NO_SIGNAL)

    def receive(self, socket_number: int, runs: NDArray[np.uint64], *, wait: bool = False) -> int:
        """Receive into runs [runs, 2] and return how many bytes came, 0 at the end of the connection.

        Raises OSError; BlockingIOError if nothing is there, when it may `wait` after SO_RCVTIMEO.
        """
        return self._call(self._receive, socket_number, runs, 0 if wait else socket.MSG_DONTWAIT)

    def _call(self, call: ctypes._NamedFuncPointer, number: int, runs: NDArray[np.uint64], flags: int) -> int:
        self._message[_IOVECS], self._message[_COUNT] = address_of(runs), len(runs)
        while (count := int(call(number, self._at, flags))) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return count
