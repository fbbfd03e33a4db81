"""An engine's front over ranks that are made up, with a real hub beside it: steps, answers, sleep, following."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorhub_core import Worker, connect, serve
from tensorhub_core.engine.calls import RankReply
from tensorhub_core.engine.config import weight_source_config
from tensorhub_core.engine.front import EngineFront, answer_update, answer_version
from tensorhub_core.engine.steps import ShardReport, SwapMode
from tensorhub_core.errors import StateError
from tensorhub_core.server.serving import Server

pytestmark = pytest.mark.timeout(60)
LOG = logging.getLogger("tests.front")


class Ranks:
    """Two ranks that take every version at once, and what an engine does around them."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.reports = [ShardReport(k, version=1, epoch=1, served=1, published=True, digest="d") for k in (0, 1)]
        self.refuses: dict[str, Exception] = {}
        self.flushes = True
        self.latest = 1

    async def ranks(self, call: str, **arguments: Any) -> list[RankReply]:
        self.told.append(call)
        if call in self.refuses:
            raise self.refuses[call]
        if call == "update":
            version = self.latest if arguments["version"] == "latest" else arguments["version"]
            self._set(version=version, served=None, published=True, digest=f"of {version}")
        elif call == "process":
            self._set(served=self.reports[0].version)
        elif call == "withdraw":
            self._set(version=None, served=None, published=False, digest="")
        return [{**msgspec.to_builtins(report), "replica": "engine"} for report in self.reports]

    async def pause(self, mode: SwapMode) -> None:
        self.told.append(("pause", mode))
        if "pause" in self.refuses:
            raise self.refuses["pause"]

    async def reset_caches(self) -> bool:
        self.told.append("reset")
        return self.flushes

    async def set_version(self, version: int) -> None:
        self.told.append(("version", version))

    async def resume(self) -> None:
        self.told.append("resume")

    def _set(self, **changes: Any) -> None:
        self.reports = [dataclasses.replace(report, **changes) for report in self.reports]


@pytest.fixture
def hub() -> Iterator[Server]:
    with serve(lease_s=2.0, heartbeat_s=0.2) as server:
        yield server


@pytest.fixture
def trainer(hub: Server) -> Iterator[Worker]:
    with connect(hub.address, model="policy", replica="trainer", settings={"close_timeout_s": 0.2}) as worker:
        worker.register({"w": np.zeros(8, np.float32)})
        worker.publish(1)
        yield worker


def run(hub: Server, ranks: Ranks, script: Any, **config: Any) -> None:
    """Start a front, let `script(front)` run, leave."""

    async def main() -> None:
        given = {"server": hub.address, "follow": False, "timeout_s": 5, **config}
        front = EngineFront(ranks, weight_source_config(given), LOG)
        await front.start()
        ranks.told.clear()
        await script(front)
        await front.leave()

    asyncio.run(main())


def trains(trainer: Worker, ranks: Ranks, version: int) -> None:
    trainer.unpublish()
    trainer.publish(version, fresh=True)
    ranks.latest = version


def test_a_swap_goes_through_its_steps_in_order(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        assert answer_version(front)[1]["version"] == 1
        trains(trainer, ranks, 2)
        status, body = await answer_update(front, {"version": 2, "mode": "keep"})
        assert (status, body["version"], body["state"], body["last_swap"]["mode"]) == (200, 2, "serving", "keep")
        assert [shard["digest"] for shard in body["shards"]] == ["of 2"] * 2

    run(hub, ranks, script)
    steps = [("pause", "keep"), "update", "process", "reset", ("version", 2), "resume"]
    assert ranks.told == [*steps, "leave"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"version": 1.5}, 400, "version must be"),
        ({"versoin": 1}, 400, "versoin"),
        ({"mode": "in_place"}, 400, "mode must be one of wait, keep, abort"),
        ({"version": 9}, 404, "9"),
    ],
)
def test_what_cannot_be_had_stops_nothing(
    hub: Server, trainer: Worker, body: dict[str, Any], status: int, text: str
) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        got, answer = await answer_update(front, body)
        assert (got, answer["state"], answer["version"]) == (status, "serving", 1)
        assert text in answer["error"]

    run(hub, ranks, script)
    assert ranks.told == ["leave"]


def test_caches_that_cannot_be_reset_are_no_success(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        trains(trainer, ranks, 2)
        ranks.flushes = False
        status, answer = await answer_update(front, {})
        assert (status, answer["state"], answer["version"]) == (409, "failed", None)
        assert "cache" in answer["error"]
        ranks.flushes = True
        status, answer = await answer_update(front, {})
        assert (status, answer["state"], answer["version"]) == (200, "serving", 2)

    run(hub, ranks, script)
    assert ranks.told.count("resume") == 1, "nothing ran between the failure and the second swap"


def test_a_mode_that_cannot_be_had_leaves_the_engine_as_it_was(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        trains(trainer, ranks, 2)
        ranks.refuses["pause"] = StateError("3 requests are running")
        outcome = await front.swap("latest", "in_place")
        assert (outcome.ok, outcome.version, outcome.code) == (False, 1, "state_error")
        assert "3 requests are running" in outcome.message
        assert front.status.state == "serving"

    run(hub, ranks, script)
    assert ranks.told == [("pause", "in_place"), "resume", "leave"]


def test_requests_that_do_not_end_in_time_are_a_missed_deadline(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def never(mode: SwapMode) -> None:
        await asyncio.Event().wait()

    ranks.pause = never  # type: ignore[method-assign]

    async def script(front: EngineFront) -> None:
        trains(trainer, ranks, 2)
        status, answer = await answer_update(front, {})
        assert (status, answer["state"], answer["version"]) == (504, "serving", 1)
        assert "did not stop within" in answer["error"]

    run(hub, ranks, script, timeout_s=0.3)
    assert ranks.told == ["resume", "leave"]


def test_an_engine_that_sleeps_holds_and_serves_nothing_until_it_wakes(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        await front.sleep()
        assert ranks.told == [("pause", "abort"), "withdraw"]
        assert (front.status.state, front.status.version) == ("paused", None)
        status, answer = await answer_update(front, {})
        assert (status, answer["state"]) == (409, "paused")
        assert "released" in answer["error"]
        trains(trainer, ranks, 3)
        outcome = await front.wake()
        assert (outcome.version, front.status.state) == (3, "serving")

    run(hub, ranks, script)
    assert ranks.told[2:] == ["update", "process", "reset", ("version", 3), "resume", "leave"]


@pytest.mark.parametrize("how", ["raises", "a rank says no", "no pause"])
def test_memory_is_not_released_while_a_copy_is_out(hub: Server, trainer: Worker, how: str) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        if how == "raises":
            ranks.refuses["withdraw"] = StateError("no answer")
        elif how == "no pause":
            ranks.refuses["pause"] = StateError("no answer")
        else:
            ranks.reports[1] = dataclasses.replace(ranks.reports[1], ok=False, message="a reader does not let go")
        with pytest.raises(StateError):
            await front.sleep()
        ranks.refuses.clear()
        ranks.reports = [dataclasses.replace(report, ok=True, message="") for report in ranks.reports]
        assert (await answer_update(front, {}))[0] == 200, "it can be brought back at once"
        assert (front.status.state, front.status.version) == ("serving", 1)

    run(hub, ranks, script)


def test_swaps_wait_for_each_other_and_a_client_that_hangs_up_does_not_stop_one(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()
    original, gate = ranks.ranks, asyncio.Event()

    async def slowly(call: str, **arguments: Any) -> list[RankReply]:
        if call == "update":
            await gate.wait()
        return await original(call, **arguments)

    ranks.ranks = slowly  # type: ignore[method-assign]

    async def script(front: EngineFront) -> None:
        trains(trainer, ranks, 2)
        first = asyncio.create_task(front.swap(2, "wait"))
        second = asyncio.create_task(front.swap("latest", "abort"))
        await asyncio.sleep(0.05)
        first.cancel()
        gate.set()
        assert (await second).version == 2
        assert front.status.version == 2

    run(hub, ranks, script)
    assert [step for step in ranks.told if isinstance(step, tuple) and step[0] == "pause"] == [("pause", "wait")]


def test_it_follows_by_itself(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        for version in (2, 3):
            await asyncio.to_thread(trains, trainer, ranks, version)
            until = asyncio.get_running_loop().time() + 20
            while front.status.version != version:
                assert asyncio.get_running_loop().time() < until
                await asyncio.sleep(0.02)

    run(hub, ranks, script, follow=True)


def test_it_does_not_try_to_follow_while_it_sleeps(hub: Server, trainer: Worker) -> None:
    ranks = Ranks()

    async def script(front: EngineFront) -> None:
        tried, original = [], front.swap

        async def swap(version: Any, mode: SwapMode) -> Any:
            tried.append(version)
            return await original(version, mode)

        front.swap = swap  # type: ignore[method-assign]
        await front.sleep()
        await asyncio.to_thread(trains, trainer, ranks, 2)
        await asyncio.sleep(0.3)
        assert tried == [], "each try would make the next one later"
        assert (await front.wake()).version == 2
        await asyncio.to_thread(trains, trainer, ranks, 3)
        until = asyncio.get_running_loop().time() + 20
        while front.status.version != 3:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.02)

    run(hub, ranks, script, follow=True)


def test_a_server_without_a_front_says_so() -> None:
    assert answer_version(None)[0] == 409
    waiting: Coroutine[Any, Any, tuple[int, dict[str, Any]]] = answer_update(None, {})
    status, body = asyncio.run(waiting)
    assert status == 409
    assert "--weight-source tensorhub" in body["error"]
