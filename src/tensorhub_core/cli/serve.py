"""`tensorhub serve`: the reference server in the foreground."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
from pathlib import Path

import click

from tensorhub_core.config import DEFAULT_BIND
from tensorhub_core.errors import StateError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.schedule.policy import POLICIES
from tensorhub_core.server.collecting import collect_seldom
from tensorhub_core.server.loop import Outdated, ServerLoop
from tensorhub_core.server.serving import epoch_now, make_loop
from tensorhub_core.server.standby import ServerLock, wait_for_lock
from tensorhub_core.settings import load_settings
from tensorhub_core.wire.curve import server_keys


@click.command()
@click.option("--bind", metavar="ADDRESS", help=f"Address to listen on; port 0 takes a free one. [{DEFAULT_BIND}]")
@click.option("--retain", type=int, help="Newest whole versions that no client's call may lose; 0 is off. [1]")
@click.option("--retain-model", multiple=True, metavar="NAME=N", help="Another number for one model; repeatable.")
@click.option("--lease-s", type=float, help="Seconds without a heartbeat after which a worker is suspected. [5]")
@click.option("--heartbeat-s", type=float, help="Seconds between two heartbeats of a worker. [1]")
@click.option("--grace-s", type=float, help="Seconds after a restart in which the server only listens. [one lease]")
@click.option("--policy", type=click.Choice(sorted(POLICIES)), help="How readers are spread over sources. [auto]")
@click.option("--curve-secret", metavar="FILE", help="Secret certificate of the server: speak CURVE (see keygen).")
@click.option("--curve-clients", metavar="DIR", help="Public certificates of the clients that may connect. [any]")
@click.option(
    "--lock", metavar="FILE", type=click.Path(path_type=Path), help="Serve only while holding this file's lock."
)
@click.option("--journal", metavar="FILE", help="Append everything that is decided on, for `tensorhub replay`.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least severe message. [info]"
)
def serve(lock: Path | None, retain_model: tuple[str, ...], **options: object) -> None:
    """Run the reference server until SIGTERM or Ctrl-C.

    The first line on stdout is `listening on ADDRESS`; messages go to stderr. With --lock it first waits, without
    listening, until no other server holds the lock of FILE: a standby.
    """
    server = load_settings(cli={**options, "retain_models": ",".join(retain_model) or None}).server
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    get_logger().setLevel(server.log_level.upper())
    allow_many_connections()
    keys = server_keys(server)
    end = _End()
    held = None if lock is None else _wait(lock, end)
    if lock is not None and held is None:
        return
    try:
        _run(make_loop(server, server.bind, epoch_now() if held is None else held.epoch, keys), held, end)
    finally:
        if held is not None:
            held.release()


class _End:
    """Hear SIGTERM and Ctrl-C."""

    def __init__(self) -> None:
        self.wanted = False
        self.loop: ServerLoop | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, *_: object) -> None:
        self.wanted = True
        if self.loop is not None:
            self.loop.stop()


def _wait(lock: Path, end: _End) -> ServerLock | None:
    def waiting() -> None:
        click.echo(f"standby: waiting for {lock}", err=True)

    return wait_for_lock(lock, at_least=epoch_now, stopped=lambda: end.wanted, waiting=waiting)


def _run(loop: ServerLoop, held: ServerLock | None, end: _End) -> None:
    """Serve until the end is wanted; raises StateError if another server is, or may be, the one that serves."""
    lost: list[str] = []

    def watch(_: float) -> bool:
        lost.extend(filter(None, [None if held is None else held.lost()]))
        return bool(lost)

    end.loop = loop
    if end.wanted:
        loop.stop()
    collect_seldom()
    click.echo(f"listening on {loop.address}")
    try:
        loop.run(None if held is None else watch)
    except Outdated as error:
        if held is not None:
            held.raise_to(error.heard)
        raise
    finally:
        loop.close()
        get_logger("server").info("server ended; %s", loop.counters)
    if lost:
        raise StateError(f"{lost[0]}: another server may serve by now, so that this one stops")


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what it may have: every worker is one connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # without it the server runs, with fewer connections
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
