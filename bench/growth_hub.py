"""The real hub with many followers of one trainer: what a version and an idle second cost it; part of `growth.py`.

The followers are connections that speak the protocol, in processes of their own (one has a limit of open files). They
send what real ones send in a round and move no byte. Measured is the CPU time of the hub's threads: the loop's, which
decides and is the one that saturates first, and ZeroMQ's, which only moves messages.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from common import hub
from control_plane import Shape, join_hub, placement_of, shape, withdraw
from many_workers import Crowd, allow_files, processes, tell
from memory_server import Connection

from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Committed,
    Done,
    Filling,
    Heartbeat,
    JoinRound,
    Ok,
    Promise,
    Publish,
    PutBlob,
    Register,
    Reply,
    Request,
    Unpublish,
    Wait,
)
from tensorhub_core.wire.codec import decode_reply, encode, split

SIZE = 1 << 30
"""Bytes of a shard, as it is said: large enough that readers queue behind each other."""
SEGMENTS = 64
MARKS = 8
"""Prefixes that a reader announces."""
HUB = ("--lease-s", "600", "--heartbeat-s", "100", "--grace-s", "600", "--log-level", "error")
VERSIONS = 3
BEATS_A_SECOND = 10_000
"""Heartbeats of all followers together, as of so many workers: what each costs depends on how many come at a time."""
ACT = str(Path(__file__).resolve())


class Followers(Crowd):
    """Connections of one process; each is a replica of one shard that follows the trainer."""

    def __init__(self, address: str, first: int) -> None:
        super().__init__(address, first)
        self._round = -1
        self._shape = shape(64)

    def register(self) -> None:
        """Register made-up memory."""
        layout = self._shape.layout
        self._all(self._sockets, lambda _: PutBlob(digest_of(layout), layout), Ok)
        self._all(self._sockets, lambda n: PutBlob(digest_of(self._placement(n)), self._placement(n)), Ok)
        digest = digest_of(layout)
        self._all(self._sockets, lambda n: Register(digest, digest_of(self._placement(n)), SIZE, SEGMENTS), Ok)

    def _placement(self, place: int) -> bytes:
        return placement_of(1 + self._first + place, self._shape)

    def wait(self, newer_than: int) -> None:
        """Ask to be told of a newer version; the answers are taken by `update`."""
        self._request += 1
        frames = encode(self._request, Wait(None if newer_than < 0 else (1, newer_than)))
        for socket in self._sockets:
            socket.send_multipart(frames)

    def update(self, version: int) -> dict[str, float]:
        """Hear of a version, read it in two waves, and hold it; returns the seconds since all had heard."""
        for socket in self._sockets:
            self._reply(socket, self._request, Available)
        began = time.monotonic()
        self._round += 1
        for wave in (self._sockets[::2], self._sockets[1::2]):
            self._read(wave, version)
        return {"seconds": time.monotonic() - began}

    def _read(self, wave: Sequence[zmq.Socket[bytes]], version: int) -> None:
        number, sums = self._round, self._shape.sums[version]
        promises = self._all(wave, lambda _: JoinRound(number, None, "update"), Promise)
        for promise in promises:
            if not isinstance(promise, Promise) or sums not in promise.blobs:
                raise RuntimeError("a promise did not bring the checksums of its version")
        self._all(wave, lambda _: Unpublish(), Ok)
        self._all(wave, lambda _: Filling(number), Ok)
        for mark in range(1, MARKS + 1):
            prefix = SEGMENTS * mark // (MARKS + 1)
            announce = Announce(number, prefix, prefix * (SIZE // SEGMENTS))
            self._all(wave, lambda _, announce=announce: announce, Ok)  # type: ignore[misc]
        self._all(wave, lambda _: Done(number, digest_of(sums)), Committed)

    def idle(self, seconds: float, beats_a_second: float) -> dict[str, float]:
        """Send one heartbeat after the other, as evenly as the workers' own clocks would; returns how many."""
        self._request += 1
        frames, count, taken, sent = encode(self._request, Heartbeat()), len(self._sockets), 0, 0
        began = time.monotonic()
        while (since_s := time.monotonic() - began) < seconds:
            due = int(since_s * count * beats_a_second)
            for place in range(sent, due):
                self._sockets[place % count].send_multipart(frames)
            sent = due
            while taken < sent - count // 4:  # who was asked a moment ago has its answer by now
                self._reply(self._sockets[taken % count], self._request, Ok)
                taken += 1
            time.sleep(0.0005)
        for place in range(taken, sent):
            self._reply(self._sockets[place % count], self._request, Ok)
        return {"beats": float(sent), "seconds": since_s}

    def _all(
        self, sockets: Sequence[zmq.Socket[bytes]], message: Callable[[int], Request], kind: type[Reply] | None = None
    ) -> list[Reply]:
        """Send a request on every connection; return the answers, which have to be of a kind if one is named."""
        self._request += 1
        for place, socket in enumerate(sockets):
            socket.send_multipart(encode(self._request, message(place)))
        return [self._reply(socket, self._request, kind) for socket in sockets]

    def _reply(self, socket: zmq.Socket[bytes], request: int, kind: type[Reply] | None) -> Reply:
        while True:
            if not socket.poll(60_000):
                raise RuntimeError("no answer within a minute")
            frames = split(socket.recv_multipart())
            if frames.request == request:
                break
        reply = decode_reply(frames)
        if kind is not None and not isinstance(reply, kind):
            raise RuntimeError(f"the hub said {reply} instead of {kind.__name__}")
        return reply


def act(address: str, first: int) -> None:
    """Be one process: do what each line of standard input says, and print what came of it."""
    allow_files()
    crowd = Followers(address, first)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, float] = {}
        if "join" in order:
            answer = crowd.join(order["join"])
            crowd.register()
        elif "wait" in order:
            crowd.wait(order["wait"])
        elif "update" in order:
            answer = crowd.update(order["update"])
        else:
            answer = crowd.idle(order["idle"], order["rate"])
        print(json.dumps(answer), flush=True)


class Spent(NamedTuple):
    """CPU seconds of the hub: of its loop, and of ZeroMQ's threads."""

    loop: float
    network: float

    def since(self, before: Spent) -> Spent:
        """Return what was spent since."""
        return Spent(self.loop - before.loop, self.network - before.network)


def spent(pid: int) -> Spent:
    """Return what the threads of a process have spent by now."""
    loop = network = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text()
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        if name.startswith("ZMQ"):
            network += seconds
        else:
            loop += seconds
    return Spent(loop, network)


class Figures(NamedTuple):
    """What a hub with so many followers was measured to spend: per worker and version, and per heartbeat."""

    workers: int
    version_s: float
    """From the publish until everybody holds the version, as if its bytes took no time."""
    version: Spent
    beat: Spent
    beats_a_second: float
    share: float
    """Of the time of a version that the loop was busy."""


def measure(workers: int, count: int, idle_s: float) -> Figures:
    """Measure a hub with so many followers in `count` processes."""
    with hub(*HUB) as (address, pid), _trainer(address) as trainer, processes(address, count, workers, ACT) as made:
        each, model = workers // count, shape(64)
        for process in made:
            tell([process], join=each)
        best: tuple[float, Spent] | None = None
        for version in range(VERSIONS):
            tell(made, wait=version - 1)
            before, began = spent(pid), time.monotonic()
            _publish(trainer, model, version)
            tell(made, update=version)
            took = time.monotonic() - began
            if version and (best is None or took < best[0]):
                best = (took, spent(pid).since(before))
        assert best is not None
        before = spent(pid)
        answers = tell(made, idle=idle_s, rate=BEATS_A_SECOND / (each * count))
        idle, beats = spent(pid).since(before), sum(answer["beats"] for answer in answers)
        rate = sum(answer["beats"] / answer["seconds"] for answer in answers)
    total = each * count
    version_cost = Spent(best[1].loop / total, best[1].network / total)
    beat = Spent(idle.loop / beats, idle.network / beats)
    return Figures(total, best[0], version_cost, beat, rate, best[1].loop / best[0])


@contextlib.contextmanager
def _trainer(address: str) -> Iterator[Connection]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        trainer = Connection(context, address)
        join_hub(trainer, 0, shape(64)._replace(total_bytes=SIZE, segments=SEGMENTS), "trainer")
        yield trainer
    finally:
        context.destroy(linger=0)


def _publish(trainer: Connection, model: Shape, version: int) -> None:
    sums = model.sums[version]
    trainer.ask(PutBlob(digest_of(sums), sums))
    if version:
        withdraw(trainer, placement_of(0, model))
    trainer.ask(Publish(version, digest_of(sums)))


if __name__ == "__main__":
    act(sys.argv[2], int(sys.argv[3]))
