"""Share links between flows: max-min fair, computed anew only for the flows that a change can reach.

A flow crosses all of its links at one rate. Rates are max-min fair: no flow could get more without taking from one
that has no more than it does (progressive filling). A link is one direction of a network card, or what two datacentres
share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Link:
    """One direction of a link; `bytes_per_s` can be had."""

    __slots__ = ("bytes_per_s", "carried_bytes", "flows", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name, self.bytes_per_s = name, bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.carried_bytes = 0.0


class Flow:
    """Bytes on their way over some links; `changing` is called before the rate changes, `changed` after it has."""

    __slots__ = ("changed", "changing", "links", "rate")

    def __init__(self, links: Iterable[Link], changing: Callable[[], None], changed: Callable[[], None]) -> None:
        self.links = tuple(links)
        self.rate = 0.0
        self.changing, self.changed = changing, changed


def fair_rates(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Return the max-min fair rates of flows that share links with no others."""
    rates: dict[Flow, float] = {}
    left: dict[Link, float] = {}
    count: dict[Link, int] = {}
    flows = list(flows)
    for flow in flows:
        for link in flow.links:
            left.setdefault(link, link.bytes_per_s)
            count[link] = count.get(link, 0) + 1
    order = {link: number for number, link in enumerate(left)}
    heap = [(left[link] / count[link], number, link) for link, number in order.items()]
    heapq.heapify(heap)
    while heap:
        share, number, link = heapq.heappop(heap)
        if not count[link]:
            continue
        now = left[link] / count[link]
        if now > share:  # others have been given less than their share of this link since
            heapq.heappush(heap, (now, number, link))
            continue
        for flow in link.flows:
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

    def settle(self) -> None:
        """Give every flow that a change reaches its new rate."""
        while self._dirty:
            flows = self._reached()
            changed = [(flow, rate) for flow, rate in fair_rates(flows).items() if rate != flow.rate]
            for flow, _ in changed:
                flow.changing()
            for flow, rate in changed:
                flow.rate = rate
            for flow, _ in changed:
                flow.changed()

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
