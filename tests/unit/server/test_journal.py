"""The journal of a server's life: what is written is what is replayed, whatever happens to the file."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner

from tensorhub_core.cli.main import tensorhub
from tensorhub_core.errors import ConfigError, ProtocolMismatch
from tensorhub_core.ids import SessionId
from tensorhub_core.server import journal as journal_module
from tensorhub_core.server import replay as replay_module
from tensorhub_core.server.journal import Gap, Journal, LifeHeader, framed, read_journal, record_of
from tensorhub_core.server.replay import Summary, replay_file
from tensorhub_core.state.events import Disconnected, Event, Received, Tick
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.state.messages import PROTOCOL, Heartbeat, Hello, Publish, PutBlob, Register, Unpublish

LOGGER = logging.getLogger("tensorhub.test")
CONFIG = MachineConfig(server_epoch=7, lease_s=3.0)


def life(workers: int = 3, base_s: float = 100.0) -> list[tuple[float, Event]]:
    """Workers come, publish, fall silent, and one withdraws."""
    found: list[tuple[float, Event]] = []

    def say(session: bytes, request: int, message: object) -> None:
        found.append((base_s + len(found) * 0.01, Received(SessionId(session), request, message)))  # type: ignore[arg-type]

    digests = {data: xxhash.xxh3_128_digest(data) for data in (b"layout", b"placement", b"sums")}
    for number in range(workers):
        session = b"s%d" % number
        say(session, 1, Hello(PROTOCOL, f"token-{number}", "policy", f"replica-{number}"))
        for data, digest in digests.items():
            say(session, 2, PutBlob(digest, data))
        say(session, 3, Register(digests[b"layout"], digests[b"placement"], 100, 1))
        say(session, 4, Publish(1, digests[b"sums"]))
    say(b"s0", 5, Unpublish())
    found.append((found[-1][0] + 1, Disconnected(SessionId(b"s1"))))
    found.append((found[-1][0] + 5, Tick()))
    say(b"s2", 6, Heartbeat())
    return found


def play(events: list[tuple[float, Event]], path: Path, config: MachineConfig = CONFIG, close: bool = True) -> Journal:
    """Live a life with a journal, as the server's loop does."""
    state = ServerState.new(config, events[0][0])
    made = Journal(path, 1 << 30, LOGGER)
    made.begin(config, state.started_s)
    for now, event in events:
        made.append(now, event, state.counter)
        state, _ = step(state, event, now)
    if close:
        made.close()
    return made


def items(path: Path) -> list[object]:
    with path.open("rb") as file:
        return list(read_journal(file, path.stat().st_size))


def test_what_was_decided_on_is_read_back_word_for_word(tmp_path: Path) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)
    header, *records = items(path)
    assert header == LifeHeader(PROTOCOL, events[0][0], CONFIG)
    assert [(record.now, record.event()) for record in records] == events  # type: ignore[attr-defined]
    assert path.stat().st_mode & 0o077 == 0


def test_a_replayed_life_ends_as_the_lived_one_did(tmp_path: Path) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)
    summary = replay_file(path)
    assert (summary.sound, summary.lives, summary.events, summary.gaps) == (True, 1, len(events), [])
    state = ServerState.new(CONFIG, events[0][0])
    for now, event in events:
        state, _ = step(state, event, now)
    assert summary.state is not None
    assert summary.state.workers.keys() == state.workers.keys()
    assert {w.id: w.suspected for w in summary.state.workers.values()} == {
        w.id: w.suspected for w in state.workers.values()
    }
    assert summary.state.counter == state.counter


def test_until_stops_after_that_event(tmp_path: Path) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)
    for until in (0, 1, 7, len(events), len(events) + 5):
        summary = replay_file(path, until)
        assert summary.events == min(until, len(events))
    one = replay_file(path, 1).state
    assert one is not None
    assert len(one.workers) == 1


def test_lives_follow_each_other_in_one_file(tmp_path: Path) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)
    play(events[:4], path, MachineConfig(server_epoch=8))
    summary = replay_file(path)
    assert (summary.sound, summary.lives, summary.events) == (True, 2, len(events) + 4)
    assert summary.state is not None
    assert summary.state.config.server_epoch == 8


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_tail_costs_the_last_event_only_and_the_next_life_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path, events = tmp_path / "journal", life()
    play(events, path)
    whole = path.read_bytes()
    last = len(framed(b"TEST", journal_module.msgspec.msgpack.encode(record_of(events[-1][0], events[-1][1], 99))))
    cut = chance.randrange(1, last)
    path.write_bytes(whole[:-cut])
    summary = replay_file(path)
    assert (summary.sound, summary.events) == (True, len(events) - 1)
    assert [gap.size for gap in summary.gaps] == [last - cut]
    assert CliRunner().invoke(tensorhub, ["replay", str(path)]).output.startswith("gap: ")
    play(events, path)
    summary = replay_file(path)
    assert (summary.sound, summary.lives, summary.events) == (True, 2, 2 * len(events) - 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_bytes_in_the_file_are_gaps_and_never_an_exception(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "journal"
    play(life(2), path)
    play(life(2), path)
    data = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.randbytes(chance.randrange(1, 5000))
        elif kind == 2:
            del data[at : at + chance.randrange(1, 500)]
        else:
            data[at:at] = journal_module.HEADER_MARK + chance.randbytes(20)
    path.write_bytes(bytes(data))
    found = items(path)
    sizes = [item.size for item in found if isinstance(item, Gap)]
    assert sum(sizes) <= len(data)
    try:
        summary = replay_file(path)
    except ConfigError:
        assert not any(isinstance(item, LifeHeader) for item in found)
    else:
        assert len(summary.gaps) == len(sizes) or not summary.sound
        result = CliRunner().invoke(tensorhub, ["replay", str(path)])
        assert result.exit_code in (0, 1)
        assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("data", [b"hello", os.urandom(5000), b"\xf5TJH", b"\xf5TJE" + b"\x00" * 50])
def test_a_file_that_is_no_journal_is_named(tmp_path: Path, data: bytes) -> None:
    (path := tmp_path / "file").write_bytes(data)
    with pytest.raises(ConfigError, match="is not a journal"):
        replay_file(path)
    result = CliRunner().invoke(tensorhub, ["replay", str(path)])
    assert result.exit_code == 1
    assert str(path) in result.output
    with pytest.raises(ConfigError, match="cannot be read"):
        replay_file(tmp_path / "none")
    (empty := tmp_path / "empty").touch()
    assert replay_file(empty) == Summary()


def test_a_journal_of_another_protocol_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    header = journal_module.msgspec.msgpack.encode(LifeHeader(PROTOCOL + 1, 0.0, CONFIG))
    path.write_bytes(framed(journal_module.HEADER_MARK, header))
    with pytest.raises(ProtocolMismatch, match=str(PROTOCOL + 1)):
        replay_file(path)


def break_at(number: int) -> Callable[[ServerState], list[str]]:
    seen = iter(range(1, 10**6))
    return lambda _: ["l0_made_up: a witness"] if next(seen) == number else []


@pytest.mark.parametrize("number", [1, 5, 20])
def test_the_first_broken_invariant_is_named_with_its_event(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)
    monkeypatch.setattr(replay_module, "check", break_at(number))
    result = CliRunner().invoke(tensorhub, ["replay", str(path)])
    assert result.exit_code == 1
    assert f"broken at event {number} (" in result.output
    assert "l0_made_up: a witness" in result.output
    monkeypatch.setattr(replay_module, "check", break_at(number))
    document = json.loads(CliRunner().invoke(tensorhub, ["replay", "--json", str(path)]).output)
    assert document["broken"]["event"] == document["events"] == number
    assert document["sound"] is False


def test_a_step_that_raises_and_one_that_goes_another_way_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "journal", life()
    play(events, path)

    def fail(*_: object) -> None:
        raise KeyError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "step", fail)
        summary = replay_file(path)
        assert (summary.broken_at, summary.broken) == (1, ["it raised KeyError: 'gone'"])
    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "step", lambda state, event, now: (state, []))
        summary = replay_file(path)
        assert summary.broken_at == 2
        assert "ids" in summary.broken[0]


def test_a_summary_names_models_versions_and_workers(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    play(life(), path)
    document = json.loads(CliRunner().invoke(tensorhub, ["replay", "--json", str(path)]).output)
    assert document["sound"] is True
    assert document["broken"] is None
    assert [model["model"] for model in document["models"]] == ["policy"]
    assert document["models"][0]["versions"] == [{"epoch": 1, "version": 1, "replicas": ["replica-1", "replica-2"]}]
    assert sorted(document["models"][0]["workers"]) == ["replica-0", "replica-1", "replica-2"]
    text = CliRunner().invoke(tensorhub, ["replay", str(path)]).output
    assert "all invariants held" in text
    assert "policy: highest whole version 1" in text


def test_at_its_limit_it_ends_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, events = tmp_path / "journal", life()
    made = Journal(path, 2000, LOGGER)
    made.begin(CONFIG, 0.0)
    for _ in range(3):
        for now, event in events:
            made.append(now, event, 0)
    made.close()
    assert 500 < path.stat().st_size <= 2000
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "limit of 2,000 bytes" in caplog.text
    assert not [item for item in items(path) if isinstance(item, Gap)], "it ends with a whole record"
    again = Journal(path, 2000, LOGGER)
    again.begin(CONFIG, 0.0)
    again.close()
    assert path.stat().st_size <= 2000, "what is there already counts"


def test_a_disk_that_cannot_be_written_costs_the_journal_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_EVERY_S", 0.01)
    made = Journal(tmp_path / "journal", 1 << 30, LOGGER)

    def full(_: object, __: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    made.begin(CONFIG, 0.0)
    for now, event in life():
        made.append(now, event, 0)
        time.sleep(0.005)
    made.close()
    made.append(0.0, Tick(), 0)
    assert caplog.text.count("No space left on device") == 1


def test_a_disk_that_hangs_holds_nobody_up_and_costs_a_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_EVERY_S", 0.01)
    monkeypatch.setattr(journal_module, "MOST_WAITING_BYTES", 10_000)
    monkeypatch.setattr(journal_module, "_JOIN_S", 0.1)
    hang = threading.Event()
    monkeypatch.setattr(Journal, "_write", lambda self, data: hang.wait(30))
    made = Journal(tmp_path / "journal", 1 << 30, LOGGER)
    made.begin(CONFIG, 0.0)
    time.sleep(0.1)
    for now, event in life() * 20:
        made.append(now, event, 0)
    assert made._waiting_bytes <= 10_000
    made.close()
    hang.set()
    assert "too slow" in caplog.text


def test_it_is_on_the_disk_within_seconds_without_being_closed(tmp_path: Path) -> None:
    path, events = tmp_path / "journal", life()
    made = play(events, path, close=False)
    deadline = time.monotonic() + 10
    while len(items(path)) < len(events) + 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    made.close()
    made.close()
