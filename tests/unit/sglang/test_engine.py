"""An SGLang engine as a swap uses it: calls and answers, every way to stop, callers that pause it themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_core.errors import DeadlineExceeded, StateError
from tensorhub_sglang import server
from tensorhub_sglang.server import SGLangEngine
from tests.unit.sglang.manager import FakeManager, Received, soon, wrapped

pytestmark = pytest.mark.timeout(30)
OK = [{"ok": True}, {"ok": True}]
BUSY = [{"ok": True}, {"ok": False, "busy": True, "message": "requests are running"}]
PREPARING = [{"ok": False, "busy": False, "message": "requests are being prepared"}] * 2


def run(script: Callable[[FakeManager, SGLangEngine], Awaitable[None]], timeout_s: float = 5.0) -> FakeManager:
    """Let `script(fake, engine)` run on a fresh engine."""
    fakes = []

    async def main() -> None:
        fakes.append(FakeManager())
        engine = SGLangEngine(wrapped(fakes[0]), timeout_s, lambda *call: call, Received)
        await script(fakes[0], engine)

    asyncio.run(main())
    return fakes[0]


def flushing(*replies: Any) -> Callable[[str, dict[str, Any]], Any]:
    """Answer the flushes in turn, the last one for ever."""
    left = list(replies)
    return lambda call, arguments: OK if call != "flush" else left.pop(0) if len(left) > 1 else left[0]


# --- calls ----------------------------------------------------------------------------------------------------------


def test_every_ranks_answer_comes_in_order() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = lambda call, arguments: [{"shard": 0}, {"shard": 1}]
        assert await engine.ranks("update", version=3, timeout_s=1.0) == [{"shard": 0}, {"shard": 1}]

    assert run(script).log == [("update", {"version": 3, "timeout_s": 1.0})]


def test_an_answer_that_comes_too_late_is_not_the_next_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LATE_S", 0.0)

    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = lambda call, arguments: None
        with pytest.raises(DeadlineExceeded, match="'update'"):
            await engine.ranks("update", timeout_s=0.05)
        second = asyncio.create_task(engine.ranks("process"))
        await soon(lambda: len(fake.numbers) == 2)
        fake.take(Received(number=fake.numbers[0], replies=['{"of": "update"}']))
        fake.take(Received(number=fake.numbers[1], replies=['{"of": "process"}']))
        assert await second == [{"of": "process"}]

    run(script)


def test_an_engine_that_is_busy_with_a_swap_does_not_pass_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEARD_S", 0.02)
    monkeypatch.setattr(server, "_LATE_S", 0.0)

    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = lambda call, arguments: None
        for call in ("describe", "update"):
            with pytest.raises(DeadlineExceeded):
                await engine.ranks(call, timeout_s=0.1)
            assert bool(fake.last_receive_tstamp) == (call == "update")

    run(script)


# --- stopping -------------------------------------------------------------------------------------------------------


def test_wait_lets_requests_finish_and_holds_new_ones() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        end = asyncio.Event()
        tasks = [asyncio.create_task(fake.run_request("old", end))]
        await soon(lambda: "old runs" in fake.log)
        pausing = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(fake.run_request("new", end)))
        await asyncio.sleep(0.05)
        assert (fake.log, pausing.done(), engine.held) == (["old runs"], False, True)
        end.set()
        await pausing
        fake.log.append("weights")
        await engine.resume()
        await asyncio.gather(*tasks)
        assert not engine.held

    # The new request may reach the scheduler before the weights: it is stopped by then.
    log = run(script).log
    assert [step for step in log if step != "new runs"] == ["old runs", "stop retract", "flush", "weights", "go on"]
    assert log.index("stop retract") < log.index("new runs")


def test_a_wait_that_is_given_up_lets_held_requests_go_on() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        end = asyncio.Event()
        old = asyncio.create_task(fake.run_request("old", end))
        await soon(lambda: "old runs" in fake.log)
        pausing = asyncio.create_task(asyncio.wait_for(engine.pause("wait"), 0.1))
        await asyncio.sleep(0.05)
        new = asyncio.create_task(fake.run_request("new", end))
        with pytest.raises(asyncio.TimeoutError):
            await pausing
        await soon(lambda: "new runs" in fake.log)
        assert not engine.held
        end.set()
        await asyncio.gather(old, new)

    assert sorted(run(script).log) == ["go on", "new runs", "old runs"]


def test_abort_ends_requests_also_those_that_come_to_the_scheduler_later() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        first, late = asyncio.Event(), asyncio.Event()
        fake.aborts = [first]
        tasks = [
            asyncio.create_task(fake.run_request("old", first)),
            asyncio.create_task(fake.run_request("late", late)),
        ]
        await soon(lambda: "late runs" in fake.log)
        pausing = asyncio.create_task(engine.pause("abort"))
        await soon(lambda: first.is_set())
        fake.aborts = [late]
        await pausing
        await asyncio.gather(*tasks)

    log = run(script).log
    assert log[2:] == ["abort"] * (len(log) - 4) + ["stop retract", "flush"]
    assert log.count("abort") >= 2


def test_keep_does_not_wait_for_requests() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        async with fake.request():
            await engine.pause("keep")
            assert fake.log == ["r runs", "stop retract", "flush"]
            await engine.resume()

    assert run(script).log[-1] == "go on"


def test_in_place_is_refused_at_once_while_requests_run() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = flushing(BUSY)
        async with fake.request():
            with pytest.raises(StateError, match="in_place"):
                await engine.pause("in_place")
            assert (engine.held, fake.is_pause) == (False, False)

    assert run(script).log == ["r runs", "stop in_place", "flush", "go on"]


@pytest.mark.parametrize("mode", ["wait", "keep", "abort", "in_place"])
def test_a_cache_that_is_not_flushed_on_one_rank_stops_every_mode(mode: Any) -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = flushing(BUSY)
        assert not await engine.reset_caches()
        with pytest.raises(StateError):
            await engine.pause(mode)
        assert (engine.held, fake.is_pause) == (False, False)

    run(script)


def test_requests_that_are_being_prepared_are_waited_for() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = flushing(PREPARING, PREPARING, OK)
        assert await engine.reset_caches()

    assert run(script).log == ["flush"] * 3


def test_no_answer_is_no_flush() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        fake.answers = flushing([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "_FLUSH_S", 0.0)
            assert not await engine.reset_caches()

    run(script)


def test_a_version_is_named_only_if_every_rank_names_it() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.set_version(4)
        assert fake.weight_version == "4"
        fake.answers = lambda call, arguments: BUSY
        with pytest.raises(StateError, match="version 5"):
            await engine.set_version(5)
        assert fake.weight_version == "4"

    assert run(script).log[0] == ("set_version", {"version": "4"})


# --- callers that pause ---------------------------------------------------------------------------------------------


def test_an_engine_that_a_caller_paused_stays_paused() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.callers_pause(SimpleNamespace(mode="retract"))
        await engine.pause("wait")
        await engine.resume()
        assert (engine.held, fake.is_pause) == (False, True)
        await engine.callers_continue(SimpleNamespace(), lambda: True)
        assert not fake.is_pause

    assert run(script).log == ["stop retract", "flush", "go on"]


def test_a_pause_during_a_swap_holds_after_it() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.pause("keep")
        await engine.callers_pause(SimpleNamespace(mode="retract"))
        await engine.resume()
        assert (engine.held, fake.is_pause) == (False, True)

    assert "go on" not in run(script).log


def test_an_order_to_go_on_waits_for_the_swap() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.callers_pause(SimpleNamespace(mode="retract"))
        await engine.pause("keep")
        order = asyncio.create_task(engine.callers_continue(SimpleNamespace(), lambda: True))
        await asyncio.sleep(0.05)
        assert (order.done(), fake.is_pause) == (False, True)
        await engine.resume()
        await order
        assert not fake.is_pause

    assert run(script).log.count("go on") == 1


def test_nobody_lets_an_engine_run_that_holds_no_version() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.pause("keep")
        with pytest.raises(StateError, match="swap to one first"):
            await engine.callers_continue(SimpleNamespace(), lambda: False)
        assert fake.is_pause

    run(script)


def test_nothing_runs_before_the_memory_is_back() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.pause("abort")
        engine.released = frozenset({"kv_cache", "cuda_graph"})
        await engine.resume()
        assert (engine.held, fake.is_pause) == (True, True)
        engine.released = frozenset({"cuda_graph"})
        await engine.resume()
        assert (engine.held, fake.is_pause) == (False, False)

    run(script)


def test_requests_that_would_wait_for_ever_are_ended_with_the_engine() -> None:
    async def script(fake: FakeManager, engine: SGLangEngine) -> None:
        await engine.pause("keep")
        ended = asyncio.Event()
        fake.aborts = [ended]
        held = asyncio.create_task(fake.run_request("held", ended))
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        await engine.end_held()
        await held

    assert "go on" not in run(script).log
