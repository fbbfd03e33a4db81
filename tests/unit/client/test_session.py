"""The session against a scripted server and the real one, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tensorhub_core.client.identity import Identity, Standing
from tensorhub_core.client.session import Session
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import (
    ConfigError,
    DeadlineExceeded,
    ProtocolMismatch,
    ServerUnreachable,
    StateError,
    TensorHubError,
    VersionConflict,
)
from tensorhub_core.server.serving import serve
from tensorhub_core.state.messages import (
    Failure,
    Filling,
    GetBlob,
    Hello,
    LeaseLost,
    ListVersions,
    NothingNewer,
    Ok,
    PutBlob,
    Register,
    Reply,
    Request,
    Superseded,
    UnknownSession,
    Versions,
    Wait,
    Welcome,
)
from tests.unit.client.fake_server import FakeServer, answer_everything, welcome

pytestmark = pytest.mark.timeout(60)


class Ears:
    """Listener that remembers what it heard."""

    def __init__(self) -> None:
        self.pushes: list[Reply] = []
        self.reopened: list[tuple[Welcome, int]] = []
        self.over: list[TensorHubError] = []

    def on_push(self, message: Reply) -> None:
        self.pushes.append(message)

    def on_reopened(self, welcome: Welcome, life: int) -> None:
        self.reopened.append((welcome, life))

    def on_over(self, error: TensorHubError) -> None:
        self.over.append(error)


def identity(token: str = "t") -> Identity:
    return Identity(token, "policy", "replica")


@contextlib.contextmanager
def connected(address: str, ears: Ears | None = None, **more: object) -> Iterator[Session]:
    session = Session(address, identity(), ears or Ears(), **more)  # type: ignore[arg-type]
    try:
        session.open(5.0)
        yield session
    finally:
        session.close()


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds, time.monotonic())


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def test_requests_are_answered_by_the_real_server() -> None:
    with serve() as server, connected(server.address) as session:
        assert session.request(ListVersions(), soon()) == Versions(())
        with pytest.raises(StateError, match="blob"):
            session.request(GetBlob(b"x" * 16), soon())


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://host", "nonsense", "udp://1.2.3.4:5"])
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Session(address, identity(), Ears())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def silent_listener(greeting: bytes = b"") -> Iterator[str]:
    """Accept connections and say nothing, or something that is not ZeroMQ."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])
                    with contextlib.suppress(OSError):
                        accepted[-1].sendall(greeting)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in accepted:
            one.close()


@pytest.mark.parametrize("kind", ["nobody listens", "silent", "not ZeroMQ", "no such host"])
def test_an_unreachable_server_is_named_within_the_deadline(kind: str) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "nobody listens":
            address = f"tcp://127.0.0.1:{free_port()}"
        elif kind == "no such host":
            address = "tcp://no-such-host.invalid:7077"
        else:
            address = stack.enter_context(silent_listener(b"" if kind == "silent" else b"HTTP/1.0 400 Bad\r\n\r\n"))
        session = Session(address, identity(), Ears())
        try:
            begun = time.monotonic()
            with pytest.raises(ServerUnreachable, match=address):
                session.open(0.6)
            assert time.monotonic() - begun < 5
        finally:
            session.close()


@pytest.mark.parametrize("protocol", [0, 2, 65535])
def test_a_server_of_another_protocol_is_refused_at_once(protocol: int) -> None:
    with FakeServer(protocol=protocol).running() as server:
        session = Session(server.address, identity(), Ears())
        with pytest.raises(ProtocolMismatch, match=server.address):
            session.open(30.0)
        session.close()


def test_a_refused_hello_is_the_servers_error() -> None:
    def refuse(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        server.reply(session, request, Failure("protocol_mismatch", "too old"))

    with FakeServer(refuse).running() as server:
        session = Session(server.address, identity(), Ears())
        with pytest.raises(ProtocolMismatch, match="too old"):
            session.open(30.0)
        session.close()


def test_a_failure_becomes_its_error_and_a_late_answer_is_dropped() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if isinstance(message, Hello):
            server.reply(session, request, welcome())
        elif isinstance(message, ListVersions):
            server.reply(session, request, Failure("version_conflict", "taken"))

    with FakeServer(script).running() as server, connected(server.address) as session:
        with pytest.raises(VersionConflict, match="taken"):
            session.request(ListVersions(), soon())
        with pytest.raises(DeadlineExceeded, match="Wait"):
            session.request(Wait(), soon(0.2))


def test_a_call_past_its_deadline_tells_a_silent_server_from_a_slow_one() -> None:
    with FakeServer(answer_everything).running() as server:
        session = Session(server.address, identity(), Ears())
        session.open(5.0)
    try:
        with pytest.raises(ServerUnreachable, match=server.address):
            session.request(ListVersions(), soon(1.5))
    finally:
        session.close()


def test_a_forgotten_session_says_hello_again_and_asks_again() -> None:
    """The server forgets everybody once: durable requests are asked again under their number, others are dropped."""
    forgotten = threading.Event()

    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if isinstance(message, Hello):
            server.reply(session, request, welcome(server.epoch, next_round=7))
        elif isinstance(message, Wait) and not forgotten.is_set():
            forgotten.set()
            server.known.clear()
            server.epoch = 2
            server.reply(session, 0, UnknownSession(2))
        else:
            server.reply(session, request, Ok())

    ears, lost = Ears(), []
    with FakeServer(script).running() as server, connected(server.address, ears) as session:
        register = Register(b"l" * 16, b"p" * 16, 1, 1)
        session.standing = Standing(blobs=(PutBlob(b"l" * 16, b"layout"),), register=register)
        session.submit(Filling(0), lost.append, life=1)
        until(lambda: server.messages(Filling) != [])
        assert session.request(Wait(), soon()) == Ok()
        waits = [(number, message) for _, number, message in server.received if isinstance(message, Wait)]
        assert len(waits) == 2
        assert waits[0] == waits[1]
        kinds = [type(message) for _, _, message in server.received]
        assert kinds[kinds.index(Wait) + 1 :] == [Hello, PutBlob, Register, Wait]
        assert [(w.server_epoch, w.next_round, life) for w, life in ears.reopened] == [(2, 7, 2)]
        session.tell(Filling(0), life=1)
        assert session.request(ListVersions(), soon()) == Ok()
        assert server.messages(Filling) == [Filling(0)], "a request of an earlier life is not sent"
        hellos = server.messages(Hello)
        assert [h.token for h in hellos if isinstance(h, Hello)] == ["t", "t"]


def test_a_server_that_comes_back_at_its_address_is_greeted_again() -> None:
    ears = Ears()
    with FakeServer().running() as first:
        session = Session(first.address, identity(), ears)
        session.open(5.0)
    with FakeServer(epoch=2, bind=first.address).running():
        try:
            assert session.request(ListVersions(), soon(10)) == Ok()
            until(lambda: len(ears.reopened) == 1)
            assert ears.reopened[0][0].server_epoch == 2
        finally:
            session.close()


def test_a_server_that_moved_is_looked_up_again() -> None:
    moved: list[str] = []
    with FakeServer().running() as first:
        session = Session(first.address, identity(), Ears(), resolve=lambda _: moved[0])
        session.open(5.0)
    with FakeServer(epoch=2).running() as second:
        moved.append(second.address)
        try:
            assert session.request(ListVersions(), soon(10)) == Ok()
            assert session.address == second.address
        finally:
            session.close()


def test_a_superseded_session_is_over_for_good() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        server.reply(session, *((request, welcome()) if isinstance(message, Hello) else (0, Superseded("taken"))))

    ears = Ears()
    with FakeServer(script).running() as server, connected(server.address, ears) as session:
        for _ in range(2):
            with pytest.raises(StateError, match="taken"):
                session.request(ListVersions(), soon())
        until(lambda: ears.over != [])
        assert "taken" in str(ears.over[0])


def test_pushes_reach_the_listener_and_versions_heard_of_are_said_again() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if isinstance(message, Hello):
            server.reply(session, request, welcome())
        else:
            server.reply(session, 0, LeaseLost(0, "l1", "gone"))
            server.reply(session, request, NothingNewer(0, 2, 9))
            server.known.clear()

    ears = Ears()
    with FakeServer(script).running() as server, connected(server.address, ears) as session:
        session.request(ListVersions(), soon())
        assert ears.pushes == [LeaseLost(0, "l1", "gone")]
        until(lambda: len(server.messages(Hello)) == 2)
        assert [h.high for h in server.messages(Hello) if isinstance(h, Hello)] == [None, (2, 9)]


def test_closing_fails_what_is_open_and_what_comes_later() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if isinstance(message, Hello):
            server.reply(session, request, welcome())

    with FakeServer(script).running() as server, connected(server.address) as session:
        threading.Timer(0.1, session.close).start()
        with pytest.raises(StateError, match="closed"):
            session.request(Wait(), soon(20))
        session.close()
        with pytest.raises(StateError, match="closed"):
            session.request(Wait(), soon(20))


def test_garbage_from_the_server_is_survived() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        for junk in ([b""], [b"TH"], [b"x" * 12, b"y"], [b"TH\0\1" + bytes(8), b"\xff" * 40], [b"a", b"b", b"c"]):
            server.socket.send_multipart([session, *junk])
        answer_everything(server, session, request, message)

    with FakeServer(script).running() as server, connected(server.address) as session:
        assert session.request(ListVersions(), soon()) == Ok()


def test_a_forked_child_is_refused() -> None:
    with serve() as server, connected(server.address) as session:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    session.request(ListVersions(), soon())
                except StateError as error:
                    code = 0 if "fork" in str(error) else 2
                session.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.request(ListVersions(), soon()) == Versions(())


def test_no_thread_or_file_is_left_by_many_sessions() -> None:
    process = psutil.Process()
    with serve() as server:

        def one() -> None:
            with connected(server.address):
                pass

        one()
        threads, files = threading.active_count(), process.num_fds()
        for _ in range(100):
            one()
        assert threading.active_count() == threads
        until(lambda: process.num_fds() <= files + 2)


def test_a_session_that_leaves_waits_for_the_answer_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    with FakeServer().running() as server, connected(server.address) as session:
        server.mute = True
        wait = session._link.wait
        monkeypatch.setattr(session._link, "wait", lambda *args, **more: (turns.append(0.0), wait(*args, **more))[1])
        session.leave(0.5)  # ten heartbeats long, and no answer
    assert 0 < len(turns) < 60
