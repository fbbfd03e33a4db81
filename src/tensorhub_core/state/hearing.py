"""What a hello says of versions and of earlier lives of the server (laws L5, L10)."""

from __future__ import annotations

from tensorhub_core.ids import ReplicaName, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import Hello
from tensorhub_core.state.names import add_stream
from tensorhub_core.state.records import ModelState


def hear_high(s: Step, model: ModelState, m: Hello) -> None:
    """Learn the highest version a client ever heard of, and that there was a server life before this one.

    There was one if this life has not met the process, which knows of versions already: it may hold one that others
    read, whatever newer ones were published meanwhile.
    """
    keys, before = keys_of(m, m.high), (model.heard, model.created, model.epoch)
    # What is only held may be published by this shard alone yet: who was told of it says so (law L1).
    told = {(held.epoch, held.number) for held in m.offloads} | ({m.high} if m.high is not None else set())
    if m.created is not None:
        model.created = max(model.created or (0, 0), (m.created[0], m.created[1]))
    comes_back = bool(keys or m.created) and not m.observer and not is_known(s, model, m)
    for key in keys:
        if s.state.deserted:
            s.state.deserted, s.state.listening, s.state.listen_from_s = False, True, s.now
        known = max((k for k in (model.high, model.heard) if k is not None), default=None)
        if key in told and (known is None or key > known):
            model.heard, comes_back = key, True
    hear_stream(s, model, m, max((epoch for epoch, _ in (*keys, *keys_of(m, m.created))), default=0))
    if (model.heard, model.created, model.epoch) != before:
        s.touched.add(model.name)
    if comes_back and s.now < s.state.listen_from_s + s.state.config.grace_s:
        s.state.listening = True


def hear_stream(s: Step, model: ModelState, m: Hello, epoch: int) -> None:
    """Learn the newest epoch that a worker has heard of, and whether that is its own stream's or that one is over."""
    if epoch > model.epoch:
        model.epoch, model.stream = epoch, None  # the stream that was the newest is over
    own = own_epoch(m)
    if m.stream is not None and own is not None and m.stream not in model.streams:
        add_stream(s, model, m.stream, over=own < model.epoch)


def own_epoch(m: Hello) -> int | None:
    """Return the epoch of the versions that a worker has made or holds."""
    return m.created[0] if m.created is not None else max((epoch for epoch, _ in keys_of(m, None)), default=None)


def keys_of(m: Hello, more: VersionKey | None) -> list[VersionKey]:
    """Return the versions that a worker says it holds, and one more that it speaks of."""
    held = [(held.epoch, held.number) for held in (m.held, *m.offloads) if held is not None]
    return held if more is None else [*held, (more[0], more[1])]


def is_known(s: Step, model: ModelState, m: Hello) -> bool:
    """Tell whether this life of the server knows the process that says hello."""
    group = model.groups.get(ReplicaName(m.replica))
    worker = None if group is None else s.worker_at(group, m.shard)
    return worker is not None and worker.token == m.token
