"""A rank's side: it never raises, says what is bounded, and every rank's word comes to all, in order."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from tensorhub_sglang import rank

pytestmark = pytest.mark.timeout(30)


class Batch(list[Any]):
    """A batch of requests."""

    def is_empty(self) -> bool:
        return not self


class Scheduler:
    """A scheduler with requests in each of the places that keep its cache from being flushed."""

    def __init__(self) -> None:
        self.running_batch, self.last_batch, self.chunked_req = Batch(), None, None
        self.waiting_queue: list[str] = []
        self.compiling: list[str] = []
        self.compiled: list[str] = []
        self.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: bool(self.compiling), get_ready_grammar_requests=self._ready
        )
        self.weight_version = "1"

    def _ready(self) -> list[str]:
        ready = [request for request in self.compiling if request in self.compiled]
        self.compiling = [request for request in self.compiling if request not in ready]
        return ready

    def _add_request_to_queue(self, request: str) -> None:
        self.waiting_queue.append(request)

    def flush_cache(self, empty_cache: bool) -> bool:
        return not self.compiling and self.running_batch.is_empty() and not self.chunked_req

    def record_weight_version_change(self, new_version: str) -> None:
        self.weight_version = new_version


def test_a_call_reaches_the_shard_and_a_failure_is_an_answer() -> None:
    assert rank.carry_out(Scheduler(), "describe", "{}", None, 1)["code"] == "state_error"
    assert "--weight-source" in rank.carry_out(Scheduler(), "update", '{"version": 2}', None, 1)["message"]
    for arguments in ("not json", "[]", '{"unknown": 1}'):
        for call in ("describe", "flush", "set_version"):
            reply = rank.carry_out(Scheduler(), call, arguments, object(), 1)
            assert (reply["ok"], reply["shard"]) == (call == "flush" and arguments == "{}", 1)


def test_a_flush_says_whether_waiting_helps() -> None:
    scheduler = Scheduler()
    assert rank.carry_out(scheduler, "flush", "{}", None, 0)["ok"]
    scheduler.compiling = ["a", "b"]
    scheduler.compiled = ["a"]
    reply = rank.carry_out(scheduler, "flush", "{}", None, 0)
    assert (reply["ok"], reply["busy"], scheduler.waiting_queue) == (False, False, ["a"])
    scheduler.compiled = ["b"]
    assert rank.carry_out(scheduler, "flush", "{}", None, 0)["ok"]
    assert scheduler.waiting_queue == ["a", "b"]
    scheduler.running_batch.append("c")
    reply = rank.carry_out(scheduler, "flush", "{}", None, 0)
    assert (reply["ok"], reply["busy"], reply["message"]) == (False, True, "requests are running")


def test_a_version_is_named() -> None:
    scheduler = Scheduler()
    assert rank.carry_out(scheduler, "set_version", '{"version": "7"}', None, 0)["ok"]
    assert scheduler.weight_version == "7"


def test_what_a_rank_says_is_bounded() -> None:
    long = {"shard": 3, "ok": False, "code": "layout_mismatch", "message": "x" * 10**6}
    said = json.loads(rank.to_text(long, 3))
    assert (said["shard"], said["code"], len(said["message"])) == (3, "layout_mismatch", 8 * 1024 + 4)
    for unsayable in ({"shard": 3, "what": object()}, {"shard": 3, "what": ["x" * 10**6]}):
        said = json.loads(rank.to_text(unsayable, 3))
        assert (said["shard"], said["ok"]) == (3, False)


def test_all_ranks_hear_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3
    barrier, said = threading.Barrier(count), {}

    def all_gather(rows: list[torch.Tensor], own: torch.Tensor, group: int) -> None:
        said[group] = own.clone()
        barrier.wait(10)
        for index, row in enumerate(rows):
            row.copy_(said[index])
        barrier.wait(10)

    monkeypatch.setattr(distributed, "all_gather", all_gather)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: count)
    texts = ['{"of": 0}', '{"of": "é", "more": "than others"}', ""]
    heard: dict[int, list[str]] = {}

    def be(index: int) -> None:
        heard[index] = rank.from_all(texts[index], index)

    threads = [threading.Thread(target=be, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert heard == {index: texts for index in range(count)}
