"""Bids, speeds and policies for tests of the choice between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from kvferry.connector.bids import Bid, PlaceTokens, Speeds
from kvferry.connector.choosing import (
    BidChooser,
    Choice,
    RequestState,
)
from support.clock import Clock

PLACES = ("peer", "host", "file", "object")
PROMPT = 400
PARTS = st.lists(
    st.builds(PlaceTokens, st.sampled_from(PLACES), st.integers(1, 100)),
    min_size=1,
    max_size=3,
    unique_by=lambda part: part.place,
).map(tuple)
RATES = st.dictionaries(st.sampled_from([*PLACES, "computed"]), st.floats(1, 1e6))
WEIGHTS = st.dictionaries(st.sampled_from(PLACES), st.floats(0, 10))


def speeds(rates: Mapping[str, float]) -> Speeds:
    """Speeds with these tokens per second, by place; those of computing are named ``computed``."""
    found = Speeds(Clock())
    for what, rate in rates.items():
        for tokens in (10, 1000):
            if what == "computed":
                found.record_computation(tokens, tokens / rate)
            else:
                found.record_load((PlaceTokens(what, tokens),), tokens / rate)
    return found


def bid(source: str = "a", looking: bool = False, promised: bool = False, **parts: int) -> Bid:
    """A bid of so many tokens from each place."""
    return Bid(
        source, tuple(PlaceTokens(place, tokens) for place, tokens in parts.items()), looking, promised
    )


def first_policy() -> BidChooser:
    return BidChooser("first", Speeds(Clock()), 10.0)


def weight_policy(weights: Mapping[str, float]) -> BidChooser:
    return BidChooser("weight", Speeds(Clock()), 10.0, weights)


def cost_policy(measured: Speeds) -> BidChooser:
    return BidChooser("cost", measured, 10.0)


POLICIES = st.one_of(
    st.builds(first_policy),
    st.builds(weight_policy, WEIGHTS),
    RATES.map(lambda rates: cost_policy(speeds(rates))),
)


def choose(
    chooser: BidChooser,
    bids: Sequence[Bid],
    missing: int = PROMPT,
    *,
    waited: float = 0.0,
    before: Bid | None = None,
    computed: int | None = None,
    state: RequestState | None = None,
) -> Choice:
    """The choice for a request that has waited so long, and for which `before` was chosen last time."""
    state = RequestState(attempts=1) if state is None else state
    state.propose(bid(looking=True), 0, 0.0, crowded=False, patience_seconds=0.0)
    state.proposed = before
    named = [(one.source, one) for one in bids]
    return chooser.choose(state, named, missing, missing if computed is None else computed, waited)


def best(
    policy: BidChooser, bids: Sequence[Bid], missing: int = PROMPT, before: Bid | None = None
) -> Bid | None:
    """The best of the bids of sources that have answered."""
    return choose(policy, bids, missing, before=before).bid
