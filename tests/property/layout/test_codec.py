"""A layout has one encoding, whatever the order of registration; everything else is refused with a typed error."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub_core.errors import LayoutMismatch, RegistrationError
from tensorhub_core.layout.canonical import build_layout, decode_layout, encode_layout
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Box, Layout, TensorSpec
from tests.property.layout import strategies as draw_layout

NAMES = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=20)
EDGES = (-(2**63), -1, 0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
DAMAGES = 8
"""How often each drawn layout is damaged: drawing one takes far longer than decoding it."""


def hostile(chance: random.Random) -> Any:
    """Return something that is not expected there."""
    number = chance.choice((*EDGES, chance.randrange(-(2**63), 2**64), chance.randrange(20)))
    size = chance.randrange(4)
    return chance.choice(
        (
            number,
            number,
            None,
            chance.choice((0.0, -1.5, float("nan"), float("inf"))),
            "".join(chr(chance.choice((0, 65, 0x1F600, chance.randrange(0xD800)))) for _ in range(size)),
            chance.randbytes(size),
            [chance.choice((-3, 0, 2, chance.choice(EDGES), chance.randrange(2**64))) for _ in range(size)],
        )
    )


def damage(tree: Any, chance: random.Random) -> None:
    """Change one node of nested lists."""
    path = chance.choice(leaves(tree)[1:])
    node = tree
    for at in path[:-1]:
        node = node[at]
    match chance.choice(("put", "drop", "twice")):
        case "put":
            node[path[-1]] = hostile(chance)
        case "drop":
            del node[path[-1]]
        case "twice":
            node.insert(path[-1], node[path[-1]])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8), st.randoms())
def test_order_of_registration_does_not_matter(shapes: dict[str, tuple[int, ...]], chance: random.Random) -> None:
    specs = [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault(shape, []).append(name)
    groups = [names for names in alike.values() if chance.random() < 0.5]
    blob = encode_layout(build_layout(specs, groups, shard=1, num_shards=3, tag="x"))
    chance.shuffle(specs)
    chance.shuffle(groups)
    for names in groups:
        chance.shuffle(names)
    layout = build_layout(specs, groups, shard=1, num_shards=3, tag="x")
    assert encode_layout(layout) == blob
    assert decode_layout(blob) == layout
    assert {spec.name: spec.shape for spec in layout.tensors} == shapes


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_boxed_layouts_round_trip(data: st.DataObject) -> None:
    model = data.draw(draw_layout.logicals())
    for layout in data.draw(draw_layout.sources(model, whole=False)):
        assert decode_layout(encode_layout(layout)) == layout


def leaves(node: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the paths of all nodes of nested lists."""
    inner = [leaves(each, (*path, at)) for at, each in enumerate(node)] if isinstance(node, list) else []
    return [path, *(each for group in inner for each in group)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**64 - 1))
def test_damaged_layouts_are_refused_or_valid(data: st.DataObject, seed: int) -> None:
    model = data.draw(draw_layout.logicals())
    encoded = encode_layout(data.draw(draw_layout.sources(model, whole=False))[0])
    chance = random.Random(seed)
    for _ in range(DAMAGES):
        tree = msgspec.msgpack.decode(encoded)
        for _ in range(chance.randint(1, 2)):
            damage(tree, chance)
        check_decoded(msgspec.msgpack.encode(tree))


def check_decoded(blob: bytes) -> None:
    """Check that bytes are refused, or are the one encoding of a valid layout."""
    try:
        decoded = decode_layout(blob)
    except LayoutMismatch:
        return
    assert encode_layout(decoded) == blob
    rebuilt = build_layout(
        decoded.tensors,
        [[decoded.tensors[index].name for index in group] for group in decoded.storages],
        shard=decoded.shard,
        num_shards=decoded.num_shards,
        tag=decoded.tag,
        segment_bytes=decoded.segment_bytes,
    )
    assert rebuilt == decoded
    assert len(segment_table(decoded)) <= 1 << 22


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(LayoutMismatch):
        decode_layout(noise)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.lists(
            st.tuples(*[st.tuples(st.integers(0, 7), st.integers(0, 3)) for _ in range(rank)]), min_size=1, max_size=14
        )
    )
)
def test_overlapping_boxes_are_refused(cuts: list[tuple[tuple[int, int], ...]]) -> None:
    rank = len(cuts[0])
    counts = np.zeros((10,) * rank, int)
    boxes = []
    for cut in cuts:
        start, shape = (tuple(each) for each in zip(*cut, strict=True))
        counts[tuple(slice(a, a + n) for a, n in cut)] += 1
        boxes.append(Box("x", (0,) * rank, shape, start))
    spec = TensorSpec("t", "uint8", (10,) * rank, tuple(boxes))
    if counts.max() > 1:
        with pytest.raises(RegistrationError, match="overlap"):
            build_layout([spec], shard=0, num_shards=1)
    else:
        assert build_layout([spec], shard=0, num_shards=1) == Layout(0, 1, (spec,), ((0,),))
