"""The bench of many workers, small: so many connect at once and are held, and every one of them is answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKERS, BURST, PROCESSES = 300, 200, 2


@pytest.mark.timeout(120)
def test_all_are_welcome_and_held(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--workers", WORKERS, "--burst", BURST, "--processes", PROCESSES, "--hold-s", 2, "--json", file]
    command = [sys.executable, str(ROOT / "bench" / "many_workers.py"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows[f"{BURST} workers at once: all are welcome"]["value"] > 0
    assert rows[f"{WORKERS} idle workers: heartbeats answered"]["value"] >= WORKERS
    assert 0 < rows[f"per worker of {WORKERS}"]["value"] < 200, "kB, as nothing but sessions is held"
