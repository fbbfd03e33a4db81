"""`tensorhub keygen`: make the keys of a server and of its clients."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import click

from tensorhub_core.errors import ConfigError

SERVER = "server"
CLIENTS = "clients"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--name", default="client", help="Name of the client. [client]")
def keygen(directory: Path, name: str) -> None:
    """Make a CURVE key pair of the server and one of a client in DIR, and say what to set on each side.

    A server's pair that is there already is kept, so that each call adds one client; nothing is overwritten.
    """
    if not _NAME.fullmatch(name) or name == SERVER:
        raise ConfigError(f"--name must be letters, digits, dots and dashes, and not {SERVER!r}; it is {name!r}")
    clients = directory / CLIENTS
    try:
        clients.mkdir(parents=True, exist_ok=True)
        fresh = make_server(directory)
        make_pair(directory, name, clients / f"{name}.key", directory / f"{name}.key_secret")
    except OSError as error:
        raise ConfigError(f"no keys can be written to {directory}: {error.strerror or error}") from None
    root = directory.absolute()
    click.echo(f"{'made' if fresh else 'kept'} the server's keys, made those of client {name!r}\n")
    click.echo(f"server:\n  export TENSORHUB_CURVE_SECRET={root / SERVER}.key_secret")
    click.echo(f"  export TENSORHUB_CURVE_CLIENTS={root / CLIENTS}\n")
    click.echo(f"client {name}:\n  export TENSORHUB_CURVE_SERVER={root / SERVER}.key")
    click.echo(f"  export TENSORHUB_CURVE_CLIENT={root / name}.key_secret")


def make_server(directory: Path) -> bool:
    """Make the server's pair if there is none; tell whether it was made. Raises ConfigError if half of it is there."""
    files = [directory / f"{SERVER}.key", directory / f"{SERVER}.key_secret"]
    there = [path for path in files if path.exists()]
    if there and len(there) < len(files):
        raise ConfigError(f"{there[0]} is there without its other half: bring that, or take another folder")
    if not there:
        make_pair(directory, SERVER, *files)
    return not there


def make_pair(directory: Path, name: str, public: Path, secret: Path) -> None:
    """Make a pair of certificates at two paths, the secret one private; raises ConfigError if one is taken."""
    from zmq.auth import create_certificates

    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} exists: remove it, or take another name; keys are never overwritten")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".keygen-") as draft:  # for its user only
        drafts = [Path(path) for path in create_certificates(draft, name)]
        os.chmod(drafts[0], 0o644)
        os.chmod(drafts[1], 0o600)
        done: list[Path] = []
        try:
            for path, target in zip(reversed(drafts), (secret, public), strict=True):
                os.link(path, target)  # fails where a rename would overwrite
                done.append(target)
        except OSError:
            for target in done:
                with contextlib.suppress(OSError):
                    target.unlink()
            raise
