"""`tensorhub publish` serves what torch and Megatron saved, and `tensorhub pull` writes the model that it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.processes.cli.commands import running, tensorhub
from tests.processes.cli.test_publish_pull import library_reads
from tests.processes.cli.test_publish_pull import truth as expected
from tests.unit.checkpoint.dcp_samples import save_dcp, save_on_two_ranks, weights
from tests.unit.megatron.test_checkpoint import CONFIG, OTHERS, hugging_face, saved
from tests.unit.megatron.test_checkpoint import model as megatron_model


def pulled(hub: str, model: str, tmp_path: Path, *arguments: object) -> tuple[object, str]:
    """Publish a folder, pull it, and return the tensors and what the publisher said on stderr."""
    said = tmp_path / f"{model}.log"
    with running("publish", *arguments, "--model", model, "--version", 3, "--server", hub, log=said) as publisher:
        assert publisher.first_line == f"published {model} 3"
        out = tmp_path / f"{model}.out"
        ended = tensorhub("pull", "--model", model, "--out", out, "--server", hub)
        assert ended.code == 0, ended.err
        stopped = publisher.end()
        assert stopped.code == 0, stopped.err
    return library_reads(out), stopped.err


def test_what_two_ranks_of_torch_saved(hub: str, model: str, tmp_path: Path) -> None:
    save_on_two_ranks(tmp_path)
    tensors, said = pulled(hub, model, tmp_path, tmp_path / "model")
    assert tensors == expected(weights())
    assert "items that are not weights" in said


def test_one_of_two_models_under_other_names(hub: str, model: str, tmp_path: Path) -> None:
    state = {"policy": {"tok": torch.arange(6), "extra": torch.ones(1)}, "value": {"tok": torch.zeros(2)}}
    folder = save_dcp(tmp_path / "in", state)
    (tmp_path / "names.json").write_text('{"policy.tok": "model.embed", "policy.extra": null}')
    options = ("--prefix", "policy", "--names", tmp_path / "names.json", "--copy", "--format", "dcp")
    tensors, said = pulled(hub, model, tmp_path, folder, *options)
    assert tensors == expected({"model.embed": torch.arange(6)})
    assert "left out 2 items" in said
    error = tensorhub("publish", folder, "--model", model, "--version", 4, "--server", hub).error
    assert "tensors in several groups" in error


def test_what_megatron_saved(hub: str, model: str, tmp_path: Path) -> None:
    state = megatron_model()
    saved(tmp_path / "ckpt" / "iter_0000012", {**state, **OTHERS})
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("12")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors, said = pulled(hub, model, tmp_path, tmp_path / "ckpt", "--hf-config", tmp_path)
    assert tensors == expected({name: t.contiguous() for name, t in hugging_face(state).items()})
    assert f"left out {len(OTHERS)} items" in said
    error = tensorhub("publish", tmp_path / "ckpt", "--model", model, "--version", 4, "--server", hub).error
    assert "--hf-config" in error


@pytest.mark.parametrize("kind", ["hostile", "cut", "nothing"])
def test_folders_that_are_refused(kind: str, hub: str, model: str, tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "in", {"a": torch.ones(3)})
    index = folder / ".metadata"
    touched = tmp_path / "touched"
    if kind == "hostile":
        index.write_bytes(f"cos\nsystem\n(S'touch {touched}'\ntR.".encode())
    elif kind == "cut":
        index.write_bytes(index.read_bytes()[:-100])
    else:
        index.unlink()
    error = tensorhub("publish", folder, "--model", model, "--version", 1, "--server", hub).error
    assert {"hostile": "'os.system'", "cut": "is damaged", "nothing": "not saved to its end"}[kind] in error
    assert not touched.exists()
