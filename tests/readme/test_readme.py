"""What the README shows is what happens: its programs run, in processes of their own, and print what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.readme.snippets import Run, missing_lines, pattern_of, runs_of

ROOT = Path(__file__).resolve().parents[2]
RUNS = runs_of(ROOT / "README.md")
LIMIT_S = 100.0


def execute(run: Run, folder: Path) -> str:
    """Write the files, run the script with this interpreter first in PATH, return what it printed."""
    for name, text in run.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", run.script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None or _group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed
    return printed


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_readme_has_the_quickstart() -> None:
    assert any(len(run.files) >= 2 and run.expected for run in RUNS)


@pytest.mark.parametrize("run", RUNS, ids=[f"run-{number}" for number in range(1, len(RUNS) + 1)])
def test_the_readme_is_true(run: Run, tmp_path: Path) -> None:
    printed = execute(run, tmp_path)
    assert missing_lines(run.expected, printed) == [], printed


def test_a_page_is_read_block_by_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python file=a.py\nprint(1)\n```\n```sh\nnot run\n```\n"
        "```sh run\npython a.py\n```\n```text expect\n1\n\n```\n```python\nnot a file\n```\n"
    )
    assert runs_of(page) == [Run("python a.py\n", {"a.py": "print(1)\n"}, ["1"])]


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


def test_tables_are_compared_without_their_rulers() -> None:
    assert pattern_of("│ policy  │  12 │") == pattern_of(" policy 3 ")


def test_a_failing_script_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="said so"):
        execute(Run("echo said so; false; echo never", {}), tmp_path)


def test_a_script_that_leaves_a_process_behind_does_not_keep_it(tmp_path: Path) -> None:
    printed = execute(Run("sleep 300 > /dev/null 2>&1 & echo $!", {}), tmp_path)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(printed)) and psutil.Process(int(printed)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
