"""How long the loop lets messages come together: only where there are many workers, and never for long."""

from __future__ import annotations

from tensorhub_core.server.pace import BUSY_RATE, ENOUGH, MANY_WORKERS, MOST_PAUSE_S, Pace


def steady(pace: Pace, workers: int, rate: float, since_s: float, seconds: float) -> list[float]:
    """Let messages come at a steady rate and the loop take them after each pause; return the pauses."""
    now, pauses, last = since_s, [0.0], since_s
    while now < since_s + seconds:
        now += max(pauses[-1], 1 / rate)
        taken = round((now - last) * rate)
        last += taken / rate
        pauses.append(pace.pause_s(workers, taken, now))
    return pauses


def busy() -> Pace:
    """Return the pace of a hub of 10,000 workers, each with a heartbeat a second, at 1001 seconds."""
    pace = Pace()
    steady(pace, 10_000, 10_000, 1000, 1)
    return pace


def test_a_hub_of_few_workers_never_pauses() -> None:
    assert not any(steady(Pace(), MANY_WORKERS - 1, 50_000, 1000, 1))


def test_a_hub_with_little_to_do_never_pauses() -> None:
    assert not any(steady(Pace(), 10_000, 0.9 * BUSY_RATE, 1000, 1))


def test_heartbeats_of_many_workers_are_taken_together() -> None:
    pauses = steady(busy(), 10_000, 10_000, 1001, 1)
    assert max(pauses) <= MOST_PAUSE_S
    assert len(pauses) < 2 * 10_000 / ENOUGH, "the loop woke up for every message"


def test_who_has_enough_to_do_does_not_pause() -> None:
    assert busy().pause_s(10_000, 2 * ENOUGH, 1001) == 0.0


def test_when_it_becomes_quiet_the_next_message_is_taken_as_it_comes() -> None:
    pace = busy()
    assert pace.pause_s(10_000, 1, 1001) > 0.0
    assert pace.pause_s(10_000, 1, 1002) == 0.0
