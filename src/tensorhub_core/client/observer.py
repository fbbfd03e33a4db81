"""Watch a model's versions without holding any: for engines' front ends, which have no weights of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.connect import open_session
from tensorhub_core.client.identity import Identity, checked
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.oneshot import OBSERVER
from tensorhub_core.client.place import read_facts, settle
from tensorhub_core.client.session import Session
from tensorhub_core.client.versions import Version
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import StateError
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import decode_layout
from tensorhub_core.layout.types import Layout
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.settings import Settings, load_settings
from tensorhub_core.state.messages import (
    Available,
    Blob,
    Cancel,
    DescribeVersion,
    GetBlob,
    Reply,
    VersionLayouts,
    Wait,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_LEAVE_S = 1.0
_CACHED_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class Held:
    """One shard of a replica that holds a version whole; `converted`: not in the publisher's dtypes."""

    replica: str
    shard: int
    num_shards: int
    layout: Layout
    converted: bool = False


class Observer:
    """A session that belongs to no replica; made by `observe()`. Its calls may come from any thread."""

    def __init__(self, model: str, session: Session, call_timeout_s: float) -> None:
        """Take over an open session; `observe()` does this."""
        self.model = model
        self._session = session
        self._call_timeout_s = call_timeout_s
        self._layouts: dict[bytes, Layout] = {}

    @property
    def server(self) -> str:
        """Return the address of the server."""
        return self._session.address

    def submit_wait(self, newer_than: VersionKey | None, answer: Callable[[Reply], None]) -> Callable[[], None]:
        """Ask for a whole version newer than `newer_than` (None = any); return what withdraws the question.

        `answer` hears `Available`, or a `Failure`, on the session's thread and must not block.
        """
        number = self._session.submit(Wait(newer_than), answer)

        def withdraw() -> None:
            self._session.forget(number)
            with contextlib.suppress(Exception):
                self._session.submit(Cancel(number), lambda _: None)

        return withdraw

    def wait(self, newer_than: VersionKey | None = None, timeout_s: float | None = None) -> Version:
        """Block until a whole version newer than `newer_than` (None = any) is available; raises DeadlineExceeded."""
        future: Awaited[Reply] = Awaited()
        withdraw = self.submit_wait(newer_than, future.set_result)
        try:
            reply = checked(self._session.result(future, self._deadline(timeout_s), "wait()"))
        except BaseException:
            withdraw()
            raise
        assert isinstance(reply, Available)
        return Version(reply.number, reply.epoch)

    def find(self, version: int | None = None, timeout_s: float | None = None) -> Version:
        """Return a version (None = the latest) if somebody holds it whole, else raise VersionUnavailable."""
        described = self._describe(version, self._deadline(timeout_s))
        return Version(described.number, described.epoch)

    def holders(self, version: int | None = None, timeout_s: float | None = None) -> tuple[Version, list[Held]]:
        """Return a version (None = the latest) with everyone who holds it whole, and in which layout.

        Raises VersionUnavailable if nobody does, LayoutMismatch if a layout cannot be read.
        """
        deadline = self._deadline(timeout_s)
        described = self._describe(version, deadline)
        held = [
            Held(row.replica, row.shard, row.num_shards, self._layout(row.layout, deadline), row.converted)
            for row in described.layouts
        ]
        return Version(described.number, described.epoch), held

    def close(self) -> None:
        """Leave; idempotent, bounded."""
        self._session.leave(_LEAVE_S)
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._call_timeout_s if timeout_s is None else timeout_s, time.monotonic())

    def _describe(self, version: int | None, deadline: Deadline) -> VersionLayouts:
        reply = self._session.request(DescribeVersion(version), deadline)
        if not isinstance(reply, VersionLayouts):
            raise StateError(f"the server answered a question about versions with {type(reply).__name__}")
        return reply

    def _layout(self, digest: bytes, deadline: Deadline) -> Layout:
        layout = self._layouts.get(digest)
        if layout is None:
            reply = self._session.request(GetBlob(digest), deadline)
            if not isinstance(reply, Blob):
                raise StateError(f"the server answered a question about a layout with {type(reply).__name__}")
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[digest] = decode_layout(reply.data)
        return layout


def observe(
    server: str | Sequence[str] | None = None,
    *,
    model: str,
    zone: str | None = "",
    settings: Mapping[str, object] | Settings | None = None,
) -> Observer:
    """Connect as an observer of `model`; arguments and errors as of `connect()`. Any thread.

    The newest version is that of all zones. With a `zone` (None: that of this process) it is what the replicas there
    take for it, which seed agents may hold back.
    """
    filled = load_settings(settings)
    if zone is None:
        zone = settle(filled, os.environ, read_facts()).zone.value
    identity = Identity(secrets.token_hex(16), model, OBSERVER, zone=zone, observer=True)
    session, _ = open_session(server, identity, Mailbox(WorkerCounters()), filled)
    return Observer(model, session, filled.client.call_timeout_s)
