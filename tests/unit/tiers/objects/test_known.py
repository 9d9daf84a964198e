from __future__ import annotations

import pytest

from kvferry.tiers.index.key_table import TierKeys, tags_of
from kvferry.tiers.objects.known import Known
from support.chunk_files import key


def shown(*numbers: int, tag: str = "1") -> list[tuple[bytes, str]]:
    return [(key(number), tag) for number in numbers]


def has(known: Known, *numbers: int) -> list[bool]:
    return known._tags.known(tags_of([key(number) for number in numbers])).tolist()


def list_all(known: Known, *numbers: int, tag: str = "1") -> None:
    with known.listing():
        known.show(shown(*numbers, tag=tag))


def test_what_a_listing_shows_is_known_at_once_and_what_it_lacks_is_forgotten_at_its_end():
    known = Known(TierKeys())
    list_all(known, 1, 2)
    with known.listing():
        known.show(shown(2, 3))
        assert has(known, 1, 2, 3) == [True, True, True]
    assert has(known, 1, 2, 3, 4) == [False, True, True, False]
    assert len(known) == 2


def test_a_listing_that_breaks_off_forgets_nothing():
    known = Known(TierKeys())
    list_all(known, 1)

    def breaks_off():
        with known.listing():
            known.show(shown(2))
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        breaks_off()
    assert has(known, 1, 2) == [True, True]


def test_what_happens_during_a_listing_is_newer_than_it():
    known = Known(TierKeys())
    list_all(known, 1, 2)
    with known.listing():
        known.discard(key(1))
        known.add(key(3))
        known.discard(key(4))
        known.add(key(4))
        known.show(shown(1, 2))
    assert has(known, 1, 2, 3, 4) == [False, True, True, True]
    list_all(known, 1, 2)
    assert has(known, 1, 2, 3, 4) == [True, True, False, False]


def test_a_bad_object_is_not_known_until_it_has_changed():
    known = Known(TierKeys())
    list_all(known, 1, 2)
    known.distrust(key(1), "1")
    list_all(known, 1, 2)
    assert has(known, 1, 2) == [False, True]
    list_all(known, 1, 2, tag="2")
    assert has(known, 1, 2) == [True, True]
    known.distrust(key(1), "2")
    known.add(key(1))
    list_all(known, 1, 2, tag="2")
    assert has(known, 1) == [True]


def test_without_tags_a_bad_object_stays_bad_until_it_is_stored_again():
    known = Known(TierKeys())
    list_all(known, 1, tag="")
    known.distrust(key(1), "")
    list_all(known, 1, tag="")
    assert has(known, 1) == [False]
    known.add(key(1))
    assert has(known, 1) == [True]


def test_changes_count_what_listings_add_and_lack():
    known = Known(TierKeys())
    list_all(known, 1, 2)
    assert known.changes == 2
    known.add(key(3))
    list_all(known, 1, 2, 3)
    assert known.changes == 2
    list_all(known, 1)
    assert known.changes == 4
