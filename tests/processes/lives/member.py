"""A process of the drill: a trainer's or reader's shard, or the hub; it writes down all that it says and hears.

    python -m tests.processes.lives.member ROLE HISTORY ADDRESS [REPLICA SHARD]

Orders come as JSON lines on standard input; the process ends with it. `{"arm": ["before", "Done", 9]}` has the process
signal itself with 9 right before it sends its next `Done`; `after` means right after, `heard` on receipt (for the hub:
before and after it has carried out a request). Every line of the history is written at once, so that nothing is lost
when the process is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorhub_core import TensorHubError, Worker, connect
from tensorhub_core.client.link import Link
from tensorhub_core.clock import SystemClock
from tensorhub_core.config import ServerConfig
from tensorhub_core.server.loop import ServerLoop
from tensorhub_core.server.options import machine_config
from tensorhub_core.server.serving import epoch_now
from tensorhub_core.state.events import Event, Received
from tensorhub_core.wire.codec import decode_reply, decode_request, split

SHARD_BYTES = 2 << 20
SHARDS = 2
CALL_S = 20.0
STACKS = signal.SIGUSR1
"""Has a member write the stacks of its threads to standard error."""
LEASE_S = 0.7
MARK = 0xA5
FIELDS = ("round", "epoch", "number", "generation", "server_epoch", "prefix", "code", "published", "promised", "held")
SETTINGS = {"segment_bytes": 64 << 10, "window": 2, "stall_s": 1.0, "call_timeout_s": CALL_S, "close_timeout_s": 1}


def content(version: int, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a version's shard, u8 [bytes]."""
    return np.random.default_rng([version, shard]).integers(0, 256, SHARD_BYTES, np.uint8)


class History:
    """What this process did and heard, one JSON object a line."""

    def __init__(self, path: str, **who: Any) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = {"pid": os.getpid(), **who}
        self._armed: tuple[str, str, int] | None = None

    def write(self, kind: str, **what: Any) -> None:
        """Append a line."""
        line = {"t": time.monotonic(), "kind": kind, **self._who, **what}
        os.write(self._file, json.dumps(line, default=str).encode() + b"\n")

    def message(self, kind: str, message: Any) -> None:
        """Write down a message, by its name and the fields that matter."""
        found = {name: value for name in FIELDS if (value := getattr(message, name, None)) is not None}
        if "held" in found:
            found["held"] = [found["held"].epoch, found["held"].number]
        self.write(kind, message=type(message).__name__, **found)

    def arm(self, when: str, message: str, number: int) -> None:
        """Have the process signal itself at this point, once."""
        self._armed = (when, message, number)

    def reached(self, when: str, message: str) -> None:
        """Signal this process if this is the point."""
        armed = self._armed
        if armed is not None and armed[:2] == (when, message):
            self._armed = None
            self.write("crash", when=when, message=message, signal=armed[2])
            os.kill(os.getpid(), armed[2])


def tap_link(history: History) -> None:
    """Write down every message of this process's connection, and crash where it is told to."""
    send, receive = Link.send, Link.receive

    def tapped_send(link: Link, frames: list[bytes]) -> bool:
        message = decode_request(split(frames))
        history.reached("before", type(message).__name__)
        sent = send(link, frames)
        if sent:
            history.message("out", message)
            history.reached("after", type(message).__name__)
        return sent

    def tapped_receive(link: Link) -> list[bytes] | None:
        frames = receive(link)
        if frames is not None:
            message = decode_reply(split(frames))
            history.message("in", message)
            history.reached("heard", type(message).__name__)
        return frames

    Link.send, Link.receive = tapped_send, tapped_receive  # type: ignore[method-assign]


def brake(done_bytes: int, total_bytes: int, _: str) -> None:
    """Slow a read down, so that its prefix is announced and followed."""
    if done_bytes < total_bytes // 2:
        time.sleep(0.13)


class Member:
    """A worker with one tensor."""

    def __init__(self, history: History, address: str, replica: str, shard: int) -> None:
        self._history, self._shard = history, shard
        self.memory = np.full(SHARD_BYTES, MARK, np.uint8)
        self.worker: Worker = connect(
            address,
            model="policy",
            replica=replica,
            shard=shard,
            num_shards=SHARDS,
            transport="nixl",
            settings=SETTINGS,
        )
        self.worker.register({f"shard.{shard}": self.memory})
        history.write("ready")

    def call(self, name: str, function: Callable[[], Any], **about: Any) -> Any:
        """Make a call and write down its beginning and its end; None if it failed."""
        history = self._history
        history.write("begin", call=name, **about)
        try:
            value = function()
        except TensorHubError as error:
            history.write("end", call=name, error=type(error).__name__, text=str(error), **about)
            return None
        more = {} if value is None else {"version": int(value), "epoch": value.epoch}
        history.write("end", call=name, error=None, **{**about, **more})
        return True if value is None else value

    def publish(self, version: int) -> None:
        """Make a version and publish it."""
        self.memory[:] = content(version, self._shard)
        self.call("publish", lambda: self.worker.publish(version, fresh=True), version=version)

    def unpublish(self) -> None:
        """Take it back, and overwrite it at once."""
        version = self.worker.version
        if self.call("unpublish", self.worker.unpublish, version=None if version is None else int(version)):
            self.memory[:] = MARK

    def follow(self, stop: threading.Event) -> None:
        """Update again and again; look at every byte of what came, and after a failure whether bytes still come."""
        while not stop.is_set():
            version = self.call("update", lambda: self.worker.update(timeout_s=CALL_S, progress=brake))
            if version is not None:
                right = np.array_equal(self.memory, content(int(version), self._shard))
                self._history.write("bytes", right=right, version=int(version), epoch=version.epoch)
            else:
                before = self.memory.copy()
                time.sleep(0.2)
                if self.worker.version is None:
                    self._history.write("late", late=not np.array_equal(before, self.memory))
            with contextlib.suppress(TensorHubError):
                self.worker.wait(newer_than=self.worker.version, timeout_s=1.0)


def run_member(history: History, role: str, address: str, replica: str, shard: int) -> None:
    """Do what the orders say until they end."""
    tap_link(history)
    member = Member(history, address, replica, shard)
    stop = threading.Event()
    if role == "reader":
        threading.Thread(target=member.follow, args=(stop,), daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        if "arm" in order:
            history.arm(*order["arm"])
        elif "publish" in order:
            member.publish(order["publish"])
        elif "unpublish" in order:
            member.unpublish()
    stop.set()
    history.write("over")
    os._exit(0)  # whoever is in the middle of a call is not waited for


def run_hub(history: History, address: str) -> None:
    """Serve, and crash where it is told to."""
    step = ServerLoop._step

    def tapped_step(loop: ServerLoop, event: Event) -> None:
        message = type(event.message).__name__ if isinstance(event, Received) else ""
        history.reached("before", message)
        step(loop, event)
        history.reached("after", message)

    ServerLoop._step = tapped_step  # type: ignore[method-assign]
    config = machine_config(ServerConfig(lease_s=LEASE_S, heartbeat_s=LEASE_S / 10), epoch_now())
    loop = ServerLoop(config, address, clock=SystemClock())
    history.write("ready", address=loop.address)
    threading.Thread(target=loop.run, daemon=True).start()
    for line in sys.stdin:
        history.arm(*json.loads(line)["arm"])
    os._exit(0)


def main() -> None:
    """Play a role."""
    faulthandler.register(STACKS, all_threads=True)
    role, path, address, *place = sys.argv[1:]
    if role == "hub":
        return run_hub(History(path, role=role), address)
    replica, shard = place[0], int(place[1])
    run_member(History(path, role=role, replica=replica, shard=shard), role, address, replica, shard)


if __name__ == "__main__":
    main()
