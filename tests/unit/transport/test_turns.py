"""Earlier turns are found by their chunks, and compared by their tokens where they depart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ProtocolError
from kvferry.keys.chunk import ChunkKeys, Item
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import (
    MAX_TURNS,
    AskTurn,
    KeptTurn,
    Turns,
    decode_numbered,
    decode_reply,
    decode_request,
    encode,
)
from kvferry.transport.redeem import Grant
from kvferry.transport.turns import (
    ASK_SECONDS,
    MAX_SILENT_SECONDS,
    SILENT_SECONDS,
    TurnContent,
    TurnIndex,
    TurnQueries,
    shared_tokens,
)
from support.clock import Clock
from transport.cards import ticket

CHUNK = 4
A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)
BOTH = {A: 1, B: 1}


def content(tokens, salt="", items=()) -> TurnContent:
    keys = ChunkKeys(CHUNK, list(tokens), salt=salt, items=items)
    return TurnContent(CHUNK, tuple(keys.chunks()), list(tokens), tuple(item.start for item in items))


def kept(of: TurnContent, name="r") -> KeptTurn:
    grant = Grant.of(LeaseWord(1, 2, 3), len(of.tokens), [[5, 6], [7]])
    return KeptTurn("D", ticket(name), grant, 1, 0, [])


def publish(index: TurnIndex, of: TurnContent, name="r") -> None:
    index.publish(of, kept(of, name), f"lease {name}")


def names(turns: list[KeptTurn]) -> list[str]:
    return [turn.ticket.decode().rstrip(".") for turn in turns]


def found(index: TurnIndex, prompt: TurnContent) -> list[KeptTurn]:
    return index.find(AskTurn(7, CHUNK, list(prompt.keys))).kept


def same(one, other) -> int:
    """How far two begin alike, token by token."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


TOKENS = st.lists(st.integers(0, 1), max_size=20)


@given(TOKENS, TOKENS)
def test_shared_tokens_are_the_equal_ones_from_the_start_if_they_fill_a_chunk(prompt, turn):
    index = TurnIndex()
    publish(index, content(turn))
    answer = found(index, content(prompt))
    expected = same(prompt, turn)
    if expected < CHUNK:
        assert answer == []
    else:
        assert [shared_tokens(content(prompt), one) for one in answer] == [expected]


@given(st.lists(TOKENS, max_size=MAX_TURNS, unique_by=tuple), TOKENS)
def test_the_turn_that_shares_most_is_found(turns, prompt):
    index = TurnIndex()
    for number, turn in enumerate(turns):
        publish(index, content(turn), str(number))
    most = max((same(prompt, turn) for turn in turns), default=0)
    answer = [shared_tokens(content(prompt), one) for one in found(index, content(prompt))]
    assert max(answer, default=0) == (most if most >= CHUNK else 0)
    assert len(answer) <= MAX_TURNS


def test_a_withdrawn_turn_is_not_found():
    index, one = TurnIndex(), content(range(9))
    publish(index, one)
    index.withdraw(ticket("r"))
    index.withdraw(ticket("never published"))
    assert (found(index, one), len(index)) == ([], 0)


def test_a_turn_that_is_withdrawn_while_it_is_looked_for_ends_no_thread():
    class Leaving(dict):
        """Turns that another thread withdraws right after each look at them."""

        def __contains__(self, key) -> bool:
            return self.get(key) is not None

        def get(self, key, default=None):
            return self.pop(key, default)

    index, one = TurnIndex(), content(range(9))
    index._turns = Leaving()
    publish(index, one)
    assert names(found(index, one)) == ["r"]
    assert found(index, one) == []


def test_keys_of_another_turn_stay_when_one_is_withdrawn():
    index, one, other = TurnIndex(), content(range(9)), content([*range(6), 7])
    for of, lease in ((one, "one"), (other, "other")):
        publish(index, of, lease)
    index.withdraw(ticket("one"))
    assert names(found(index, one)) == ["other"]
    index.withdraw(ticket("other"))
    assert (found(index, one), found(index, other), len(index)) == ([], [], 0)


def test_the_last_of_many_turns_that_begin_alike_are_found():
    index = TurnIndex()
    for number in range(MAX_TURNS + 2):
        one = content([*range(6), number])
        publish(index, one, str(number))
    assert names(found(index, content(range(9)))) == ["5", "4", "3", "2"]


def test_a_tenant_does_not_find_anothers_turn():
    index, one = TurnIndex(), content(range(9), salt="mine")
    publish(index, one)
    assert found(index, content(range(9))) == []
    assert found(index, content(range(9), salt="mine"))


def test_chunks_of_another_length_are_others():
    index, one = TurnIndex(), content(range(9))
    publish(index, one)
    assert index.find(AskTurn(7, 8, list(one.keys))) == Turns(7, [])


def test_tokens_are_compared_up_to_where_something_stands_in_their_place():
    image = content(range(11), items=(Item(9, 1, "a picture"),))
    assert image.tokens_after(1) == [4, 5, 6, 7]
    assert image.tokens_after(2) == [8]
    index = TurnIndex()
    publish(index, image)
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
    answer = Turns(3, [msgspec.structs.replace(kept(one), chunks=2, next_tokens=[8])])
    assert decode_reply(encode(answer)) == decode_numbered(encode(answer)) == answer
    assert decode_numbered(encode(question)) is None
    assert decode_numbered(b"\xff\x00") is None


@pytest.mark.parametrize("keys", [[b"short"], [b"x" * 32] * 65_537])
def test_a_question_out_of_bounds_is_none(keys):
    with pytest.raises(ProtocolError):
        decode_request(encode(AskTurn(3, CHUNK, keys)))


def test_answers_are_waited_for_until_all_have_come():
    questions = TurnQueries(Clock())
    number, asked = questions.begin(BOTH)
    assert asked == [A, B]
    questions.handle_reply(A, Turns(number, []))
    assert questions.answers(number) is None
    one = kept(content(range(9)))
    questions.handle_reply(B, Turns(number, [one]))
    questions.handle_reply(B, Turns(number, []))
    questions.handle_reply(("10.0.0.3", 3), Turns(number, [one]))
    questions.handle_reply(A, Turns(number + 1, [one]))
    assert questions.answers(number) == [(B, one)]


def test_a_silent_peer_is_not_asked_for_a_while():
    clock = Clock()
    questions = TurnQueries(clock)
    number, _ = questions.begin(BOTH)
    questions.handle_reply(A, Turns(number, []))
    clock.now = ASK_SECONDS
    assert questions.answers(number) == []
    assert questions.begin(BOTH)[1] == [A]
    clock.now += SILENT_SECONDS
    assert questions.begin(BOTH)[1] == [A, B]


class Asked:
    """Questions to one peer, and a clock."""

    def __init__(self):
        self.clock = Clock()
        self.questions = TurnQueries(self.clock)

    def ask(self, answers, run=1):
        """Whether it was asked; the answer, or none in time."""
        number, asked = self.questions.begin({A: run})
        if answers:
            self.questions.handle_reply(A, Turns(number, []))
        self.clock.now += ASK_SECONDS
        assert self.questions.answers(number) == []
        return asked == [A]

    def pauses(self, count):
        """Seconds for which it is left alone, each time that it was silent again."""
        for _ in range(count):
            assert self.ask(answers=False)
            yield self.pause()

    def pause(self):
        began = self.clock.now
        while not self.questions.begin({A: 1})[1]:
            self.clock.now += 5
        return self.clock.now - began


def test_the_pause_of_a_peer_doubles_with_each_silence():
    assert list(Asked().pauses(8)) == [10, 20, 40, 80, 160, 320, 320, 320]
    assert (SILENT_SECONDS, MAX_SILENT_SECONDS) == (10, 320)


def test_an_answer_ends_the_count_of_silences():
    asked = Asked()
    list(asked.pauses(4))
    assert asked.ask(answers=True)
    assert list(asked.pauses(2)) == [10, 20]


def test_a_late_answer_shortens_the_pause_to_the_first_one():
    asked = Asked()
    list(asked.pauses(4))
    assert asked.ask(answers=False)
    asked.questions.handle_reply(A, Turns(99, []))
    assert asked.pause() == 10
    assert list(asked.pauses(1)) == [20]


def test_another_run_of_who_was_silent_is_asked_at_once_and_is_not_known_to_be_silent():
    asked = Asked()
    list(asked.pauses(4))
    assert asked.ask(answers=False)
    assert not asked.ask(answers=False)
    assert asked.ask(answers=False, run=2)
    assert not asked.ask(answers=False, run=2)
    asked.clock.now += 10
    assert asked.ask(answers=False, run=2)


def test_a_peer_named_by_an_offer_is_asked_at_once_and_its_next_silence_counts():
    asked = Asked()
    list(asked.pauses(2))
    assert asked.ask(answers=False)
    asked.questions.note_ticket(A)
    asked.questions.note_ticket(B)
    assert list(asked.pauses(1)) == [80]


def test_questions_that_were_open_at_once_are_one_silence():
    asked = Asked()
    numbers = [asked.questions.begin({A: 1})[0] for _ in range(3)]
    asked.clock.now += ASK_SECONDS
    for number in numbers:
        assert asked.questions.answers(number) == []
    assert asked.pause() == 10


def test_a_peer_that_is_none_any_more_is_forgotten():
    asked = Asked()
    assert asked.ask(answers=False)
    asked.questions.begin({B: 1})
    assert asked.questions.begin({A: 1})[1] == [A], "its silence is forgotten"


def test_a_question_that_is_dropped_hears_nothing():
    questions = TurnQueries(Clock())
    number, _ = questions.begin({A: 1})
    questions.drop(number)
    questions.handle_reply(A, Turns(number, [kept(content(range(9)))]))
    with pytest.raises(KeyError):
        questions.answers(number)
