"""Engines that fill from peers and swap in place answer like fresh ones from the checkpoint: tokens and logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from tensorhub_core import Server
from tensorhub_core.layout.segments import segment_table

from ..models import Checkpoints, training
from ..trainers import sharded_training
from .engines import answers, following, fresh, shard_of

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["dense-tied", "dense-untied", "moe", "mla"])
def test_first_fill_peer_fill_and_swap_equal_a_fresh_engine(kind: str, checkpoints: Checkpoints, hub: Server) -> None:
    one, two, bare = checkpoints(kind, 1), checkpoints(kind, 2), checkpoints.bare(kind)
    expected = {version: fresh(checkpoint) for version, checkpoint in ((1, one), (2, two))}
    assert expected[1] != expected[2], "the test needs weights that answer differently"
    with training(hub.address, one) as trainer, following(bare, hub.address) as (llm, engine):
        assert answers(llm) == expected[1], "a disk-less start"
        trainer.worker.unpublish()
        with following(bare, hub.address, staged=True) as (other, second):
            assert second.status.shards[0].source == engine.status.replica, "only the first engine holds version 1"
            assert second.status.shards[0].digest == engine.status.shards[0].digest
            assert second.status.replica != engine.status.replica
            assert answers(other) == expected[1], "an engine-to-engine fill"
            trainer.publish(two, 2)
            for which, swapped in ((llm, engine), (other, second)):
                outcome = swapped.swap()
                assert (outcome.version, outcome.changed, outcome.code) == (2, True, "")
                assert answers(which) == expected[2], "a swap in place, with the long prompt cached before"
                assert which.get_weight_version() == "2"
            times = [swapped.status.last_swap for swapped in (engine, second)]
            assert [time is not None and time.stage_s is not None for time in times] == [False, True]


def test_engines_behind_a_trainer_of_another_layout(checkpoints: Checkpoints, hub: Server) -> None:
    """The first one takes what it needs from every rank of the trainer, the second one copies what the first holds."""
    kind = "dense-untied"
    one, two, bare = checkpoints(kind, 1), checkpoints(kind, 2), checkpoints.bare(kind)
    expected = [fresh(one), fresh(two)]
    with (
        sharded_training(hub.address, one, "megatron") as publish,
        following(bare, hub.address) as (llm, engine),
        following(bare, hub.address) as (other, second),
    ):
        assert [answers(each) for each in (llm, other)] == expected[:1] * 2
        publish(two, 2)
        for swapped, source in ((engine, "trainer"), (second, engine.status.replica)):
            assert swapped.swap().version == 2
            assert swapped.status.shards[0].source == source
        assert [answers(each) for each in (llm, other)] == expected[1:] * 2
        assert engine.status.shards[0].digest == second.status.shards[0].digest


def test_the_digest_is_of_the_bytes_in_memory(checkpoints: Checkpoints, hub: Server) -> None:
    kind = "dense-untied"
    with (
        training(hub.address, checkpoints(kind, 1)) as trainer,
        following(checkpoints.bare(kind), hub.address) as (llm, engine),
    ):
        digests = [engine.status.shards[0].digest]
        assert digests[0] == _digest(shard_of(llm))
        trainer.publish(checkpoints(kind, 2), 2)
        engine.swap()
        digests.append(engine.status.shards[0].digest)
        assert digests[1] == _digest(shard_of(llm))
        assert digests[0] != digests[1]
        assert engine.status.shards[0].total_bytes == sum(t.nbytes for t in shard_of(llm).fit.tensors.values())


def _digest(shard) -> str:  # type: ignore[no-untyped-def]
    """Hash the registered tensors' bytes, segment by segment, without the product's own hashing."""
    import torch

    layout = shard.worker._resources.memory.layout
    table = segment_table(layout)
    flat = [
        shard.fit.tensors[layout.tensors[group[0]].name].detach().reshape(-1).view(torch.uint8).numpy()
        for group in layout.storages
    ]
    runs = zip(table.storage.tolist(), table.offset_bytes.tolist(), table.length_bytes.tolist(), strict=True)
    sums = [xxhash.xxh3_64_intdigest(flat[at][start : start + size].tobytes()) for at, start, size in runs]
    return xxhash.xxh3_128_hexdigest(np.array(sums, "<u8").tobytes())
