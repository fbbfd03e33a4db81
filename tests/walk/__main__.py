"""`python -m tests.walk`: walk the scenes of CI; other sizes by options."""

from __future__ import annotations

from dataclasses import fields

import click

from tests.walk.drill import find, golden_of
from tests.walk.mutants import MUTANTS
from tests.walk.scenes import CI, NIGHTLY, Scene
from tests.walk.search import walk
from tests.walk.traces import render


def scene_of(budget: str) -> Scene:
    """Read a scene from `name=value,...`."""
    kinds = {f.name: f.type for f in fields(Scene)}
    values: dict[str, object] = {"name": "custom"}
    for part in filter(None, budget.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds or name == "name":
            raise click.BadParameter(f"{name!r} is none of {', '.join(sorted(kinds.keys() - {'name'}))}")
        values[name] = bool(int(value)) if kinds[name] == "bool" else int(value)
    return Scene(**values)  # type: ignore[arg-type]


def keep_traces(only: str) -> None:
    """Write the golden traces."""
    for mutant in (m for m in MUTANTS if only in m.name):
        found, text = find(mutant)
        if not found.broken:
            raise SystemExit(f"{mutant.name} is not found")
        golden_of(mutant).write_text(text, encoding="utf-8")
        print(f"{mutant.name}: {len(found.trace)} steps, {found.states:,} states, {found.took_s:.1f} s", flush=True)


@click.command()
@click.option("--budget", default="", help="one scene, for example sources=2,readers=1,crashes=1,verify=0")
@click.option("--nightly", is_flag=True, help="the larger scenes")
@click.option("--only", default="", help="scenes whose name contains this")
@click.option("--golden", is_flag=True, help="write the shortest traces of the mutants again")
@click.option("--most", type=int, default=None, help="stop a scene after so many states")
def main(budget: str, nightly: bool, only: str, golden: bool, most: int | None) -> None:
    """Walk every state within the budgets; exit code 1 at the first broken law, with its shortest trace."""
    if golden:
        return keep_traces(only)
    scenes = [scene_of(budget)] if budget else [s for s in (NIGHTLY if nightly else CI) if only in s.name]
    total_s = 0.0
    for scene in scenes:
        found = walk(scene, most)
        total_s += found.took_s
        print(found, flush=True)
        if found.broken:
            print(render(found))
            raise SystemExit(1)
    print(f"{len(scenes)} scenes, {total_s:.1f} s")


main()
