"""The loop between the machine and the socket: time reaches it, its faults stay visible, lost peers are reported."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.client.oneshot import ask
from tensorhub_core.clock import SystemClock
from tensorhub_core.ids import SessionId
from tensorhub_core.server import loop as loop_module
from tensorhub_core.server.loop import ServerLoop
from tensorhub_core.server.serving import Server, serve
from tensorhub_core.state.events import Disconnected, Event, Received, Tick
from tensorhub_core.state.machine import step
from tensorhub_core.state.messages import (
    Failure,
    GetStatus,
    Heartbeat,
    ListVersions,
    Ok,
    StatusReply,
    Versions,
    Welcome,
)
from tensorhub_core.state.records import MachineConfig
from tests.processes.server.raw import RawClient, eventually


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Record every event that reaches the machine."""
    events: list[Event] = []

    def recording(state: Any, event: Event, now: float) -> Any:
        events.append(event)
        return step(state, event, now)

    monkeypatch.setattr(loop_module, "step", recording)
    return events


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(lease_s=0.4, heartbeat_s=0.1) as running:
        yield running


def replicas(server: Server) -> list[str]:
    reply = ask(server.address, GetStatus(), timeout_s=10)
    assert isinstance(reply, StatusReply)
    return [replica.replica for model in reply.models for replica in model.replicas]


def test_a_silent_worker_is_forgotten_although_others_never_pause(server: Server) -> None:
    with RawClient(server.address) as silent, RawClient(server.address) as busy:
        silent.hello("silent")
        busy.hello("busy")
        assert sorted(replicas(server)) == ["busy", "silent"]
        deadline = time.monotonic() + 10
        while "silent" in replicas(server) and time.monotonic() < deadline:
            assert isinstance(busy.ask(Heartbeat()), Ok)
            time.sleep(0.005)  # far more often than the machine asks for ticks
        assert replicas(server) == ["busy"]


def test_an_exception_of_the_machine_is_answered_counted_and_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(state: Any, event: Event, now: float) -> Any:
        if isinstance(event, Received) and isinstance(event.message, ListVersions):
            raise KeyError("a programming error")
        return step(state, event, now)

    with RawClient(server.address) as client, caplog.at_level(logging.ERROR, "tensorhub.server"):
        client.hello()
        monkeypatch.setattr(loop_module, "step", broken)
        for _ in range(3):
            reply = client.ask(ListVersions())
            assert isinstance(reply, Failure)
            assert reply.code == "error"
            assert "ListVersions" in reply.message
            assert "a programming error" in reply.message
        assert isinstance(client.ask(Heartbeat()), Ok), "the loop goes on"
        monkeypatch.setattr(loop_module, "step", step)
        assert isinstance(client.ask(ListVersions()), Versions)
    assert server.counters.errors == 3
    logged = [record for record in caplog.records if "ListVersions" in record.getMessage()]
    assert len(logged) == 1, "once in five seconds"
    assert logged[0].exc_info is not None


def test_failing_ticks_do_not_make_the_loop_spin(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: dict[int, list[float]] = {}  # by thread: other servers of this process tick too

    def broken(state: Any, event: Event, now: float) -> Any:
        if isinstance(event, Tick):
            ticks.setdefault(threading.get_ident(), []).append(now)
            raise RuntimeError("every tick fails")
        return step(state, event, now)

    with RawClient(server.address) as client:
        client.hello()
        monkeypatch.setattr(loop_module, "step", broken)
        eventually(lambda: any(len(times) >= 4 for times in list(ticks.values())), "ticks go on")
        gaps = [later - earlier for times in ticks.values() for earlier, later in itertools.pairwise(times)]
        assert min(gaps) >= loop_module.FAILED_TICK_PAUSE_S * 0.9
        assert isinstance(client.ask(Heartbeat()), Ok)


def test_a_push_to_a_connection_that_is_gone_becomes_an_event(seen: list[Event]) -> None:
    with serve() as server, RawClient(server.address) as other:
        gone = RawClient(server.address)
        assert isinstance(gone.hello("replica"), Welcome)
        session = next(event.session for event in seen if isinstance(event, Received))
        gone.close()
        time.sleep(0.3)  # until the server's side of the connection has ended
        assert isinstance(other.hello("replica"), Welcome), "it takes the place, which the old worker would be told"
        eventually(lambda: server.counters.gone == 1, "the push was tried")
        eventually(lambda: Disconnected(SessionId(session)) in seen, "the machine hears of it")


def test_a_session_that_cannot_be_reached_is_reported_once(seen: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server, RawClient(server.address) as client:
        monkeypatch.setattr(server._loop._outbox, "send", lambda *_: loop_module.Delivery.GONE)
        client.post(Heartbeat())
        eventually(lambda: server.counters.gone == 1, "the send was tried")
    lost = [event for event in seen if isinstance(event, Disconnected)]
    assert len(lost) == 1


def test_stop_before_run_and_from_another_thread() -> None:
    loop = ServerLoop(MachineConfig(1), "tcp://127.0.0.1:0", clock=SystemClock())
    loop.stop()
    loop.run()
    loop.close()
    loop = ServerLoop(MachineConfig(1), "tcp://127.0.0.1:0", clock=SystemClock())
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    loop.close()
    loop.close()


def test_a_server_that_died_says_so_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> None:
        raise MemoryError("none left")

    server = serve()
    monkeypatch.setattr(server._loop, "_receive_batch", dies)
    with RawClient(server.address) as client:
        client.post(Heartbeat())
        eventually(lambda: not server._thread.is_alive(), "the thread ends")
    with pytest.raises(Exception, match="none left"):
        server.close()
    server.close()
