"""Wait for a version to be available, told by the server."""

from __future__ import annotations

import contextlib

from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.identity import checked
from tensorhub_core.client.session import Session
from tensorhub_core.client.versions import Version
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.messages import Available, Cancel, Reply, Wait


def wait_for(session: Session, newer_than: VersionKey | None, deadline: Deadline) -> Version:
    """Block until a whole version newer than `newer_than` (None = any) is available; raises DeadlineExceeded."""
    future: Awaited[Reply] = Awaited()
    number = session.submit(Wait(newer_than), future.set_result)
    try:
        reply = checked(session.result(future, deadline, "wait()"))
    except BaseException:
        session.forget(number)
        with contextlib.suppress(TensorHubError):
            session.submit(Cancel(number), lambda _: None)
        raise
    assert isinstance(reply, Available)
    return Version(reply.number, reply.epoch)
