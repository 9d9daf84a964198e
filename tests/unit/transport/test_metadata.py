"""A peer's transport metadata is read by its own bounds before NIXL reads it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ProtocolError
from kvferry.geometry import Region
from kvferry.transport.messages import MAX_AGENT_BYTES, Outgoing
from kvferry.transport.metadata import MAX_ROWS, check_metadata, parse_metadata
from support.examples import examples
from support.metadata import KEY, item, mutations, row, written
from transport.cards import cards

HERE, THERE = Region(1 << 40, 4096), Region(1 << 41, 64)
QUICK = examples(100)


def test_registered_regions_are_parsed_in_order():
    found = parse_metadata(written([row(HERE), row(THERE)]))
    assert (found.name, found.regions) == ("P/0.0/64", (HERE, THERE))
    gpu = Region(1 << 40, 4096, "VRAM", 3)
    assert parse_metadata(written([row(gpu)], kind=1)).regions == (gpu,)


def test_parsed_metadata_ends_before_the_part_that_ucx_reads_without_a_length():
    sealed = parse_metadata(written([row(HERE)])).sealed
    assert item(b"c", b"some address" + bytes(1 << 16)) in sealed
    assert sealed.endswith(item(b"", row(HERE) + b"\xff" * 16))
    assert sealed.startswith(b"nixlSerDes|" + item(b"Agent", b"P/0.0/64") + item(b"Conns", 1))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "expected NIXL's"),
        (b"nixlSerDes|", "lacks 'Agent' at byte 11"),
        (bytes(MAX_AGENT_BYTES + 1), f"{MAX_AGENT_BYTES + 1} bytes"),
        (written([row(HERE)])[:-1], "42 are left"),
        (written([row(HERE)]) + b"x", "1 bytes after its end"),
        (written([row(HERE)], name=b"\xff\xfe"), "not UTF-8 text"),
        (written([row(HERE)], name=b"n" * 5000), "5000 bytes of 'Agent'"),
        (written([row(HERE)], address=b""), "0 bytes of 'c'"),
        (written([row(HERE)], address=bytes(1 << 20)), "1048576 bytes of 'c'"),
        (written([row(HERE)], backend=b"POSIX"), "POSIX"),
        (written([row(HERE)], backends=0), "of 0 backends"),
        (written([row(HERE)], backends=2), "of 2 backends"),
        (written([row(HERE)], backends=b"\1"), "1 bytes of b'Conns', expected 8"),
        (written([row(HERE)]).replace(b"Agent", b"Agens"), "lacks 'Agent' at byte 11"),
        (written([row(HERE)], kind=2), "memory kind 2"),
        (written([row(HERE)], kind=0xFFFFFFFF), "memory kind 4294967295"),
        (written([row(HERE)], sections=1 << 60), "kinds of memory"),
        (written([row(HERE)], count=0), "registers 0 regions"),
        (written([row(HERE)], count=MAX_ROWS + 1), f"registers {MAX_ROWS + 1} regions"),
        (written([row(HERE)], count=2), "lacks 'an item'"),
        (written([row(HERE)[:10]]), "which is impossible"),
        (written([row(Region(1 << 40, 0))]), "0 bytes at 0x"),
        (written([row(Region((1 << 63) - 1, 2))]), "which is impossible"),
        (written([row(Region(1, 1, "DRAM", 1 << 40))]), "which is impossible"),
        (written([row(HERE, b"")]), "unknown memory type"),
        (written([row(HERE, KEY[:8] + b"\x09" + KEY[9:])]), "unknown memory type"),
        (written([row(HERE, KEY[:12])]), "by its own list"),
        (written([row(HERE, b"\xff" * 8 + KEY[8:])]), "by its own list"),
    ],
)
def test_values_out_of_bounds_are_refused_in_words(data, says):
    with pytest.raises(ProtocolError, match=says):
        parse_metadata(data)


def test_damaged_metadata_is_read_or_refused_and_nothing_else():
    good, refused = written([row(HERE), row(THERE)], address=bytes(range(1, 214))), 0
    for what, data in mutations(good, 2000, seed=1):
        try:
            parse_metadata(data)
        except ProtocolError:
            refused += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert 500 < refused < 1500


@QUICK
@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data):
    for whole in (data, b"nixlSerDes|" + data):
        try:
            parse_metadata(whole)
        except ProtocolError:
            continue


def card(**changes):
    (one,) = cards()
    regions = [*one.geometry.regions, Region(one.words_address, 8 * one.words)]
    one = msgspec.structs.replace(one, agent=written([row(region) for region in regions]))
    return msgspec.structs.replace(one, **changes)


def test_a_card_may_name_only_what_its_metadata_registers():
    good = card()
    check_metadata(good)
    geometry = good.geometry
    wider = replace(geometry, regions=(replace(geometry.regions[0], length=1 << 50),))
    gpu = replace(geometry, regions=(replace(geometry.regions[0], memory="VRAM"),))
    for lie in (
        {"words_address": good.words_address + 8},
        {"words": good.words + 1},
        {"geometry": wider},
        {"geometry": gpu},
        {"outgoing": Outgoing("h", 1, 1 << 45, 1 << 20, 1)},
    ):
        with pytest.raises(ProtocolError, match="does not register"):
            check_metadata(card(**lie))
