"""Keep peers attached from job to job, known by the digest of their description."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import PeerId, Transport

MOST_IDLE_PEERS = 64


@dataclass(slots=True)
class AttachedPeer:
    """A peer; `proven` once a read from it was done."""

    peer: PeerId
    proven: bool = False


class Peers:
    """The peers that the reading side is attached to; between jobs at most 64, the ones used last."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._attached: OrderedDict[bytes, AttachedPeer] = OrderedDict()
        self._doubtful: list[AttachedPeer] = []
        """Those that the transport may have lost; or it keeps them, and what they cost, until they are detached."""

    def attach(self, description: bytes) -> AttachedPeer:
        """Return the peer of a description; raises TransportError if it cannot be attached."""
        key = xxhash.xxh3_128_digest(description)
        if key not in self._attached:
            try:
                self._attached[key] = AttachedPeer(self._transport.attach(description))
            except TransportError:
                self.doubt_all()
                raise
        self._attached.move_to_end(key)
        return self._attached[key]

    def trim(self) -> None:
        """Detach those not used for longest, and the doubtful ones; no read may be in flight."""
        for doubtful in self._doubtful:
            self._detach(doubtful)
        self._doubtful.clear()
        while len(self._attached) > MOST_IDLE_PEERS:
            self._detach(self._attached.popitem(last=False)[1])

    def drop(self, description: bytes) -> None:
        """Detach a peer that failed, so that it is attached anew next time."""
        found = self._attached.pop(xxhash.xxh3_128_digest(description), None)
        if found is not None:
            self._detach(found)

    def doubt_all(self) -> None:
        """Use no peer any more without attaching it anew: a failure may have cost the transport its peers."""
        self._doubtful += self._attached.values()
        self._attached.clear()

    def forget_all(self) -> None:
        """Forget all peers: a fence has detached them."""
        self._attached.clear()
        self._doubtful.clear()

    def _detach(self, found: AttachedPeer) -> None:
        with contextlib.suppress(TransportError):
            self._transport.detach(found.peer)
