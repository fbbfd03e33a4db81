"""Share links between flows: max-min fair, computed anew only for the flows that a change can reach.

A flow crosses all of its links at one rate. Rates are max-min fair: no flow could get more, up to the most that it
takes, without taking from one that has no more than it does (progressive filling). A link is one direction of a network
card, or what two datacentres share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Protocol


class Link:
    """One direction of a link; `bytes_per_s` can be had."""

    __slots__ = ("bytes_per_s", "carried_bytes", "flows", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name, self.bytes_per_s = name, bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.carried_bytes = 0.0


class Owner(Protocol):
    """Whose bytes they are."""

    def changing(self) -> None:
        """Hear that the rate of some of its flows is about to change."""

    def changed(self) -> None:
        """Hear that it has."""


class Flow:
    """Bytes on their way over some links, at `most` so many per second."""

    __slots__ = ("links", "most", "owner", "rate")

    def __init__(self, links: Iterable[Link], owner: Owner | None = None, most: float = math.inf) -> None:
        self.links = tuple(links)
        self.rate = 0.0
        self.owner, self.most = owner, most


def fair_rates(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Return the max-min fair rates of flows that share links with no others."""
    flows = list(flows)
    if len(flows) == 1:
        flow = flows[0]
        return {flow: min(flow.most, *(link.bytes_per_s for link in flow.links))}
    rates: dict[Flow, float] = {}
    left: dict[Link, float] = {}
    count: dict[Link, int] = {}
    for flow in flows:
        for link in flow.links:
            left.setdefault(link, link.bytes_per_s)
            count[link] = count.get(link, 0) + 1
    heap: list[tuple[float, int, Link | Flow]] = [
        (left[link] / count[link], number, link) for number, link in enumerate(left)
    ]
    heap += [(flow.most, len(left) + number, flow) for number, flow in enumerate(flows) if flow.most < math.inf]
    heapq.heapify(heap)
    while heap:
        share, number, full = heapq.heappop(heap)
        if isinstance(full, Flow):
            given: Iterable[Flow] = (full,)
        elif not count[full]:
            continue
        else:
            now = left[full] / count[full]
            if now > share:  # others have been given less than their share of this link since
                heapq.heappush(heap, (now, number, full))
                continue
            given = full.flows
        for flow in given:
            if flow in rates:
                continue
            rates[flow] = share
            for other in flow.links:
                left[other] = max(0.0, left[other] - share)
                count[other] -= 1
    return rates


class Network:
    """All flows at work. Changes are noted, and take effect together in `settle`."""

    def __init__(self) -> None:
        self._dirty: dict[Link, None] = {}
        self._heard: dict[Callable[[], None], None] = {}

    def add(self, flow: Flow) -> None:
        """Let a flow run."""
        for link in flow.links:
            link.flows[flow] = None
            self._dirty[link] = None

    def remove(self, flow: Flow) -> None:
        """Let a flow rest; the caller has counted what it brought."""
        flow.rate = 0.0
        for link in flow.links:
            link.flows.pop(flow, None)
            self._dirty[link] = None

    def bound(self, flow: Flow, most: float) -> None:
        """Let a flow that runs take at most so many bytes per second."""
        flow.most = most
        for link in flow.links:
            self._dirty[link] = None

    def touch(self, link: Link) -> None:
        """Note that a link gives more or less than before."""
        self._dirty[link] = None

    def once_settled(self, action: Callable[[], None]) -> None:
        """Let something happen once, when all rates are those of now."""
        self._heard[action] = None

    def settle(self) -> None:
        """Give every flow that a change reaches its new rate."""
        while self._dirty or self._heard:
            if not self._dirty:
                heard, self._heard = self._heard, {}
                for action in heard:
                    action()
                continue
            flows = self._reached()
            changed = [(flow, rate) for flow, rate in fair_rates(flows).items() if rate != flow.rate]
            owners = {flow.owner: None for flow, _ in changed if flow.owner is not None}
            for owner in owners:
                owner.changing()
            for flow, rate in changed:
                flow.rate = rate
            for owner in owners:
                owner.changed()

    def _reached(self) -> list[Flow]:
        """Return the flows that share a link with a changed one, or with a flow that does."""
        ahead = list(self._dirty)
        self._dirty = {}
        seen, found = dict.fromkeys(ahead), dict[Flow, None]()
        while ahead:
            for flow in ahead.pop().flows:
                if flow in found:
                    continue
                found[flow] = None
                for link in flow.links:
                    if link not in seen:
                        seen[link] = None
                        ahead.append(link)
        return list(found)
