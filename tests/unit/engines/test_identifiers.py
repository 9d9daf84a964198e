"""Images whose identifiers clients choose: one identifier that stands for two has no certain content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.common.errors import Unnameable
from kvferry.connector.content import Adapters, Prompts, content_of
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.items import Identifiers, name_of
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tools.models.layout import EngineShape, lay_out
from support.block_pool import request
from support.mm import feature
from support.models import attention, model

CAT, DOG = [1.0, 2.0], [1.0, 3.0]


def ask(book: Identifiers, pixels: Any, identifier: str, name: str = "a") -> Any:
    """A request with an image, after the book has seen it."""
    one = request(name, range(8), mm_features=[feature(1, pixels, identifier)])
    book.note(one)
    return one


def named(one: Any) -> bool:
    try:
        name_of(one.mm_features[0])
    except Unnameable:
        return False
    return True


def test_an_image_may_come_again_under_its_identifier_and_under_others() -> None:
    book = Identifiers()
    assert all(named(ask(book, CAT, identifier)) for identifier in ("mine", "mine", "yours", "mine"))
    assert named(ask(book, DOG, "another"))


def test_an_identifier_that_stood_for_another_image_names_nothing_any_more() -> None:
    book = Identifiers()
    cat, dog = ask(book, CAT, "mine"), ask(book, DOG, "mine")
    assert not named(dog), "vLLM may compute the dog from what it keeps of the cat"
    assert not named(cat), "a cat that still waits may be computed from what vLLM keeps of the dog"
    cats = [ask(book, CAT, "two objects of one content") for _ in range(2)]
    ask(book, DOG, "two objects of one content")
    assert not any(map(named, cats))
    assert not named(ask(book, CAT, "mine"))
    assert named(ask(book, DOG, "yours"))
    with pytest.raises(Unnameable, match=r"under the same identifier \(uuid\)"):
        content_of(dog, 8, Adapters())


def test_an_identifier_whose_first_content_is_not_known_names_nothing() -> None:
    book = Identifiers()
    ask(book, None, "mine")
    assert not named(ask(book, CAT, "mine"))


def test_content_that_is_not_sent_again_changes_nothing() -> None:
    book = Identifiers()
    ask(book, CAT, "mine")
    ask(book, None, "mine")
    assert named(ask(book, CAT, "mine"))


def test_content_without_a_digest_makes_its_identifier_uncertain() -> None:
    book = Identifiers()
    cat, odd = ask(book, CAT, "mine"), feature(1, CAT, "mine")
    odd.data["pixel_values"].data = 10**5000  # too long a number to be printed
    book.note(request("b", range(8), mm_features=[odd]))
    assert not named(cat)
    assert not named(ask(book, CAT, "mine")), "vLLM may compute this cat from what it keeps of the other"


def test_a_running_requests_chunks_lose_their_names() -> None:
    book = Identifiers()
    form = canonical_form_of(lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 9)), 4)
    prompts = Prompts(form, Adapters())
    cat = ask(book, CAT, "mine")
    assert prompts.add(cat) is not None
    assert prompts.get(cat) is not None
    ask(book, DOG, "mine", "b")
    assert prompts.get(cat) is None
    assert "identifier" in prompts.why_unnamed(cat.request_id)


def test_identifiers_of_any_length_cost_little_and_the_last_ones_are_remembered() -> None:
    book = Identifiers(max_identifiers=3)
    for number in range(9):
        ask(book, CAT, "x" * 1_000_000 + str(number))
        ask(book, CAT, "mine")
    assert len(book) == 3
    ask(book, CAT, "half a pair \ud800")
    assert not named(ask(book, DOG, "mine"))


def test_an_engine_notes_every_request_that_comes_in() -> None:
    seen: list[Any] = []

    scheduler = KVFerryConnector.__new__(KVFerryConnector)
    scheduler._identifiers, scheduler._wrap = Identifiers(), lambda one: one
    scheduler._half = SimpleNamespace(on_new_request=seen.append)
    cat, dog = (request("a", range(8), mm_features=[feature(1, pixels, "mine")]) for pixels in (CAT, DOG))
    for one in (cat, dog):
        scheduler.on_new_request(one)
    assert seen == [cat, dog]
    assert not named(dog)


def test_items_that_no_digest_can_be_made_of_have_no_name() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    for odd in (deep, {1: 2, "a": 3}, 10**5000):
        one = feature(1, CAT)
        one.data["pixel_values"].data = odd
        with pytest.raises(Unnameable):
            name_of(one)
