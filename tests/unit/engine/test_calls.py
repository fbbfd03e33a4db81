"""What a rank answers to its front: a report whatever happens, in plain values."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from tensorhub_core.engine.calls import CALLS, answer, report_of
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.steps import ShardReport
from tensorhub_core.errors import VersionUnavailable

REPORT = ShardReport(1, version=4, epoch=2, served=4, published=True, source="trainer", digest="ab", staged=(2, 5))


class Shard:
    """A rank that answers every call with one report, or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.heard = error, cast("list[Any]", [])
        self.worker = type("Worker", (), {"model": "policy", "replica": "engine"})

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> ShardReport | None:
            self.heard.append((name, *arguments))
            if self.error is not None:
                raise self.error
            return REPORT

        return call


def ask(shard: Shard | None, call: str, **arguments: Any) -> dict[str, Any]:
    return answer(cast("EngineShard | None", shard), 3, call, arguments)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_is_answered_in_plain_values_that_give_the_report_back(call: str) -> None:
    arguments = {"version": 4} if call in ("update", "stage") else {}
    reply = json.loads(json.dumps(ask(Shard(), call, **arguments)))
    assert report_of(reply) == REPORT
    assert ("replica" in reply) == (call == "describe")
    assert ("running" in reply) == (call == "staged")


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_call_that_raises_is_answered_with_the_reason(call: str) -> None:
    arguments = {"version": 4} if call in ("update", "stage") else {}
    report = report_of(ask(Shard(VersionUnavailable("nobody")), call, **arguments))
    assert (report.shard, report.ok, report.code, report.message) == (
        3,
        False,
        "version_unavailable",
        "nobody",
    )


@pytest.mark.parametrize(
    ("shard", "call", "arguments", "code", "text"),
    [
        (None, "update", {"version": 1}, "state_error", "--weight-source tensorhub"),
        (Shard(), "format", {}, "config_error", "unknown call 'format'"),
        (Shard(), "update", {}, "error", "version"),
        (Shard(), "update", {"version": 1, "colour": 2}, "error", "colour"),
        (Shard(RuntimeError()), "process", {}, "error", "RuntimeError"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_a_report(
    shard: Shard | None, call: str, arguments: dict[str, Any], code: str, text: str
) -> None:
    report = report_of(ask(shard, call, **arguments))
    assert (report.ok, report.code, report.version) == (False, code, None)
    assert text in report.message


def test_arguments_reach_the_rank() -> None:
    shard = Shard()
    ask(shard, "update", version=7, timeout_s=2.5)
    ask(shard, "stage", version="latest")
    ask(shard, "withdraw", timeout_s=1.0)
    assert shard.heard == [("update", 7, 2.5), ("stage", "latest", None), ("withdraw", 1.0)]
