"""Keys learnt from listings, while this process adds and discards some."""

from __future__ import annotations

import pytest

from kvferry.tiers.index import ListedKeys, TierKeys, tags_of
from support.chunk_files import key


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class Listed(ListedKeys):
    """Listed keys, and the keys of their tier."""

    def __init__(self, **options: int) -> None:
        self.tier = TierKeys()
        super().__init__(self.tier, **options)


def has(listed: Listed, *numbers: int) -> list[bool]:
    found: list[bool] = listed.tier.contains(tags_of(keys(*numbers))).tolist()
    assert found == [key(number) in listed for number in numbers]
    return found


def list_all(listed: ListedKeys, *numbers: int) -> None:
    with listed.listing():
        listed.add_page(keys(*numbers))


def test_a_shown_key_is_known_at_once_and_one_not_shown_is_removed_at_the_end():
    listed = Listed()
    list_all(listed, 1, 2)
    with listed.listing():
        listed.add_page(keys(2, 3))
        assert has(listed, 1, 2, 3) == [True, True, True]
    assert has(listed, 1, 2, 3, 4) == [False, True, True, False]
    assert len(listed) == 2


def test_a_listing_that_breaks_off_removes_nothing():
    listed = Listed()
    list_all(listed, 1)

    def breaks_off():
        with listed.listing():
            listed.add_page(keys(2))
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        breaks_off()
    assert has(listed, 1, 2) == [True, True]


def test_change_during_a_listing_is_newer_than_the_listing():
    listed = Listed()
    list_all(listed, 1, 2)
    with listed.listing():
        listed.discard(key(1))
        listed.add(key(3))
        listed.discard(key(4))
        listed.add(key(4))
        listed.add_page(keys(1, 2))
    assert has(listed, 1, 2, 3, 4) == [False, True, True, True]
    list_all(listed, 1, 2)
    assert has(listed, 1, 2, 3, 4) == [True, True, False, False]


def test_a_listing_of_one_part_leaves_the_others_alone():
    one, other, third = bytes([7]) * 32, bytes([8]) * 32, bytes([7]) + bytes(31)
    listed = Listed()
    with listed.listing():
        listed.add_page([one, other])
    with listed.listing((7,)):
        listed.discard(other)
        listed.add(other)
        listed.add_page([third])
    assert [each in listed for each in (one, other, third)] == [False, True, True]
    with listed.listing((8,)):
        listed.discard(third)
        listed.add_page([other])
    assert [each in listed for each in (one, other, third)] == [False, True, False]


def test_listings_add_no_more_keys_than_are_allowed():
    listed = Listed(max_keys=3)
    listed.add(key(0))
    list_all(listed, 0, 1, 2, 3, 4)
    assert has(listed, 0, 1, 2, 3, 4) == [True, True, True, False, False]


def test_changes_count_what_listings_add_and_remove():
    listed = Listed()
    list_all(listed, 1, 2)
    assert listed.changes == 2
    listed.add(key(3))
    list_all(listed, 1, 2, 3)
    assert listed.changes == 2
    list_all(listed, 1)
    assert listed.changes == 4
