"""Print a run's live account: who read which version from whom, what it cost, what was learnt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule as Line
from rich.table import Table

from demo.engines import Answer, Report
from demo.proof import Check, Step

_BAR_CELLS = 20
_NAME_CELLS = 10


class Account:
    """Write the account to a console; the main thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def title(self, text: str) -> None:
        """Begin a part."""
        self._console.print(Line(f"[bold]{escape(text)}[/] [dim]{self._clock()}[/]", align="left", style="dim"))

    def fact(self, name: str, text: str) -> None:
        """State one fact."""
        self._console.print(f"  [bold]{escape(name):<{_NAME_CELLS}}[/] {escape(text)}")

    def arrived(self, version: int, reports: Mapping[str, Report]) -> None:
        """Tell where each engine got a version from and how long it did not answer meanwhile."""
        self._console.print(f"[bold cyan]version {version}[/] [dim]{self._clock()}[/]")
        for replica, report in reports.items():
            source = ", ".join(report.sources) or "itself"
            line = f"  {replica:<{_NAME_CELLS}} [green]<- {source:<{_NAME_CELLS}}[/] {megabytes(report.total_bytes):>9}"
            if report.total_s:
                line += f"   stall {report.total_s:6.3f} s: {_parts(report)}"
            else:
                line += "   its first fill"
            self._console.print(line)

    def answer(self, version: int, answer: Answer) -> None:
        """Show one prompt's likeliest answer."""
        self._console.print(f"  [yellow]{escape(answer.prompt)}[/] -> [italic]{escape(_shown(answer))}[/]")

    def changes(self, old: int, before: Sequence[Answer], new: int, after: Sequence[Answer]) -> None:
        """Show what a version answers beside what an earlier one did."""
        table = Table(show_lines=True)
        for head in ("prompt", f"version {old}", f"version {new}"):
            table.add_column(head, overflow="fold")
        for was, now in zip(before, after, strict=True):
            table.add_row(escape(now.prompt), escape(_shown(was)), escape(_shown(now)))
        self._console.print(table)

    def learnt(self, step: Step, used: int, seconds: Mapping[str, float], *, words: bool) -> None:
        """Tell what was learnt from a version's answers, and, if wanted, how many words they had."""
        cells = round(step.reward * _BAR_CELLS)
        bar = "█" * cells + "░" * (_BAR_CELLS - cells)
        took = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        self._console.print(
            f"  reward {step.reward:.3f} [magenta]{bar}[/]{f' {step.words:.1f} words an answer;' if words else ''}"
            f" learnt from {used} of {len(step.answers)} [dim]({took})[/]"
        )

    def checks(self, checks: Sequence[Check]) -> None:
        """Show the proof."""
        for check in checks:
            mark = "[bold green]yes[/]" if check.held else "[bold red]NO [/]"
            self._console.print(f"  {mark} {escape(check.claim)}\n        [dim]{escape(check.figures)}[/]")

    def end(self, held: bool) -> None:
        """Say how the run ended."""
        word = "[bold green]everything held[/]" if held else "[bold red]NOT everything held[/]"
        self._console.print(f"\n{word} [dim]after {time.monotonic() - self._began:.0f} s[/]")

    def _clock(self) -> str:
        return f"+{time.monotonic() - self._began:.0f} s"


def megabytes(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 1e6:.1f} MB"


def _shown(answer: Answer) -> str:
    """Return an answer on one line, with dots if it was cut off."""
    return " ".join(answer.text.split()) + ("" if answer.finished else " ...")


def _parts(report: Report) -> str:
    staged = f", staged in {report.stage_s:.3f} s before" if report.stage_s else ""
    word = "install" if report.stage_s else "transfer"
    return f"drain {report.drain_s:.3f} + {word} {report.transfer_s:.3f} + process {report.process_s:.3f}{staged}"
