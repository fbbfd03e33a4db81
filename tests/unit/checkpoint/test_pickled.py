"""Nothing that an index or a saved tensor names is run or made, and damage is a typed error."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.checkpoint import dcp_index, saved_tensor
from tensorhub_core.checkpoint.dcp import open_dcp
from tensorhub_core.checkpoint.pickled import Record, read_pickle
from tensorhub_core.errors import ConfigError
from tests.unit.checkpoint.dcp_samples import assembled, save_dcp


def touches(module: str, function: str, path: Path) -> dict[str, bytes]:
    """Return pickles that call `function` with a command, in each way in which a pickle can."""
    command = f"touch {path}"
    text = b"X" + len(command).to_bytes(4, "little") + command.encode()
    named = f"c{module}\n{function}\n".encode()
    stacked = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, function)) + b"\x93"
    return {
        "GLOBAL": named + text + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04" + stacked + text + b"\x85R.",
        "INST": b"(" + text + f"i{module}\n{function}\n".encode() + b".",
        "OBJ": b"(" + named + text + b"o.",
        "NEWOBJ": b"\x80\x02" + named + text + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04" + stacked + text + b"\x85}\x92.",
        "not called": named + b".",
    }


HOSTILE = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "__import__"),
    ("subprocess", "Popen"),
    ("torch.hub", "load"),
    ("torch", "load"),
    ("torch", "os.system"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__class__"),
    ("collections", "OrderedDict.__class__"),
    ("copyreg", "_reconstructor"),
]


@pytest.mark.parametrize(("module", "function"), HOSTILE)
def test_other_classes_are_refused_by_name(module: str, function: str, tmp_path: Path) -> None:
    folder, touched = save_dcp(tmp_path / "in", {"a": torch.zeros(3)}), tmp_path / "touched"
    for way, data in touches(module, function, touched).items():
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            open_dcp(folder)
        assert f"'{module}.{function}'" in str(caught.value), way
        assert ".metadata" in str(caught.value)
    assert not touched.exists()


def archive(**records: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a zip archive as torch makes it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, record in records.items():
            file.writestr(f"archive/{name.replace('__', '/').replace('_', '.')}", record)
    return np.frombuffer(data.getvalue(), np.uint8)


@pytest.mark.parametrize(("module", "function"), HOSTILE)
def test_a_saved_tensor_is_read_as_carefully(module: str, function: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for data in touches(module, function, touched).values():
        with pytest.raises(ConfigError) as caught:
            saved_tensor.locate(archive(data_pkl=data, data__0=bytes(12)), "file: tensor 'a'")
        assert f"file: tensor 'a' names '{module}.{function}'" in str(caught.value)
    assert not touched.exists()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI%d\ntQI%d\n%s%sI00\nNtR."
)


@pytest.mark.parametrize(
    ("count", "start", "shape", "strides", "fault"),
    [
        (3, 0, b"(I3\nt", b"(I1\nt", None),
        (3, 1, b"(I1\nI2\nt", b"(I9\nI1\nt", None),
        (3, 1, b"(I3\nt", b"(I1\nt", "ends at byte 16 of a storage of 12"),
        (3, 0, b"(I3\nt", b"(I2\nt", "ends at byte 20 of a storage of 12"),
        (3, 0, b"(I2\nI2\nt", b"(I2\nI1\nt", "ends at byte 16"),
        (4, 0, b"(I3\nt", b"(I1\nt", "do not take the 12 bytes"),
        (3, -1, b"(I3\nt", b"(I1\nt", "does not say where"),
        (3, 0, b"(I-3\nt", b"(I1\nt", "are impossible"),
        (3, 0, b"(I3\nt", b"(I1\nI1\nt", "are impossible"),
        (3, 0, b"(I3\nt", b"(I-1\nt", "are impossible"),
        (3, 0, b"(S'3'\nt", b"(I1\nt", "are impossible"),
        (3, 0, b"N", b"(I1\nt", "are impossible"),
    ],
)
def test_a_saved_tensor_lies_within_its_record(
    count: int, start: int, shape: bytes, strides: bytes, fault: str | None
) -> None:
    data = archive(data_pkl=TENSOR % (count, start, shape, strides), data__0=bytes(range(12)))
    if fault is not None:
        with pytest.raises(ConfigError, match=fault):
            saved_tensor.locate(data, "it")
        return
    saved = saved_tensor.locate(data, "it")
    assert saved.contiguous
    assert data[saved.start_bytes :][: saved.length_bytes].tolist() == list(range(12))[start * 4 :]


def test_a_tensor_that_is_larger_than_any_memory_when_it_is_copied() -> None:
    for size in (1 << 50, 1 << 61):
        data = archive(data_pkl=TENSOR % (3, 0, b"(I%d\nt" % size, b"(I0\nt"), data__0=bytes(12))
        with pytest.raises(ConfigError, match="more memory than there is"):
            saved_tensor.gathered(data, saved_tensor.locate(data, "it"))


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ({}, "0 records describe"),
        ({"data_pkl": b"N."}, "something else than one tensor"),
        ({"data_pkl": TENSOR % (3, 0, b"(I3\nt", b"(I1\nt")}, "record '0' is missing"),
        ({"data_pkl": b"N.", "byteorder": b"big"}, "byte order is b'big'"),
        ({"data_pkl": b"N." * (1 << 20)}, "has 2,097,152 bytes"),
    ],
)
def test_archives_that_hold_no_tensor(records: dict[str, bytes], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        saved_tensor.locate(archive(**records), "it")


def test_an_archive_with_any_damage_is_refused_or_harmless() -> None:
    data, rng, refused = (
        archive(data_pkl=TENSOR % (3, 0, b"(I3\nt", b"(I1\nt"), data__0=bytes(12)),
        np.random.default_rng(3),
        0,
    )
    cut = [data[:size] for size in range(0, data.nbytes, 5)]
    changed = []
    while len(changed) < 3000:
        copy = data.copy()
        at, count = int(rng.integers(data.nbytes)), int(rng.choice([1, 2, 4, 8]))
        copy[at : at + count] = rng.choice([0, 1, 8, 0x7F, 0x80, 0xFF]) if rng.integers(2) else rng.integers(256)
        changed.append(copy)
    for damaged in cut + changed:
        try:
            saved = saved_tensor.locate(damaged, "it")
        except ConfigError:
            refused += 1
        else:
            assert 0 <= saved.start_bytes <= saved.start_bytes + saved.length_bytes <= damaged.nbytes
            assert saved_tensor.gathered(damaged, saved).nbytes == saved.length_bytes
    assert refused > len(cut)


ALLOWED = [(reader, name) for reader in (dcp_index, saved_tensor) for name in reader._NAMES]


@pytest.mark.parametrize(("reader", "name"), ALLOWED, ids=str)
def test_what_is_allowed_is_inert(reader: Any, name: tuple[str, str]) -> None:
    stand_in = reader._NAMES[name]
    if isinstance(stand_in, str):
        return
    assert stand_in in (tuple, dict) or issubclass(stand_in, Record)
    called = f"c{name[0]}\n{name[1]}\n".encode()
    # give it attributes: as its state, and as the state of its slots
    for state in (b"}(S'__new__'\nN u", b"(N}(S'__new__'\nNut"):
        with pytest.raises(ConfigError, match="damaged"):
            read_pickle(called + state.replace(b" ", b"") + b"b.", reader._NAMES, "it")
    made = read_pickle(called + b")R.", reader._NAMES, "it")
    assert type(made) in (tuple, dict) or (type(made) is stand_in and made.args == ())


def test_objects_are_their_arguments_and_their_state() -> None:
    made = read_pickle(b"cm\nn\n(I1\nS'two'\ntR}S'field'\nI3\nsb.", {("m", "n"): Record}, "it")
    assert isinstance(made, Record)
    assert (made.args, made.state, made.get("field"), made.get("other")) == ((1, "two"), {"field": 3}, 3, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"I1",
        b"(I1\nI2\n",
        b"\x80\x63.",
        b"S'a'\nI1\nR.",
        b"P1\n.",
        b"\x82\x01.",
        b"g7\n.",
        b"\xff" * 64,
    ],
)
def test_damage_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(ConfigError, match="it"):
        read_pickle(data, {}, "it")


@pytest.mark.parametrize("data", [b"Nr\xff\xff\xff\x7f.", b"Np2147483647\n."])
def test_memory_for_notes_that_nobody_takes_is_not_asked_for(data: bytes) -> None:
    with pytest.raises(ConfigError, match="it takes note number 2,147,483,647"):
        read_pickle(data, {}, "it")


NESTED = b"N" + b"2\x86" * 60
"""A tuple of twice the tuple before it, sixty times."""


@pytest.mark.parametrize(
    "data",
    [
        b"}" + NESTED + b"Ns.",
        b"}(" + NESTED + b"Nu.",
        b"(" + NESTED + b"\x91.",
        b"N" + b"p0\ng0\ng0\n\x87" * 60 + b".",
        b"N" + b"(02\x86" * 60 + b".",
        b"N" + b"2\x86" * 12 + b"p0\n0}" + b"g0\nNs" * 1000 + b".",
    ],
    ids=["a key", "keys", "a set", "by notes", "behind marks that are dropped", "a large key over and over"],
)
def test_a_small_pickle_cannot_take_for_ever(data: bytes) -> None:
    with pytest.raises(ConfigError, match="nested in each other over and over"):
        read_pickle(data, {}, "it")


def test_what_is_shared_by_many_is_not_taken_for_work_without_end() -> None:
    items = b"".join(b"I%d\ng0\n" % number for number in range(3000))
    shared = b"(I1\n(I2\nI3\nttp0\n0"
    assert read_pickle(shared + b"}(" + items + b"u.", {}, "it") == dict.fromkeys(range(3000), (1, (2, 3)))


def record(name: str, **fields: bytes) -> bytes:
    """Return the pickle of an object of torch's with fields that are pickles."""
    texts = b"".join(b"S'%s'\n" % field.encode() + value for field, value in fields.items())
    return b"ctorch.distributed.checkpoint.metadata\n%s\n)R}(" % name.encode() + texts + b"ub"


def test_many_tensors_cannot_share_one_long_list_of_parts(tmp_path: Path) -> None:
    part = record("ChunkStorageMetadata", offsets=b"(I0\nt", sizes=b"(I1\nt") + b"p0\n0"
    listed = b"]p1\n(" + b"g0\n" * 400 + b"e0"
    properties = record("TensorProperties", dtype=b"ctorch\nfloat32\n")
    tensor = record("TensorStorageMetadata", properties=properties, size=b"(I1\nt", chunks=b"g1\n") + b"p2\n0"
    for count, said in ((1, "does not say in which file"), (400, "more parts than its")):
        keys = b"".join(b"S'w%d'\ng2\n" % number for number in range(count))
        index = record("Metadata", state_dict_metadata=b"}(" + keys + b"u", storage_data=b"}")
        (tmp_path / ".metadata").write_bytes(part + listed + tensor + index + b".")
        with pytest.raises(ConfigError, match=said):
            open_dcp(tmp_path)


@pytest.mark.parametrize("data", [b"N.", b"}.", b"I1\n.", b"S'text'\n.", b"(I1\nI2\nt."])
def test_plain_values_are_no_index(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ConfigError, match="something else than the index"):
        open_dcp(tmp_path)


def test_an_index_with_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    state = {"model": {"a.b": torch.ones(3, 4), "c": torch.ones(2)}, "step": 1}
    folder = save_dcp(tmp_path, state)
    path, rng, refused = folder / ".metadata", np.random.default_rng(2), 0
    data = path.read_bytes()
    whole = assembled(open_dcp(folder))
    cut = [data[:size] for size in range(0, len(data), 7)]
    flipped = []
    while len(flipped) < 600:
        at, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
        flipped.append(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
    for damaged in cut + flipped:
        path.write_bytes(damaged)
        try:
            found = assembled(open_dcp(folder))
        except ConfigError:
            refused += 1
        else:
            assert {bytes_ for *_, bytes_ in found.values()} <= {bytes_ for *_, bytes_ in whole.values()}
    assert refused > len(cut)
