"""Names, dtypes, ties and limits of layouts, and blobs that nobody honest would send."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch, RegistrationError
from tensorhub_core.layout import checks
from tensorhub_core.layout.canonical import build_layout, decode_layout, digest_of, dtype_bytes, encode_layout
from tensorhub_core.layout.types import Box, Layout, TensorSpec

NAMES = ["a/b c\nd", "ключ.重み.🙂", "x" * 4096, "\x00", "tab\t", "ß", "ss", "é", "e\u0301"]


def spec(name: str, *shape: int, dtype: str = "float32", boxes: tuple[Box, ...] | None = None) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name, dtype, shape, boxes)


def one(*specs: TensorSpec, aliases: tuple[tuple[str, ...], ...] = (), **changes: int) -> Layout:
    """Build the layout of a single shard."""
    return build_layout(specs, aliases, shard=0, num_shards=1, **changes)


def blob(*tensors: object, storages: object = None, head: tuple[int, int] = (0, 1), segment: object = 64) -> bytes:
    """Encode what a peer may claim to be a layout."""
    groups = [[number] for number in range(len(tensors))] if storages is None else storages
    return msgspec.msgpack.encode([*head, tensors, groups, "", segment, "xxh3"])


def test_any_unicode_name_survives_the_round_trip() -> None:
    layout = one(*(spec(name, 2) for name in NAMES))
    assert sorted(each.name for each in decode_layout(encode_layout(layout)).tensors) == sorted(NAMES)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([spec("a", 1), spec("", 1)], "tensor 1 has an empty name"),
        ([spec("a", 1), spec("b", 1), spec("a", 2)], "'a' is registered twice.*position 2"),
        ([spec("\ud800", 1)], "tensor 0 has a name that is not unicode text"),
        ([spec("n" * (1 << 17), 1)], "name of 131,072 bytes"),
        ([spec("a", 1, dtype="float31")], "'a': dtype 'float31' cannot be transferred"),
        ([spec("a", 1, dtype="qint8")], "'a': dtype 'qint8' cannot be transferred"),
        ([spec("a", 3, -1)], "'a' has a negative size"),
        ([spec("a", 1 << 40, 1 << 40)], "'a' of shape .* is larger than any memory"),
        ([spec("a", 0, 1 << 62)], "'a' of shape .* is larger than any memory"),
        ([spec("a", *([1] * 33))], "'a' has 33 axes"),
        ([spec("a", 1 << 30, 1 << 20)], "more than 4,194,304 segments"),
        ([spec("a", 4, boxes=(Box("", (0,), (1,), (0,)),))], "box 0 of 'a' has an empty name"),
        ([spec("a", 4, boxes=(Box("x", (0,), (2,), (3,)),))], "box 0 of 'a' does not lie inside"),
        ([spec("a", 4, boxes=(Box("x", (-1,), (2,), (0,)),))], "box 0 of 'a' has a negative number"),
        ([spec("a", 4, boxes=(Box("x", (1 << 62,), (2,), (0,)),))], "box 0 of 'a' is larger than any memory"),
        ([spec("a", 4, boxes=(Box("x", (0, 0), (2,), (0,)),))], "box 0 of 'a' has offset"),
        ([spec("a", 4, boxes=(Box("x", (0, 0), (2, 2), (0,)),))], "box 0 of 'a' does not lie inside"),
        ([spec("a", 4, boxes=(Box("x", (0,), (2,), (0, 0)),))], "box 0 of 'a' has offset"),
    ],
)
def test_tensors_that_cannot_be_described_are_named(specs: list[TensorSpec], text: str) -> None:
    with pytest.raises(RegistrationError, match=f"(?s){text}"):
        one(*specs)


def test_a_large_shard_needs_larger_segments() -> None:
    big = spec("a", 1 << 30, 1 << 10, dtype="uint8")
    assert one(big, segment_bytes=1 << 20).tensors == (big,)
    with pytest.raises(RegistrationError, match="use larger segments"):
        one(big, segment_bytes=1 << 10)


def test_dtype_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    sizes = {str(kind)[6:]: kind.itemsize for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    quantised = {name for name in sizes if name.startswith(("qint", "quint"))}
    assert {name: dtype_bytes(name) for name in sizes.keys() - quantised} == {
        name: size for name, size in sizes.items() if name not in quantised
    }


def test_ties_are_merged_and_ordered() -> None:
    specs = [spec(name, 2) for name in "edcba"]
    layout = one(*specs, aliases=(("d", "b"), ("e",), ("a", "d"), ("b", "b")))
    assert [each.name for each in layout.tensors] == list("abcde")
    assert layout.storages == ((0, 1, 3), (2,), (4,))


@pytest.mark.parametrize(
    ("aliases", "text"),
    [
        ((("a", "zz"),), "alias 'zz' is not among"),
        ((("a", "b"),), "'a' .* and 'b' .* share bytes but differ"),
        ((("a", "c"),), "'a' .* and 'c' .* share bytes but differ"),
    ],
)
def test_impossible_ties_are_refused(aliases: tuple[tuple[str, ...], ...], text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        one(spec("a", 2, 3), spec("b", 3, 2), spec("c", 2, 3, dtype="int32"), aliases=aliases)


def test_sizes_of_other_integer_types_are_accepted() -> None:
    box = Box("x", (np.int64(0),), (np.int64(2),), (np.int64(0),))  # type: ignore[arg-type]
    layout = one(TensorSpec("a", "int8", (np.int64(4),), (box,)))  # type: ignore[arg-type]
    assert decode_layout(encode_layout(layout)) == layout
    with pytest.raises(RegistrationError, match="'a'"):
        one(TensorSpec("a", "int8", (2.0,)))  # type: ignore[arg-type]


def test_every_part_of_a_layout_changes_its_fingerprint() -> None:
    base = spec("a", 4, 4)
    variants = [
        one(base),
        one(spec("b", 4, 4)),
        one(spec("a", 4, 4, dtype="int32")),
        one(spec("a", 16)),
        one(spec("a", 4, 4, boxes=(Box("a", (0, 0), (4, 4), (0, 0)),))),
        one(base, spec("b", 4, 4)),
        one(base, spec("b", 4, 4), aliases=(("a", "b"),)),
        one(base, segment_bytes=32),
        build_layout([base], shard=0, num_shards=2),
        build_layout([base], shard=1, num_shards=2),
        build_layout([base], shard=0, num_shards=1, tag="packed"),
        build_layout([base], shard=0, num_shards=1, checksum="weighted"),
    ]
    digests = {digest_of(encode_layout(layout)) for layout in variants}
    assert len(digests) == len(variants)
    assert all(len(digest) == 16 for digest in digests)


GOOD = ["a", "float32", [4], None]


@pytest.mark.parametrize(
    "data",
    [
        blob(["b", "int8", [1], None], ["a", "int8", [1], None]),
        blob(["a", "int8", [1], None], ["a", "int8", [1], None]),
        blob(["", "int8", [1], None]),
        blob(["a", "int8", [-1], None]),
        blob(["a", "int8", [2**64 - 1], None]),
        blob(["a", "int8", [2**63 - 1] * 30, None]),
        blob(["a", "int8", [1] * 4000, None]),
        blob(["a", "object", [1], None]),
        blob(GOOD, head=(1, 1)),
        blob(GOOD, head=(-1, 1)),
        blob(GOOD, head=(0, 0)),
        blob(GOOD, head=(0, 2**40)),
        blob(GOOD, segment=0),
        blob(GOOD, segment=1),
        blob(GOOD, segment=2**60),
        blob(GOOD, storages=[]),
        blob(GOOD, storages=[[]]),
        blob(GOOD, storages=[[1]]),
        blob(GOOD, storages=[[-1]]),
        blob(GOOD, storages=[[0], [0]]),
        blob(GOOD, storages=[[0, 0]]),
        blob(GOOD, ["b", "float32", [4], None], storages=[[1], [0]]),
        blob(GOOD, ["b", "float32", [4], None], storages=[[1, 0]]),
        blob(GOOD, ["b", "float32", [5], None], storages=[[0, 1]]),
        blob(["a", "int8", [4], [["x", [0], [3], [0]], ["y", [0], [2], [2]]]]),
        blob(["a", "int8", [4], [["x", [0], [2**64 - 1], [1]]]]),
        blob(["a", "int8", [4], [["x", [], [], [4]]]]),
        blob(["a", "int8", [], [["x", [], [], []], ["y", [], [], []]]]),
        blob(*[[f"{n:09}", "int8", [], [["x", [], [], []]] * 9] for n in range(2)]),
        b"",
        b"\xc0",
        b"\x80\x04\x95cos\nsystem\n",
        b"\x91" * 100_000,
        blob(GOOD) + b"\x00",
        blob(GOOD).replace(struct.pack("B", 64), b"\xcd\x00\x40"),
        msgspec.msgpack.encode([0, 1, [GOOD], [[0]], "", 64, "crc"]),
        msgspec.msgpack.encode([0, 1, [GOOD], [[0]], "", 64, "xxh3", "more"]),
        msgspec.msgpack.encode([0, 1, [GOOD], [[0]], "", 64]),
        msgspec.msgpack.encode([0, 1, [GOOD], [[0]]]),
    ],
)
def test_hostile_blobs_are_refused(data: bytes) -> None:
    assert decode_layout(blob(GOOD)).tensors[0].name == "a"
    with pytest.raises(LayoutMismatch):
        decode_layout(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x96\x00\x01\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x96\x00\x01\x91\x94\xdb\xff\xff\xff\xffname",
        blob(["a", "uint8", [2**50], None], segment=16),
        blob(*[[f"{n:04}", "uint8", [2**40], None] for n in range(1000)], segment=2**20),
    ],
)
def test_claimed_sizes_take_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LayoutMismatch):
            decode_layout(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_too_many_boxes_to_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Box("x", (n, 0), (1, 64), (n, 0)) for n in range(64))
    cells = tuple(Box("x", (n, m), (1, 1), (n, m)) for n in range(64) for m in range(64))
    monkeypatch.setattr(checks, "MAX_PAIRS", 1000)
    assert one(spec("a", 64, 64, boxes=rows)).tensors[0].boxes == rows
    with pytest.raises(RegistrationError, match="too many small boxes"):
        one(spec("a", 64, 64, boxes=cells))
    monkeypatch.setattr(checks, "MAX_BOXES", 100)
    with pytest.raises(RegistrationError, match="more than 100 boxes"):
        one(spec("a", 64, 64, boxes=rows), spec("b", 64, 64, boxes=rows))


def test_a_layout_too_large_for_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorhub_core.layout import canonical

    layout = one(*(spec(f"{n:0200}", 1) for n in range(10)))
    data = encode_layout(layout)
    monkeypatch.setattr(canonical, "MAX_LAYOUT_BYTES", 2000)
    with pytest.raises(RegistrationError, match="10 tensors takes"):
        encode_layout(layout)
    with pytest.raises(LayoutMismatch, match="over the limit"):
        decode_layout(data)
