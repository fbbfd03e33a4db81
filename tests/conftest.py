"""What every test gets: no settings of the user's, folders of its own, and no process left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_MULTIPROCESSING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_EMBEDDED_SERVER = "tensorhub_core.server"
_END_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_folder = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Hide the user's settings, and keep an embedded server and its files inside this run."""
    _draw_the_same_examples(config)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A forked child has the pipes of pytest-xdist: if it outlives its worker, nobody hears of the worker's end.
        os.register_at_fork(after_in_child=_die_with_the_parent)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl-C, and so would every command that a test interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith("TENSORHUB_")]:
        del os.environ[name]
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-tests-"))
    config.stash[_folder] = folder
    for variable in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        home = folder / variable.lower()
        home.mkdir(mode=0o700)
        os.environ[variable] = str(home)


def _die_with_the_parent() -> None:
    """Have this process killed when the thread ends that has forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _draw_the_same_examples(config: pytest.Config) -> None:
    """Let hypothesis draw the same examples each time: what fails, fails for everybody.

    `make nightly-property` draws others.
    """
    with contextlib.suppress(ImportError):  # no environment of an engine has it
        from hypothesis import settings

        if config.getoption("--hypothesis-profile", None) is None:
            settings.register_profile("same", derandomize=True, database=None)
            settings.load_profile("same")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's folders."""
    if _folder in config.stash:
        _end_embedded_server(config.stash[_folder] / "xdg_runtime_dir" / "tensorhub" / "address")
        shutil.rmtree(config.stash[_folder], ignore_errors=True)


def _end_embedded_server(record: Path) -> None:
    """End the server that tests without an address started: it is detached, and would stay until it is idle."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        process = psutil.Process(json.loads(record.read_text())["pid"])
        if _is(process, _EMBEDDED_SERVER):
            process.kill()
            process.wait(_END_TIMEOUT_S)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fail the run if a test left a child process running; ends it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    ours = [child for child in ours if not _is(child, *_MULTIPROCESSING)]
    _, alive = psutil.wait_procs(ours, timeout=_patience(ours))
    left = []
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and not _is(child, _EMBEDDED_SERVER):
                left.append(f"{child.pid}: {' '.join(child.cmdline())}")
            child.kill()
    assert not left, "tests left processes running:\n" + "\n".join(left)


def _patience(children: list[psutil.Process]) -> float:
    """Return how many seconds to wait for them: an embedded server is not waited for, it stays until it is idle."""
    waited_for = [child for child in children if not _is(child, _EMBEDDED_SERVER)]
    return _END_TIMEOUT_S if waited_for else 0.0


def _is(child: psutil.Process, *programs: str) -> bool:
    try:
        return any(program in " ".join(child.cmdline()) for program in programs)
    except psutil.NoSuchProcess:
        return True
