"""Of several servers with one lock file one serves, in a life that is counted; whoever is over stops."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub_core import serve
from tensorhub_core.client.oneshot import ask
from tensorhub_core.errors import ServerUnreachable, TensorHubError
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH
from tensorhub_core.state.messages import PROTOCOL, Failure, GetStatus, Hello, StatusReply, Welcome
from tests.processes.server.raw import RawClient, ServerProcess, eventually, server_process
from tests.processes.server.standby import Candidate, Candidates, candidates

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Candidates]:
    with candidates(tmp_path) as found:
        yield found


def status(server: str, timeout_s: float = 10.0) -> StatusReply:
    reply = ask(server, GetStatus(), timeout_s=timeout_s)
    assert isinstance(reply, StatusReply)
    return reply


def both(*servers: Candidate) -> str:
    return ",".join(server.address for server in servers)


def hello(server_epoch: int) -> Hello:
    return Hello(PROTOCOL, secrets.token_hex(8), "m", "r", server_epoch=server_epoch)


def test_a_standby_neither_listens_nor_answers(made: Candidates) -> None:
    active, waiting = made.pair()
    assert not waiting.serves
    with pytest.raises(ServerUnreachable, match="refused"):
        status(waiting.address, 1.0)
    assert status(active.address).server_epoch == made.counter()
    assert status(both(waiting, active)).server_epoch == made.counter(), "who asks finds the one that serves"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_standby_takes_over_in_a_later_life(made: Candidates, how: signal.Signals) -> None:
    active, waiting = made.pair()
    first = status(both(active, waiting)).server_epoch
    active.signal(how)
    waiting.wait_until_it_serves()
    second = status(both(active, waiting)).server_epoch
    assert second == made.counter() > first
    assert active.code() == (-signal.SIGKILL if how is signal.SIGKILL else 0)
    again = made.start()
    again.wait_until_it_waits()
    waiting.signal(signal.SIGKILL)
    again.wait_until_it_serves()
    assert status(again.address).server_epoch == made.counter() > second


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_standby_ends_when_it_is_told_to(made: Candidates, how: signal.Signals) -> None:
    active, waiting = made.pair()
    waiting.signal(how)
    assert waiting.code() == 0
    assert not waiting.serves
    assert status(active.address)


def test_the_counter_of_a_file_is_raised_whatever_the_clock_says(made: Candidates) -> None:
    ahead = 10 * made_now()
    made.lock.write_text(f"{ahead:020}\n")
    server = made.start()
    server.wait_until_it_serves()
    assert status(server.address).server_epoch == ahead + 1 == made.counter()


def made_now() -> int:
    with serve() as server:
        return status(server.address).server_epoch


@pytest.mark.parametrize("content", [b"important = 1\n", b"17\n", b"\x00" * 21, b"9" * 4000])
def test_a_file_that_holds_something_else_is_left_alone(made: Candidates, content: bytes) -> None:
    made.lock.write_bytes(content)
    server = made.start()
    assert server.code() == 1
    assert "holds something else" in server.log
    assert made.lock.read_bytes() == content


def test_a_lock_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    for lock in (tmp_path, tmp_path / "none" / "hub.lock"):
        server = Candidate(tmp_path, lock, "hub")
        assert server.code() == 1
        assert str(lock) in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("how", ["removed", "replaced", "rewritten"])
def test_whoever_has_lost_its_file_stops(made: Candidates, how: str) -> None:
    server = made.start()
    server.wait_until_it_serves()
    if how == "rewritten":
        made.lock.write_text(f"{made.counter() + 1:020}\n")
    else:
        made.lock.unlink()
    if how == "replaced":
        made.lock.write_text("")
    assert server.code() == 1
    assert str(made.lock) in server.log
    assert "this one stops" in server.log


def test_a_stopped_server_keeps_the_lock_until_its_file_is_replaced(made: Candidates) -> None:
    active, waiting = made.pair()
    first = made.counter()
    active.signal(signal.SIGSTOP)
    with pytest.raises(ServerUnreachable):
        status(both(active, waiting), 1.5)
    assert not waiting.serves, "the lock is what decides"
    made.lock.rename(made.folder / "old.lock")
    waiting.wait_until_it_serves()
    assert status(both(active, waiting)).server_epoch == made.counter() > first
    with RawClient(active.address) as client:
        client.post(hello(made.counter()))
        client.post(GetStatus())
        active.signal(signal.SIGCONT)
        assert active.code() == 1
        assert not client.socket.poll(200), "it answers nobody any more"
    assert "this one stops" in active.log
    assert waiting.process.poll() is None


def test_a_server_that_hears_of_a_later_one_stops_without_an_answer(tmp_path: Path) -> None:
    server = ServerProcess("--bind", "tcp://127.0.0.1:0", errors=tmp_path / "err")
    epoch = status(server.address).server_epoch
    with RawClient(server.address) as client, RawClient(server.address) as other:
        assert isinstance(client.ask(hello(epoch)), Welcome)
        other.post(hello(epoch + 1))
        assert server.process.wait(20) == 1
        assert not other.socket.poll(200)
    assert f"a worker has heard of server epoch {epoch + 1}" in server.log
    assert "Traceback" not in server.log
    server.end()


def test_a_server_in_this_process_that_hears_of_a_later_one_says_so_at_its_close() -> None:
    server = serve()
    with RawClient(server.address) as client:
        client.post(hello(status(server.address).server_epoch + 1))
        assert not client.socket.poll(500)
    with pytest.raises(TensorHubError, match="later one serves"):
        server.close()


def test_after_a_higher_epoch_was_heard_of_the_next_life_is_above_it(made: Candidates) -> None:
    active, waiting = made.pair()
    heard = made.counter() + 10**9
    with RawClient(active.address) as client:
        client.post(hello(heard))
        assert active.code() == 1
    waiting.wait_until_it_serves()
    assert status(waiting.address).server_epoch > heard
    with RawClient(waiting.address) as client:
        assert isinstance(client.ask(hello(heard)), Welcome)


@pytest.mark.parametrize(
    ("epoch", "code"),
    [(-1, "malformed_message"), (MOST_SERVER_EPOCH + 1, "config_error"), (2**64 - 1, "malformed_message")],
)
def test_an_epoch_that_no_server_has_is_refused(tmp_path: Path, epoch: int, code: str) -> None:
    """What the protocol's numbers cannot be does not even reach the server's state."""
    with server_process(tmp_path) as server, RawClient(server.address) as client:
        reply = client.ask(hello(epoch))
        assert isinstance(reply, Failure)
        assert reply.code == code
        eventually(lambda: status(server.address) is not None, "it serves on")
