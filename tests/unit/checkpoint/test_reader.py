"""The reader agrees with the safetensors library on what is right, and names what is wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from tensorhub_core.checkpoint.reader import open_checkpoint
from tensorhub_core.errors import ConfigError
from tests.unit.checkpoint.samples import (
    as_bytes,
    bytes_of,
    name_of,
    one_of_each,
    random_tensor,
    raw_file,
    save,
    save_sharded,
    write_index,
)

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def seen(folder: Path, copy: bool = False) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {t.name: (t.dtype, t.shape, as_bytes(t.buffer)) for t in open_checkpoint(folder, copy=copy).tensors}


def truth(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (name_of(t.dtype), tuple(t.shape), bytes_of(t)) for name, t in tensors.items()}


@pytest.mark.parametrize("copy", [False, True])
def test_single_file_of_every_dtype_and_shape(tmp_path: Path, copy: bool) -> None:
    tensors = one_of_each()
    save(tmp_path / "model.safetensors", tensors)
    assert seen(tmp_path, copy) == truth(tensors)
    checkpoint = open_checkpoint(tmp_path, copy=copy)
    assert [t.name for t in checkpoint.tensors] == sorted(tensors)
    assert checkpoint.total_bytes == sum(len(bytes_of(t)) for t in tensors.values())
    assert checkpoint.files == (tmp_path / "model.safetensors",)


def test_sharded_files(tmp_path: Path) -> None:
    tensors = one_of_each()
    names = list(tensors)
    save_sharded(tmp_path, [{name: tensors[name] for name in names[part::3]} for part in range(3)])
    assert seen(tmp_path) == truth(tensors)


def test_other_files_than_those_of_the_index_are_left_alone(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    save_sharded(tmp_path, [tensors])
    save(tmp_path / "consolidated.safetensors", {"other": torch.ones(3)})
    assert seen(tmp_path) == truth(tensors)


def test_a_lone_file_of_another_name_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors", {"a": torch.ones(2)})
    assert seen(tmp_path) == truth({"a": torch.ones(2)})


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs" / "1234", {"a": torch.ones(2)})
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1234")
    assert seen(tmp_path / "snapshot") == truth({"a": torch.ones(2)})


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, {"a": torch.zeros(1000, dtype=torch.uint8), "b": torch.zeros(24, dtype=torch.uint8)})
    checkpoint = open_checkpoint(tmp_path)
    first, second = checkpoint.tensors
    assert second.buffer.ctypes.data == first.buffer.ctypes.data + 1000
    assert not first.buffer.flags.writeable
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 1)
        file.write(b"\xff")
    assert second.buffer[-1] == 0xFF


def test_a_copy_does_not_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_sharded(tmp_path, [{"a": torch.zeros(4000, dtype=torch.uint8)}, {"b": torch.ones(24, dtype=torch.uint8)}])
    heard: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(tmp_path, copy=True, progress=lambda done, total: heard.append((done, total)))
    size = sum(file.stat().st_size for file in checkpoint.files)
    assert heard[-1] == (size, size)
    for file in checkpoint.files:
        os.truncate(file, 0)
    assert not path.exists()
    assert as_bytes(checkpoint.tensors[1].buffer) == b"\x01" * 24


def test_progress_reads_the_files_before_they_are_mapped(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(40_000_000, dtype=torch.uint8), "b": torch.ones(24, dtype=torch.uint8)}
    save(tmp_path / "model.safetensors", tensors)
    heard: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(tmp_path, progress=lambda done, total: heard.append((done, total)))
    size = checkpoint.files[0].stat().st_size
    assert [done for done, _ in heard] == [16 << 20, 32 << 20, size]
    assert {total for _, total in heard} == {size}
    assert as_bytes(checkpoint.tensors[1].buffer) == b"\x01" * 24


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.arange(10)})
    buffer = open_checkpoint(tmp_path).tensors[0].buffer
    assert np.array_equal(buffer.view(np.int64), np.arange(10))


def test_packed_floats_count_bytes_along_the_last_axis(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        raw_file({"w": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}, b"abcdef")
    )
    assert seen(tmp_path) == {"w": ("float4_e2m1fn_x2", (2, 3), b"abcdef")}


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6),
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=6, unique=True),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_names_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], names: list[str], seed: int
) -> None:
    dtypes = (torch.bfloat16, torch.uint8, torch.float64, torch.float8_e5m2, torch.int16, torch.complex64)
    chosen = zip(names, shapes, dtypes, strict=False)
    tensors = {name: random_tensor(dtype, tuple(shape), seed) for name, shape, dtype in chosen}
    tensors["always"] = torch.ones(1)
    folder = tmp_path_factory.mktemp("any")
    save(folder / "model.safetensors", tensors)
    assert seen(folder) == truth(tensors)


BROKEN_FILES = {
    "empty file": (b"", "fewer than"),
    "seven bytes": (b"1234567", "fewer than"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", "more than the"),
    "header beyond the file": (struct.pack("<Q", 100) + b"{}", "cut off inside its header"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c", "more than the"),
    "not utf-8": (raw_file(b'{"\xff": 1}'), "not JSON"),
    "not json": (raw_file(b"hello"), "not JSON"),
    "a list": (raw_file(b"[]"), "JSON object"),
    "nested deeply": (raw_file(b"[" * 200_000), "not JSON"),
    "a number of many digits": (raw_file(b'{"a": ' + b"9" * 10_000 + b"}"), "not JSON"),
    "name twice": (
        raw_file(b'{"a": %s, "a": %s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2)),
        "'a' appears twice",
    ),
    "empty name": (raw_file({"": F32}, b"x" * 8), "not empty"),
    "half a surrogate pair": (raw_file(rb'{"\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "unicode"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}, "a": F32}, b"x" * 8), "__metadata__"),
    "no dtype": (raw_file({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"x" * 8), "'a'"),
    "unknown dtype": (raw_file({"a": {**F32, "dtype": "F31"}}, b"x" * 8), "'F31'"),
    "dtype is a list": (raw_file({"a": {**F32, "dtype": ["F32"]}}, b"x" * 8), "'a' has dtype"),
    "dtype without torch name": (
        raw_file({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"xxx"),
        "F6_E2M3",
    ),
    "negative axis": (raw_file({"a": {**F32, "shape": [-2]}}, b"x" * 8), "impossible shape"),
    "boolean axis": (raw_file({"a": {**F32, "shape": [True, 2]}}, b"x" * 8), "impossible shape"),
    "fractional axis": (raw_file({"a": {**F32, "shape": [2.0]}}, b"x" * 8), "impossible shape"),
    "too many axes": (raw_file({"a": {**F32, "shape": [1] * 70}}, b"x" * 8), "impossible shape"),
    "overflowing shape": (raw_file({"a": {**F32, "shape": [1 << 40, 1 << 40]}}, b"x" * 8), "'a' of F32"),
    "shape of other size": (raw_file({"a": {**F32, "shape": [3]}}, b"x" * 8), "takes 12 bytes"),
    "one offset": (raw_file({"a": {**F32, "data_offsets": [0]}}, b"x" * 8), "data_offsets"),
    "negative offset": (raw_file({"a": {**F32, "data_offsets": [-8, 0]}}, b"x" * 8), "data_offsets"),
    "offsets reversed": (raw_file({"a": {**F32, "data_offsets": [8, 0]}}, b"x" * 8), "ends before it begins"),
    "cut off": (raw_file({"a": F32}, b"x" * 7), "cut off: tensor 'a'"),
    "bytes left over": (raw_file({"a": F32}, b"x" * 9), "1 bytes after"),
    "hole": (raw_file({"a": {**F32, "data_offsets": [4, 12]}}, b"x" * 12), "'a' leaves a hole"),
    "overlap": (raw_file({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"x" * 12), "'b' overlaps"),
    "odd half bytes": (
        raw_file({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"xxx"),
        "whole bytes",
    ),
    "no tensors": (raw_file({}), "no tensors"),
}
LIBRARY_ACCEPTS = {
    "empty name",
    "dtype without torch name",
    "odd half bytes",
    "no tensors",
    "name twice",
    "too many axes",
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = BROKEN_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", sorted(set(BROKEN_FILES) - LIBRARY_ACCEPTS))
def test_the_library_refuses_the_same_files(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BROKEN_FILES[case][0])
    with pytest.raises((SafetensorError, ValueError)):
        safetensors.torch.load_file(tmp_path / "model.safetensors")


@given(cut=st.integers(0, 400), flip=st.integers(0, 400), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_damaged_files_never_do_more_than_raise(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, bit: int
) -> None:
    whole = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.ones((2, 3), dtype=torch.bfloat16)})
    data = bytearray(whole)
    data[flip % len(data)] ^= 1 << bit
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_bytes(bytes(data[: max(0, len(data) - cut)]))
    try:
        expected = safetensors.torch.load_file(folder / "model.safetensors")
    except Exception:
        expected = None
    if expected:
        assert seen(folder) == truth(expected)
    else:
        with pytest.raises(ConfigError):
            open_checkpoint(folder)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent does not exist"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is not a directory"):
        open_checkpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"no model.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"not a regular file"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=r"2 safetensors files but no model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_a_pipe_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "gone.safetensors"}, "gone.safetensors is missing"),
        (
            {"a": "one.safetensors", "z": "one.safetensors"},
            "places tensor 'z' in .*one.safetensors, but no file has it",
        ),
        ({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}, "'b' in .*but it is in .*two"),
        ({"a": "../one.safetensors"}, "outside the directory"),
        ({"a": "/etc/passwd"}, "outside the directory"),
        ({"a": "one\0.safetensors"}, "outside the directory"),
        ({"a": ""}, "outside the directory"),
        ({"a": 1}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
        ({}, "names no tensor"),
    ],
)
def test_wrong_indexes(tmp_path: Path, places: object, message: str) -> None:
    save(tmp_path / "one.safetensors", {"a": torch.ones(1)})
    save(tmp_path / "two.safetensors", {"b": torch.ones(1), "c": torch.ones(1)})
    write_index(tmp_path, places)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff", b'{"weight_map": {"a": "x", "a": "y"}}'])
def test_indexes_that_are_not_json_objects(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"index.json"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", {"a": torch.ones(1)})
    save(tmp_path / "two.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ConfigError, match=r"'a' is in both .*one.safetensors and .*two.safetensors"):
        open_checkpoint(tmp_path)


def test_many_small_tensors(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((i % 5 + 1,), i % 256, dtype=torch.uint8) for i in range(20_000)}
    save(tmp_path / "model.safetensors", tensors)
    assert seen(tmp_path) == truth(tensors)
