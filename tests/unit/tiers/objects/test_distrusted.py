"""Bad objects are left out of listings until they change or are stored again."""

from __future__ import annotations

from kvferry.tiers.objects.bucket_index import DistrustedObjects
from support.chunk_files import key


def page(*numbers: int, etag: str = "1") -> list[tuple[bytes, str]]:
    return [(key(number), etag) for number in numbers]


def test_a_bad_object_is_left_out_until_it_has_changed():
    distrusted = DistrustedObjects()
    distrusted.add(key(1), "1")
    assert distrusted.trusted(page(1, 2)) == [key(2)]
    assert key(1) in distrusted
    assert distrusted.trusted(page(1, 2, etag="2")) == [key(1), key(2)]
    assert key(1) not in distrusted
    assert distrusted.trusted(page(1)) == [key(1)]


def test_bad_object_without_etag_is_distrusted_until_stored_again():
    distrusted = DistrustedObjects()
    distrusted.add(key(1), "")
    assert distrusted.trusted(page(1, etag="")) == []
    distrusted.discard(key(1))
    assert distrusted.trusted(page(1, etag="")) == [key(1)]
