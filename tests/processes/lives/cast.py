"""Start the processes of a drill, give them orders, kill and restart them, and collect their histories."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.processes.lives.member import LEASE_S, SHARDS, STACKS
from tests.processes.lives.validators import Line

ROOT = Path(__file__).parents[3]
START_S = 60.0
TRIES = 4
POLL_S = 0.02
STACKS_S = 1.0
ERROR_LINES = 120
TRAINERS = ("trainer-0", "trainer-1")
READERS = ("reader-0", "reader-1", "reader-2", "reader-3")
Place = tuple[str, int]
HUB: Place = ("hub", 0)
WHO = ("pid", "role", "replica", "shard")


class Process:
    """One life of one place."""

    def __init__(self, place: Place, arguments: Sequence[str], errors: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.processes.lives.member", *arguments]
        self.place, self.errors = place, errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=env, stderr=file)

    @property
    def pid(self) -> int:
        """Return the process's id, which its lines carry."""
        return self.process.pid

    def order(self, **what: Any) -> None:
        """Give an order; one that is gone does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """End it, in whatever state it is."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Cast:
    """A hub, two trainers and four readers of two shards each: 13 processes."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self.lines: list[Line] = []
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._lives = 0
        self._playing: dict[Place, Process] = {}
        self.address = "tcp://127.0.0.1:0"
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        hub = self.start(HUB)
        self.address = self.wait_for(hub, lambda line: line["kind"] == "ready")["address"]
        for replica in (*TRAINERS, *READERS):
            for process in [self.start((replica, shard)) for shard in range(SHARDS)]:
                self.wait_for(process, lambda line: line["kind"] == "ready")

    def start(self, place: Place) -> Process:
        """Start a life in a place."""
        self._lives += 1
        history = self._folder / f"{self._lives}.jsonl"
        role = place[0].split("-")[0]
        more = () if place == HUB else (place[0], str(place[1]))
        process = self._playing[place] = Process(
            place, (role, str(history), self.address, *more), history.with_suffix(".err")
        )
        return process

    def of(self, place: Place) -> Process:
        """Return who plays a place."""
        return self._playing[place]

    def collect(self) -> list[Line]:
        """Read what has been written since the last call; return the new lines."""
        fresh: list[Line] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            fresh += [json.loads(line) for line in data[:whole].splitlines()]
        self.lines += fresh
        return fresh

    def history(self) -> list[Line]:
        """Return all lines in the order of time."""
        self.collect()
        return sorted(self.lines, key=lambda line: line["t"])

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for something in the history; raises AssertionError."""
        end = time.monotonic() + timeout_s
        while True:
            self.collect()
            if condition():
                return
            if time.monotonic() > end:
                self._show_stacks()
                raise AssertionError(f"{what} did not come within {timeout_s:g} s\n{self._last_lines()}")
            time.sleep(POLL_S)

    def wait_for(self, process: Process, wanted: Callable[[Line], bool], timeout_s: float = START_S) -> Line:
        """Return the first line of a process that is wanted."""
        found: list[Line] = []

        def look() -> bool:
            found.extend(line for line in self.lines if line["pid"] == process.pid and wanted(line))
            return bool(found)

        self.until(look, f"a line of {process.place}", timeout_s)
        return found[0]

    def _show_stacks(self) -> None:
        """Have every process write where its threads are, also one that is stuck in a library that holds the lock."""
        for process in self._playing.values():
            if process.process.poll() is None:
                process.process.send_signal(STACKS)
        time.sleep(STACKS_S)

    def _last_lines(self) -> str:
        """Return the last lines of every living process, but for heartbeats."""
        text = []
        for place, process in sorted(self._playing.items()):
            said = [
                x for x in self.history() if x["pid"] == process.pid and x.get("message") not in ("Heartbeat", "Ok")
            ]
            text.append(f"--- {place} {process.pid}, returned {process.process.poll()}")
            text += process.errors.read_text().splitlines()[-ERROR_LINES:]
            text += [json.dumps({key: value for key, value in x.items() if key not in WHO}) for x in said[-12:]]
        return "\n".join(text)

    # --- what happens -----------------------------------------------------------------------------------------------

    def trainers(self) -> list[Process]:
        """Return the trainers' processes."""
        return [self._playing[replica, shard] for replica in TRAINERS for shard in range(SHARDS)]

    def publish(self) -> None:
        """Have all trainers take back what they published, make the next version and publish it."""
        self.version += 1
        for process in self.trainers():
            process.order(unpublish=True)
            process.order(publish=self.version)

    def newest_everywhere(self) -> bool:
        """Tell whether every reader's present life has the newest version, all of its bytes right."""
        best: dict[int, int] = {}
        for line in self.lines:
            if line["kind"] == "bytes":
                best[line["pid"]] = line["version"]
        return all(
            best.get(self._playing[replica, shard].pid) == self.version
            for replica in READERS
            for shard in range(SHARDS)
        )

    def restart(self, place: Place) -> Process:
        """End a place's present life, if it still lives, and start the next one."""
        self.of(place).end()
        process = self.start(place)
        self.wait_for(process, lambda line: line["kind"] == "ready")
        if place[0] in TRAINERS:
            process.order(publish=self.version)
        return process

    def strike(self, place: Place, when: str, message: str, number: int, pause_s: float = 0.0) -> None:
        """Have a process signal itself at a point of the next version's life; then wake it, or start the next one.

        Raises AssertionError if the point is not reached while everybody gets the next few versions.
        """
        process = self.of(place)
        self.collect()
        before = self._crashes(process)
        process.order(arm=[when, message, int(number)])
        for _ in range(TRIES):  # a short read may be over before there is a prefix to announce
            self.publish()
            self.until(
                lambda: self._crashes(process) > before or self.newest_everywhere(),
                f"{when} {message} at {place}",
                START_S,
            )
            if self._crashes(process) > before:
                break
        else:
            raise AssertionError(f"{place} got {TRIES} versions and never came to the point {when} {message}")
        if number == signal.SIGSTOP:
            time.sleep(pause_s)
            process.process.send_signal(signal.SIGCONT)
        else:
            process.process.wait()
            self.restart(place)

    def _crashes(self, process: Process) -> int:
        return sum(line["kind"] == "crash" and line["pid"] == process.pid for line in self.lines)

    def settle(self, timeout_s: float) -> None:
        """Publish one more version and wait until every reader has it."""
        self.publish()
        self.until(self.newest_everywhere, f"version {self.version} at every reader", timeout_s)

    def close(self) -> None:
        """End all processes."""
        for process in self._playing.values():
            process.end()


LONG_S, SHORT_S = 4.5 * LEASE_S, 1.5 * LEASE_S
"""A pause after which a worker counts as dead, and one after which it is only suspected."""
