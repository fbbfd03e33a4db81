"""`tensorhub demo` as a user runs it, and what it says when a reader gets something wrong."""

from __future__ import annotations

import io
import re
import signal
import subprocess

import numpy as np
import psutil
import pytest
from rich.console import Console

from tensorhub_core.cli.demo import READERS, TRAINER, Story
from tensorhub_core.cli.demo_worker import base_tensors, is_version
from tests.processes.cli.commands import COMMAND, environment, tensorhub

SHORT = ("demo", "--seconds", "3", "--megabytes", "8")


@pytest.mark.timeout(240)
def test_every_reader_gets_the_versions_from_somebody() -> None:
    done = tensorhub(*SHORT, timeout_s=200)
    assert done.code == 0, done.out + done.err
    newest = max(int(n) for n in re.findall(r"published version (\d+)", done.out))
    assert newest >= 3
    for reader in READERS:
        filled = re.findall(rf"{reader} +<- (.+?) +version (\d+), 8.0 MB in .*, every number right", done.out)
        assert filled, reader
        assert int(filled[-1][1]) == newest
        assert {source for sources, _ in filled for source in sources.split(", ")} <= {TRAINER, *READERS} - {reader}
    assert "NO" not in done.out


@pytest.mark.timeout(240)
def test_interrupting_leaves_no_process() -> None:
    process = subprocess.Popen(
        [*COMMAND, *SHORT[:2], "300", *SHORT[3:]], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    while "published version 1" not in process.stdout.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(60) != 0
    process.stdout.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []


def story(*events: dict[str, object]) -> Story:
    told = Story(Console(file=io.StringIO()))
    for event in events:
        told.hear(event)
    return told


PUBLISHED = {"event": "published", "who": TRAINER, "version": 2, "bytes": 8}


def filled(who: str, version: int = 2, right: bool = True) -> dict[str, object]:
    facts = {"version": version, "bytes": 8, "seconds": 0.1, "sources": [TRAINER], "right": right}
    return {"event": "filled", "who": who, **facts}


def test_all_readers_must_have_the_newest_version() -> None:
    assert story(PUBLISHED, *map(filled, READERS)).held()
    assert not story(PUBLISHED, *map(filled, READERS[:-1])).held()
    assert not story(PUBLISHED, *map(filled, READERS[:-1]), filled(READERS[-1], version=1)).held()


@pytest.mark.parametrize(
    "off",
    [
        filled(READERS[0], right=False),
        {"event": "failed", "who": READERS[0], "error": "DeadlineExceeded: no"},
        {"event": "ended", "who": TRAINER},
    ],
)
def test_anything_off_is_a_failure(off: dict[str, object]) -> None:
    assert not story(PUBLISHED, *map(filled, READERS), off, filled(READERS[0])).held()


def test_one_wrong_number_is_noticed() -> None:
    base = base_tensors(3, 4000)
    tensors = {name: tensor * np.float32(5) for name, tensor in base.items()}
    assert is_version(tensors, base, 5)
    assert not is_version(tensors, base, 4)
    tensors["layers.2.weight"][-1] = np.nextafter(tensors["layers.2.weight"][-1], np.float32(9))
    assert not is_version(tensors, base, 5)
