"""`tensorhub seed`: hold the newest versions of a model in host memory until stopped."""

from __future__ import annotations

import os
import re
import secrets
import socket

import click

from tensorhub_core.cli.common import interface_option, server_option
from tensorhub_core.cli.signals import Stop
from tensorhub_core.client.connect import connect
from tensorhub_core.client.observer import observe
from tensorhub_core.client.seeding import MOST_VERSIONS, Seeder
from tensorhub_core.client.worker import Worker
from tensorhub_core.settings import load_settings

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B|)", re.IGNORECASE)


@click.command()
@click.option("--model", required=True, help="Name of the model.")
@click.option(
    "--keep", is_flag=True, help="Be a keeper: publishers need no memory for copies, and hand over to it when they end."
)
@click.option(
    "--replica", help="Name under which the hub shows this seed, followed by a letter. Default: a unique one."
)
@click.option(
    "--zone",
    help="Datacentre of this process. Without --keep it is a seed agent of it: it brings every new version across,"
    " and the others there go on with what they have until it is whole in the zone.",
)
@click.option("--spot", is_flag=True, help="This machine may vanish at any time.")
@click.option(
    "--versions", type=click.IntRange(1, MOST_VERSIONS), default=1, help="How many of the newest versions to hold. [1]"
)
@click.option(
    "--memory",
    callback=lambda _, __, text: None if text is None else bytes_of(text),
    metavar="SIZE",
    help="Most host memory to take for versions, such as 600G or 64GiB. Default: what the machine has.",
)
@interface_option
@server_option
def seed(
    model: str,
    keep: bool,
    replica: str | None,
    zone: str | None,
    spot: bool,
    versions: int,
    memory: int | None,
    interface: str | None,
    server: str | None,
) -> None:
    """Follow a model and serve its newest versions from host memory, until SIGTERM or Ctrl-C.

    Prints `seeding MODEL`, then `holds MODEL VERSION` for each version. Takes memory for one version more than it
    holds: the oldest one serves until the newest is whole. Reads each shard of a version as one of its holders has it.
    Ends with an error if there is not enough memory.
    """
    if keep and spot:
        raise click.UsageError("--keep and --spot: nobody relies on a machine that may vanish")
    settings = load_settings(cli={"server": server, "interface": interface})
    stop = Stop()
    name = replica or f"{'keeper' if keep else 'seed'}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"

    seeds = bool(zone) and not keep

    def connect_shard(replica: str, shard: int, num_shards: int) -> Worker:
        address = settings.client.server
        who = {"replica": replica, "shard": shard, "num_shards": num_shards, "zone": zone, "spot": spot}
        return connect(address, model=model, **who, keeper=keep, seeds=seeds, settings=settings)  # type: ignore[arg-type]

    # It looks for versions everywhere, also for those that agents have yet to bring into its zone.
    with observe(settings.client.server, model=model, zone="", settings=settings) as observer:
        seeder = Seeder(connect_shard, name, versions, stop.wanted, memory)
        stop.begin_serving()
        click.echo(f"seeding {model}")
        try:
            seeder.follow(observer, lambda version: click.echo(f"holds {model} {version}"))
        finally:
            seeder.close()


def bytes_of(text: str) -> int:
    """Read a size: a number of bytes, or one with a unit such as 64G, 64GB or 64GiB; raises click.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: write it as in 600G or 64GiB")
    unit = match[2].upper()
    factor = (1024 if match[3].lower() == "ib" else 1000) ** (" KMGT".index(unit) if unit else 0)
    return int(float(match[1]) * factor)
