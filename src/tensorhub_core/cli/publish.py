"""`tensorhub publish`: serve a checkpoint folder as a version until stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from tensorhub_core.checkpoint.formats import FORMATS, OpenOptions, open_folder
from tensorhub_core.checkpoint.names_file import read_names
from tensorhub_core.cli.common import place_options, server_option
from tensorhub_core.cli.progress import terminal_progress
from tensorhub_core.cli.signals import Stop
from tensorhub_core.client.connect import connect
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, TensorHubError
from tensorhub_core.settings import load_settings

_LOOK_EVERY_S = 1.0
_CLOSE_S = 1.0


@click.command()
@click.argument("checkpoint_dir", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="Name of the model.")
@click.option("--version", required=True, type=click.IntRange(min=0), help="Number of the version.")
@click.option("--stream", help="Life of the version numbers: a new name starts a new epoch.")
@click.option("--replica", help="Name under which the hub shows this publisher. Default: a unique one.")
@click.option("--drain-s", type=click.FloatRange(min=0), default=30.0, help="Longest wait for readers at the end. [30]")
@click.option(
    "--copy", is_flag=True, help="Read the files into memory first, so that they may change while they are served."
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Format of the folder. Default: what it looks like.")
@click.option("--prefix", help="Serve only the tensors whose keys begin with this, without it (dcp).")
@click.option(
    "--names",
    type=click.Path(path_type=Path),
    help="JSON file of other names for keys, null to leave one out (dcp, torch_dist).",
)
@click.option(
    "--hf-config",
    type=click.Path(path_type=Path),
    help="Hugging Face folder or config.json of the model (torch_dist). Default: config.json in CHECKPOINT_DIR.",
)
@place_options
@server_option
def publish(
    checkpoint_dir: Path,
    model: str,
    version: int,
    stream: str | None,
    replica: str | None,
    drain_s: float,
    copy: bool,
    kind: str | None,
    prefix: str | None,
    names: Path | None,
    hf_config: Path | None,
    server: str | None,
    place: dict[str, str | None],
) -> None:
    """Serve the weights in CHECKPOINT_DIR as a version until SIGTERM or Ctrl-C.

    CHECKPOINT_DIR holds Hugging Face safetensors files (safetensors), what torch.distributed.checkpoint saved (dcp), or
    what Megatron saved (torch_dist; needs tensorhub-megatron and --hf-config). Optimizer states are left out. Prints
    `published MODEL VERSION` when everyone can read it. The files are mapped, not copied: leave them alone while they
    are served, or use --copy.
    """
    settings = load_settings(cli={"server": server, "close_timeout_s": _CLOSE_S, **place})
    stop = Stop()
    with terminal_progress("reading") as report:
        renamed = None if names is None else read_names(names)
        checkpoint = open_folder(checkpoint_dir, OpenOptions(prefix, renamed, hf_config, copy, report), kind)
    if checkpoint.left_out:
        click.echo(f"left out {checkpoint.left_out} items that are not weights", err=True)
    with connect(settings.client.server, model=model, replica=replica, stream=stream, settings=settings) as worker:
        worker.register(((tensor.name, tensor) for tensor in checkpoint.tensors), checkpoint.boxes)
        published = worker.publish(version)
        stop.begin_serving()
        click.echo(f"published {model} {version}")
        serve_until(stop, worker, published)
        hand_over(worker, settings.client.handover_s)
        withdraw(worker, drain_s)


def serve_until(stop: Stop, worker: Worker, newest: Version) -> None:
    """Return when the end is wanted; raises the session's error if it is over for good.

    A server that is away is waited for: readers go on meanwhile, and the session tells it again what is held.
    """
    while not stop.wanted():
        with contextlib.suppress(DeadlineExceeded, ServerUnreachable):
            newest = worker.wait(newer_than=newest, timeout_s=_LOOK_EVERY_S)


def hand_over(worker: Worker, handover_s: float) -> None:
    """Give others the time to take over what is retained here; say on stderr what they did not."""
    if handover_s > 0:
        try:
            worker.hand_over(handover_s)
        except TensorHubError as error:
            click.echo(f"Warning: {error}", err=True)


def withdraw(worker: Worker, drain_s: float) -> None:
    """Unpublish; raises DeadlineExceeded if readers are still at it after `drain_s`."""
    try:
        worker.unpublish(drain_s)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"readers were still at it after {drain_s:g} s; they go on from another holder, or fail"
        ) from None
