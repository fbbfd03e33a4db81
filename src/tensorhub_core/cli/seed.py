"""`tensorhub seed`: hold the newest versions of a model in host memory until stopped."""

from __future__ import annotations

import os
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


@click.command()
@click.option("--model", required=True, help="Name of the model.")
@click.option(
    "--keep", is_flag=True, help="Be a keeper: publishers need no memory for copies, and hand over to it when they end."
)
@click.option(
    "--replica", help="Name under which the hub shows this seed, followed by a letter. Default: a unique one."
)
@click.option("--zone", help="Datacentre of this process: readers in the same zone prefer it.")
@click.option(
    "--versions", type=click.IntRange(1, MOST_VERSIONS), default=1, help="How many of the newest versions to hold. [1]"
)
@interface_option
@server_option
def seed(
    model: str,
    keep: bool,
    replica: str | None,
    zone: str | None,
    versions: int,
    interface: str | None,
    server: str | None,
) -> None:
    """Follow a model and serve its newest versions from host memory, until SIGTERM or Ctrl-C.

    Prints `seeding MODEL`, then `holds MODEL VERSION` for each version. Takes memory for one version more than it
    holds: the oldest one serves until the newest is whole. Reads each shard of a version as one of its holders has it.
    """
    settings = load_settings(cli={"server": server, "interface": interface})
    stop = Stop()
    name = replica or f"{'keeper' if keep else 'seed'}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"

    def connect_shard(replica: str, shard: int, num_shards: int) -> Worker:
        address = settings.client.server
        where = {"replica": replica, "shard": shard, "num_shards": num_shards}
        return connect(address, model=model, **where, zone=zone, keeper=keep, settings=settings)  # type: ignore[arg-type]

    with observe(settings.client.server, model=model, settings=settings) as observer:
        seeder = Seeder(connect_shard, name, versions, stop.wanted)
        stop.begin_serving()
        click.echo(f"seeding {model}")
        try:
            seeder.follow(observer, lambda version: click.echo(f"holds {model} {version}"))
        finally:
            seeder.close()
