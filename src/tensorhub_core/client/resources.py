"""Own what a worker has to give back: the transport, the executor, the memory that peers may see, the session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from tensorhub_core.client.identity import Standing
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.offload import OffloadPolicy, Offloads
from tensorhub_core.client.offload_copy import Original
from tensorhub_core.client.prefix_word import with_page
from tensorhub_core.client.reading import Executor
from tensorhub_core.client.session import Session
from tensorhub_core.client.staging_room import StagingRoom
from tensorhub_core.client.stock import Stock
from tensorhub_core.client.vouching import Voucher
from tensorhub_core.clock import Deadline
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import Held, PutBlob, Register
from tensorhub_core.transport.base import Transport

MakeTransport = Callable[[], Transport]
MakeExecutor = Callable[[Transport], Executor]


class Resources:
    """Made when first needed, given back in the right order: nothing is freed that a peer may still read."""

    def __init__(
        self,
        session: Session,
        make_transport: MakeTransport,
        make_executor: MakeExecutor,
        policy: OffloadPolicy | None = None,
    ) -> None:
        self.session = session
        self.memory: RegisteredMemory | None = None
        self.serving = False
        """The transport serves the memory and the server knows where it lies."""
        self._make_transport, self._make_executor = make_transport, make_executor
        self._transport: Transport | None = None
        self._executor: Executor | None = None
        self.room = StagingRoom(make_transport, make_executor)
        self.offloads = Offloads(session, make_transport, self._original, policy or OffloadPolicy())
        self.voucher = Voucher(session, self._stock)
        self.uncertain: tuple[int, PutBlob] | None = None
        """The version that the registered memory was to hold when the server's last word was not heard."""

    @property
    def transport(self) -> Transport:
        """Return the data plane; raises TransportError if this machine has none."""
        if self._transport is None:
            self._transport = self._make_transport()
        return self._transport

    @property
    def executor(self) -> Executor:
        """Return the reading thread."""
        if self._executor is None:
            self._executor = self._make_executor(self.transport)
        return self._executor

    def serve(self, memory: RegisteredMemory, deadline: Deadline) -> None:
        """Let peers reach this memory instead of what was served before, and tell the server where it lies.

        Raises TransportError or the server's error; then nothing is served.
        """
        self.hide()
        transport, regions, agent = self.transport, with_page(memory.regions(), memory.page), b""
        if regions:
            transport.register(regions)
            agent = transport.describe()
        self.memory = memory
        placement = memory.placement(transport.name, agent)
        blobs = tuple(PutBlob(digest_of(data), data) for data in (memory.layout_blob, placement))
        sizes = (memory.total_bytes, memory.num_segments)
        register = Register(blobs[0].digest, blobs[1].digest, *sizes, memory.portable)
        self.session.standing = Standing(None, blobs, register)
        for blob in blobs:
            self.session.request(blob, deadline)
        self.session.request(register, deadline)
        self.serving = True

    def stand(self, key: VersionKey, sums: PutBlob, life: int, converted: bool = False) -> None:
        """Say after every further hello that the memory holds `key`, offered to all; the server said so in `life`."""
        memory, standing = self.memory, self.session.standing
        assert memory is not None
        assert standing.register is not None
        where = standing.register
        sizes = (memory.total_bytes, memory.num_segments)
        held = Held(*key, where.layout, where.placement, sums.digest, *sizes, memory.portable, converted)
        self.session.standing = Standing(held, (*standing.blobs[:2], sums), where)
        self.uncertain = None
        self.voucher.look_ahead(Stock(held.layout, held.placement, sums, memory))
        if self.session.hellos != life:
            self.session.say_hello_again()

    def withdrawn(self, done: Callable[[], None]) -> None:
        """Note that nobody relies on the registered memory; on the session's thread.

        Calls `done()` when it is the caller's again: what makes an offload copy of it, or sums it, may still read it.
        """
        self.uncertain = None
        if self.memory is not None:
            self.memory.page.clear()
        self.session.offer_nothing()
        self.offloads.release(lambda: self.voucher.release(done))

    def _stock(self, placement: bytes) -> Stock | None:
        """Return what is offered at the placement of this digest; any thread."""
        standing, memory, room = self.session.standing, self.memory, self.room
        held, staged, holds = standing.held, room.memory, room.holds
        if held is not None and memory is not None and held.placement == placement:
            return Stock(held.layout, placement, standing.blobs[2], memory)
        here = staged is not None and digest_of(room.placement) == placement
        if standing.register is not None and staged is not None and holds is not None and here:
            return Stock(standing.register.layout, placement, holds[1], staged)
        return self.offloads.stock(placement)

    def _original(self, key: VersionKey) -> Original | None:
        """Return the memory that holds a version, registered or staging; any thread."""
        standing, memory, room = self.session.standing, self.memory, self.room
        layout = next(iter(standing.blobs), None)
        if memory is None or standing.register is None or layout is None:
            return None
        portable, gone = memory.portable, memory.gone
        held = standing.held
        if held is not None and (held.epoch, held.number) == key:
            return Original(key, memory, layout, standing.blobs[2], portable, gone, converted=held.converted)
        if room.memory is not None and room.holds is not None and room.holds[0] == key:
            return Original(key, room.memory, layout, room.holds[1], portable, converted=room.holds[2])
        if self.uncertain is not None and self.uncertain[0] == key[1]:
            return Original(key, memory, layout, self.uncertain[1], portable, gone, trusted=False)
        return None

    def hide(self) -> None:
        """End the serving side: nobody reads the memory any more, whatever the server thinks."""
        self.serving = False
        if self.memory is not None:
            self.memory.page.clear()
        if self._transport is not None:
            self._transport.revoke()

    def close(self) -> None:
        """Give everything back: readers first, then what they read, then the connection. Idempotent, never raises.

        In a forked child nothing is its own, and the locks may be held by threads that it does not have.
        """
        if os.getpid() != self.session.pid:
            return
        executor, self._executor = self._executor, None
        transport, self._transport = self._transport, None
        self.voucher.close()
        with _logged("executor"):
            if executor is not None:
                executor.close()
        with _logged("staging memory"):
            self.room.close()
        self.offloads.close()
        with _logged("transport"):
            if transport is not None:
                transport.shutdown()
        with _logged("session"):
            self.session.close()
        self.memory = None


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        get_logger("client").exception("closing the %s failed", what)
