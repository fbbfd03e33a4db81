"""Ways to get tensors from one process into another, each in its best simple form; both sides of each.

The *source* `offer`s, the *sink* `accept`s the offer and `run`s, again and again. Ways that push wait in a thread of
the source until the sink asks for the next run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shapes import Shape

MOST_VECTORS = 1024
MOST_OF_MOONCAKE = 256
CHUNK_BYTES = 4 << 20
LOOPBACK = "127.0.0.1"
Memory = NDArray[np.uint8]


class Way:
    """One way; made on both sides for one shape, `memory` being the side's own."""

    def __init__(self, shape: Shape, memory: Memory, source_memory: Memory) -> None:
        self.shape, self.memory, self.source_memory = shape, memory, source_memory
        self.tensors = shape.tensors(memory)

    def offer(self) -> Any:
        """Begin to serve; return what the sink needs."""

    def accept(self, offer: Any) -> None:
        """Connect to the source."""

    def run(self) -> None:
        """Get everything once."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what was taken."""


class Memcpy(Way):
    """A copy inside the sink's process, tensor by tensor: what no transport can beat."""

    def accept(self, offer: Any) -> None:
        """Find the source's bytes."""
        self._from = self.shape.tensors(self.source_memory)

    def run(self) -> None:
        """Copy."""
        for to, source in zip(self.tensors, self._from, strict=True):
            np.copyto(to, source)


class VmReadv(Way):
    """`process_vm_readv` with 1,024 runs a call, long ones in calls of their own."""

    def offer(self) -> Any:
        """Say where the bytes lie."""
        return {"pid": os.getpid(), "address": self.memory.ctypes.data}

    def accept(self, offer: Any) -> None:
        """Prepare the vectors of all calls."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._call = libc.process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        word, long = ctypes.c_void_p, ctypes.c_ulong
        self._call.argtypes = [ctypes.c_int, word, long, word, long, long]
        self._pid = offer["pid"]
        offsets, lengths = np.array(self.shape.offsets, np.uint64), np.array(self.shape.lengths, np.uint64)
        self._local = np.stack([offsets + np.uint64(self.memory.ctypes.data), lengths], axis=1)
        self._remote = np.stack([offsets + np.uint64(offer["address"]), lengths], axis=1)

    def run(self) -> None:
        """Read."""
        at, count = 0, len(self._local)
        while at < count:
            step = min(MOST_VECTORS, count - at)
            moved = self._call(self._pid, self._local[at:].ctypes.data, step, self._remote[at:].ctypes.data, step, 0)
            if moved < 0:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
            at = self._follow(at, step, moved)

    def _follow(self, at: int, step: int, moved: int) -> int:
        """Return the run to go on with; a run that came in part is finished first."""
        ends = np.cumsum(self._local[at : at + step, 1])
        done = int(np.searchsorted(ends, moved, side="right"))
        if done == step:
            return at + step
        offset = moved - (int(ends[done - 1]) if done else 0)
        run = at + done
        while offset < int(self._local[run, 1]):
            left = int(self._local[run, 1]) - offset
            local = np.array([int(self._local[run, 0]) + offset, left], np.uint64)
            remote = np.array([int(self._remote[run, 0]) + offset, left], np.uint64)
            moved = self._call(self._pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
            if moved <= 0:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
            offset += moved
        return run + 1


class Pushed(Way):
    """A way whose source sends when it is asked, on a thread that ends when the sink closes."""

    serves = False

    def close(self) -> None:
        """Let the source's thread end."""
        if not self.serves:
            self._leave()

    def _leave(self) -> None:
        """Tell the source that no more is wanted."""
        raise NotImplementedError

    def _serve(self) -> None:
        self.serves = True
        threading.Thread(target=self._serve_all, daemon=True).start()

    def _serve_all(self) -> None:
        while self._asked():
            self._push()

    def _asked(self) -> bool:
        """Wait until the sink asks; False at its end."""
        raise NotImplementedError

    def _push(self) -> None:
        """Send everything once."""
        raise NotImplementedError


class RawTcp(Pushed):
    """One connection, `sendmsg` and `recvmsg_into` right from and into the tensors, up to 1,024 of them a call."""

    def offer(self) -> Any:
        """Listen."""
        self._views = [tensor.data for tensor in self.tensors]
        self._listener = socket.create_server((LOOPBACK, 0))
        self._serve()
        return self._listener.getsockname()[1]

    def accept(self, offer: Any) -> None:
        """Connect."""
        self._views = [tensor.data for tensor in self.tensors]
        self._socket = socket.create_connection((LOOPBACK, offer))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        """Ask and receive."""
        self._socket.sendall(b"!")
        if len(self._views) == 1:
            view = self._views[0]
            while view:
                view = view[self._socket.recv_into(view) :]
            return
        for group in self._groups():
            while group:
                got = self._socket.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
                if not got:
                    raise EOFError("the source has gone")
                group = _rest(group, got)

    def _leave(self) -> None:
        self._socket.close()

    def _asked(self) -> bool:
        if not hasattr(self, "_socket"):
            self._socket = self._listener.accept()[0]
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return bool(self._socket.recv(1))
        except OSError:
            return False

    def _push(self) -> None:
        for group in self._groups():
            while group:
                group = _rest(group, self._socket.sendmsg(group))

    def _groups(self) -> Iterator[list[memoryview]]:
        for begin in range(0, len(self._views), MOST_VECTORS):
            yield self._views[begin : begin + MOST_VECTORS]


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the views after `done` bytes."""
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return []


class Zmq(Pushed):
    """ZeroMQ over TCP: frames of 4 MiB without a copy at the source; short tensors share a multipart message."""

    def offer(self) -> Any:
        """Bind."""
        import zmq

        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 64)
        port = self._socket.bind_to_random_port(f"tcp://{LOOPBACK}")
        self._messages = list(self._all())
        self._serve()
        return port

    def accept(self, offer: Any) -> None:
        """Connect."""
        import zmq

        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.set(zmq.RCVHWM, 64)
        self._socket.connect(f"tcp://{LOOPBACK}:{offer}")
        self._messages = list(self._all())

    def run(self) -> None:
        """Ask and receive."""
        self._socket.send(b"!")
        for message in self._messages:
            for frame, to in zip(self._socket.recv_multipart(copy=False), message, strict=True):
                to[:] = frame.buffer

    def _leave(self) -> None:
        self._socket.send(b"")
        self._socket.close(linger=1000)

    def _asked(self) -> bool:
        more = bool(self._socket.recv())
        if not more:
            self._socket.close()
        return more

    def _push(self) -> None:
        for message in self._messages:
            self._socket.send_multipart(message, copy=len(message) > 1)

    def _all(self) -> Iterator[list[memoryview]]:
        message: list[memoryview] = []
        size = 0
        for tensor in self.tensors:
            view = tensor.data
            for at in range(0, len(view), CHUNK_BYTES):
                piece = view[at : at + CHUNK_BYTES]
                if message and size + len(piece) > CHUNK_BYTES:
                    yield message
                    message, size = [], 0
                message.append(piece)
                size += len(piece)
        yield message


def join_gloo(rank: int, port: int) -> None:
    """Make the process group of both sides, once for the life of a process: source and sink call it at once."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    url = f"tcp://{LOOPBACK}:{port}"
    torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=2)


class Gloo(Pushed):
    """`torch.distributed` over gloo: one `send` and `recv` a tensor; after `join_gloo`."""

    tag = 1

    def offer(self) -> Any:
        """Wait for the sink."""
        self._prepare()
        self._serve()

    def accept(self, offer: Any) -> None:
        """Prepare the tensors."""
        self._prepare()

    def run(self) -> None:
        """Ask and receive."""
        self._distributed.send(self._token, 0, tag=self.tag)
        for tensor in self._parts:
            self._distributed.recv(tensor, 0, tag=self.tag)

    def _leave(self) -> None:
        self._token[0] = 0
        self._distributed.send(self._token, 0, tag=self.tag)

    def _prepare(self) -> None:
        import torch
        import torch.distributed

        self._distributed = torch.distributed
        self._parts = [torch.from_numpy(part) for part in self._arrays()]
        self._token = torch.ones(1, dtype=torch.uint8)

    def _arrays(self) -> Sequence[Memory]:
        return self.tensors

    def _asked(self) -> bool:
        self._distributed.recv(self._token, 1, tag=self.tag)
        return bool(self._token[0])

    def _push(self) -> None:
        for tensor in self._parts:
            self._distributed.send(tensor, 1, tag=self.tag)


class GlooFlat(Gloo):
    """The same with one send of all tensors as one buffer; packing and unpacking it are not counted."""

    tag = 2

    def _arrays(self) -> Sequence[Memory]:
        return [self.memory[: self.shape.span_bytes]]


@functools.cache
def mooncake_engine(address: int, length_bytes: int) -> Any:
    """Return a started engine that serves and fills this memory; one for the life of a process."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("Mooncake's engine did not start")
    if engine.register_memory(address, length_bytes):
        raise RuntimeError("Mooncake could not register the memory")
    return engine


class Mooncake(Way):
    """Mooncake's transfer engine over TCP: one registered memory, 256 reads a batch (it fails with thousands)."""

    def offer(self) -> Any:
        """Serve the memory."""
        address = self.memory.ctypes.data
        return {"peer": f"{LOOPBACK}:{mooncake_engine(address, self.memory.nbytes).get_rpc_port()}", "address": address}

    def accept(self, offer: Any) -> None:
        """Prepare the batch."""
        here = self.memory.ctypes.data
        self._engine = mooncake_engine(here, self.memory.nbytes)
        local = [here + at for at in self.shape.offsets]
        remote = [offer["address"] + at for at in self.shape.offsets]
        rows = list(zip(local, remote, self.shape.lengths, strict=True))
        parts = [zip(*rows[at : at + MOST_OF_MOONCAKE], strict=True) for at in range(0, len(rows), MOST_OF_MOONCAKE)]
        self._batches = [(offer["peer"], *(list(column) for column in part)) for part in parts]

    def run(self) -> None:
        """Read."""
        for batch in self._batches:
            code = self._engine.batch_transfer_sync_read(*batch)
            if code:
                raise RuntimeError(f"Mooncake could not read {len(batch[1])} tensors: code {code}")
