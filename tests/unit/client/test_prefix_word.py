"""The word in which a worker shows its progress says what was written, or nothing at all."""

from __future__ import annotations

import random

import pytest

from tensorhub_core.client.prefix_word import (
    MOST_LANDINGS,
    PAGE_BYTES,
    PrefixPage,
    segments_in,
    tag_of,
    with_page,
    word_of,
)
from tensorhub_core.transport.base import Region

TAG = tag_of(b"\x01\x02\x03\x04and more")


def test_a_word_says_how_much_of_which_manifest_is_verified() -> None:
    for segments in (1, 2, 255, 256, 1 << 20, (1 << 32) - 1):
        assert segments_in(word_of(TAG, segments), TAG, (1 << 32) - 1) == segments


@pytest.mark.parametrize("segments", [0, -1, 1 << 32])
def test_what_cannot_be_said_says_nothing(segments: int) -> None:
    assert word_of(TAG, segments) == 0


def test_no_word_says_nothing_whatever_the_tag() -> None:
    assert segments_in(0, 0, 100) == segments_in(0, TAG, 100) == 0


def test_the_progress_of_another_manifest_or_beyond_the_end_counts_for_nothing() -> None:
    word = word_of(TAG, 7)
    assert segments_in(word, TAG, 7) == 7
    assert segments_in(word, TAG, 6) == 0
    assert segments_in(word, TAG ^ 1, 7) == 0
    assert segments_in(word, tag_of(b"\x02\x02\x03\x04"), 7) == 0


def test_a_word_that_was_read_while_it_was_written_counts_for_nothing_else() -> None:
    """Cut anywhere: the first bytes of one and the rest of the other."""
    chance = random.Random(1)
    for _ in range(2000):
        one, other = (chance.randrange(1, 1 << chance.randrange(1, 33)) for _ in range(2))
        cut = 8 * chance.randrange(1, 8)
        low = (1 << cut) - 1
        torn = word_of(TAG, one) & low | word_of(TAG, other) & ~low
        assert segments_in(torn, TAG, 1 << 32) in (0, one, other)


def test_words_of_strangers_count_for_nothing() -> None:
    chance = random.Random(2)
    assert not any(segments_in(chance.getrandbits(64), TAG, 1 << 20) for _ in range(5000))


def test_a_page_holds_the_own_word_and_places_for_others() -> None:
    page = PrefixPage()
    region = page.region
    assert region.address % PAGE_BYTES == 0
    assert (region.length_bytes, region.device) == (PAGE_BYTES, "cpu")
    page.show(TAG, 3)
    places = [page.landing(number) for number in range(MOST_LANDINGS)]
    assert len(set(places)) == MOST_LANDINGS
    assert all(region.address < place <= region.address + PAGE_BYTES - 8 for place in places)
    other = PrefixPage()
    other.show(TAG, 9)
    assert page.landed(5) == 0
    import ctypes

    ctypes.memmove(places[5], other.address, 8)
    assert segments_in(page.landed(5), TAG, 9) == 9
    assert page.landed(4) == page.landed(6) == 0
    assert ctypes.c_uint64.from_address(page.address).value == word_of(TAG, 3)
    page.landing(5)
    assert page.landed(5) == 0
    page.clear()
    assert ctypes.c_uint64.from_address(page.address).value == 0


def test_a_page_is_registered_with_memory_and_not_alone() -> None:
    page, memory = PrefixPage(), Region(1 << 20, 5)
    assert with_page([memory], page) == [memory, page.region]
    assert with_page([], page) == []
