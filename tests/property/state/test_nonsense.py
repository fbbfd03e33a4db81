"""Any message in any order, from any session: the machine answers, keeps its laws and never raises."""

from __future__ import annotations

import collections
import random
import typing

import msgspec

from tensorhub_core.ids import SessionId
from tensorhub_core.state.bounds import PACKED_CUT_BYTES
from tensorhub_core.state.events import Disconnected, Received, Send, Tick
from tensorhub_core.state.invariants import check
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.state.messages import (
    PROTOCOL,
    Done,
    Ended,
    Filling,
    HandOver,
    Held,
    Hello,
    JoinRound,
    Leave,
    LeaveRound,
    Offloaded,
    OffloadFailed,
    Publish,
    PutBlob,
    Register,
    RegisterStaging,
    Request,
)
from tests.sim.hub import digest

KINDS: tuple[type, ...] = typing.get_args(Request)
WEIGHTS = {
    **{Done: 20, Filling: 12, JoinRound: 8, PutBlob: 8, Register: 8, RegisterStaging: 16},
    **{Hello: 1, Leave: 1, LeaveRound: 1, HandOver: 1},
}
DATA = [b"layout", b"placement", b"sums", b"other"]


def any_value(chance: random.Random, kind: object, state: ServerState) -> object:
    """Draw a value of a field's type, mostly one that means something."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is int:
        return chance.choice([0, 0, 0, 1, 1, 2, 3, -1, 2**40])
    if kind is bool:
        return chance.random() < 0.5
    if kind is float:
        return chance.random()
    if kind is str:
        return chance.choice(
            ["policy", "a", "b", "", "x" * 2000, *sorted(state.leases)[:3], *sorted(state.tickets)[:3]]
        )
    if kind is bytes:
        return chance.choice([*map(digest, DATA), *DATA, b"", b"12345678", bytes(PACKED_CUT_BYTES)])
    if origin is typing.Literal:
        return chance.choice(args)
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(any_value(chance, args[0], state) for _ in range(chance.randrange(3)))
    if origin is tuple:
        return tuple(any_value(chance, a, state) for a in args)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return any_message(chance, typing.cast(type, kind), state)
    if kind is type(None):
        return None
    return any_value(chance, chance.choice(args), state)


def any_mode(chance: random.Random) -> str:
    """Draw the mode of a round."""
    return chance.choices(("replicate", "stage", "install"), (4, 8, 2))[0]


def any_message(chance: random.Random, kind: type, state: ServerState, name: str = "") -> typing.Any:
    """Draw a message of a kind; some are made to fit so that the walk gets anywhere."""
    hints = typing.get_type_hints(kind)
    fields = {name: any_value(chance, hints[name], state) for name in kind.__struct_fields__}
    if kind is Hello and chance.random() < 0.97:
        fields |= {
            "protocol": PROTOCOL,
            "model": "policy",
            "replica": name,
            "token": name + chance.choice("111112"),
            "num_shards": 1,
            "shard": 0,
        }
        fields |= {"high": None, "held": None, "observer": False, "stream": None}
        fields["server_epoch"] = chance.choice((0, 0, 0, 1, 2))
    group = next((m.groups[r] for m in state.models.values() for r in m.groups if r == name), None)
    if "round" in fields and group is not None and chance.random() < 0.9:
        current = group.open_round()
        fields["round"] = group.next_round if current is None else current.number
        fields |= {"want": None, "mode": any_mode(chance)} if "want" in fields else {}
        if fields.get("mode") == "install":
            staged = [w.staged.key for w in state.workers.values() if w.replica == name and w.staged is not None]
            fields["have"] = staged[0] if staged else (1, 1)
    asked = [w.offload_asked for w in state.workers.values() if w.replica == name and w.offload_asked is not None]
    if kind in (Offloaded, OffloadFailed) and asked:
        fields["copy"] = asked[0]
        fields |= {"placement": digest(b"placement")} if kind is Offloaded else {}
    if kind is RegisterStaging and chance.random() < 0.9:
        fields["placement"] = digest(b"placement")
    if kind is PutBlob and chance.random() < 0.9:
        data = chance.choice(DATA)
        fields = {"digest": digest(data), "data": data}
    if kind is Done and chance.random() < 0.9:
        fields["sums"] = digest(b"sums")
    if kind in (Register, Publish) and chance.random() < 0.9:
        fields |= {"layout": digest(b"layout"), "placement": digest(b"placement")} if kind is Register else {}
        fields |= {"sums": digest(b"sums"), "held_epoch": None} if kind is Publish else {}
    return kind(**fields)


def test_nonsense_neither_raises_nor_breaks_a_law() -> None:
    heard: collections.Counter[str] = collections.Counter()
    staged = 0
    for seed in range(150):
        chance, now = random.Random(seed), 0.0
        state = ServerState.new(MachineConfig(server_epoch=1, retain=seed % 3), now)
        sessions = [SessionId(b"s%d" % k) for k in range(4)]
        for number in range(1, 400):
            session = chance.choice(sessions)
            draw = chance.random()
            if draw < 0.05:
                now += chance.choice([0.1, 1.0, 6.0, 20.0])
                state, _ = step(state, Tick(), now)
            elif draw < 0.07:
                state, _ = step(state, Disconnected(session), now)
            else:
                kind = chance.choices(KINDS, [WEIGHTS.get(k, 4) for k in KINDS])[0]
                if session not in state.sessions and chance.random() < 0.8:
                    kind = Hello
                message = any_message(chance, kind, state, session.decode())
                try:
                    message = msgspec.convert(msgspec.to_builtins(message), type(message))
                except msgspec.ValidationError:
                    continue  # too large: the decoder refuses it as well
                state, effects = step(state, Received(session, number, message), now)
                heard.update(type(e.message).__name__ for e in effects if isinstance(e, Send))
            staged += sum(w.staged is not None and w.staged.prefix > 0 for w in state.workers.values())
            broken = check(state)
            assert not broken, (seed, number, broken)
    for kind in ("Published", "Promise", "Committed", "LeaseLost", "Superseded", "OffloadKept", "DropOffload"):
        assert heard[kind], f"the walk never got as far as {kind}: {heard}"
    assert staged, "nothing was ever staged"


def any_hello(chance: random.Random) -> Hello:
    """Draw a hello as any shard of any replica, with any past: also as somebody else over the same connection."""

    def key() -> tuple[int, int]:
        return chance.choice((0, 1, 1, 2, 3)), chance.choice((0, 1, 2, 3, 2**63 - 1))

    def held() -> Held:
        blobs = (digest(chance.choice(DATA)) for _ in range(3))
        return Held(*key(), *blobs, chance.choice((0, 400)), chance.choice((0, 4)))

    def perhaps(make: typing.Callable[[], typing.Any]) -> typing.Any:
        return make() if chance.random() < 0.5 else None

    return Hello(
        PROTOCOL,
        chance.choice(("1", "2", "3", "4")),
        chance.choice(("policy", "policy", "critic")),
        chance.choice(("a", "b")),
        chance.choice((0, 1)),
        chance.choice((2, 2, 2, 3)),
        stream=chance.choice((None, "s", "t")),
        spot=chance.random() < 0.2,
        observer=chance.random() < 0.1,
        high=perhaps(key),
        held=perhaps(held),
        ended=perhaps(lambda: Ended(chance.choice((0, 1, 2, 5)), perhaps(key))),
        offloads=tuple(held() for _ in range(chance.choice((0, 0, 1, 2)))),
        keeper=chance.random() < 0.2,
        created=perhaps(key),
    )


def test_any_hello_over_any_connection_neither_raises_nor_breaks_a_law() -> None:
    for seed in range(20):
        chance, now = random.Random(seed), 0.0
        state = ServerState.new(MachineConfig(server_epoch=1, retain=seed % 3), now)
        sessions = [SessionId(b"s%d" % k) for k in range(5)]
        for number in range(1, 250):
            session = chance.choice(sessions)
            kind = chance.choices(KINDS, [WEIGHTS.get(k, 4) for k in KINDS])[0]
            message: typing.Any = any_hello(chance)
            if session in state.sessions and kind is not Hello:
                message = any_message(chance, kind, state, state.workers[state.sessions[session]].replica)
            try:
                message = msgspec.convert(msgspec.to_builtins(message), type(message))
            except msgspec.ValidationError:
                continue
            now += chance.choice((0.0,) * 40 + (1.0, 6.0, 20.0))
            state, _ = step(state, chance.choice((Tick(),) + (Received(session, number, message),) * 15), now)
            broken = check(state)
            assert not broken, (seed, number, broken)
