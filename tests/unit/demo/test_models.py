from __future__ import annotations

from pathlib import Path

import pytest

from demo.models import without_weights
from demo.ports import free_ports
from demo.processes import DemoError


def test_no_weight_file_is_copied(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    weights = {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.bin", "x.pt"}
    for name in wanted | weights:
        (checkpoint / name).write_text(name)
    bare = without_weights(checkpoint, tmp_path / "bare")
    assert {file.name for file in bare.iterdir()} == wanted
    assert (bare / "config.json").read_text() == "config.json"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DemoError, match="has no config"):
        without_weights(tmp_path / "empty", tmp_path / "bare")


def test_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20
