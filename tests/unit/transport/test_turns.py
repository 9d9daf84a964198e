"""Earlier turns are found by their chunks, and compared by their tokens where they depart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvferry.errors import ProtocolError
from kvferry.keys.chunk import ChunkKeys, Item
from kvferry.transport.messages import (
    MOST_TURNS,
    AskTurn,
    KeptTurn,
    Turns,
    decode_reply,
    decode_request,
    encode,
    turns_of,
)
from kvferry.transport.turns import ASK_SECONDS, SILENT_SECONDS, Content, Questions, TurnIndex, shared_tokens
from support.clock import Clock

CHUNK = 4
A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)


def content(tokens, salt="", items=()) -> Content:
    keys = ChunkKeys(CHUNK, list(tokens), salt=salt, items=items)
    return Content(CHUNK, tuple(keys.chunks()), list(tokens), tuple(item.start for item in items))


def kept(of: Content, lease="r") -> KeptTurn:
    return KeptTurn("D", lease, 1, 2, 3, len(of.tokens), 1, 0, [], [[5, 6], [7]])


def found(index: TurnIndex, prompt: Content) -> list[KeptTurn]:
    return index.find(AskTurn(7, CHUNK, list(prompt.keys))).kept


def same(one, other) -> int:
    """How far two begin alike, token by token."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


TOKENS = st.lists(st.integers(0, 1), max_size=20)


@given(TOKENS, TOKENS)
def test_what_is_shared_is_what_is_the_same_from_the_first_token_on_if_a_chunk_is(prompt, turn):
    index = TurnIndex()
    index.publish(content(turn), kept(content(turn)))
    answer = found(index, content(prompt))
    expected = same(prompt, turn)
    if expected < CHUNK:
        assert answer == []
    else:
        assert [shared_tokens(content(prompt), one) for one in answer] == [expected]


@given(st.lists(TOKENS, max_size=MOST_TURNS, unique_by=tuple), TOKENS)
def test_of_several_turns_one_that_shares_most_is_found(turns, prompt):
    index = TurnIndex()
    for number, turn in enumerate(turns):
        index.publish(content(turn), kept(content(turn), str(number)))
    most = max((same(prompt, turn) for turn in turns), default=0)
    answer = [shared_tokens(content(prompt), one) for one in found(index, content(prompt))]
    assert max(answer, default=0) == (most if most >= CHUNK else 0)
    assert len(answer) <= MOST_TURNS


def test_what_is_withdrawn_is_not_found():
    index, one = TurnIndex(), content(range(9))
    index.publish(one, kept(one))
    index.withdraw("r")
    index.withdraw("never published")
    assert (found(index, one), len(index)) == ([], 0)


def test_what_another_turn_is_found_by_stays_when_one_is_withdrawn():
    index, one, other = TurnIndex(), content(range(9)), content([*range(6), 7])
    for of, lease in ((one, "one"), (other, "other")):
        index.publish(of, kept(of, lease))
    index.withdraw("one")
    assert [each.lease for each in found(index, one)] == ["other"]
    index.withdraw("other")
    assert (found(index, one), index._by_key) == ([], {})


def test_of_many_turns_that_begin_alike_the_last_are_found():
    index = TurnIndex()
    for number in range(MOST_TURNS + 2):
        one = content([*range(6), number])
        index.publish(one, kept(one, str(number)))
    assert [each.lease for each in found(index, content(range(9)))] == ["5", "4", "3", "2"]


def test_a_tenant_does_not_find_anothers_turn():
    index, one = TurnIndex(), content(range(9), salt="mine")
    index.publish(one, kept(one))
    assert found(index, content(range(9))) == []
    assert found(index, content(range(9), salt="mine"))


def test_chunks_of_another_length_are_others():
    index, one = TurnIndex(), content(range(9))
    index.publish(one, kept(one))
    assert index.find(AskTurn(7, 8, list(one.keys))) == Turns(7, [])


def test_tokens_are_compared_up_to_where_something_stands_in_their_place():
    image = content(range(11), items=(Item(9, 1, "a picture"),))
    assert image.after(1) == [4, 5, 6, 7]
    assert image.after(2) == [8]
    index = TurnIndex()
    index.publish(image, kept(image))
    for prompt in (content(range(11)), content(range(11), items=(Item(9, 1, "another"),))):
        (answer,) = found(index, prompt)
        assert shared_tokens(prompt, answer) == 9


@pytest.mark.parametrize(
    ("one", "other", "goes_on"), [(9, 9, True), (9, 6, True), (12, 8, True), (6, 9, False), (7, 9, False)]
)
def test_a_longer_turn_begins_with_a_shorter(one, other, goes_on):
    assert content(range(one)).begins_with(content(range(other))) == goes_on
    different = content([*range(other - 1), 99])
    assert not content(range(one)).begins_with(different)


def test_a_turn_with_another_image_behind_its_last_chunk_is_not_a_shorter_one():
    first, second = (content(range(10), items=[Item(9, 1, name)]) for name in ("an image", "another"))
    assert not second.begins_with(first)
    assert content(range(10), items=[Item(9, 1, "an image")]).keys == first.keys


def test_an_answer_to_more_than_was_asked_is_none():
    prompt = content(range(9))
    lying = msgspec.structs.replace(kept(prompt), chunks=3)
    assert shared_tokens(prompt, lying) == 0


def test_questions_and_answers_travel():
    one = content(range(9))
    question = AskTurn(3, CHUNK, list(one.keys))
    assert decode_request(encode(question)) == question
    answer = Turns(3, [kept(one).found(2, [8])])
    assert decode_reply(encode(answer)) == turns_of(encode(answer)) == answer
    assert turns_of(encode(question)) is None
    assert turns_of(b"\xff\x00") is None


@pytest.mark.parametrize("keys", [[b"short"], [b"x" * 32] * 65_537])
def test_a_question_out_of_bounds_is_none(keys):
    with pytest.raises(ProtocolError):
        decode_request(encode(AskTurn(3, CHUNK, keys)))


def test_answers_are_waited_for_until_all_have_come():
    questions = Questions(Clock())
    number, asked = questions.begin([A, B])
    assert asked == [A, B]
    questions.hear(A, Turns(number, []))
    assert questions.answers(number) is None
    one = kept(content(range(9)))
    questions.hear(B, Turns(number, [one]))
    questions.hear(B, Turns(number, []))
    questions.hear(("10.0.0.3", 3), Turns(number, [one]))
    questions.hear(A, Turns(number + 1, [one]))
    assert questions.answers(number) == [(B, one)]


def test_who_does_not_answer_is_left_alone_for_a_while():
    clock = Clock()
    questions = Questions(clock)
    number, _ = questions.begin([A, B])
    questions.hear(A, Turns(number, []))
    clock.now = ASK_SECONDS
    assert questions.answers(number) == []
    assert questions.begin([A, B])[1] == [A]
    clock.now += SILENT_SECONDS
    assert questions.begin([A, B])[1] == [A, B]


def test_a_question_that_is_dropped_hears_nothing():
    questions = Questions(Clock())
    number, _ = questions.begin([A])
    questions.drop(number)
    questions.hear(A, Turns(number, [kept(content(range(9)))]))
    with pytest.raises(KeyError):
        questions.answers(number)
