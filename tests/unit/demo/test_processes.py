from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from demo.processes import Children, DemoError, wait_until

ROOT = Path(__file__).resolve().parents[3]
FAMILY = (  # starts a child that ignores SIGTERM, as an engine's worker might
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN);"
    ' print("up", flush=True); time.sleep(600)\'])\n'
    "print(child.pid, flush=True); time.sleep(600)\n"
)


def soon(what: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def started_child(log: Path) -> int:
    """Return the process id that FAMILY printed, once its child is up."""
    assert soon(lambda: log.exists() and len(log.read_text().split()) == 2)
    return int(next(word for word in log.read_text().split() if word != "up"))


def test_a_whole_group_ends(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("family", [sys.executable, "-c", FAMILY])
        grandchild = started_child(child.log)
        assert child.alive()
        children.stop(child, timeout_s=0.3)
        assert not child.alive()
        assert not runs(child.group)
        assert not runs(grandchild)
        children.stop(child, timeout_s=0.3)  # again: nothing to do


def test_leaving_ends_everything(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        sleepers = [children.start(str(n), [sys.executable, "-c", "import time; time.sleep(600)"]) for n in range(3)]
    assert not any(runs(child.group) for child in sleepers)
    children.close()


def test_an_error_ends_everything(tmp_path: Path) -> None:
    started = []

    def interrupted() -> None:
        with Children(tmp_path) as children:
            started.append(children.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not runs(started[0].group)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_nothing(tmp_path: Path, number: int) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from demo.processes import Children\n"
            f"children = Children(Path({str(tmp_path)!r}))\n"
            f"print(children.start('family', [sys.executable, '-c', {FAMILY!r}]).group, flush=True); time.sleep(600)",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    leader = int(owner.stdout.readline())
    grandchild = started_child(tmp_path / "family.log")
    os.kill(owner.pid, number)
    owner.wait()
    owner.stdout.close()
    assert soon(lambda: not runs(leader) and not runs(grandchild))


def test_a_program_that_ends_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("hub", [sys.executable, "-c", "print('no such port'); raise SystemExit(3)"])
        with pytest.raises(DemoError, match=r"(?s)hub ended with code 3.*no such port"):
            wait_until("the hub listens", lambda: False, [child], 20.0)


def test_the_cause_far_above_the_end_is_shown(tmp_path: Path) -> None:
    program = (
        "print('ready soon'); print('NameError: the cause'); [print('page', n) for n in range(99)]\n"
        "print('RuntimeError: see above'); raise SystemExit(1)"
    )
    with Children(tmp_path) as children:
        child = children.start("engine", [sys.executable, "-c", program])
        child.wait(20.0)
        lines = child.tail().splitlines()
    assert lines[0].strip() == "NameError: the cause"
    assert lines[-1].strip() == "RuntimeError: see above"
    assert len(lines) < 20


def test_a_deadline_shows_what_was_waited_for(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start(
            "engine", [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
        )
        assert soon(lambda: "loading" in child.log.read_text())
        with pytest.raises(DemoError, match=r"(?s)ready: not after.*loading"):
            wait_until("ready", lambda: False, [child], 0.2)
        with pytest.raises(DemoError, match="not done after"):
            child.wait(0.1)


def test_environment_and_output(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        program = "import os, sys; print(os.environ['WORD']); print('to stderr', file=sys.stderr)"
        child = children.start("echo", [sys.executable, "-c", program], {"WORD": "given"})
        assert child.wait(20.0) == 0
    assert set((tmp_path / "echo.log").read_text().splitlines()) == {"given", "to stderr"}


def test_a_program_that_listens_is_told_what_to_do(tmp_path: Path) -> None:
    echo = "import sys\nfor line in sys.stdin: print('heard', line.strip(), flush=True)"
    with Children(tmp_path) as children:
        child = children.start("echo", [sys.executable, "-c", echo], listens=True)
        child.tell("one")
        child.tell("two")
        assert soon(lambda: child.text() == "heard one\nheard two\n")
        child.end_input()
        child.end_input()
        assert child.wait(20) == 0


def test_a_program_that_does_not_listen_any_more_is_named(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("deaf", [sys.executable, "-c", "raise SystemExit(3)"], listens=True)
        assert child.wait(20) == 3
        with pytest.raises(DemoError, match="deaf"):
            child.tell("one")
