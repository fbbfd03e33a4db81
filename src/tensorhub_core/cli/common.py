"""What several commands share: the options for the server and for where this process runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from tensorhub_core.errors import ServerUnreachable
from tensorhub_core.server.embedded import running_address
from tensorhub_core.settings import Settings, load_settings

server_option = click.option(
    "--server",
    metavar="ADDRESS",
    help="Address of the reference server, several with commas between. Default: TENSORHUB_SERVER, else this user's"
    " embedded server.",
)

interface_option = click.option(
    "--interface",
    metavar="NAME",
    help="Network interface or RDMA device for the bytes, such as eth0 or mlx5_0. `tensorhub doctor` lists them.",
)


def place_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say where it runs; it gets them as settings, in `place`."""

    @interface_option
    @click.option("--rail", metavar="NAME", help="NIC group of this process. Default: detected.")
    @click.option("--host", metavar="NAME", help="Machine of this process. Default: detected.")
    @click.option("--zone", metavar="NAME", help="Datacentre of this process. Default: detected.")
    @functools.wraps(command)
    def placed(*, zone: str | None, host: str | None, rail: str | None, interface: str | None, **others: Any) -> None:
        command(place={"zone": zone, "host": host, "rail": rail, "interface": interface}, **others)

    return placed


def existing_server(server: str | None, **options: str | None) -> tuple[str, Settings]:
    """Return the address of a server for a command that starts none, and the settings, with more options.

    Raises ServerUnreachable if none was named and no embedded one runs.
    """
    settings = load_settings(cli={"server": server, **options})
    address = settings.client.server or running_address(settings.server)
    if address is None:
        raise ServerUnreachable(
            "no server was named and no embedded one runs: give --server ADDRESS, set TENSORHUB_SERVER, or start"
            " `tensorhub serve`"
        )
    return address, settings


def printable(text: str) -> str:
    """Return text from a peer with everything that could steer a terminal escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
