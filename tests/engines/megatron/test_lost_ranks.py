"""Ranks that lose one of them do not wait for it for ever, say which it is, and publish nothing without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorhub_core import connect, serve

from . import lost_ranks
from .ranks import Ranks

PATIENCE_S = 2.0


@pytest.fixture
def address() -> Iterator[str]:
    with serve() as server:
        yield server.address


@pytest.mark.timeout(60)
def test_a_rank_that_stands_still_is_named_in_bounded_time(address: str, tmp_path: Path) -> None:
    told = [tmp_path / f"told.{rank}" for rank in (0, 2)]
    with Ranks(3) as job, ThreadPoolExecutor(1) as pool:
        job.run(lost_ranks.begin, address, PATIENCE_S)
        stepping = pool.submit(job.run, lost_ranks.step_without, 1, str(tmp_path / "told"))
        deadline = time.monotonic() + 20
        while not all(path.exists() for path in told):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.end(1)
        with pytest.raises(AssertionError, match="rank 1: it ended"):
            stepping.result(20)
    for path in told:
        said = path.read_text()
        assert said.startswith("StateError: taking back version 0: rank 1 of the trainer is gone or does not come"), (
            said
        )


@pytest.mark.timeout(60)
def test_a_step_that_raises_on_one_rank_is_not_made_up_for_by_its_next_one(
    ranks: Callable[[int], Ranks], address: str
) -> None:
    job = ranks(3)
    job.run(lost_ranks.begin, address, 30.0)
    for said, version in job.run(lost_ranks.raise_on_one, 1):
        assert said.startswith("StateError: "), said
        assert "not at the same step: some have begun 1, others 2" in said
        assert version == 0
    with connect(address, model="m", replica="watcher") as watcher:
        assert all(info.version == 0 for info in watcher.versions())
    job.run(lost_ranks.end)


@pytest.mark.timeout(60)
def test_what_ranks_were_not_given_alike_is_refused_by_name(ranks: Callable[[int], Ranks], address: str) -> None:
    for said in ranks(2).run(lost_ranks.attach_unlike, address):
        assert said.startswith(
            "ConfigError: the ranks of the trainer were given different values of stream, every: "
        ), said
    with connect(address, model="m", replica="watcher") as watcher:
        assert watcher.versions() == []
