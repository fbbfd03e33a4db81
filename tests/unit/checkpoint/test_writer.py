"""What the writer writes, the safetensors library and our reader read back; a failed write leaves nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tensorhub_core.checkpoint.reader import open_checkpoint
from tensorhub_core.checkpoint.writer import check_target, write_checkpoint
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError
from tests.unit.checkpoint.samples import TORCH_DTYPES, bytes_of, name_of, one_of_each, random_tensor, save

Truth = dict[str, tuple[str, tuple[int, ...], bytes]]


def raw(tensors: dict[str, torch.Tensor]) -> list[RawTensor]:
    return [
        RawTensor(name, name_of(t.dtype), tuple(t.shape), np.frombuffer(bytes_of(t), np.uint8))
        for name, t in tensors.items()
    ]


def truth(tensors: dict[str, torch.Tensor]) -> Truth:
    return {name: (name_of(t.dtype), tuple(t.shape), bytes_of(t)) for name, t in tensors.items()}


def library_reads(files: tuple[Path, ...]) -> Truth:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(safetensors.torch.load_file(file))
    return truth(found)


def ours_reads(folder: Path) -> Truth:
    return {t.name: (t.dtype, t.shape, t.buffer.tobytes()) for t in open_checkpoint(folder).tensors}


def test_a_single_file_is_the_library_s_file_byte_for_byte(tmp_path: Path) -> None:
    tensors = one_of_each()
    (file,) = write_checkpoint(tmp_path / "out", raw(tensors))
    save(tmp_path / "truth.safetensors", tensors)
    assert file.name == "model.safetensors"
    assert file.read_bytes() == (tmp_path / "truth.safetensors").read_bytes()
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert ours_reads(tmp_path / "out") == truth(tensors)


@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=9, unique=True),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=9, max_size=9),
    dtypes=st.lists(st.sampled_from(TORCH_DTYPES), min_size=9, max_size=9),
    max_shard_bytes=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    max_shard_bytes: int,
) -> None:
    tensors = {"first": torch.ones(2)}
    for seed, (name, shape, dtype) in enumerate(zip(names, shapes, dtypes, strict=False)):
        packed_scalar = dtype is torch.float4_e2m1fn_x2 and not shape
        if not packed_scalar and name != "__metadata__":
            tensors[name] = random_tensor(dtype, tuple(shape), seed)
    folder = tmp_path_factory.mktemp("any") / "out"
    files = write_checkpoint(folder, raw(tensors), max_shard_bytes=max_shard_bytes)
    assert library_reads(files) == truth(tensors)
    assert ours_reads(folder) == truth(tensors)
    for file in files:
        assert sum(len(bytes_of(t)) for t in safetensors.torch.load_file(file).values()) <= max_shard_bytes or (
            sum(t.numel() > 0 for t in safetensors.torch.load_file(file).values()) == 1
        )


def test_shards_have_an_index_as_other_tools_write_it(tmp_path: Path) -> None:
    tensors = {name: torch.full((10,), index, dtype=torch.int32) for index, name in enumerate("abcde")}
    files = write_checkpoint(tmp_path / "out", raw(tensors), max_shard_bytes=80)
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *(file.name for file in files),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {
        name: files[place].name for name, place in zip("abcde", (0, 0, 1, 1, 2), strict=True)
    }


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    write_checkpoint(
        tmp_path / "out",
        raw({"a": torch.zeros(1000), "b": torch.zeros(500)}),
        max_shard_bytes=1,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(4000, 6000), (6000, 6000)]


def test_an_empty_directory_is_filled_and_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    write_checkpoint(tmp_path / "link", raw({"a": torch.ones(1)}))
    assert (tmp_path / "link").is_symlink()
    assert ours_reads(tmp_path / "out") == truth({"a": torch.ones(1)})


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_checkpoint(tmp_path / "out", raw({"a": torch.ones(1)}))
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_a_directory_in_use_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    with pytest.raises(ConfigError, match=r"out is not empty"):
        write_checkpoint(tmp_path / "out", raw({"a": torch.ones(1)}))
    with pytest.raises(ConfigError, match=r"precious exists and is not a directory"):
        check_target(tmp_path / "out" / "precious")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "precious"]


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("a", "float32", "'a' is repeated"),
        ("", "float32", "'' is repeated or cannot be stored"),
        ("__metadata__", "float32", "cannot be stored"),
        ("\ud800", "float32", "cannot be stored"),
        ("b", "complex128", "cannot store dtype complex128"),
        ("b", "complex32", "cannot store dtype complex32"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path, name: str, dtype: str, message: str) -> None:
    tensors = [RawTensor(n, d, (0,), np.zeros(0, np.uint8)) for n, d in (("a", "float32"), (name, dtype))]
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(tmp_path / "out", tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def breaking(done: int, total: int) -> None:
        raise error

    kind = ConfigError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind):
        write_checkpoint(tmp_path / "out", raw({"a": torch.ones(9)}), progress=breaking)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_fills_up_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def meanwhile(done: int, total: int) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").write_text("1")

    with pytest.raises(ConfigError, match=r"not empty"):
        write_checkpoint(tmp_path / "out", raw({"a": torch.ones(9)}), progress=meanwhile)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["other", "out"]


def test_a_parent_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made: .*file is not a directory"):
        write_checkpoint(tmp_path / "file" / "out", raw({"a": torch.ones(1)}))


def test_a_target_that_cannot_be_looked_at_or_replaced_is_refused_before_anything_moves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: File name too long"):
        check_target(tmp_path / ("n" * 300) / "out")
    mounted = next((path for path in map(Path, ("/dev/shm", "/dev/mqueue", "/proc")) if _is_empty_mount(path)), None)
    if mounted is not None:
        with pytest.raises(ConfigError, match=r"where a file system is mounted.*: name a folder in it"):
            check_target(mounted)


def _is_empty_mount(path: Path) -> bool:
    return os.path.ismount(path) and not os.listdir(path)
