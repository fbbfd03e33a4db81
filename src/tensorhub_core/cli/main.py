"""The `tensorhub` command: a table of commands, each imported only when it runs."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import click

from tensorhub_core.errors import TensorHubError

COMMANDS = {
    "serve": "Run the reference server.",
    "keygen": "Make the keys of a server and its clients.",
    "status": "Show models, versions, replicas and who reads from whom.",
    "publish": "Serve a checkpoint folder as a version until stopped.",
    "seed": "Hold the newest versions of a model in host memory until stopped.",
    "pull": "Write a version from live replicas to a folder.",
    "layout": "Show what lies in which shard, or save it.",
    "plan": "Show what one layout would read of another one.",
    "doctor": "Say which transports work on this machine.",
    "demo": "Move versions from a trainer to three readers on this machine, for 15 seconds.",
    "replay": "Check the invariants of a server's life that was recorded.",
    "bench": "Measure this machine's transfer rates.",
}
"""Each command is the object of its own name in `tensorhub_core.cli.NAME`; what is not installed is not listed."""


class LazyGroup(click.Group):
    """Import a command's module when it is called, and end with exit code 1 and one line on a `TensorHubError`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the installed commands."""
        return [name for name in COMMANDS if _installed(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS or not _installed(cmd_name):
            return None
        command = getattr(importlib.import_module(f"tensorhub_core.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except TensorHubError as error:
            click.echo("Error: " + " ".join(str(error).split()), err=True)
            ctx.exit(1)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(f"tensorhub_core.cli.{name}") is not None


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    try:
        click.echo(f"tensorhub {version('tensorhub-core')}")
    except PackageNotFoundError:
        click.echo("tensorhub (not installed)")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it.")
def tensorhub() -> None:
    """Move new model weights from trainers to inference engines, peer to peer."""


def main() -> None:
    """Run the command line; exits with 0, 1 (TensorHubError) or 2 (usage)."""
    tensorhub(prog_name="tensorhub")


if __name__ == "__main__":
    main()
