"""The tests' own tools: what is forked is a process of its own, tells how it ended, and does not outlive the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..models import Checkpoints
from .server import FLOAT32, Servers
from .zygote import Forked, Job, Zygote

pytestmark = pytest.mark.timeout(300)
HERE = "tests.engines.sglang.test_rig"


def say_and_end(code: int) -> None:
    """Say who this is and exit."""
    print(os.getsid(0) == os.getpid(), "sglang" in sys.modules, os.environ["ASKED_FOR"], flush=True)
    sys.exit(code)


def sleep_with_a_child() -> None:
    """Start a child in the same group and stay."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    child.wait()


def job(function: str, log: Path, *arguments: int) -> Job:
    """Return a job that runs a function of this module."""
    return Job(HERE, function, list(arguments), {"ASKED_FOR": "yes"}, str(log))


def wait_for(process: Forked) -> int:
    """Wait until a forked process has ended."""
    until = time.monotonic() + 60
    while (code := process.poll()) is None:
        assert time.monotonic() < until, process.text()
        time.sleep(0.02)
    return code


def child_of(process: Forked) -> psutil.Process:
    """Return the process that `sleep_with_a_child` started."""
    until = time.monotonic() + 60
    while not process.log.exists() or not process.text().strip():
        assert time.monotonic() < until
        time.sleep(0.02)
    return psutil.Process(int(process.text()))


def test_a_fork_is_a_session_with_sglang_imported_and_its_end_is_known(zygote: Zygote, folder: Path) -> None:
    process = zygote.fork(job("say_and_end", folder / "log", 7))
    assert wait_for(process) == 7
    assert process.text() == "True True yes\n"
    assert wait_for(zygote.fork(Job(HERE, "no_such_function", [], {}, str(folder / "other")))) == 1


def test_ending_one_ends_its_group(zygote: Zygote, folder: Path) -> None:
    process = zygote.fork(job("sleep_with_a_child", folder / "log"))
    child = child_of(process)
    process.end()
    assert wait_for(process) == -signal.SIGKILL
    child.wait(10)


def test_what_is_forked_ends_with_the_zygote(folder: Path) -> None:
    own = Zygote(folder, warm=False)
    process = own.fork(job("sleep_with_a_child", folder / "log"))
    child, forked = child_of(process), psutil.Process(process.pid)
    own.close()
    _, left = psutil.wait_procs([child, forked], timeout=10)
    assert left == []


def test_stock_engines_answer_alike_whatever_their_ranks_and_not_alike_for_other_weights(
    servers: Servers, checkpoints: Checkpoints
) -> None:
    """What every other test compares with."""
    one = servers.fresh(checkpoints("tied-float32", 2), *FLOAT32)
    two = servers.fresh(checkpoints("tied-float32", 2), *FLOAT32, ranks=2)
    assert one.answers == two.answers != servers.fresh(checkpoints("tied-float32", 1), *FLOAT32).answers
    assert one.memory[0].keys() == two.memory[0].keys() == two.memory[1].keys()
    assert two.memory[0] != two.memory[1]
    assert servers.fresh(checkpoints("tied-float32", 2), *FLOAT32) is one
