"""What `tensorhub publish` serves, `tensorhub pull` writes again, byte for byte."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.processes.cli.commands import running, tensorhub
from tests.unit.checkpoint.samples import bytes_of, one_of_each, random_tensor, save, save_sharded


def library_reads(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in folder.glob("*.safetensors")} == names
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found.update(safetensors.torch.load_file(folder / name))
    return {name: (t.dtype, t.shape, bytes_of(t)) for name, t in found.items()}


def truth(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (t.dtype, t.shape, bytes_of(t)) for name, t in tensors.items()}


def versions(hub: str, model: str) -> list[int]:
    status = json.loads(tensorhub("status", "--json", "--server", hub).out)
    return [row["version"] for m in status["models"] if m["model"] == model for row in m["versions"] if row["whole"]]


def test_a_single_file_of_every_dtype(hub: str, model: str, tmp_path: Path) -> None:
    tensors = {
        **one_of_each(),
        "naïve/層 1\n": torch.arange(5),
        "large": random_tensor(torch.bfloat16, (3000, 2000), 1),
    }
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", tensors)
    arguments = ("--model", model, "--version", 3, "--server", hub)
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log") as publisher:
        assert publisher.first_line == f"published {model} 3"
        pulled = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub)
        assert (pulled.code, pulled.out) == (0, f"pulled {model} 3 to {tmp_path / 'out'}\n"), pulled.err
        assert "100% of " in pulled.err
        ended = publisher.end()
    assert (ended.code, ended.out) == (0, ""), ended.err
    assert library_reads(tmp_path / "out") == truth(tensors)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "in" / "model.safetensors").read_bytes()
    assert versions(hub, model) == []


def test_sharded_files_in_and_out(hub: str, model: str, tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": random_tensor(torch.float16, (50, 40 + i), i) for i in range(12)}
    names = list(tensors)
    (tmp_path / "in").mkdir()
    save_sharded(tmp_path / "in", [{name: tensors[name] for name in names[part::3]} for part in range(3)])
    arguments = ("--model", model, "--version", 0, "--server", hub)
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log") as publisher:
        pulled = tensorhub(
            "pull",
            "--model",
            model,
            "--version",
            0,
            "--out",
            tmp_path / "out",
            "--max-shard-bytes",
            10_000,
            "--server",
            hub,
        )
        assert pulled.code == 0, pulled.err
        assert publisher.end(signal.SIGINT).code == 0
    assert library_reads(tmp_path / "out") == truth(tensors)
    assert len(list((tmp_path / "out").glob("model-*-of-00007.safetensors"))) == 7


def test_what_was_pulled_can_be_published(hub: str, model: str, tmp_path: Path) -> None:
    tensors = {"w": random_tensor(torch.bfloat16, (30, 20), 0)}
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", tensors)
    source, server = tmp_path / "in", ("--server", hub)
    for version in range(2):
        out = tmp_path / f"out-{version}"
        arguments = ("--model", model, "--version", version, *server)
        with running("publish", source, *arguments, log=tmp_path / "log"):
            assert tensorhub("pull", "--model", model, "--out", out, *server).code == 0
        source = out
    assert library_reads(source) == truth(tensors)


def test_a_file_that_changes_while_it_is_served_is_noticed(hub: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.safetensors"
    save(path, {"w": random_tensor(torch.uint8, (100_000,), 0)})
    arguments = ("--model", model, "--version", 1, "--server", hub)
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log"):
        with path.open("r+b") as file:
            file.seek(-500, 2)
            byte = file.read(1)[0]
            file.seek(-500, 2)
            file.write(bytes([byte ^ 1]))
        pulled = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub, "--timeout-s", 20)
    assert "corrupt" in pulled.error.lower() or "checksum" in pulled.error.lower()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "log"]


def test_a_copy_is_served_whatever_happens_to_the_file(hub: str, model: str, tmp_path: Path) -> None:
    tensors = {"w": random_tensor(torch.uint8, (100_000,), 0)}
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.safetensors"
    save(path, tensors)
    arguments = ("--model", model, "--version", 1, "--server", hub, "--copy")
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log"):
        path.write_bytes(b"")
        assert tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub).code == 0
    assert library_reads(tmp_path / "out") == truth(tensors)


def test_other_bytes_under_a_taken_version_are_refused(hub: str, model: str, tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "model.safetensors", {"w": torch.full((100,), value)})
    arguments = ("--model", model, "--version", 1, "--server", hub)
    with running("publish", tmp_path / "one", *arguments, log=tmp_path / "log"):
        assert "version" in tensorhub("publish", tmp_path / "two", *arguments).error
        with running("publish", tmp_path / "one", *arguments, log=tmp_path / "log2") as again:
            assert again.first_line == f"published {model} 1"


@pytest.mark.parametrize("version", [(), ("--version", "latest"), ("--version", 9)])
def test_a_version_that_nobody_holds(hub: str, model: str, tmp_path: Path, version: tuple[object, ...]) -> None:
    pulled = tensorhub("pull", "--model", model, *version, "--out", tmp_path / "out", "--server", hub)
    assert model in pulled.error
    assert list(tmp_path.iterdir()) == []
