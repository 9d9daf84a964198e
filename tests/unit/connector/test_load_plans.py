"""Plans to load a prefix from one source or from two."""

from __future__ import annotations

import pytest

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.source import Answer, LoadPlan, load_plans
from kvferry.planning.select import LoadSpan


def bid(of, tokens):
    return Bid(of, (PlaceTokens(of, tokens),))


class Source:
    """Has so many tokens from the first on, and may bring those up to an end."""

    def __init__(self, name, tokens, ends=0):
        self.name, self.tokens, self.ends = name, tokens, ends
        self.asked = []

    def ask(self, local_tokens):
        def head(alignment_tokens):
            end = self.tokens // alignment_tokens * alignment_tokens
            return bid(self.name, end - local_tokens) if end > local_tokens else None

        def tail(first):
            self.asked.append(first)
            return bid(self.name, self.ends - first) if self.ends > first else None

        bids = [bid(self.name, self.tokens - local_tokens)] if self.tokens > local_tokens else []
        return self, Answer(bids, lambda: None, head, tail)


def plans(sources, local_tokens, alignment_tokens):
    return load_plans([source.ask(local_tokens) for source in sources], local_tokens, alignment_tokens)


NEAR, FAR = Source("near", 50), Source("far", 20, ends=90)


def names(offers):
    return [([source.name for source, _ in offer.source_bids], offer.bid.tokens) for offer in offers]


def test_each_has_something_alone_and_one_the_beginning_of_what_the_other_has_the_end_of():
    found = plans([NEAR, FAR], 0, 16)
    assert names(found) == [(["near"], 50), (["far"], 20), (["near", "far"], 90)]
    assert [part.tokens for part in found[-1].bid.parts] == [48, 42]
    assert found[-1].last is FAR


@pytest.mark.parametrize(
    ("sources", "alignment_tokens"), [([FAR], 16), ([NEAR, FAR], 0), ([FAR, Source("no", 9)], 16)]
)
def test_no_plan_has_two_parts_of_one_source_or_a_useless_head(sources, alignment_tokens):
    assert all(len(offer.source_bids) == 1 for offer in plans(sources, 0, alignment_tokens))


def test_a_load_from_one_source_has_one_part():
    (offer,) = plans([NEAR], 8, 16)
    assert offer.parts(8, 42, 100) == [(NEAR, bid("near", 42), LoadSpan(8, 50, 100))]
    assert offer.parts(8, 30, 100) == [(NEAR, bid("near", 42), LoadSpan(20, 50, 100))], "some has come since"


@pytest.mark.parametrize(
    ("external", "spans"),
    [
        (90, [LoadSpan(0, 90, 100, (0, 48)), LoadSpan(0, 90, 100, (48, 90))]),
        (60, [LoadSpan(30, 90, 100, (0, 48)), LoadSpan(30, 90, 100, (48, 90))]),
        (42, [LoadSpan(48, 90, 100, (48, 90))]),
    ],
    ids=["nothing is here", "some of the first", "all of the first"],
)
def test_each_of_two_sources_loads_its_missing_part(external, spans):
    head, tail = bid("near", 48), bid("far", 42)
    plan = LoadPlan(Bid.composed(head, tail), ((NEAR, head), (FAR, tail)))
    assert [span for _, _, span in plan.parts(0, external, 100)] == spans
