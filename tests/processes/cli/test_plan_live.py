"""`plan` and `layout` look up what replicas hold just now, and ask for no byte of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tensorhub_core import connect
from tensorhub_core.cli.layouts import load_layout
from tensorhub_core.client.worker import Worker
from tensorhub_core.layout.types import Box
from tests.processes.cli.commands import tensorhub

ROWS, COLUMNS = 256, 4096


@contextlib.contextmanager
def trainer(hub: str, model: str) -> Iterator[list[Worker]]:
    """Publish version 1 as two shards of rows."""
    half = ROWS // 2
    with contextlib.ExitStack() as stack:
        workers = []
        for shard in range(2):
            options = {"model": model, "replica": "trainer", "shard": shard, "num_shards": 2}
            worker = stack.enter_context(connect(hub, settings={"handover_s": 0}, **options))
            box = Box("w", (shard * half, 0), (half, COLUMNS), (0, 0))
            worker.register({"part": np.ones((half, COLUMNS), np.float16)}, boxes={"part": [box]})
            workers.append(worker)
        threads = [threading.Thread(target=worker.publish, args=(1,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        yield workers


def test_a_plan_between_live_replicas(hub: str, model: str, tmp_path: Path) -> None:
    with trainer(hub, model), connect(hub, model=model, replica="engine", settings={"handover_s": 0}) as engine:
        engine.register({"w": np.zeros((ROWS, COLUMNS), np.float16)})
        early = tensorhub("plan", "--from", f"{model}:trainer", "--to", f"{model}:engine", "--server", hub).error
        assert "engine holds no version" in early
        engine.replicate()
        names = ("--from", f"{model}@1:trainer", "--to", f"{model}:engine", "--server", hub)
        found = json.loads(tensorhub("plan", *names, "--json").out)
        saved = tensorhub("layout", f"{model}:trainer", "--out", tmp_path / "trainer", "--server", hub)
        assert saved.code == 0, saved.err
    (shard,) = found["shards"]
    assert shard["needed_bytes"] == shard["read_bytes"] == 2 * ROWS * COLUMNS
    assert [each["shard"] for each in shard["sources"]] == [0, 1]
    first, second = (load_layout(file) for file in sorted((tmp_path / "trainer").iterdir()))
    assert (first.shard, second.shard, first.num_shards) == (0, 1, 2)
    assert second.tensors[0].boxes == (Box("w", (ROWS // 2, 0), (ROWS // 2, COLUMNS), (0, 0)),)
    # What was saved serves when nobody is there any more.
    again = json.loads(tensorhub("plan", "--from", tmp_path / "trainer", "--to", tmp_path / "trainer", "--json").out)
    assert [each["raw"] for each in again["shards"]] == [True, True]


def test_names_that_nobody_has(hub: str, model: str) -> None:
    with trainer(hub, model):
        unknown = tensorhub("layout", f"{model}:engine", "--server", hub).error
        assert "no replica 'engine'" in unknown
        assert "trainer" in unknown
        assert "version 7" in tensorhub("layout", f"{model}@7:trainer", "--server", hub, timeout_s=30).error
        assert "knows no model" in tensorhub("layout", "nobody:trainer", "--server", hub).error


def test_a_model_without_a_replica_is_told_which_there_are(hub: str, model: str) -> None:
    with trainer(hub, model):
        for text in (model, f"{model}@1", f"{model}:", f"{model}@1:"):
            said = tensorhub("layout", text, "--server", hub).error
            assert f"name one of its replicas, {model}" in said, said
            assert ":trainer" in said, said
        said = tensorhub("plan", "--from", model, "--to", f"{model}:trainer", "--server", hub).error
        assert f"name one of its replicas, {model}:trainer" in said
        assert "there is no file or folder nobody, and it is no MODEL:REPLICA" in tensorhub("layout", "nobody").error
