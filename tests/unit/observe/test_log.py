"""Logging belongs to the program: importing and using TensorHub changes nobody's handlers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorhub_core.observe.log import get_logger

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, filename=sys.argv[1], filemode="w", format="%(name)s %(message)s")
before = list(logging.getLogger().handlers)
from tensorhub_core.observe.log import get_logger
from tensorhub_core.transport.nixl_agent import load_bindings
load_bindings()
get_logger("client").info("still heard")
assert logging.getLogger().handlers == before
assert not get_logger().handlers
"""


def test_parts_log_under_one_root() -> None:
    assert get_logger().name == "tensorhub"
    assert get_logger("client").name == "tensorhub.client"
    assert get_logger("client").parent is get_logger()


def test_loading_the_data_plane_leaves_the_programs_log_files_open(tmp_path: Path) -> None:
    log = tmp_path / "program.log"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(log)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "tensorhub.client still heard\n"
    assert done.stdout == ""
