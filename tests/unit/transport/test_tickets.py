"""The producer's tickets against a model that is simple enough to be right by looking at it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from kvferry.transport.lease import LeaseWord
from kvferry.transport.redeem import (
    CROWDED,
    MAX_CONSUMERS,
    RELEASED,
    UNKNOWN,
    Grant,
    NotRedeemed,
    PromptContent,
    Redeem,
    Redeemed,
    TicketBook,
    Unchanged,
    new_ticket,
)
from support.examples import examples
from support.locked import locked
from transport.cards import ticket

RUN = 5
CONTENT = PromptContent("tokens", "items", "adapter", "salt")
GRANT = Grant.of(LeaseWord(3, 7, RUN), 4, [[1, 2]])
SOME = structs.replace(GRANT, tokens=2)


def book(*names: str) -> TicketBook:
    made = TicketBook()
    for name in names:
        made.publish(ticket(name), name, 4, CONTENT, GRANT)
    return made


def redeem(made: TicketBook, name: str, consumer: int = 1, content=CONTENT, tokens: int = 4):
    return made.redeem(Redeem(8, consumer, ticket(name), tokens, content))


def refused(answer) -> str:
    assert isinstance(answer, NotRedeemed)
    assert answer.number == 8
    return answer.reason


def test_a_ticket_is_exchanged_for_its_grant_as_often_as_its_consumer_asks():
    made = book("a")
    assert redeem(made, "a") == redeem(made, "a") == Redeemed(8, GRANT)
    assert made.claimed(1, [ticket("a"), ticket("b")]) == ["a"]
    assert made.claimed(2, [ticket("a")]) == []


def test_the_answer_to_a_ticket_says_what_the_caches_of_the_producer_had():
    made = TicketBook()
    made.publish(ticket("a"), "a", 4, CONTENT, GRANT, cached_tokens=3)
    assert redeem(made, "a") == Redeemed(8, GRANT, 3)


def test_a_prompt_that_is_being_computed_is_granted_as_far_as_it_is():
    made = TicketBook()
    made.publish(ticket("a"), "a", 4, CONTENT, SOME)
    assert redeem(made, "a") == Redeemed(8, SOME)
    again = Redeem(8, 1, ticket("a"), 4, CONTENT, 2)
    assert made.redeem(again) == Unchanged(8)
    longer = Grant.of(LeaseWord(3, 7, RUN), 4, [[1, 2, 5]])
    made.advance("a", longer)
    made.advance("never published", longer)
    assert made.redeem(again) == Redeemed(8, longer)
    assert made.claimed(1, [ticket("a")]) == ["a"]


def test_a_consumer_without_the_prompt_learns_nothing_of_one_that_is_being_computed():
    made = TicketBook()
    made.publish(ticket("a"), "a", 4, CONTENT, SOME)
    for known in (0, 2):
        asked = Redeem(8, 2, ticket("a"), 4, PromptContent("others", "items", "adapter", "salt"), known)
        assert "hold other tokens" in refused(made.redeem(asked))
    assert made.claimed(2, [ticket("a")]) == []
    assert made.release(2, [ticket("a")]) == []


def test_a_ticket_names_one_lease():
    made = book("a")
    with pytest.raises(ValueError, match="names another lease"):
        made.publish(ticket("a"), "b", 4, CONTENT, Grant.of(LeaseWord(9, 9, RUN), 4, [[9]]))
    assert redeem(made, "a") == Redeemed(8, GRANT)


def test_a_lease_that_has_ended_does_not_touch_another_one_with_its_ticket():
    made, grant = book("a"), Grant.of(LeaseWord(4, 8, RUN), 4, [[3]])
    redeem(made, "a")
    assert made.release(1, [ticket("a")]) == ["a"]
    made.publish(ticket("a"), "b", 4, CONTENT, grant)
    made.advance("a", GRANT)
    assert redeem(made, "a").grant == grant
    made.withdraw(["a"])
    assert redeem(made, "a").grant == grant


def test_a_guessed_ticket_is_unknown_and_so_is_one_that_was_withdrawn():
    made = book("a")
    assert refused(redeem(made, "b")) == UNKNOWN
    made.withdraw(["a", "never published"])
    assert refused(redeem(made, "a")) == UNKNOWN
    assert len(made) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": 3}, "the ticket is for 4 tokens, not for 3"),
        ({"content": PromptContent("others", "items", "adapter", "salt")}, "hold other tokens than"),
        ({"content": PromptContent("tokens", "others", "adapter", "salt")}, "hold other images"),
        (
            {"content": PromptContent("tokens", "items", "other", "salt")},
            "LoRA adapter, this prompt has other",
        ),
        ({"content": PromptContent("tokens", "items", "adapter", "other")}, "another cache_salt"),
        ({"content": PromptContent("tokens", "items", "adapter")}, "another cache_salt"),
    ],
)
def test_a_stolen_ticket_is_worth_nothing_with_another_prompt_and_stays_its_owners(change, says):
    made = book("a")
    redeem(made, "a", 1)
    assert says in refused(redeem(made, "a", 2, **change))
    assert made.claimed(2, [ticket("a")]) == made.release(2, [ticket("a")]) == []
    assert redeem(made, "a", 1) == Redeemed(8, GRANT)


def test_a_lease_ends_with_the_last_consumer_that_has_claimed_it():
    made = book("a")
    redeem(made, "a", 1)
    redeem(made, "a", 2)
    assert made.release(1, [ticket("a")]) == []
    assert refused(redeem(made, "a", 1)) == RELEASED
    assert made.release(1, [ticket("a")]) == []
    assert made.release(2, [ticket("a"), ticket("a")]) == ["a"]
    assert refused(redeem(made, "a", 3)) == UNKNOWN


def test_a_ticket_that_a_heartbeat_names_often_is_one_lease():
    made = book("a")
    redeem(made, "a")
    assert made.claimed(1, [ticket("a")] * 4096) == ["a"]


def test_runs_that_somebody_makes_up_fill_no_memory_and_cost_no_claim_that_stands():
    made = book("a")
    for consumer in range(MAX_CONSUMERS):
        redeem(made, "a", consumer)
    made.release(3, [ticket("a")])
    assert refused(redeem(made, "a", MAX_CONSUMERS)) == CROWDED
    assert refused(redeem(made, "a", 3)) == RELEASED
    assert redeem(made, "a", 4) == Redeemed(8, GRANT)


def test_a_stolen_ticket_alone_ends_no_lease():
    made = book("a")
    assert made.release(1, [ticket("a")]) == []
    refused(redeem(made, "a", 1, PromptContent("others")))
    assert made.release(1, [ticket("a")]) == []
    assert redeem(made, "a", 2) == Redeemed(8, GRANT)


def test_a_reason_is_cut_to_what_a_message_may_carry():
    made = TicketBook()
    made.publish(ticket("a"), "a", 4, PromptContent("t", adapter="\U0001f600" * 4096), GRANT)
    assert len(refused(redeem(made, "a", content=PromptContent("t")))) <= 1024


def test_tickets_are_16_random_bytes():
    made = {new_ticket() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(one) for one in made} == {16}


def test_a_ticket_that_is_withdrawn_while_others_redeem_is_never_redeemed_after():
    """Two threads, as in an engine."""
    for _ in range(200):
        made, late = book("a"), []
        gone = threading.Event()

        def ask(made=made, gone=gone, late=late) -> None:
            while True:
                was_gone = gone.is_set()
                answer = redeem(made, "a")
                if was_gone:
                    late.append(answer)
                    return

        thread = threading.Thread(target=ask)
        thread.start()
        made.withdraw(["a"])
        gone.set()
        thread.join()
        assert isinstance(late[0], NotRedeemed)


def test_the_book_is_looked_at_and_changed_under_its_lock_alone():
    """A ticket that is withdrawn between two looks of the channel's thread would end that thread."""
    made = TicketBook()
    made._open, made._tickets = locked(dict, made._lock), locked(dict, made._lock)
    for name in "abc":
        made.publish(ticket(name), name, 4, CONTENT, GRANT)
    redeem(made, "a")
    assert made.claimed(1, [ticket("a")]) == made.release(1, [ticket("a")]) == ["a"]
    made.withdraw("abc")
    assert len(made) == 0


NAMES, CONSUMERS = st.sampled_from("abc"), st.integers(1, 3)
CONTENTS = st.sampled_from([CONTENT, PromptContent("others")])


class Tickets(RuleBasedStateMachine):
    """The book, and for each open ticket the sets of those that hold it and that have let go of it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TicketBook()
        self.model: dict[str, tuple[set[int], set[int]]] = {}

    @rule(name=NAMES)
    def publish(self, name: str) -> None:
        if name not in self.model:
            self.book.publish(ticket(name), name, 4, CONTENT, GRANT)
            self.model[name] = set(), set()

    @rule(names=st.lists(NAMES))
    def withdraw(self, names: list[str]) -> None:
        self.book.withdraw(names)
        for name in names:
            self.model.pop(name, None)

    @rule(name=NAMES, consumer=CONSUMERS, content=CONTENTS, tokens=st.sampled_from([4, 4, 5]))
    def redeem(self, name: str, consumer: int, content: PromptContent, tokens: int) -> None:
        holders, gone = self.model.get(name, (set(), {consumer}))
        good = content == CONTENT and tokens == 4 and consumer not in gone
        answer = redeem(self.book, name, consumer, content, tokens)
        assert isinstance(answer, Redeemed if good else NotRedeemed)
        if good:
            holders.add(consumer)

    @rule(consumer=CONSUMERS, names=st.lists(NAMES))
    def release(self, consumer: int, names: list[str]) -> None:
        over = []
        for name in names:
            holders, gone = self.model.get(name, (set(), set()))
            if consumer in holders:
                holders.remove(consumer)
                gone.add(consumer)
                if not holders:
                    over.append(name)
                    del self.model[name]
        assert self.book.release(consumer, [ticket(name) for name in names]) == over

    @invariant()
    def holders_are_the_models(self) -> None:
        assert len(self.book) == len(self.model)
        for consumer in (1, 2, 3):
            held = [name for name in "abc" if consumer in self.model.get(name, ((), ()))[0]]
            assert self.book.claimed(consumer, [ticket(name) for name in "abc"]) == held


TestTickets = Tickets.TestCase
TestTickets.settings = examples(40, stateful_step_count=30)
