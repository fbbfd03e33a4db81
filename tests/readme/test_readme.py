"""What the README shows is what happens: its programs run, in processes of their own, and print what it says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.readme.snippets import Page, Step, missing_lines, named_blocks, pattern_of, play, read_page, run_block

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


@pytest.fixture
def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "TENSORHUB_HOST": "node-1",
    }


@pytest.mark.timeout(240)
def test_the_readme_is_true(tmp_path: Path, environment: dict[str, str]) -> None:
    page = read_page((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(page.files) >= 2
    assert sum(step.background for step in page.steps) >= 2, "the quickstart is two processes"
    assert any("tensorhub status" in step.script and step.expected for step in page.steps)
    play(page, tmp_path, environment, LIMIT_S)


def test_a_page_is_read_block_by_block() -> None:
    page = read_page(
        "```python file=a.py\nprint(1)\n```\n```sh\nnot run\n```\n```sh background\npython a.py\n```\n"
        "```text expect\n1\n\n```\n```python\nnot a file\n```\n```sh run\nls\n```\n"
    )
    assert page == Page({"a.py": "print(1)\n"}, [Step("python a.py\n", True, ["1"]), Step("ls\n", False)])


def test_named_blocks_are_found_by_their_names() -> None:
    page = "```python name=a\nx = 1\n```\n```python\nx = 2\n```\n```sh name=b\nls\n```\n"
    assert named_blocks(page) == {"a": "x = 1\n", "b": "ls\n"}
    with pytest.raises(AssertionError, match="name=a twice"):
        named_blocks(page + page)


def test_a_block_runs_with_what_it_is_given(tmp_path: Path) -> None:
    assert run_block("y = x + 1\n", tmp_path, x=1)["y"] == 2


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        ("got version 12\nin 0.7 s\n", []),
        ("noise\ngot version 3\nmore noise\nin   1,200.5 s", []),
        ("in 0.5 s\ngot version 3", ["in 1.5 s"]),
        ("got version x\nin 0.5 s", ["got version 7"]),
        ("", ["got version 7", "in 1.5 s"]),
    ],
)
def test_expected_lines_are_found_in_order_whatever_the_numbers(printed: str, missing: list[str]) -> None:
    assert missing_lines(["got version 7", "in 1.5 s"], printed) == missing


def test_tables_are_compared_whatever_their_widths() -> None:
    assert pattern_of(" policy   12 ") == pattern_of("policy 3")


@pytest.mark.parametrize(
    ("step", "why", "limit_s"),
    [
        (Step("echo said so; false; echo never", False), "exit code 1", LIMIT_S),
        (Step("echo other", False, ["this"]), "not printed by", 1.5),
        (Step("echo this; sleep 60", False, ["this"]), "not done", 1.5),
        (Step("echo other", True, ["this"]), "it ended", LIMIT_S),
        (Step("echo other; sleep 60", True, ["this"]), "too late", 1.5),
    ],
)
def test_a_step_that_does_not_do_as_shown_fails(
    step: Step, why: str, limit_s: float, tmp_path: Path, environment: dict[str, str]
) -> None:
    with pytest.raises(AssertionError, match=why):
        play(Page(steps=[step]), tmp_path, environment, limit_s)


def test_steps_run_side_by_side_and_nothing_stays(tmp_path: Path, environment: dict[str, str]) -> None:
    background = Step("sleep 300 & echo $! > pid; echo ready; while ! test -e go; do sleep 0.1; done; sleep 60", True)
    background.expected = ["ready"]
    play(Page(steps=[background, Step("touch go; cat pid", False)]), tmp_path, environment, LIMIT_S)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
