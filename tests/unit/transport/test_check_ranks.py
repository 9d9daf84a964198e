"""Peers that have the key and lie about their ranks: refused in words, before anything is planned."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from msgspec import structs

from kvferry.common.errors import ProtocolError
from kvferry.geometry import Interleave, Region
from kvferry.transport.messages import (
    MAX_AGENT_BYTES,
    MAX_DIFFERENCES,
    MAX_LAYERS,
    MAX_NAME,
    MAX_RANKS,
    MAX_REGIONS,
    PROTOCOL,
    Hello,
    Outgoing,
    PeerInfo,
    RankCard,
    Refused,
    decode_reply,
    differences,
    encode,
    make_refusal,
)
from transport.cards import cards, facts


def told(*ranks: RankCard) -> None:
    """Send these ranks, and read what was sent."""
    decode_reply(encode(PeerInfo(facts(), ranks)))


def changed(card: RankCard, **of_geometry) -> RankCard:
    return structs.replace(card, geometry=replace(card.geometry, **of_geometry))


def with_layers(card: RankCard, change) -> RankCard:
    group, *rest = card.geometry.groups
    return changed(card, groups=(replace(group, layers=tuple(change(group.layers))), *rest))


@contextmanager
def counting_steps() -> Iterator[Counter[str]]:
    """Count the lines of Python that run in functions called meanwhile, under "line"."""
    steps: Counter[str] = Counter()

    def count(frame, event, argument):
        steps[event] += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield steps
    finally:
        sys.settrace(before)


def test_ranks_of_an_engine_are_taken():
    told(*cards())
    told(*cards(2))


def test_ranks_that_contradict_each_other_are_refused():
    first, second = cards(2)
    for ranks in [
        (first,),
        (first, first),
        (first, changed(second, tp_size=4)),
        (first, second, second),
        (first, changed(second, tp_rank=0)),
    ]:
        with pytest.raises(ProtocolError, match="ranks of one size, each with its own index"):
            told(*ranks)


def test_ranks_with_other_groups_are_refused():
    first, second = cards(2)
    group = second.geometry.groups[0]
    for groups in [(), (group, replace(group, layers=()))]:
        with pytest.raises(ProtocolError, match="different KV cache groups"):
            told(first, changed(second, groups=groups))


@pytest.mark.parametrize(
    "region",
    [
        Region(-1, 10),
        Region(1 << 62, 1 << 63),
        Region(0, 0),
        Region(4096, 10, device=-1),
        Region(4096, 10, memory="TAPE\x1b[2J"),
    ],
)
def test_regions_that_cannot_be_are_refused(region):
    (card,) = cards()
    with pytest.raises(ProtocolError, match=r"region|memory") as refusal:
        told(changed(card, regions=(*card.geometry.regions, region)))
    assert str(refusal.value).isprintable()


def test_words_that_cannot_be_are_refused():
    (card,) = cards()
    out = Outgoing("127.0.0.1", 5, 0, 1, card.words)
    for spoiled, says in [
        (structs.replace(card, words_address=(1 << 63) - 8), "words at address"),
        (structs.replace(card, outgoing=out), "none of them a lease word"),
        (structs.replace(card, outgoing=structs.replace(out, host="a b")), "outgoing.host"),
        (structs.replace(card, agent=bytes(MAX_AGENT_BYTES + 1)), "agent"),
    ]:
        with pytest.raises(ProtocolError, match=says):
            told(spoiled)


def test_more_than_anyone_has_is_refused_quickly():
    (card,) = cards()
    region, layer = card.geometry.regions[0], card.geometry.groups[0].layers[0]
    many = [replace(layer, name=str(number)) for number in range(MAX_LAYERS)]
    shared = replace(layer.page, block_tokens=16 * 512, interleave=Interleave(0, 512, 1))
    few = [Region(4096 * (number + 1), 10) for number in range(MAX_REGIONS)]
    cases = [
        ([card] * (MAX_RANKS + 1), "length <= 256"),
        ([changed(card, regions=(region, *few))], f"regions of a rank, at most {MAX_REGIONS}"),
        ([with_layers(card, lambda of: [*of, *many])], f"layers of a rank, at most {MAX_LAYERS}"),
        ([with_layers(card, lambda of: [replace(of[0], name="x" * (MAX_NAME + 1))])], "of a name, at most"),
        ([changed(card, groups=card.geometry.groups * 300)], "groups of a rank, at most"),
        ([with_layers(card, lambda of: [replace(of[0], page=shared)])], "512 ranks that divide the tokens"),
    ]
    for ranks, says in cases:
        data = encode(PeerInfo(facts(), tuple(ranks)))
        with counting_steps() as steps, pytest.raises(ProtocolError, match=says):
            decode_reply(data)
        assert steps["line"] < 1_000_000, says


@pytest.mark.parametrize("part", ["layers", "regions"])
def test_checking_ranks_takes_time_in_proportion_to_their_number(part):
    (card,) = cards()
    layer, region = card.geometry.groups[0].layers[0], card.geometry.regions[0]
    steps = []
    for count in (MAX_LAYERS // 64, MAX_LAYERS // 8):
        if part == "layers":
            layers = [replace(layer, name=str(number)) for number in range(count)]
            many = with_layers(card, lambda _, layers=layers: layers)
        else:
            regions = [Region(4096 * (number + 1), 10) for number in range(count - 1)]
            many = changed(card, regions=(*regions, region))
        data = encode(PeerInfo(facts(), (many,)))
        with counting_steps() as counted:
            decode_reply(data)
        steps.append(counted["line"])
    assert steps[1] < 9 * steps[0], "eight times as many"


def test_ids_and_sentences_have_a_limit():
    for spoiled in [
        PeerInfo(facts("x" * 257), ()),
        PeerInfo(structs.replace(facts(), software="x" * 1025), ()),
        PeerInfo(structs.replace(facts(), incarnation=1 << 40), ()),
        Refused(["x"] * (MAX_DIFFERENCES + 1)),
        Refused(["x" * 20_000]),
    ]:
        with pytest.raises(ProtocolError, match=r"length <=|<= 4294967295"):
            decode_reply(encode(spoiled))


def test_a_refusal_of_very_many_differences_can_be_read_and_says_how_many_more():
    ours, theirs = ({str(number): side * 4096 for number in range(1000)} for side in "ab")
    found = differences(Hello(PROTOCOL, facts(**theirs)), Hello(PROTOCOL, facts(**ours)))
    said = decode_reply(encode(make_refusal(found)))
    assert isinstance(said, Refused)
    assert len(said.differences) == MAX_DIFFERENCES
    assert said.differences[-1] == "937 more differences"
