"""A standby takes over while workers read, publish and withdraw; the server that is over does no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tensorhub_core import DeadlineExceeded, ServerUnreachable, Worker, connect
from tests.processes.client.samples import Tensors, blank, make, same
from tests.processes.client.test_faults import BY, SMALL, Brake, in_background
from tests.processes.client.test_hub_killed import everybody_is_back
from tests.processes.server.raw import eventually
from tests.processes.server.standby import Candidate, Candidates, candidates

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
SHARDS = 2
MIB = 24


class Site:
    """Two servers with one lock file, and replicas of two shards."""

    def __init__(self, made: Candidates) -> None:
        self.made = made
        self.active, self.waiting = made.pair()
        self._workers = contextlib.ExitStack()
        self.everybody: list[Worker] = []

    @property
    def addresses(self) -> list[str]:
        return [self.active.address, self.waiting.address]

    def replica(self, name: str, seed: int, filled: bool, **settings: Any) -> list[tuple[Worker, Tensors]]:
        """Connect and register all shards of a replica; the bytes of a shard follow from the seed."""
        found = []
        for shard in range(SHARDS):
            worker = connect(
                self.addresses,
                model="m",
                replica=name,
                shard=shard,
                num_shards=SHARDS,
                settings={**SMALL, "call_timeout_s": 60, "close_timeout_s": 2, **settings},
            )
            self._workers.callback(worker.close)
            self.everybody.append(worker)
            tensors = content(seed, shard)
            worker.register(tensors := tensors if filled else blank(tensors))
            found.append((worker, tensors))
        return found

    def close(self) -> None:
        self._workers.close()


def content(seed: int, shard: int) -> Tensors:
    return make("plain", 10 * seed + shard, mib=MIB)


def all_of(replica: list[tuple[Worker, Tensors]], call: Callable[[Worker], Any]) -> list[Future[Any]]:
    return [in_background(lambda worker=worker: call(worker)) for worker, _ in replica]  # type: ignore[misc]


def done(futures: list[Future[Any]], timeout_s: float = 60.0) -> list[Any]:
    return [future.result(timeout_s) for future in futures]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with candidates(tmp_path) as made:
        found = Site(made)
        yield found
        found.close()


def publish(replica: list[tuple[Worker, Tensors]], version: int, seed: int) -> None:
    """Withdraw what is published, write the seed's bytes and publish them, on all shards at once."""
    done(all_of(replica, lambda worker: worker.unpublish()))
    for shard, (_, tensors) in enumerate(replica):
        for name, fresh in content(seed, shard).items():
            tensors[name].copy_(fresh)
    done(all_of(replica, lambda worker: worker.publish(version)))


def check(replica: list[tuple[Worker, Tensors]], seed: int) -> None:
    for shard, (_, tensors) in enumerate(replica):
        assert same(tensors, content(seed, shard))


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_the_active_server_is_killed_while_replicas_read(site: Site, way: str) -> None:
    trainer = site.replica("trainer", 1, True, **BY[way])
    second = site.replica("second trainer", 1, False, **BY[way])
    done(all_of(trainer, lambda worker: worker.publish(1)))
    done(all_of(second, lambda worker: worker.replicate()))
    readers = [site.replica(f"reader {n}", 1, False, **BY[way]) for n in range(2)]
    # The second one may follow the prefix of the first, which stands still at half.
    brakes = {id(worker): Brake(0.5 / (1 + n)) for n, reader in enumerate(readers) for worker, _ in reader}
    reading: list[Future[Any]] = []
    for reader in readers:
        reading += all_of(reader, lambda worker: worker.replicate(progress=brakes[id(worker)]))
        assert all(brakes[id(worker)].half.wait(60) for worker, _ in reader)
    back = everybody_is_back(*site.everybody)
    site.active.signal(signal.SIGKILL)
    withdrawing = all_of(trainer, lambda worker: worker.unpublish())
    with pytest.raises((DeadlineExceeded, ServerUnreachable)):
        second[0][0].unpublish(timeout_s=0.05)
    site.waiting.wait_until_it_serves()
    eventually(back, "everybody said hello to the standby", 30)
    assert [future.exception() for future in reading if future.done()] == []
    for brake in brakes.values():
        brake.go.set()
    assert done(reading) == [1] * 4
    for reader in readers:
        check(reader, 1)
    done(withdrawing)
    publish(trainer, 2, seed=2)
    for reader in readers:
        assert done(all_of(reader, lambda worker: worker.update())) == [2, 2]
        check(reader, 2)
    assert {worker._session.address for worker in site.everybody} == {site.waiting.address}


def test_latest_never_goes_back_over_ever_new_takeovers(site: Site) -> None:
    trainer = site.replica("trainer", 1, True)
    reader = site.replica("reader", 1, False)
    heard: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        worker = reader[0][0]
        while not stop.is_set():
            with contextlib.suppress(DeadlineExceeded, ServerUnreachable):
                heard.append(int(worker.wait(newer_than=heard[-1] if heard else None, timeout_s=0.5)))

    watching = in_background(watch)
    servers = [site.active, site.waiting]
    for version in range(1, 4):
        publish(trainer, version, seed=version) if version > 1 else done(all_of(trainer, lambda w: w.publish(1)))
        back = everybody_is_back(*site.everybody)
        servers[0].signal(signal.SIGKILL if version % 2 else signal.SIGTERM)
        servers[1].wait_until_it_serves()
        eventually(back, "everybody is back", 30)
        assert done(all_of(reader, lambda worker: worker.update())) == [version, version]
        check(reader, version)
        servers = [servers[1], _again(site, servers[0])]
    stop.set()
    watching.result(10)
    assert heard == sorted(set(heard))
    assert heard[-1] == 3


def _again(site: Site, over: Candidate) -> Candidate:
    """Start a server anew at the address of one that is over."""
    over.process.wait(20)
    again = site.made.start("--bind", over.address)
    again.address = over.address
    again.wait_until_it_waits()
    return again


def test_a_server_that_was_stopped_and_replaced_does_no_harm_when_it_wakes(site: Site) -> None:
    trainer = site.replica("trainer", 1, True)
    reader = site.replica("reader", 1, False)
    done(all_of(trainer, lambda worker: worker.publish(1)))
    assert done(all_of(reader, lambda worker: worker.replicate())) == [1, 1]
    site.active.signal(signal.SIGSTOP)
    waiting_for_2 = in_background(lambda: reader[0][0].wait(newer_than=1, timeout_s=60))
    back = everybody_is_back(*site.everybody)
    os.rename(site.made.lock, site.made.folder / "old.lock")
    site.waiting.wait_until_it_serves()
    eventually(back, "everybody found the new one", 30)
    publish(trainer, 2, seed=2)
    assert waiting_for_2.result(30) == 2
    before = [worker.counters.reconnects for worker in site.everybody]
    site.active.signal(signal.SIGCONT)
    assert site.active.code() == 1
    assert "this one stops" in site.active.log
    assert done(all_of(reader, lambda worker: worker.update())) == [2, 2]
    check(reader, 2)
    assert [worker.counters.reconnects for worker in site.everybody] == before, "nobody went back to it"
    assert reader[0][0].wait(newer_than=1, timeout_s=5) == 2


def test_who_connects_during_the_outage_waits_for_the_standby(site: Site) -> None:
    site.active.signal(signal.SIGSTOP)
    started = time.monotonic()
    connecting = in_background(lambda: connect(site.addresses, model="m", settings={"connect_timeout_s": 30}))
    time.sleep(1.0)
    assert not connecting.done()
    site.active.signal(signal.SIGKILL)
    with connecting.result(30) as worker:
        assert worker._session.address == site.waiting.address
    assert time.monotonic() - started < 30
