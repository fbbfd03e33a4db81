"""`tensorhub seed` follows a model, holds its newest versions, and takes over from those who leave."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub_core import Worker, connect
from tensorhub_core.errors import ConfigError, VersionUnavailable
from tensorhub_core.layout.types import Box
from tests.processes.cli.commands import HUB_OPTIONS, Running, running, tensorhub
from tests.processes.client.samples import blank, make, same

pytestmark = pytest.mark.timeout(120)
SETTINGS = {"handover_s": 30, "close_timeout_s": 2, "call_timeout_s": 40}
MIB = 8
BYTES = sum(tensor.nbytes for tensor in make("plain", 1, mib=MIB).values())


class Seed:
    """A running `tensorhub seed`; `holds(version)` waits for its line."""

    def __init__(self, command: Running, model: str) -> None:
        assert command.first_line == f"seeding {model}"
        self.command, self.model = command, model
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        stdout = self.command.process.stdout
        assert stdout is not None
        with contextlib.suppress(ValueError):
            for line in stdout:
                self._lines.put(line.decode().rstrip())

    def holds(self, version: int) -> None:
        assert self._lines.get(timeout=40) == f"holds {self.model} {version}"

    def end(self, number: int = signal.SIGTERM) -> int:
        self.command.process.send_signal(number)
        return self.command.process.wait(40)


@pytest.fixture
def seeds(hub: str, model: str, tmp_path: Path) -> Iterator[Callable[..., Seed]]:
    with contextlib.ExitStack() as stack:

        def start(*options: object, log: str = "seed-log", server: str = hub) -> Seed:
            arguments = ("--model", model, *options, "--server", server)
            return Seed(stack.enter_context(running("seed", *arguments, log=tmp_path / log)), model)

        yield start


def worker(hub: str, model: str, replica: str, **more: Any) -> Worker:
    settings = {**SETTINGS, **more.pop("settings", {})}
    return connect(hub, model=model, replica=replica, settings=settings, **more)


def check(hub: str, model: str, version: int, seed: int | None = None) -> str:
    """Fetch a version as a newcomer, compare every byte, and return from whom it came."""
    sources: list[str] = []
    with worker(hub, model, f"new {time.monotonic_ns()}", spot=True) as new:
        tensors = blank(make("plain", 1, mib=MIB))
        new.register(tensors)
        assert new.replicate(version, publish=False, progress=lambda done, total, s: sources.append(s)) == version
    assert same(tensors, make("plain", version if seed is None else seed, mib=MIB))
    return sources[-1]


def step(trainer: Worker, version: int) -> None:
    trainer.unpublish()
    trainer.register(make("plain", version, mib=MIB))
    trainer.publish(version)


def test_a_keeper_takes_over_when_the_trainer_ends(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    keeper = seeds("--keep", "--replica", "keeper")
    with worker(hub, model, "trainer", settings={"offload_limit_bytes": 0}) as trainer:
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)  # without a keeper there would be no room
        keeper.holds(1)
        for version in (2, 3):
            step(trainer, version)
            keeper.holds(version)
        step(trainer, 4)
    keeper.holds(4)
    assert check(hub, model, 4).startswith("keeper-")
    assert keeper.end() == 0
    with pytest.raises(VersionUnavailable):
        check(hub, model, 4)


def test_only_a_keeper_takes_the_place_of_room(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    seeds("--replica", "seed")
    with worker(hub, model, "trainer", settings={"offload_limit_bytes": 0}) as trainer:
        trainer.register(make("plain", 1, mib=MIB))
        with pytest.raises(ConfigError, match="offload_limit_bytes"):
            trainer.publish(1)


def test_the_old_version_serves_until_the_new_one_is_whole(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    keeper = seeds("--keep", "--replica", "keeper", "--versions", "2")
    with worker(hub, model, "trainer") as trainer:
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)
        keeper.holds(1)
        for version in (2, 3, 4):
            step(trainer, version)
            keeper.holds(version)
            assert check(hub, model, version - 1).startswith("keeper-")
        with pytest.raises(VersionUnavailable):
            check(hub, model, 1)
        status = json.loads(tensorhub("status", model, "--json", "--server", hub).out)
        held = {r["replica"]: r["version"] for r in status["models"][0]["replicas"]}
        assert held == {"trainer": 4, "keeper-a": 4, "keeper-b": 2, "keeper-c": 3}


def test_every_shard_as_its_holder_has_it(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    """Two shards in a processed form, which only an equal layout can read; then one shard, plain."""
    keeper = seeds("--keep", "--replica", "keeper")

    def shards(replica: str, **more: Any) -> list[Worker]:
        return [worker(hub, model, replica, shard=i, num_shards=2, **more) for i in range(2)]

    trainers = shards("trainer")
    for number, trainer in enumerate(trainers):
        trainer.register(make("tied", 20 + number), tag="packed")
        trainer.publish(1)
    keeper.holds(1)
    together = [threading.Thread(target=trainer.close) for trainer in trainers]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(30)
    readers = shards("reader", spot=True)
    blanks = [blank(make("tied", 0)) for _ in readers]
    for reader, tensors in zip(readers, blanks, strict=True):
        reader.register(tensors, tag="packed")
    reading = [threading.Thread(target=reader.replicate) for reader in readers]
    for thread in reading:
        thread.start()
    for thread in reading:
        thread.join(40)
    assert [reader.version for reader in readers] == [1, 1]
    assert all(same(tensors, make("tied", 20 + number)) for number, tensors in enumerate(blanks))
    for reader in readers:
        reader.close()
    with worker(hub, model, "trainer") as again:
        again.register(make("plain", 2, mib=MIB))
        again.publish(2)
        keeper.holds(2)
    assert check(hub, model, 2).startswith("keeper-")


def test_boxes_of_a_resharded_trainer_come_over(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    keeper = seeds("--keep", "--replica", "keeper")
    whole = make("plain", 5, mib=MIB)["layers.0.weight"]
    rows, columns = whole.shape
    parts = [worker(hub, model, "trainer", shard=i, num_shards=2) for i in range(2)]
    for number, part in enumerate(parts):
        place = Box("w", (number * rows // 2, 0), (rows // 2, columns), (0, 0))
        part.register({"part": whole[number * rows // 2 :][: rows // 2].contiguous()}, {"part": [place]})
        part.publish(5)
    keeper.holds(5)
    closing = [threading.Thread(target=part.close) for part in parts]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(30)
    with worker(hub, model, "reader", spot=True) as reader:
        tensors = blank({"w": whole})
        reader.register(tensors)
        assert reader.replicate() == 5
    assert same(tensors, {"w": whole})


def test_a_trainer_that_is_killed_and_comes_back_is_followed(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    keeper = seeds("--keep", "--replica", "keeper")
    for version in (1, 2):
        trainer = worker(hub, model, "trainer")
        trainer.register(make("plain", version, mib=MIB))
        trainer.publish(version)
        keeper.holds(version)
        trainer._session.close()  # gone without a word
        trainer.close()
    assert check(hub, model, 2).startswith("keeper-")


def test_a_hub_restart_is_survived(model: str, tmp_path: Path, seeds: Callable[..., Seed]) -> None:
    with contextlib.ExitStack() as stack:
        bind, log = "tcp://127.0.0.1:0", tmp_path / "hub-log"
        first = stack.enter_context(running("serve", "--bind", bind, *HUB_OPTIONS, log=log))
        address = first.first_line.removeprefix("listening on ")
        keeper = seeds("--keep", "--replica", "keeper", server=address)
        trainer = worker(address, model, "trainer")
        stack.callback(trainer.close)
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)
        keeper.holds(1)
        first.kill()
        stack.enter_context(running("serve", "--bind", address, *HUB_OPTIONS, log=tmp_path / "hub-log-2"))
        step(trainer, 2)
        keeper.holds(2)
        trainer.close()
        assert check(address, model, 2).startswith("keeper-")


def test_a_publisher_on_the_command_line_hands_over(
    hub: str, model: str, seeds: Callable[..., Seed], tmp_path: Path
) -> None:
    from tests.unit.checkpoint.samples import save

    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", make("plain", 3, mib=MIB))
    arguments = ("--model", model, "--version", 3, "--server", hub, "--replica", "publisher")
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log") as publisher:
        keeper = seeds("--keep", "--replica", "keeper")
        ended = publisher.end()
        assert (ended.code, ended.err) == (0, "")
    keeper.holds(3)
    assert check(hub, model, 3).startswith("keeper-")


def test_a_publisher_nobody_takes_over_from_says_so(hub: str, model: str, tmp_path: Path) -> None:
    from tests.unit.checkpoint.samples import save

    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", make("plain", 3))
    arguments = ("--model", model, "--version", 3, "--server", hub)
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log") as publisher:
        ended = publisher.end()
    assert ended.code == 0
    assert "Warning: the last reliable holder of version 3" in ended.err


def test_a_publisher_that_waits_for_somebody_ends_at_a_second_signal(hub: str, model: str, tmp_path: Path) -> None:
    from tests.unit.checkpoint.samples import save

    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", make("plain", 3))
    arguments = ("--model", model, "--version", 3, "--server", hub)
    with worker(hub, model, "idle") as idle:
        idle.register(make("plain", 1))
        with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log") as publisher:
            publisher.process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            assert publisher.process.poll() is None
            publisher.process.send_signal(signal.SIGTERM)
            publisher.process.wait(6)


def test_a_second_signal_ends_it_at_once(hub: str, model: str, seeds: Callable[..., Seed]) -> None:
    keeper = seeds("--keep", "--replica", "keeper")
    with worker(hub, model, "trainer") as trainer, worker(hub, model, "idle") as idle:
        idle.register(make("plain", 1))  # somebody who could take over, but does not
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)
        keeper.holds(1)
        trainer.close()
        process = keeper.command.process
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert process.poll() is None, "it waits for somebody who takes it over"
        os.kill(process.pid, signal.SIGTERM)
        process.wait(5)


def test_an_agent_of_a_zone_serves_the_old_version_while_it_brings_the_new_one(
    model: str, seeds: Callable[..., Seed], tmp_path: Path
) -> None:
    """Engines of its zone hear of a version when the agent has it, in another layout, too, and read none but its."""
    options = ("--lease-s", "5", "--heartbeat-s", "1", "--grace-s", "5")
    with running("serve", "--bind", "tcp://127.0.0.1:0", *options, log=tmp_path / "hub-log") as command:
        address = command.first_line.removeprefix("listening on ")
        agent = seeds("--zone", "east", "--replica", "agent", "--memory", f"{3 * BYTES}B", server=address)
        with worker(address, model, "trainer", zone="west") as trainer:
            trainer.register(make("plain", 1, mib=MIB))
            trainer.publish(1)
            agent.holds(1)
            sources: set[str] = set()
            like = [{}, {"segment_bytes": 64 << 10}]
            engines = [worker(address, model, f"engine {k}", zone="east", settings=how) for k, how in enumerate(like)]
            memory = [blank(make("plain", 1, mib=MIB)) for _ in engines]
            for engine, tensors in zip(engines, memory, strict=True):
                engine.register(tensors)
            for version in (1, 2, 3):
                if version > 1:
                    step(trainer, version)
                    assert [engine.wait(version - 1, timeout_s=40) for engine in engines] == [version] * 2
                    agent.holds(version)
                for engine, tensors in zip(engines, memory, strict=True):
                    assert engine.update(progress=lambda done, total, source: sources.add(source)) == version
                    assert same(tensors, make("plain", version, mib=MIB))
            assert sources <= {"agent-a", "agent-b", "engine 0", "engine 1"}
            assert {"agent-a", "agent-b"} <= sources
            for engine in engines:
                engine.close()
        assert agent.end() == 0


def test_two_versions_that_do_not_fit_end_it_with_an_error(hub: str, model: str, tmp_path: Path) -> None:
    with worker(hub, model, "trainer") as trainer:
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)
        ended = tensorhub("seed", "--model", model, "--zone", "east", "--memory", "1M", "--server", hub)
    assert f"2 buffers {2 * BYTES:,}" in ended.error
    assert "--memory allows 1,000,000" in ended.error


def test_wrong_usage() -> None:
    wrong = [("--versions", "0"), ("--keep", "x"), ("--keep", "--spot"), ("--memory", "much"), ("--memory", "-1")]
    for arguments in (("seed",), *(("seed", "--model", "m", *options) for options in wrong)):
        ended = tensorhub(*arguments)
        assert (ended.code, "Usage: " in ended.err) == (2, True)
