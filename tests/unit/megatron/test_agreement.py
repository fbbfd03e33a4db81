"""How long the ranks of a trainer wait for each other."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tensorhub_core.errors import StateError
from tensorhub_megatron.agreement import RanksAgree, late_s


@pytest.mark.parametrize(("given", "late"), [(timedelta(seconds=7), 7.0), (None, 1800.0)])
def test_ranks_may_come_as_late_as_the_job_lets_them(tmp_path: Path, given: timedelta | None, late: float) -> None:
    where = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=given)
    try:
        assert late_s() == late
    finally:
        dist.destroy_process_group()


def test_ranks_that_do_not_say_that_they_lost_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job larger than one number of the store can hold."""
    monkeypatch.setattr("tensorhub_megatron.agreement._ROLL_CALL_S", 0.2)
    monkeypatch.setattr("tensorhub_megatron.agreement._STORE_S", 60.0)  # a file, on a machine that may be busy
    store = dist.FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    ranks = []
    for rank in range(130):
        agreement = object.__new__(RanksAgree)
        agreement.rank, agreement.size, agreement._name, agreement._calls = rank, 130, "group", 3
        ranks.append(agreement)
    for rank in set(range(130)) - {0, 61, 129}:
        store.add(f"tensorhub/group/3/{rank // 60 * 60}", 1 << rank % 60)
    error = ranks[0]._lost("publishing version 4", RuntimeError("timed out"))
    assert isinstance(error, StateError)
    assert str(error) == (
        "publishing version 4: ranks 61, 129 of the trainer are gone or do not come: restart the job (timed out)"
    )
    assert "rank 129 of the trainer is gone or does not come" in str(ranks[61]._lost("", RuntimeError()))
    assert "connections between the ranks" in str(ranks[129]._lost("", RuntimeError()))


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("_ROLL_CALL_S", "_STORE_S"):
        monkeypatch.setattr(f"tensorhub_megatron.agreement.{bound}", 0.05)
    agreement = object.__new__(RanksAgree)
    monkeypatch.setattr(RanksAgree, "_absent", lambda _: time.sleep(1))
    assert "whoever keeps the job's store" in str(agreement._lost("", RuntimeError()))
