"""Every dtype and shape between torch and numpy, every combination of ties, and what is posted for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tensorhub_core.clock import SystemClock
from tensorhub_core.errors import LayoutMismatch, RegistrationError
from tensorhub_core.transport.base import Batch, PeerId, ReadId
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.registry import make_transport
from tests.processes.client.conftest import Hub

pytestmark = pytest.mark.timeout(90)

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0, 16), (3, 5))
NUMPY = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32")
NUMPY += ("float64", "complex64", "complex128")
TORCH_ONLY = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
TORCH_ONLY += ("float8_e8m0fnu", "float4_e2m1fn_x2", "uint1", "uint2", "uint4", "int4")
Named = dict[str, Any]


class Counting(FaultyTransport):
    """A real transport that counts what is posted on it."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        super().__init__(make_transport("auto"), plan or FaultPlan(), SystemClock())
        self.posts = self.runs = self.posted_bytes = 0

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        self.posts += 1
        self.runs += len(batch.length_bytes)
        self.posted_bytes += int(batch.length_bytes.sum())
        return super().post(peer, batch)


def bits(rng: np.random.Generator, size_bytes: int, dtype: str) -> NDArray[np.uint8]:
    return rng.integers(0, 2 if dtype == "bool" else 256, size_bytes, np.uint8)


def as_torch(flat: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.from_numpy(flat.copy()).view(kind).reshape(shape) if len(flat) else torch.empty(shape, dtype=kind)


def as_numpy(flat: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return flat.copy().view(dtype).reshape(shape)


def raw(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def kinds(names: tuple[str, ...], make: Any, fill: int | None) -> Named:
    """Make a tensor of each dtype and shape: random bits, or `fill` in every byte."""
    rng, made = np.random.default_rng(1), {}
    for dtype in names:
        item = getattr(torch, dtype).itemsize
        for shape in SHAPES:
            flat = bits(rng, item * int(np.prod(shape)), dtype)
            made[f"{dtype} {shape}"] = make(flat if fill is None else np.full_like(flat, fill), dtype, shape)
    return made


@pytest.mark.parametrize(
    ("names", "source", "target"),
    [
        (NUMPY, as_torch, as_numpy),
        (NUMPY, as_numpy, as_torch),
        (NUMPY, as_numpy, as_numpy),
        (tuple(name for name in TORCH_ONLY if hasattr(torch, name)), as_torch, as_torch),
    ],
    ids=["torch to numpy", "numpy to torch", "numpy to numpy", "dtypes of torch alone"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_shape_arrives_bit_by_bit(here: Hub, names: tuple[str, ...], source: Any, target: Any) -> None:
    originals, copies = kinds(names, source, None), kinds(names, target, 0xA5)
    trainer, reader = here.worker("trainer"), here.worker()
    trainer.register(originals)
    trainer.publish(1)
    reader.register(copies)
    assert reader.replicate() == 1
    for name, original in originals.items():
        assert raw(copies[name]) == raw(original), name
        assert tuple(copies[name].shape) == tuple(original.shape), name
    assert reader.counters.bytes_read == sum(len(raw(tensor)) for tensor in originals.values())


def test_nan_payloads_and_negative_zeros_are_kept(here: Hub) -> None:
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    halves = np.array([0x7E01, 0xFE55, 0x7C01, 0x8000], np.uint16)
    original = {"f": patterns.view(np.float32), "h": halves.view(np.float16)}
    copies = {name: np.full(array.nbytes, 0xA5, np.uint8).view(array.dtype) for name, array in original.items()}
    strided = torch.full((6, 2), 1.0)[:, 0]
    trainer, reader = here.worker("trainer"), here.worker()
    trainer.register(original)
    trainer.publish(1)
    reader.register({"f": strided, "h": copies["h"]})
    reader.replicate()
    assert raw(strided) == patterns.tobytes()
    assert raw(copies["h"]) == halves.tobytes()


def test_nothing_is_posted_for_what_is_empty(here: Hub) -> None:
    empty: Named = {"a": np.zeros((0, 16), np.float32), "b": torch.empty(3, 0, 2), "c": np.zeros((0,), np.int8)}
    trainer = here.worker("trainer")
    trainer.register(empty)
    trainer.publish(1)
    transport = Counting(FaultPlan(chances={Fault(FaultKind.FAIL): 1.0}))
    reader = here.worker(transport=transport)
    reader.register({name: tensor * 1 for name, tensor in empty.items()})
    assert reader.replicate() == 1
    assert transport.posts == 0


def test_only_bytes_that_exist_are_posted(here: Hub) -> None:
    made: Named = {"empty": np.zeros((0, 16)), "scalar": np.array(-7, np.int64), "one": torch.ones(1)}
    trainer, transport = here.worker("trainer"), Counting()
    trainer.register(made)
    trainer.publish(1)
    reader, copies = here.worker(transport=transport), {**made, "scalar": np.array(1), "one": torch.zeros(1)}
    reader.register(copies)
    reader.replicate()
    assert (transport.runs, transport.posted_bytes) == (2, 12)
    assert copies["scalar"].shape == ()
    assert (int(copies["scalar"]), float(copies["one"][0])) == (-7, 1.0)


@pytest.mark.parametrize("make", [as_torch, as_numpy])
@pytest.mark.parametrize("reader_tied", [True, False])
@pytest.mark.parametrize(("publisher_tied", "equal"), [(True, True), (False, True), (False, False)])
def test_ties_on_either_side(here: Hub, publisher_tied: bool, reader_tied: bool, equal: bool, make: Any) -> None:
    first = bits(np.random.default_rng(3), 30 * 100 * 4, "float32")
    second = first.copy()
    second[-1] ^= 0 if equal else 1

    def weights(one: NDArray[np.uint8], two: NDArray[np.uint8], tied: bool) -> Named:
        embed = make(one, "float32", (30, 100))
        head = embed[:] if tied else make(two, "float32", (30, 100))  # another object on the same memory
        return {"embed.weight": embed, "lm_head.weight": head, "norm": make(one[:40], "float32", (10,))}

    blank = np.full_like(first, 0xA5)
    source, target = weights(first, second, publisher_tied), weights(blank, blank, reader_tied)
    trainer, reader = here.worker("trainer"), here.worker()
    trainer.register(source)
    trainer.publish(1)
    reader.register(target)
    if reader_tied and not equal:
        with pytest.raises(LayoutMismatch, match=r"embed\.weight.*lm_head\.weight"):
            reader.replicate()
        assert all(set(raw(tensor)) == {0xA5} for tensor in target.values())
        return
    assert reader.replicate() == 1
    assert all(raw(target[name]) == raw(source[name]) for name in source)
    moved = 1 if publisher_tied or reader_tied else 2
    assert reader.counters.bytes_read == moved * len(first) + 40


def test_any_text_is_a_name_and_nothing_else(here: Hub) -> None:
    class Name(str):
        """As numpy's and enum's strings are."""

    worker = here.worker("trainer")
    one = np.ones(1, np.float32)
    for wrong in ("\ud800", "a\udfffb\n", "\ud83d\ude00"):
        with pytest.raises(RegistrationError, match="position 1"):
            worker.register([("fine", one), (wrong, one.copy())])
    for tensors in (None, 3, [None], [("a",)], [("a", one), (b"b", one)], {}):
        with pytest.raises(RegistrationError):
            worker.register(tensors)  # type: ignore[arg-type]
    names = ["e\u0301", "\u00e9", "x/y z\n", "\U0001f642" * 1024]
    worker.register({Name(name): one * number for number, name in enumerate(names)} | {np.str_("np"): one * 9})
    worker.publish(1)
    reader, copies = here.worker(), {name: one * -1 for name in [*names, "np"]}
    reader.register(copies)
    assert reader.replicate() == 1
    assert [int(copies[name][0]) for name in [*names, "np"]] == [0, 1, 2, 3, 9]
