"""Whether the seed of a zone is far slower than the link between the zones: then another one crosses, one at a time.

One reader crosses for a zone and version, so there is nobody to compare it with. What the link gives is known from the
last ones that crossed, other replicas than this one: the least of their rates, so that a link which has become slow is
not taken for slow seeds again and again. While two cross, they are compared with each other: if the second is no
faster, the link is the limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub_core.ids import CopyId
from tensorhub_core.schedule.speed import Speed, is_slow
from tensorhub_core.state.context import Step
from tensorhub_core.state.records import Copy, CopyState, Worker

_REMEMBERED = 4
"""How many of the last that crossed a link are remembered."""
_MOST_LINKS = 256


def note_rate(s: Step, worker: Worker, copy: Copy) -> None:
    """Remember how fast a copy came from another zone, at its end."""
    rate, rates = copy.speed.bytes_per_s, s.state.flows.rates
    if rate is None or not crosses_now(s, copy):
        return
    last = [*rates.pop(copy.route, ()), (worker.replica, rate)]
    rates[copy.route] = tuple(last[-_REMEMBERED:])
    if len(rates) > _MOST_LINKS:
        del rates[next(iter(rates))]


def slow_seeds(s: Step, copies: Iterable[Copy], before: set[CopyId]) -> set[CopyId]:
    """Return those of a version's copies that come from other zones far more slowly than they could.

    `before` are those that were found slow at the last look: they stay so until another one was measured.
    """
    crossing = [copy for copy in copies if copy.state is CopyState.FILLING and crosses_now(s, copy)]
    return {copy.id for copy in crossing if _is_slow(s, copy, crossing, copy.id in before)}


def crosses_now(s: Step, copy: Copy) -> bool:
    """Tell whether a copy is read from another zone at the moment."""
    return any(s.state.leases[lease].crosses is not None for lease in s.holder(copy).leases)


def _is_slow(s: Step, copy: Copy, crossing: list[Copy], before: bool) -> bool:
    replica = s.holder(copy).replica
    others = [c.speed for c in crossing if c.route == copy.route and s.holder(c).replica != replica]
    measured = [speed for speed in others if speed.bytes_per_s is not None]
    if measured:
        return is_slow(copy.speed, measured)
    if others:
        return before
    known = [rate for name, rate in s.state.flows.rates.get(copy.route, ()) if name != replica]
    return bool(known) and is_slow(copy.speed, [Speed(min(known))])
