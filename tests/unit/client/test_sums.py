"""Checksums of segments against one hash call per numpy slice."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from tensorhub_core.client.sums import host_sums, pack_sums, segment_sums, unpack_sums
from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Checksum


def table_of(lengths: list[list[int]]) -> SegmentTable:
    """Make a table of storages with segments of the given lengths."""
    storage = [i for i, runs in enumerate(lengths) for _ in runs]
    offsets = [sum(runs[:k]) for runs in lengths for k in range(len(runs))]
    first = np.cumsum([0, *(len(runs) for runs in lengths)])
    return SegmentTable(
        np.array(storage, np.int32),
        np.array(offsets, np.uint64),
        np.array([n for runs in lengths for n in runs], np.uint64),
        first.astype(np.int64),
    )


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths",
    [[[1, 2, 3], [], [7]], [[64 << 10] * 20, [1], [1 << 20] * 30], [[5] * 1000], [[]], [[70 << 20]]],
    ids=["small", "mixed", "many", "none", "one"],
)
@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
def test_sums_are_the_hashes_of_the_slices(lengths: list[list[int]], threads: int, checksum: Checksum) -> None:
    rng = np.random.default_rng(7)
    data = [rng.integers(0, 256, sum(runs), np.uint8) for runs in lengths]
    table = table_of(lengths)
    addresses = np.array([each.ctypes.data for each in data], np.uint64)
    sums = segment_sums(table, addresses, checksum, threads)
    digest = xxhash.xxh3_64_intdigest if checksum == "xxh3" else weighted_sum
    expected = [
        digest(data[s][o : o + n].tobytes())
        for s, o, n in zip(table.storage, table.offset_bytes.tolist(), table.length_bytes.tolist(), strict=True)
    ]
    assert sums.tolist() == expected


@pytest.mark.parametrize("without", ["the symbol", "the library", "the right function"])
def test_xxh3_is_the_same_without_the_library_s_own_function(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)
    runs = [data.ctypes.data, data.ctypes.data + 5], [300_000, 99]
    expected = [xxhash.xxh3_64_intdigest(data.data), xxhash.xxh3_64_intdigest(data[5:104].data)]
    assert host_sums("xxh3")(*runs).tolist() == expected
    if without == "the library":
        monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    else:
        wrong = SimpleNamespace(XXH3_64bits=ctypes.CDLL(None).strlen) if "right" in without else SimpleNamespace()
        monkeypatch.setattr(ctypes, "CDLL", lambda path: wrong)
    assert host_sums("xxh3")(*runs).tolist() == expected


def test_a_blob_of_sums_survives_packing_and_wrong_lengths_are_refused() -> None:
    table = table_of([[1, 2], [3]])
    sums = np.array([0, 2**64 - 1, 12345], np.uint64)
    assert pack_sums(sums)[8:16] == b"\xff" * 8
    assert unpack_sums(pack_sums(sums), table).tolist() == sums.tolist()
    for wrong in (b"", bytes(16), bytes(23), bytes(32)):
        with pytest.raises(CorruptTransfer, match="3 checksums"):
            unpack_sums(wrong, table)
