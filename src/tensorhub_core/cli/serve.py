"""`tensorhub serve`: the reference server in the foreground."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal

import click

from tensorhub_core.clock import SystemClock
from tensorhub_core.config import DEFAULT_BIND
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.loop import ServerLoop
from tensorhub_core.server.options import machine_config
from tensorhub_core.server.serving import epoch_now
from tensorhub_core.settings import load_settings


@click.command()
@click.option("--bind", metavar="ADDRESS", help=f"Address to listen on; port 0 takes a free one. [{DEFAULT_BIND}]")
@click.option("--retain", type=int, help="Newest whole versions that no client's call may lose. [0]")
@click.option("--lease-s", type=float, help="Seconds without a heartbeat after which a worker is suspected. [5]")
@click.option("--heartbeat-s", type=float, help="Seconds between two heartbeats of a worker. [1]")
@click.option("--grace-s", type=float, help="Seconds after a restart in which the server only listens. [one lease]")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least severe message. [info]"
)
def serve(**options: object) -> None:
    """Run the reference server until SIGTERM or Ctrl-C.

    The first line on stdout is `listening on ADDRESS`; messages go to stderr.
    """
    server = load_settings(cli=options).server
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    get_logger().setLevel(server.log_level.upper())
    allow_many_connections()
    loop = ServerLoop(machine_config(server, epoch_now()), server.bind, clock=SystemClock())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.stop())
    click.echo(f"listening on {loop.address}")
    try:
        loop.run()
    finally:
        loop.close()
        get_logger("server").info("server ended; %s", loop.counters)


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what it may have: every worker is one connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # without it the server runs, with fewer connections
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
