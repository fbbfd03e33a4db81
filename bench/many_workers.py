"""Many workers at one hub: so many that connect at the same moment, and ever more that are idle and held.

    python bench/many_workers.py [--workers 10000] [--burst 1000] [--processes 5] [--hold-s 20] [--json FILE]

The workers are connections that speak the protocol, in several processes, because a process has a limit of open files.
First `burst` of them connect and say hello all at once; then the others come, process by process. All of them are held
for `hold-s` seconds with heartbeats: every one has to be answered, and nobody may be asked who it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from common import Row, hub, limit, parser_of, report
from memory_server import resident_mb

from tensorhub_core.state.messages import PROTOCOL, Heartbeat, Hello, Ok, Welcome
from tensorhub_core.wire.codec import decode_reply, encode, split

NAME = "many_workers"
HEARTBEAT_S = 5.0
ANSWER_S = 60.0
LIMIT_KB = 40.0
HUB = ("--lease-s", "30", "--heartbeat-s", str(HEARTBEAT_S), "--grace-s", "30")


class Crowd:
    """Connections of one process; each is a worker of its own replica."""

    def __init__(self, address: str, first: int) -> None:
        self._address, self._first = address, first
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 20_000)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._request = 1

    def join(self, count: int) -> dict[str, float]:
        """Connect and say hello for so many at once; return when all were welcome, in seconds since the first."""
        begun_s = time.monotonic()
        fresh = []
        for number in range(len(self._sockets), len(self._sockets) + count):
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(self._address)
            name = f"rollout-{self._first + number}"
            socket.send_multipart(encode(1, Hello(PROTOCOL, f"token of {name}", "policy", name)))
            fresh.append(socket)
        self._sockets += fresh
        asked_s = time.monotonic() - begun_s
        for socket in fresh:
            self._expect(socket, 1, Welcome)
        return {"asked_s": asked_s, "welcome_s": time.monotonic() - begun_s}

    def beat(self) -> float:
        """Send a heartbeat on every connection; return how long the answers took."""
        self._request += 1
        begun_s = time.monotonic()
        for socket in self._sockets:
            socket.send_multipart(encode(self._request, Heartbeat()))
        for socket in self._sockets:
            self._expect(socket, self._request, Ok)
        return time.monotonic() - begun_s

    def _expect(self, socket: zmq.Socket[bytes], request: int, kind: type) -> None:
        if not socket.poll(int(ANSWER_S * 1000)):
            raise RuntimeError(f"no answer within {ANSWER_S:g} s")
        frames = split(socket.recv_multipart())
        reply = decode_reply(frames)
        if frames.request != request or not isinstance(reply, kind):
            raise RuntimeError(f"the hub said {reply} instead of {kind.__name__}")


def act(address: str, first: int) -> None:
    """Be one process: do what each line of standard input says, and print what came of it."""
    allow_files()
    crowd = Crowd(address, first)
    for line in sys.stdin:
        order = json.loads(line)
        if "join" in order:
            print(json.dumps(crowd.join(order["join"])), flush=True)
            continue
        end_s = time.monotonic() + order["hold_s"]
        beats, slowest_s = 0, 0.0
        while time.monotonic() < end_s:
            took_s = crowd.beat()
            beats, slowest_s = beats + 1, max(slowest_s, took_s)
            time.sleep(max(0.0, min(HEARTBEAT_S - took_s, end_s - time.monotonic())))
        print(json.dumps({"beats": beats, "slowest_s": slowest_s}), flush=True)


def allow_files() -> None:
    """Allow this process as many open files as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def processes(address: str, count: int, workers: int, script: str = __file__) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of the workers, each of them `script`; ended with the block."""
    made: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            command = [sys.executable, script, "--act", address, str(number * workers)]
            made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()


def tell(processes: Sequence[subprocess.Popen[str]], **order: float) -> list[dict[str, Any]]:
    """Tell processes what to do at the same time; return what each answers."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a process of workers ended; its error is above")
        answers.append(json.loads(line))
    return answers


def measure(workers: int, burst: int, count: int, hold_s: float) -> list[Row]:
    """Measure a burst, and then all workers held."""
    rows: list[Row] = []
    with hub(*HUB) as (address, pid), processes(address, count, workers) as made:
        empty = resident_mb(pid)
        each = burst // count
        tell(made, hold_s=0.0)  # all of them run
        begun_s = time.monotonic()
        joined = tell(made, join=each)
        rows.append(Row(f"{each * count:,} workers at once: all have asked", max(a["asked_s"] for a in joined), "s"))
        rows.append(Row(f"{each * count:,} workers at once: all are welcome", time.monotonic() - begun_s, "s"))
        begun_s, more = time.monotonic(), workers // count - each
        for process in made if more else ():
            tell([process], join=more)
        total = (workers // count) * count if more else each * count
        rows.append(Row(f"the other {more * count:,} join", time.monotonic() - begun_s, "s"))
        held = tell(made, hold_s=hold_s)
        now = resident_mb(pid)
        answered = sum(a["beats"] for a in held) * (total // count)
        rows.append(Row(f"{total:,} idle workers: heartbeats answered", answered, ""))
        rows.append(
            limit(f"{total:,} idle workers: a round of heartbeats", max(a["slowest_s"] for a in held), "s", HEARTBEAT_S)
        )
        rows.append(Row(f"hub with {total:,} idle workers", now, "MB"))
        rows.append(limit(f"per worker of {total:,}", (now - empty) * 1000 / total, "kB", LIMIT_KB))
    return rows


def main() -> None:
    """Read the options and measure."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--burst", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--hold-s", type=float, default=20.0)
    parser.add_argument("--act", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.act is not None:
        return act(arguments.act[0], int(arguments.act[1]))
    allow_files()
    report(NAME, arguments, measure(arguments.workers, arguments.burst, arguments.processes, arguments.hold_s))


if __name__ == "__main__":
    main()
