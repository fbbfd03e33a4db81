"""What several commands share: the `--server` option and the way to the server it means."""

from __future__ import annotations

import click

from tensorhub_core.errors import ServerUnreachable
from tensorhub_core.server.embedded import embedded_address, running_address
from tensorhub_core.settings import Settings, load_settings

server_option = click.option(
    "--server",
    metavar="ADDRESS",
    help="Address of the reference server, several with commas between. Default: TENSORHUB_SERVER, else this user's"
    " embedded server.",
)


def server_address(settings: Settings) -> str:
    """Return the address of the server that the settings mean; starts the embedded one if none runs."""
    if settings.client.server is not None:
        return settings.client.server
    return embedded_address(settings.client.connect_timeout_s, settings.server)


def existing_server(server: str | None) -> tuple[str, Settings]:
    """Return the address of a server for a command that only looks, and the settings; starts nothing.

    Raises ServerUnreachable if none was named and no embedded one runs.
    """
    settings = load_settings(cli={"server": server})
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
