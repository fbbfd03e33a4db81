"""`tensorhub replay`: step the server's machine through a journal and check its invariants."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tensorhub_core.cli.common import printable
from tensorhub_core.server.replay import Summary, replay_file
from tensorhub_core.state.records import ModelState, ServerState


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--until", type=click.IntRange(min=0), help="Number of the last event to take. [all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def replay(ctx: click.Context, file: Path, until: int | None, as_json: bool) -> None:
    """Step the server's machine through FILE, which `tensorhub serve --journal` wrote.

    Every invariant is checked after every event. Ends with exit code 1, and the event's number, at the first that does
    not hold; else prints how many events there were and what the server knew at the end.
    """
    summary = replay_file(file, until)
    if as_json:
        click.echo(json.dumps(as_document(summary), indent=2))
    else:
        for line in lines(summary):
            click.echo(line)
    ctx.exit(0 if summary.sound else 1)


def as_document(summary: Summary) -> dict[str, object]:
    """Return a summary as programs read it."""
    return {
        "lives": summary.lives,
        "events": summary.events,
        "sound": summary.sound,
        "broken": {"event": summary.broken_at, "kind": summary.broken_event, "invariants": summary.broken}
        if not summary.sound
        else None,
        "gaps": [{"at": gap.at, "bytes": gap.size} for gap in summary.gaps],
        "models": [] if summary.state is None else models_of(summary.state),
    }


def known_models(state: ServerState) -> list[ModelState]:
    """Return the models with a replica or a version, now or before: not those that somebody only asked about."""
    return [model for model in state.models.values() if model.groups or model.versions or model.high or model.heard]


def models_of(state: ServerState) -> list[dict[str, object]]:
    """Return what the server knew of each model: its versions, newest first, and who held or read them."""
    found: list[dict[str, object]] = []
    for model in known_models(state):
        replicas = {
            name: [state.workers[group.members[shard]].id for shard in sorted(group.members)]
            for name, group in sorted(model.groups.items())
        }
        versions = [
            {"epoch": epoch, "version": number, "replicas": sorted(model.holders.get((epoch, number), ()))}
            for epoch, number in sorted(model.versions, reverse=True)
        ]
        found.append({"model": model.name, "versions": versions, "workers": replicas})
    return found


def lines(summary: Summary) -> list[str]:
    """Return a summary for people."""
    told = [f"gap: {gap.size:,} bytes at {gap.at:,} are no records (a torn tail, or damage)" for gap in summary.gaps]
    if not summary.sound:
        told.append(f"broken at event {summary.broken_at} ({summary.broken_event}):")
        told += [f"  {printable(text)}" for text in summary.broken]
    else:
        told.append(f"all invariants held after each of {summary.events:,} events in {summary.lives} lives")
    if summary.state is not None:
        workers = len(summary.state.workers)
        told.append(f"{workers} workers, {len(summary.state.leases)} leases at the end")
        for model in known_models(summary.state):
            count = sum(len(group.members) for group in model.groups.values())
            high = "no whole version yet" if model.high is None else f"highest whole version {model.high[1]}"
            told.append(f"  {printable(model.name)}: {high}, {len(model.versions)} versions, {count} workers")
    return told
