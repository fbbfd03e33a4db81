"""`tensorhub layout` and `tensorhub plan` on saved layouts and checkpoint folders: what they say, write and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from tensorhub_core.cli.layouts import LiveName, find_layouts, live_name, load_layout, save_layouts
from tensorhub_core.cli.main import tensorhub
from tensorhub_core.cli.plan import MAX_TOLD
from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.canonical import digest_of, encode_layout
from tensorhub_core.layout.types import Layout
from tensorhub_core.settings import load_settings
from tests.unit.layout.shapes import columns, layout, rows, spec

Run = Callable[..., Result]

ROWS, COLUMNS = 512, 4096
BYTES = ROWS * COLUMNS * 2


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in an empty folder and without settings of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORHUB_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TENSORHUB_SERVER", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "config.toml").touch()
    return lambda *arguments: CliRunner().invoke(tensorhub, [*map(str, arguments)])


def row_shards(count: int) -> list[Layout]:
    return [layout(rows("w", ROWS, count, index, COLUMNS), at=(index, count)) for index in range(count)]


def column_shards(count: int) -> list[Layout]:
    return [layout(columns("w", ROWS, COLUMNS, count, index), at=(index, count)) for index in range(count)]


def test_saved_layouts_are_the_same_again(run: Run, tmp_path: Path) -> None:
    before = row_shards(3)
    files = save_layouts(before, tmp_path / "many")
    assert [load_layout(file) for file in files] == before
    assert [file.read_bytes() for file in files] == [encode_layout(each) for each in before]
    save_layouts(before[:1], tmp_path / "one.layout")
    saved = run("layout", tmp_path / "many", "--out", tmp_path / "again")
    assert saved.exit_code == 0, saved.output
    assert saved.output.splitlines() == [f"saved {tmp_path}/again/{file.name}" for file in files]
    assert [(tmp_path / "again" / file.name).read_bytes() for file in files] == [file.read_bytes() for file in files]
    alone = run("layout", tmp_path / "one.layout", "--out", tmp_path / "copy.layout")
    assert alone.exit_code == 0, alone.output
    assert load_layout(tmp_path / "copy.layout") == before[0]


def test_layouts_are_shown(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2), tmp_path / "rows")
    shown = run("layout", "rows")
    assert shown.exit_code == 0, shown.output
    for each in row_shards(2):
        assert digest_of(encode_layout(each)).hex() in shown.output
    (first, second) = json.loads(run("layout", "rows", "--json").output)
    assert first["tensors"][0]["boxes"] == [
        {"logical": "w", "offset": [0, 0], "shape": [ROWS // 2, COLUMNS], "local_offset": [0, 0]}
    ]
    assert (second["shard"], second["num_shards"]) == (1, 2)


def test_a_plan_between_rows_and_columns_reads_what_is_needed(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2), tmp_path / "rows")
    files = save_layouts(column_shards(2), tmp_path / "columns")
    found = json.loads(run("plan", "--from", "rows", "--to", ",".join(map(str, files)), "--json").output)
    assert found["fits"] is True
    for shard in found["shards"]:
        assert shard["needed_bytes"] == shard["read_bytes"] == BYTES // 2
        assert shard["ratio"] == 1.0
        assert (shard["cuts"], shard["segments"]) == (2, 0)
        assert shard["runs"] == ROWS, "one for each row"
        assert [each["read_bytes"] for each in shard["sources"]] == [BYTES // 4] * 2
        assert shard["plan_s"] > 0
    whole = json.loads(run("plan", "--from", "rows", "--to", "columns", "--json", "--whole-segments").output)
    assert [shard["read_bytes"] for shard in whole["shards"]] == [BYTES] * 2
    assert [shard["staged_bytes"] for shard in whole["shards"]] == [BYTES] * 2
    assert all(BYTES // 2 <= shard["staging_bytes"] <= 64 << 20 for shard in whole["shards"])


def test_cuts_follow_the_settings(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2), tmp_path / "rows")
    save_layouts(column_shards(2), tmp_path / "columns")
    (tmp_path / "config.toml").write_text("min_run_bytes = 0\n")
    found = json.loads(run("plan", "--from", "rows", "--to", "columns", "--json").output)
    assert [shard["ratio"] for shard in found["shards"]] == [2.0, 2.0]


def test_a_shard_of_an_equal_layout_is_read_as_it_is(run: Run, tmp_path: Path) -> None:
    save_layouts(column_shards(2), tmp_path / "columns")
    shown = run("plan", "--from", "columns", "--to", "columns")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("any of 1 of the same layout") == 2
    assert "100.0%" in shown.output


def test_every_read_is_written_down(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2), tmp_path / "rows")
    save_layouts(column_shards(2), tmp_path / "columns")
    assert run("plan", "--from", "rows", "--to", "columns", "--out", "reads.jsonl").exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "reads.jsonl").read_text().splitlines()]
    assert [line["read_bytes"] for line in lines if "needed_bytes" in line] == [BYTES // 2] * 2
    reads = [line for line in lines if "tensor" in line]
    assert [(each["shard"], each["tensor"], each["to"], each["count"]) for each in reads] == [
        (shard, "w", "w", ROWS // 2) for _ in range(2) for shard in range(2)
    ]
    assert {each["run_bytes"] for each in reads} == {COLUMNS}
    assert [each["offset_bytes"] for each in reads] == [0, 0, COLUMNS, COLUMNS]


def test_a_checkpoint_folder_is_a_layout(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.zeros((ROWS, COLUMNS), np.float16)}, folder / "model.safetensors")
    save_layouts([layout(spec("w", ROWS, COLUMNS, dtype="float16"))], tmp_path / "engine.layout")
    found = json.loads(run("plan", "--from", folder, "--to", "engine.layout", "--json").output)
    (shard,) = found["shards"]
    assert shard["raw"] is True
    assert shard["read_bytes"] == BYTES


def test_other_dtypes_fit_if_they_are_converted(run: Run, tmp_path: Path) -> None:
    save_layouts([layout(spec("w", ROWS, COLUMNS, dtype="float32"))], tmp_path / "trainer.layout")
    save_layouts([layout(spec("w", ROWS, COLUMNS))], tmp_path / "engine.layout")
    names = ("plan", "--from", "trainer.layout", "--to", "engine.layout", "--json")
    assert run(*names).exit_code == run(*names, "--cast", "fp16").exit_code == 1
    for cast in ("bf16", "true"):
        (shard,) = json.loads(run(*names, "--cast", cast).output)["shards"]
        assert (shard["needed_bytes"], shard["read_bytes"], shard["staged_bytes"]) == (BYTES, 2 * BYTES, 2 * BYTES)
    refused = run(*names, "--cast", "int8")
    assert refused.exit_code == 1
    assert "cast must be" in refused.output


def test_all_differences_are_listed(run: Run, tmp_path: Path) -> None:
    save_layouts([layout(spec("a", 4, 4), spec("b", 4), spec("c\n\x1b[2J", 2))], tmp_path / "from.layout")
    save_layouts([layout(spec("a", 4, 5), spec("b", 4, dtype="float32"), spec("d", 1))], tmp_path / "to.layout")
    refused = run("plan", "--from", "from.layout", "--to", "to.layout")
    assert refused.exit_code == 1
    lines = refused.output.splitlines()
    assert lines[0] == "Error: the layouts do not fit: 4 differences"
    assert [line.split(": ")[1].split(" ")[0] for line in lines[1:]] == ["shape", "dtype", "missing", "extra"]
    assert "\x1b" not in refused.output
    as_json = run("plan", "--from", "from.layout", "--to", "to.layout", "--json")
    assert as_json.exit_code == 1
    found = json.loads(as_json.output)
    assert found["fits"] is False
    assert len(found["shards"][0]["differences"]) == 4


def test_thousands_of_differences_are_no_flood(run: Run, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        specs = [spec(f"layers.{number}", 4, dtype=dtype) for number in range(3 * MAX_TOLD)]
        save_layouts([layout(*specs)], tmp_path / f"{dtype}.layout")
    arguments = ("plan", "--from", "float32.layout", "--to", "bfloat16.layout")
    lines = run(*arguments).output.splitlines()
    assert lines[0] == f"Error: the layouts do not fit: {3 * MAX_TOLD} differences"
    assert len(lines) == MAX_TOLD + 2
    assert lines[-1] == f"- shard 0 of 1: ... and {2 * MAX_TOLD} more: --json lists all"
    (found,) = json.loads(run(*arguments, "--json").output)["shards"]
    assert len(found["differences"]) == 3 * MAX_TOLD


def test_one_shard_that_does_not_fit_does_not_hide_the_other(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2)[:1], tmp_path / "half.layout")
    save_layouts(row_shards(4)[1:3], tmp_path / "quarters")
    mixed = run("plan", "--from", "half.layout", "--to", "quarters")
    assert mixed.exit_code == 1
    assert "1 of 4" in mixed.output
    assert "Error: the layouts do not fit: 1 difference\n- shard 2 of 4: gap in 'w'" in mixed.output


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "holds no layout"), (b"\xc1" * 40, "holds no layout"), (b"{}", "holds no layout")],
)
def test_what_is_no_layout_is_refused(run: Run, tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "bad.layout").write_bytes(data)
    refused = run("layout", "bad.layout")
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: bad.layout ")
    assert why in refused.output


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (file,) = save_layouts(row_shards(1), tmp_path / "one.layout")
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at])
        with pytest.raises(LayoutMismatch, match=r"one\.layout holds no layout"):
            load_layout(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(LayoutMismatch):
        load_layout(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy:trainer", LiveName("policy", "trainer", None)),
        ("policy@7:trainer", LiveName("policy", "trainer", 7)),
        ("Qwen/Qwen3-8B@0:10.0.0.1:8000", LiveName("Qwen/Qwen3-8B", "10.0.0.1:8000", 0)),
        ("me@home:trainer", LiveName("me@home", "trainer", None)),
        ("policy", None),
        ("policy:", None),
        (":trainer", None),
        ("@3:trainer", None),
    ],
)
def test_names_of_live_replicas(text: str, expected: LiveName | None) -> None:
    assert live_name(text) == expected


def test_what_is_nothing_at_all(run: Run) -> None:
    refused = run("plan", "--from", "nowhere", "--to", "nowhere")
    assert refused.exit_code == 1
    assert "there is no file or folder nowhere" in refused.output
    assert run("plan", "--from", "x").exit_code == 2


def test_without_a_hub_a_live_name_says_so(run: Run) -> None:
    refused = run("layout", "policy:trainer")
    assert refused.exit_code == 1
    assert "no server was named" in refused.output


def test_many_files_with_commas_between_are_longer_than_any_path(run: Run, tmp_path: Path) -> None:
    files = save_layouts(row_shards(40), tmp_path / ("folder" * 20))
    text = ",".join(map(str, files))
    assert len(text) > 4096
    assert len(find_layouts(text, load_settings(environ={})).layouts) == 40
    refused = run("layout", "n" * 300)
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: there is no file or folder nn")


def test_a_place_for_several_layouts_that_cannot_be_made_is_named(run: Run, tmp_path: Path) -> None:
    save_layouts(row_shards(2), tmp_path / "two")
    (tmp_path / "file").touch()
    for out in (tmp_path / ("n" * 300), tmp_path / "file" / "inner"):
        refused = run("layout", "two", "--out", out)
        assert refused.exit_code == 1
        assert refused.output.startswith(f"Error: cannot write {out}: ")
