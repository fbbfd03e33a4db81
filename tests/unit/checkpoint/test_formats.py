"""What a folder holds is found out from its files; what cannot be served is refused saying what was looked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tensorhub_core.checkpoint import formats
from tensorhub_core.checkpoint.formats import OpenOptions, detect, open_folder
from tensorhub_core.checkpoint.names_file import read_names
from tensorhub_core.errors import ConfigError
from tests.unit.checkpoint.dcp_samples import save_dcp
from tests.unit.checkpoint.samples import save

TENSORS = {"a": torch.ones(3)}


def megatron(folder: Path, backend: str = "torch_dist") -> Path:
    """Turn a folder into one that looks like Megatron's."""
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return folder


def safetensors(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", TENSORS)
    return folder


def test_each_format_is_found(tmp_path: Path) -> None:
    assert detect(safetensors(tmp_path / "hf")) == (tmp_path / "hf", "safetensors")
    assert detect(save_dcp(tmp_path / "dcp", TENSORS)) == (tmp_path / "dcp", "dcp")
    assert detect(megatron(save_dcp(tmp_path / "mg", TENSORS))) == (tmp_path / "mg", "torch_dist")
    (tmp_path / "dcp" / "metadata.json").write_text('{"mine": 1}')
    assert detect(tmp_path / "dcp")[1] == "dcp"
    for name in ("hf", "dcp"):
        assert [t.name for t in open_folder(tmp_path / name).tensors] == ["a"]


@pytest.mark.parametrize("newest", ["100", "release\n"])
def test_a_folder_of_iterations_stands_for_its_newest(tmp_path: Path, newest: str) -> None:
    name = "iter_0000100" if newest == "100" else "release"
    save_dcp(tmp_path / "iter_0000050", TENSORS)
    save_dcp(tmp_path / name, TENSORS)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(newest)
    assert detect(tmp_path) == (tmp_path / name, "dcp")
    shutil.rmtree(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} does not exist"):
        detect(tmp_path)


@pytest.mark.parametrize("text", ["", "ten", "-5", "../other"])
def test_a_newest_iteration_that_is_no_number(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ConfigError, match="does not hold the number of an iteration"):
        detect(tmp_path)


def test_several_formats_in_one_folder_need_a_word(tmp_path: Path) -> None:
    save_dcp(safetensors(tmp_path), {"a": torch.zeros(5)})
    with pytest.raises(ConfigError, match="say which: safetensors or dcp"):
        open_folder(tmp_path)
    assert open_folder(tmp_path, format="dcp").tensors[0].shape == (5,)
    assert open_folder(tmp_path, format="safetensors").tensors[0].shape == (3,)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "no model.safetensors, model.safetensors.index.json or single *.safetensors file, no .metadata"),
        (["inner/.metadata"], "there are checkpoints in inner below it"),
        (["__0_0.distcp"], "not saved to its end"),
        (["pytorch_model.bin"], "only pickled files"),
        (["mp_rank_00.pt"], "only pickled files"),
    ],
)
def test_what_is_no_checkpoint_is_described(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_megatron_saved_otherwise_is_refused(tmp_path: Path) -> None:
    folder = megatron(save_dcp(tmp_path, TENSORS), "zarr")
    with pytest.raises(ConfigError, match="saved by Megatron as 'zarr'"):
        open_folder(folder)
    (megatron(folder) / ".metadata").unlink()
    with pytest.raises(ConfigError, match="not saved to its end"):
        open_folder(folder)


def test_megatrons_folders_need_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = megatron(save_dcp(tmp_path, TENSORS))
    monkeypatch.setattr(formats, "entry_points", lambda *, group: [])
    with pytest.raises(ConfigError, match="install tensorhub-megatron"):
        open_folder(folder)
    with pytest.raises(ConfigError, match="no known format of checkpoints"):
        open_folder(folder, format="zarr")


def test_options_that_a_format_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors takes no prefix and no hf_config"):
        open_folder(safetensors(tmp_path / "hf"), OpenOptions(prefix="x", hf_config="y"))
    with pytest.raises(ConfigError, match="dcp takes no hf_config"):
        open_folder(save_dcp(tmp_path / "dcp", TENSORS), OpenOptions(hf_config="y"))


def test_a_file_of_names(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('{"a": "b", "c": null}')
    assert read_names(path) == {"a": "b", "c": None}
    for text in ('{"a": 1}', '{"a": ""}', "[]", '{"a": "b", "a": "c"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"names\.json"):
            read_names(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"names\.json is missing"):
        read_names(path)


NO_PATH = "n" * 300
"""Longer than any name of a file: asking for it fails otherwise than by "there is none"."""


@pytest.mark.parametrize("format", [None, "safetensors", "dcp"])
def test_a_path_that_cannot_even_be_looked_at_is_refused_by_name(tmp_path: Path, format: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"{NO_PATH} cannot be read: File name too long"):
        open_folder(tmp_path / NO_PATH, format=format)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"loop cannot be read"):
        open_folder(tmp_path / "loop", format=format)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is not a directory"):
        open_folder(tmp_path / "file", format=format)
    with pytest.raises(ConfigError, match=r"inner does not exist"):
        open_folder(tmp_path / "file" / "inner", format=format)


def test_what_lies_beside_a_checkpoint_and_cannot_be_looked_at_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lost").symlink_to(tmp_path / NO_PATH)  # like a folder of somebody else's
    safetensors(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"there are checkpoints in mine below it"):
        open_folder(tmp_path)
