"""Readers in another floating dtype than the version's: refused unless they asked, else equal to torch's own cast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core import Box, ConfigError, CorruptTransfer, LayoutMismatch, Worker
from tensorhub_core.client.piecewise_round import connect_piecewise
from tests.processes.client.conftest import LOSSY, QUICK, Hub
from tests.processes.client.samples import Tensors, noise
from tests.processes.client.test_shards import together

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 384, 700
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SEGMENTS = {"segment_bytes": 64 << 10}
Replica = list[tuple[Worker, Tensors]]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Tensors of random bits in a floating dtype, NaNs left out, beside some that no cast touches."""
    rng = np.random.default_rng(seed)
    made = {name: noise(rng, shape, dtype) for name, shape in (("up", (ROWS, COLUMNS)), ("norm", (9,)), ("one", ()))}
    made = {name: torch.where(tensor.isnan(), 1.5, tensor) for name, tensor in made.items()}
    return made | {"steps": noise(rng, (5,), torch.int64), "scale": noise(rng, (8,), torch.float8_e4m3fn)}


def converted(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) if tensor.dtype in FLOATS else tensor.clone() for name, tensor in tensors.items()}


def replica(here: Hub, name: str, tensors: Tensors, count: int = 1, **more: Any) -> Replica:
    """Connect a replica whose `count` shards hold `up` by rows and the rest whole."""
    made, settings = [], {**SEGMENTS, **more.pop("settings", {})}
    for shard in range(count):
        rows = ROWS // count
        mine = {each: tensor.clone() for each, tensor in tensors.items()}
        mine["up"] = tensors["up"][shard * rows : (shard + 1) * rows].clone()
        box = Box("up", (shard * rows, 0), (rows, COLUMNS), (0, 0))
        worker = here.worker(name, shard=shard, num_shards=count, settings=settings, **more)
        worker.register(mine, {"up": [box]} if count > 1 else None)
        made.append((worker, mine))
    return made


def publish(made: Replica, version: int = 1) -> None:
    for worker, _ in made:
        worker.publish(version)


def withdraw(made: Replica) -> None:
    for worker, _ in made:
        worker.unpublish()


def blank(dtype: torch.dtype) -> Tensors:
    return {
        name: torch.full_like(tensor.view(torch.uint8) if tensor.shape else tensor, 7).view(tensor.dtype)
        for name, tensor in converted(weights(0), dtype).items()
    }


def fill(made: Replica, method: str = "replicate") -> set[str]:
    """Fill a replica; return from whom."""
    sources: set[str] = set()
    progress = lambda done, total, source: sources.add(source)  # noqa: E731
    together([lambda w=worker: getattr(w, method)(timeout_s=60, progress=progress) for worker, _ in made])  # type: ignore[misc]
    return sources


def holds(made: Replica, right: Tensors) -> bool:
    rows = ROWS // len(made)
    for shard, (_, tensors) in enumerate(made):
        for name, tensor in right.items():
            want = tensor[shard * rows : (shard + 1) * rows] if name == "up" else tensor
            got = tensors[name]
            same = got.reshape(-1).view(torch.uint8), want.contiguous().reshape(-1).view(torch.uint8)
            if got.dtype != want.dtype or not torch.equal(*same):
                return False
    return True


def digests(made: Replica) -> list[bytes | None]:
    return [worker.digest for worker, _ in made]


def test_it_is_refused_before_a_byte_unless_it_was_asked_for(here: Hub) -> None:
    publish(replica(here, "trainer", weights(1), 2))
    right = converted(weights(1), torch.bfloat16)
    for cast in (False, "fp16"):
        ((worker, tensors),) = reader = replica(here, f"no {cast}", blank(torch.bfloat16), cast=cast)
        with pytest.raises(LayoutMismatch, match="cast") as refused:
            worker.replicate(timeout_s=30)
        names = [line.split(":")[0] for line in refused.value.differences]
        assert names == [f"dtype of '{name}'" for name in ("norm", "one", "up")], "all of them, nothing else"
        assert holds(reader, blank(torch.bfloat16))
        assert worker.version is None
        assert tensors["up"].dtype == torch.bfloat16
    for number, cast in enumerate((True, "bf16", "bfloat16")):
        reader = replica(here, f"yes {number}", blank(torch.bfloat16), cast=cast)
        fill(reader)
        assert holds(reader, right)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_floating_dtype_becomes_any_other_as_torch_casts_it(
    here: Hub, source: torch.dtype, dtype: torch.dtype
) -> None:
    truth = weights(3, source)
    publish(replica(here, "trainer", truth, 2))
    reader = replica(here, "reader", blank(dtype), 4, cast=True)
    fill(reader)
    assert holds(reader, converted(truth, dtype))


def test_the_first_converts_and_those_behind_it_copy(here: Hub) -> None:
    trainer = replica(here, "trainer", weights(1), 4)
    first, second = (replica(here, name, blank(torch.bfloat16), 2, cast=True) for name in ("first", "second"))
    publish(trainer)
    for version in (1, 2):
        right = converted(weights(version), torch.bfloat16)
        if version == 2:
            withdraw(trainer)
            for shard, (_, tensors) in enumerate(trainer):
                rows = slice(shard * ROWS // 4, (shard + 1) * ROWS // 4)
                for name, tensor in weights(2).items():
                    tensors[name].copy_(tensor[rows] if name == "up" else tensor)
            publish(trainer, 2)
        assert fill(first, "update") == {"trainer"}
        before = sum(worker.counters.bytes_read for worker, _ in second)
        assert fill(second, "update") == {"first"}
        own = sum(tensor.nbytes for _, tensors in second for tensor in tensors.values())
        assert sum(worker.counters.bytes_read for worker, _ in second) - before == own
        assert holds(first, right)
        assert holds(second, right)
        assert digests(first) == digests(second)


def test_who_converts_gets_the_same_bits_from_anyone_and_reads_who_published_first(here: Hub) -> None:
    trainer = replica(here, "trainer", weights(1), 4)
    publish(trainer)
    engine, exact = replica(here, "engine", blank(torch.bfloat16), 2, cast=True), weights(1)
    fill(engine)
    for name, dtype, cast in (("uncast", torch.float32, False), ("half", torch.float16, True)):
        for count in (1, 2):
            reader = replica(here, f"{name} {count}", blank(dtype), count, cast=cast)
            assert not fill(reader) & {"engine"}, "those would be rounded"
            assert holds(reader, converted(exact, dtype))
    one = replica(here, "one", blank(torch.bfloat16), 1, cast=True)
    assert fill(one) == {"trainer"}
    assert holds(one, converted(exact, torch.bfloat16))


@pytest.mark.parametrize("model", [LOSSY], indirect=True)
def test_what_was_converted_serves_its_own_dtype_but_is_not_converted_again(here: Hub) -> None:
    trainer = replica(here, "trainer", weights(1), 4)
    publish(trainer)
    engine = replica(here, "engine", blank(torch.bfloat16), 2, cast=True)
    fill(engine)
    withdraw(trainer)
    other = replica(here, "other", blank(torch.bfloat16), 4)
    assert fill(other) == {"engine"}
    assert holds(other, converted(weights(1), torch.bfloat16))
    for method in ("replicate", "stage"):
        ((worker, _),) = reader = replica(here, f"wide {method}", blank(torch.float32), cast=True)
        with pytest.raises(LayoutMismatch, match="no number is converted twice"):
            getattr(worker, method)(timeout_s=30)
        assert holds(reader, blank(torch.float32))


def test_a_staged_version_is_converted_when_it_comes(here: Hub) -> None:
    publish(replica(here, "trainer", weights(1), 2))
    ((worker, _),) = reader = replica(here, "reader", blank(torch.bfloat16), cast=True)
    with worker.stage(timeout_s=30) as staged:
        assert holds(reader, blank(torch.bfloat16))
        staged.install(timeout_s=30)
    assert holds(reader, converted(weights(1), torch.bfloat16))
    wide = replica(here, "wide", blank(torch.float32), 4, cast=True)
    assert fill(wide) == {"trainer"}, "what was installed is still what was converted"


def test_strided_memory_is_filled_too(here: Hub) -> None:
    publish(replica(here, "trainer", weights(1)))
    tensors = blank(torch.bfloat16) | {"up": torch.zeros(COLUMNS, ROWS, dtype=torch.bfloat16).T}
    worker = here.worker("reader", cast=True)
    worker.register(tensors)
    worker.replicate(timeout_s=30)
    assert holds([(worker, tensors)], converted(weights(1), torch.bfloat16))


def test_two_publishers_who_rounded_differently_are_noticed(here: Hub) -> None:
    """One holds float32, the other bfloat16 that is not what float32 becomes: readers of one layout would differ."""
    truth = weights(1)
    trainer = replica(here, "trainer", truth, 4)
    publish(trainer)
    first = replica(here, "first", blank(torch.bfloat16), 2, cast=True)
    fill(first)
    withdraw(first)
    truncated = converted(truth, torch.bfloat16)
    truncated["up"] = (truth["up"].view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    publish(replica(here, "truncating", truncated, 3))
    withdraw(trainer)
    second = replica(here, "second", blank(torch.bfloat16), 2, cast=True)
    with pytest.raises(CorruptTransfer, match="first manifest"):
        fill(second)


def test_nans_become_one_nan_wherever_they_are_converted(here: Hub) -> None:
    rng = np.random.default_rng(4)
    bits = rng.integers(0x7F800001, 0x80000000, ROWS * COLUMNS).astype(np.uint32)
    truth = weights(1) | {"up": torch.from_numpy(bits.view(np.float32)).reshape(ROWS, COLUMNS)}
    publish(replica(here, "trainer", truth, 4))
    for count in (1, 2, 3):
        reader = replica(here, f"reader {count}", blank(torch.bfloat16), count, cast=True)
        fill(reader)
        assert all((tensors["up"].view(torch.int16) == 0x7FC0).all() for _, tensors in reader)


@pytest.mark.parametrize("cast", ["int8", "float8_e4m3fn", "", 16])
def test_other_dtypes_cannot_be_asked_for(here: Hub, cast: Any) -> None:
    with pytest.raises(ConfigError, match="bf16"):
        here.worker("reader", cast=cast)


def test_a_version_that_passes_through_is_converted_piece_by_piece(here: Hub) -> None:
    truth = weights(1)
    publish(replica(here, "trainer", truth, 2))
    right = converted(truth, torch.bfloat16)
    wanted = [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in right.items()]
    settings = {**QUICK, **SEGMENTS, "staging_bytes": 200_000}
    for cast in (False, True):
        got: dict[str, bytes] = {}
        with connect_piecewise(
            here.server.address, model=here.model, replica=f"pieces {cast}", cast=cast, settings=settings
        ) as worker:
            take = lambda tensors, got=got: got.update((t.name, t.buffer.tobytes()) for t in tensors)  # noqa: E731
            if not cast:
                with pytest.raises(LayoutMismatch, match="cast"), worker.passing(wanted, timeout_s=30) as passing:
                    passing.begins()
                continue
            with worker.passing(wanted, timeout_s=30) as passing:
                assert passing.begins()
                passing.use(take)
        assert got == {name: bytes(each.reshape(-1).view(torch.uint8).tolist()) for name, each in right.items()}
