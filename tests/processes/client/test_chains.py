"""Engines of one layout that start together behind a trainer of another one: a chain, whatever happens to its first."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core import Worker, connect, serve
from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.messages import DescribeVersion, GetStatus, StatusReply, VersionLayouts
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import Tensors, blank, make, same
from tests.processes.client.test_faults import MIB, NIXL, Brake, in_background
from tests.processes.client.test_restart import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
TRAINER = {"segment_bytes": 1 << 20, "window": 2, "stall_s": 2.0}
ENGINE = {**TRAINER, "segment_bytes": 256 << 10}
"""Segments of another size are another layout: every one of the trainer's fills several of an engine's."""
each_way = pytest.mark.parametrize("way", ["auto", "tcp", NIXL])
Engine = tuple[Worker, Tensors]


class Traffic:
    """How many bytes each source gave one reader, by its progress."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._done = 0

    def __call__(self, done: int, total: int, source: str) -> None:
        self.bytes[source] += max(0, done - self._done)
        self._done = done


def engine(here: Hub, replica: str, way: str) -> Engine:
    return here.reader("plain", replica, mib=MIB, settings={**ENGINE, "transport": way})


def right(engines: list[Engine]) -> bool:
    expected = make("plain", 1, mib=MIB)
    return all(same(tensors, expected) for _, tensors in engines) and len({w.digest for w, _ in engines}) == 1


def until_filled(address: str, model: str, *replicas: str) -> None:
    """Wait until all of these have verified something."""

    def begun() -> bool:
        reply = ask(address, GetStatus(model))
        assert isinstance(reply, StatusReply)
        found = {r.replica: r.shards[0].done_bytes for m in reply.models for r in m.replicas}
        return all(found.get(replica) for replica in replicas)

    until(begun)


def size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def held_first(here: Hub, actor: Actor, way: str) -> tuple[str, Any]:
    """Start an engine in another process that reads half of the version and then holds; return it, and its call."""
    handle = here.remote(actor, "first", settings={**ENGINE, "transport": way})
    actor.do("register", handle, sample="plain", blank=True, mib=MIB)
    call = actor.begin("call", handle, method="replicate", hold=True, timeout_s=60)
    while True:
        _, done, total, _ = actor.events.get(timeout=60)
        if done >= total // 2:
            return handle, call


@each_way
def test_engines_that_start_together_cost_the_trainer_about_one_model(here: Hub, other: Actor, way: str) -> None:
    here.publisher(other, "plain", mib=MIB, settings={**TRAINER, "transport": way})
    engines = [engine(here, f"engine {number}", way) for number in range(4)]
    traffic = [Traffic() for _ in engines]
    with ThreadPoolExecutor(len(engines)) as pool:
        calls = [pool.submit(w.replicate, progress=t) for (w, _), t in zip(engines, traffic, strict=True)]
        assert [call.result(60) for call in calls] == [1] * 4
    assert right(engines)
    total = size(engines[0][1])
    sent = sum((each.bytes for each in traffic), Counter[str]())
    assert total <= sent["trainer"] < 1.2 * total, sent
    assert sum(sent.values()) == sum(w.counters.bytes_read for w, _ in engines) == 4 * total
    assert len(sent) > 2, "a chain, and no star around the first"


@pytest.mark.parametrize(
    ("how", "way"),
    [
        (signal.SIGKILL, "auto"),
        (signal.SIGKILL, "tcp"),
        pytest.param(signal.SIGKILL, *NIXL.values, marks=NIXL.marks),
        (signal.SIGSTOP, "tcp"),
    ],
)
def test_a_first_one_that_is_gone_is_replaced(here: Hub, other: Actor, how: signal.Signals, way: str) -> None:
    here.publisher(other, "plain", mib=MIB, settings={**TRAINER, "transport": way})
    with Actor() as actor:
        held_first(here, actor, way)
        engines = [engine(here, name, way) for name in ("second", "third")]
        traffic = [Traffic() for _ in engines]
        calls = [
            in_background(lambda w=w, t=t: w.replicate(progress=t, timeout_s=60))  # type: ignore[misc]
            for (w, _), t in zip(engines, traffic, strict=True)
        ]
        until_filled(here.server.address, here.model, "second", "third")
        actor.signal(how)
        assert [call.result(60) for call in calls] == [1, 1]
        actor.kill()
    assert right(engines)
    sent = (traffic[0].bytes + traffic[1].bytes)["trainer"]
    assert 0 < sent < 1.5 * size(engines[0][1]), "one of them reshards, the other follows it"


@each_way
def test_a_bit_that_changed_at_the_first_one_is_noticed(here: Hub, other: Actor, way: str) -> None:
    here.publisher(other, "plain", mib=MIB, settings={**TRAINER, "transport": way})
    with Actor() as actor:
        handle, call = held_first(here, actor, way)
        actor.do("flip", handle, name="layers.0.weight")
        second, traffic = engine(here, "second", way), Traffic()
        assert second[0].replicate(progress=traffic, timeout_s=60) == 1
        assert right([second])
        assert traffic.bytes["trainer"]
        assert second[0].counters.rereads == second[0].counters.failovers == 1
        actor.do("go", handle)
        assert "has changed since it was verified" in str(call.exception(60))


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_a_chain_outlives_the_server(way: str) -> None:
    server = serve(lease_s=1.0, heartbeat_s=0.1)
    address, more = server.address, {"close_timeout_s": 2.0, "transport": way}
    workers = {
        name: connect(address, model="m", replica=name, settings={**(TRAINER if name == "trainer" else ENGINE), **more})
        for name in ("trainer", "first", "second")
    }
    try:
        workers["trainer"].register(make("plain", 1, mib=MIB))
        workers["trainer"].publish(1)
        engines = [(workers[name], blank(make("plain", 1, mib=MIB))) for name in ("first", "second")]
        for worker, tensors in engines:
            worker.register(tensors)
        brake, traffic = Brake(), Traffic()
        calls = [in_background(lambda: engines[0][0].replicate(timeout_s=60, progress=brake))]
        assert brake.half.wait(60)
        calls.append(in_background(lambda: engines[1][0].replicate(timeout_s=60, progress=traffic)))
        until_filled(address, "m", "second")
        server.close()
        server = serve(address, lease_s=1.0, heartbeat_s=0.1)
        until(lambda: all(worker.counters.reconnects for worker in workers.values()))
        brake.go.set()
        assert [call.result(60) for call in calls] == [1, 1]
        assert right(engines)
        workers["trainer"].unpublish(timeout_s=20)
    finally:
        for worker in workers.values():
            worker.close()
        server.close()


def test_who_follows_one_that_converts_knows_that_what_it_gets_is_converted(here: Hub) -> None:
    rng = np.random.default_rng(1)
    values = {f"t{n}": rng.standard_normal((512, 1024)).astype(np.float32) for n in range(4)}
    trainer = here.worker("trainer", settings=TRAINER)
    trainer.register(values)
    trainer.publish(1)
    engines = []
    for name in ("first", "second"):
        worker = here.worker(name, settings=ENGINE, cast=True)
        tensors = {name: torch.zeros(array.shape, dtype=torch.bfloat16) for name, array in values.items()}
        worker.register(tensors)
        engines.append((worker, tensors))
    brake, traffic = Brake(), Traffic()
    calls = [in_background(lambda: engines[0][0].replicate(timeout_s=60, progress=brake))]
    assert brake.half.wait(60)
    calls.append(in_background(lambda: engines[1][0].replicate(timeout_s=60, progress=traffic)))
    until_filled(here.server.address, here.model, "second")
    brake.go.set()
    assert [call.result(60) for call in calls] == [1, 1]
    assert traffic.bytes["trainer"] == 0
    for _, tensors in engines:
        for name, array in values.items():
            assert torch.equal(tensors[name], torch.from_numpy(array).to(torch.bfloat16))
    reply = ask(here.server.address, DescribeVersion(1), model=here.model)
    assert isinstance(reply, VersionLayouts)
    assert {layout.replica: layout.converted for layout in reply.layouts}["second"]
