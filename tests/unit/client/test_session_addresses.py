"""A session with several addresses: who answers is taken, who is over is not believed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tensorhub_core.client.oneshot import ask
from tensorhub_core.client.session import Session
from tensorhub_core.errors import ConfigError, ServerUnreachable
from tensorhub_core.state.messages import Failure, GetStatus, Hello, ListVersions, Ok, Reply, Request, UnknownSession
from tests.unit.client.fake_server import FakeServer, answer_everything, welcome
from tests.unit.client.test_session import Ears, connected, free_port, identity, soon, until

pytestmark = pytest.mark.timeout(60)


def nobody() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Accept connections, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_the_first_that_answers_is_taken_wherever_it_stands() -> None:
    with FakeServer().running() as server, silent() as quiet:
        for addresses in (
            f"{nobody()},{server.address}",
            [nobody(), nobody(), server.address],
            [quiet, server.address],
            f"{server.address},{nobody()}",
        ):
            with connected(addresses) as session:  # type: ignore[arg-type]
                assert session.address == server.address
                assert session.request(ListVersions(), soon()) == Ok()


def test_who_asks_once_finds_it_too() -> None:
    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        answer_everything(server, session, request, message)

    with FakeServer(script).running() as server, silent() as quiet:
        for addresses in (f"{nobody()},{server.address}", [quiet, server.address], server.address):
            assert ask(addresses, GetStatus()) == Ok()
            assert len(server.messages(Hello)) >= 1


@pytest.mark.parametrize("quiet_first", [False, True])
def test_nobody_there_names_all_and_what_is_wrong_with_each(quiet_first: bool) -> None:
    refused = nobody()
    with silent() as quiet:
        first, second = (quiet, refused) if quiet_first else (refused, quiet)
        for call in (
            lambda: Session(f"{first},{second}", identity(), Ears()).open(2.5),
            lambda: ask(f"{first},{second}", GetStatus(), timeout_s=2.5),
        ):
            with pytest.raises(ServerUnreachable) as caught:
                call()
            assert f"{first} or {second}" in str(caught.value)
            assert f"{refused}: the connection was refused" in str(caught.value)
            assert f"{quiet}: it does not answer" in str(caught.value)


@pytest.mark.parametrize("addresses", ["tcp://127.0.0.1:1,", ",", "tcp://127.0.0.1:1,,tcp://127.0.0.1:2", []])
def test_an_empty_place_in_the_list_is_refused(addresses: object) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Session(addresses, identity(), Ears())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["nonsense", "tcp://", "tcp://host", "udp://1.2.3.4:5"])
def test_a_malformed_address_among_good_ones_is_named_at_once(wrong: str) -> None:
    with FakeServer().running() as server:
        for call in (
            lambda: Session([server.address, wrong], identity(), Ears()),
            lambda: ask([server.address, wrong], GetStatus()),
        ):
            with pytest.raises(ConfigError, match=f"'{wrong}' is not an address"):
                call()


def test_after_a_loss_all_are_tried_and_open_requests_are_asked_again() -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        one = first.enter_context(FakeServer(epoch=1).running())
        two = FakeServer(epoch=2, bind=nobody())
        ears = Ears()
        session = stack.enter_context(connected([one.address, two.bind], ears))  # type: ignore[arg-type]
        first.close()
        answers: list[Reply] = []
        session.submit(ListVersions(), answers.append)
        stack.enter_context(two.running())
        until(lambda: bool(answers))
        assert answers == [Ok()]
        assert session.address == two.address
        assert [hello.server_epoch for hello in two.messages(Hello)] == [1]  # type: ignore[attr-defined]
        assert [welcome.server_epoch for welcome, _ in ears.reopened] == [2]


def test_a_server_whose_time_is_over_is_not_believed() -> None:
    """The old one answers again, with its lower epoch, before the new one is found."""
    with contextlib.ExitStack() as stack:
        newest = stack.enter_context(contextlib.ExitStack())
        five = newest.enter_context(FakeServer(epoch=5).running())
        old = FakeServer(epoch=3, bind=nobody())
        six = FakeServer(epoch=6, bind=nobody())
        ears = Ears()
        session = stack.enter_context(
            connected([five.address, old.bind, six.bind], ears)  # type: ignore[arg-type]
        )
        newest.close()
        stack.enter_context(old.running())
        until(lambda: len(old.messages(Hello)) >= 2)
        answers: list[Reply] = []
        session.submit(ListVersions(), answers.append)
        time.sleep(0.2)
        assert not ears.reopened
        assert not answers
        assert not session.answers()
        assert not old.messages(ListVersions), "nothing is asked of it"
        stack.enter_context(six.running())
        until(lambda: bool(answers))
        assert session.address == six.address
        assert {hello.server_epoch for hello in old.messages(Hello)} == {5}  # type: ignore[attr-defined]


def test_an_old_server_that_asks_who_we_are_is_not_told() -> None:
    """It comes back behind the same address, as a proxy would make it, and does not know the session."""

    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if isinstance(message, ListVersions) and len(server.messages(ListVersions)) == 1:
            server.reply(session, 0, UnknownSession(3))
        else:
            answer_everything(server, session, request, message)

    with FakeServer(script, epoch=5).running() as server, connected([server.address, nobody()]) as session:  # type: ignore[arg-type]
        hellos = len(server.messages(Hello))
        answers: list[Reply] = []
        session.submit(ListVersions(), answers.append)
        until(lambda: bool(answers))
        assert answers == [Ok()]
        assert len(server.messages(Hello)) > hellos, "the old one was left, and the question asked again"
        until(session.answers)


def test_a_silent_server_is_left_for_another_after_a_lease() -> None:
    """It is stopped, not gone: its connection stands."""
    quiet = False

    def script(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        if not quiet:
            answer_everything(server, session, request, message)

    with FakeServer(script, epoch=1).running() as one, FakeServer(epoch=2, bind=nobody()).running() as two:
        ears = Ears()
        with connected([one.address, two.address], ears) as session:  # type: ignore[arg-type]
            quiet = True
            one.mute = True
            until(lambda: session.address == two.address and session.answers())
            assert [w.server_epoch for w, _ in ears.reopened] == [2]


def test_a_server_that_refuses_is_an_answer() -> None:
    def refuse(server: FakeServer, session: bytes, request: int, message: Request) -> None:
        server.reply(session, request, Failure("state_error", "it is full"))

    with FakeServer(refuse).running() as server:
        session = Session([nobody(), server.address], identity(), Ears())
        with pytest.raises(Exception, match="it is full"):
            session.open(5.0)
        session.close()


def test_the_highest_epoch_is_said_in_every_hello() -> None:
    with FakeServer(epoch=7).running() as server, connected(server.address) as session:
        session.say_hello_again()
        until(lambda: len(server.messages(Hello)) == 2)
        assert [hello.server_epoch for hello in server.messages(Hello)] == [0, 7]  # type: ignore[attr-defined]
        assert welcome(7).server_epoch == 7


def test_a_listener_that_hangs_up_is_not_called_in_a_loop() -> None:
    """It accepts every connection and closes it, as a proxy does whose server is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calls: list[float] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    calls.append(time.monotonic())
                    connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for addresses in (address, [address, nobody()]):
            session = Session(addresses, identity(), Ears())
            with pytest.raises(ServerUnreachable, match=address):
                session.open(2.0)
            session.close()
            assert 2 <= len(calls) <= 100, "ZeroMQ tries every 50 ms at first"
            calls.clear()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
