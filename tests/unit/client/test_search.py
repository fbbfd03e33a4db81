"""Where a session looks for its server: in turn, for so long, and never back to one whose time is over."""

from __future__ import annotations

import random

import pytest

from tensorhub_core.client.search import (
    ANSWER_S,
    LEAST_PAUSE_S,
    MOST_ADDRESSES,
    MOST_PAUSE_S,
    OWN_PAUSE_S,
    TRY_S,
    Search,
    parse_addresses,
)
from tensorhub_core.errors import ConfigError

ABC = ("tcp://a:1", "tcp://b:1", "tcp://c:1")


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("tcp://a:1", ("tcp://a:1",)),
        ("tcp://a:1,tcp://b:1", ("tcp://a:1", "tcp://b:1")),
        (" tcp://a:1 , tcp://b:1 ", ("tcp://a:1", "tcp://b:1")),
        (["tcp://a:1", "tcp://b:1,tcp://c:1"], ABC),
        (("tcp://a:1", "tcp://a:1"), ("tcp://a:1",)),
        ("ipc:///tmp/hub.sock", ("ipc:///tmp/hub.sock",)),
    ],
)
def test_addresses_come_in_one_text_or_in_several(given: object, addresses: tuple[str, ...]) -> None:
    assert parse_addresses(given) == addresses  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", ",", "tcp://a:1,", [], [""], 7, None, [7], ["tcp://a:1", None]])
def test_what_are_no_addresses_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_addresses(given)  # type: ignore[arg-type]


def test_there_is_a_bound_on_addresses() -> None:
    assert len(parse_addresses([f"tcp://a:{n}" for n in range(MOST_ADDRESSES)])) == MOST_ADDRESSES
    with pytest.raises(ConfigError, match="too many"):
        parse_addresses([f"tcp://a:{n}" for n in range(MOST_ADDRESSES + 1)])


def until_due(search: Search, now: float, step_s: float = 0.01, most_s: float = 60.0) -> float:
    """Look every `step_s` until it is time to connect anew; return when."""
    end = now + most_s
    while not search.due(now):
        now += step_s
        assert now < end, "it never looks for another"
    return now


def test_refused_everywhere_all_are_tried_in_turn_ever_more_slowly_but_never_slower_than_a_bound() -> None:
    search, now, tried, pauses = Search(ABC, 0.0), 0.0, [], []
    for _ in range(30):
        search.turned_away(now)
        then = until_due(search, now)
        pauses.append(round(then - now, 1))
        now = then
        tried.append(search.next(now))
    assert tried == [ABC[(n + 1) % 3] for n in range(30)]
    assert pauses[0] <= 2 * LEAST_PAUSE_S
    assert max(pauses) <= MOST_PAUSE_S
    assert pauses == sorted(pauses)


@pytest.mark.parametrize("lease_s", [0.01, 0.4, 2.0, 60.0])
def test_who_knows_a_servers_lease_tries_several_times_within_it(lease_s: float) -> None:
    """For so long a server that has restarted waits for those who hold or read something."""
    search, now, pauses = Search(ABC[:1], 0.0), 0.0, []
    search.up(now)
    search.welcomed(lease_s)
    search.lost(now)
    for _ in range(30):
        search.next(now)
        search.turned_away(now)
        then = until_due(search, now, step_s=0.001)
        pauses.append(then - now)
        now = then
    assert max(pauses) == pytest.approx(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, lease_s / 4)), abs=0.01)


def test_refusals_that_come_twice_do_not_put_the_next_try_off() -> None:
    search = Search(ABC, 0.0)
    search.turned_away(0.0)
    search.turned_away(0.04)
    assert search.due(LEAST_PAUSE_S)


def test_an_address_that_says_nothing_is_left_if_there_are_others() -> None:
    assert until_due(Search(ABC, 0.0), 0.0) == pytest.approx(TRY_S, abs=0.1)
    alone = Search(ABC[:1], 0.0)
    assert not any(alone.due(now / 10) for now in range(1000))


def test_a_server_that_accepts_but_does_not_welcome_has_more_time() -> None:
    search = Search(ABC, 0.0)
    search.up(0.5)
    assert until_due(search, 0.5) == pytest.approx(0.5 + ANSWER_S, abs=0.1)


def test_after_a_loss_the_same_server_is_tried_at_once_and_then_the_others() -> None:
    search = Search(ABC, 0.0)
    search.turned_away(0.0)
    search.next(1.0)
    search.up(1.0)
    search.welcomed(5.0)
    search.lost(9.0)
    assert search.due(9.0)
    assert search.next(9.0) is None
    search.turned_away(9.0)
    assert search.next(until_due(search, 9.0)) == ABC[2]


def test_a_connection_that_is_lost_before_a_welcome_is_no_reason_to_hurry() -> None:
    search = Search(ABC[:1], 0.0)
    for count in range(20):
        search.up(float(count))
        search.lost(float(count))
        assert not search.due(float(count))
        assert search.next(until_due(search, float(count))) == ABC[0]


def test_a_silent_server_is_left_after_a_lease_if_there_are_others() -> None:
    for addresses, leaves in ((ABC, True), (ABC[:1], False)):
        search = Search(addresses, 0.0)
        search.up(0.0)
        search.welcomed(5.0)
        now = 0.0
        while now < 20.0 and not search.due(now):
            search.asked(now)
            now += 0.5
        assert (now < 20.0) is leaves
        if leaves:
            assert now == pytest.approx(5.0, abs=0.6)


def test_a_server_that_answers_is_never_left() -> None:
    search, chance, now = Search(ABC, 0.0), random.Random(1), 0.0
    search.up(0.0)
    search.welcomed(1.0)
    for _ in range(1000):
        search.asked(now)
        now += chance.uniform(0.0, 0.9)
        assert not search.due(now)
        search.heard()


def test_a_pause_of_this_process_is_not_the_servers_silence() -> None:
    search = Search(ABC, 0.0)
    search.up(0.0)
    search.welcomed(5.0)
    search.due(0.1)
    search.asked(0.1)
    assert not search.due(100.0 + OWN_PAUSE_S), "it was this process that slept"
    assert until_due(search, 102.1) == pytest.approx(102.1 + 5.0, abs=0.3)


def test_a_lower_epoch_than_any_that_was_heard_is_not_accepted() -> None:
    search = Search(ABC, 0.0)
    assert search.accepts(5)
    assert search.accepts(5)
    assert search.accepts(9)
    assert not search.accepts(5)
    assert search.epoch == 9
