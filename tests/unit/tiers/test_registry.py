"""Every registered kind of storage tier has all that a kind must have, and keeps the protocol."""

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.connector.tier_config import read_tiers
from kvferry.doctor.storage import OWN_CHECKS
from kvferry.engines.vllm.compat.hit_sources import hit_source
from kvferry.errors import ChunkError, ConfigError
from kvferry.tiers.files.direct_io import whole_pages
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.outcome import GetOutcome, PutOutcome
from kvferry.tiers.registry import STORAGE_TIERS, medium_of
from kvferry.tiers.storage_settings import StorageSettings
from support.chunk_files import key
from support.storage_tiers import example_of
from support.stores import GROUP, NAMESPACE, OTHER, body, sections

KINDS = pytest.mark.parametrize("kind", STORAGE_TIERS)
DOCS = Path(__file__).parents[3] / "docs" / "tiers.md"
SHARED = ("write", "load_weight")


@pytest.fixture
def opened(tmp_path):
    """Opens the example of a kind, over one folder."""
    tiers = []

    def open_example(kind, namespace=NAMESPACE):
        tiers.append(example_of(kind).settings(tmp_path).open(namespace, KeyTable(), []))
        return tiers[-1]

    yield open_example
    for tier in tiers:
        tier.close()
        tier.close()


def fetch(tier, number, group=GROUP):
    """Fetch a chunk into memory of its own; a hit with other bytes than were stored fails the test."""
    right = body(number, group)
    into = whole_pages(len(right))
    done = tier.get(key(number), group, into)
    assert done is not GetOutcome.HIT or sections(group, into) == sections(group, right)
    return done


@KINDS
def test_a_kind_is_complete(kind):
    settings = STORAGE_TIERS[kind]
    assert settings.kind == kind
    assert re.fullmatch("[a-z]+", kind), "a dot would be read as the number of a second tier of the kind"
    needed = {"check", "location", "open"} | (
        set() if settings in OWN_CHECKS else {"trial_seconds", "try_out"}
    )
    assert needed <= set(vars(settings)), "methods of StorageSettings that a kind must define"
    assert example_of(kind)


@KINDS
def test_the_engines_counters_have_a_label_for_a_kind(kind):
    assert hit_source(medium_of(f"{kind}.2")) is hit_source(STORAGE_TIERS[kind].medium)


@KINDS
def test_the_settings_of_a_kind_are_documented(kind):
    title = f'**`{{"type": "{kind}"}}`**'
    assert title in DOCS.read_text(), "a section of docs/tiers.md"
    section = DOCS.read_text().split(title)[1].split('**`{"type"')[0]
    fields = [field.name for field in msgspec.structs.fields(STORAGE_TIERS[kind])]
    assert [name for name in fields if name not in SHARED and f"| `{name}` |" not in section] == []


@KINDS
def test_an_example_is_read_from_a_configuration(kind, tmp_path):
    settings = example_of(kind).settings(tmp_path)
    given = {"type": kind, **msgspec.structs.asdict(settings), "write": "back", "load_weight": 0.5}
    expected = msgspec.structs.replace(settings, write="back", load_weight=0.5)
    assert read_tiers([given]).slow == (expected,)


@KINDS
def test_two_tiers_at_one_location_are_refused_and_at_two_locations_are_not(kind, tmp_path):
    (here, again), other = (example_of(kind).settings(tmp_path) for _ in range(2)), tmp_path / "other"
    there = example_of(kind).settings(other)
    assert here.location == again.location != there.location
    assert str(tmp_path) in here.location.text


@KINDS
def test_storage_that_cannot_be_used_is_an_error_in_words(kind):
    unusable = example_of(kind).unusable
    unusable.check("tiers[0]")
    with pytest.raises(ConfigError, match=f"^{kind} tier: .*; "):
        unusable.open(NAMESPACE, KeyTable(), [])


@pytest.mark.parametrize("kind", [kind for kind, one in STORAGE_TIERS.items() if one not in OWN_CHECKS])
def test_a_trial_says_whether_the_storage_can_be_used_and_leaves_nothing(kind, tmp_path):
    settings = example_of(kind).settings(tmp_path)
    assert settings.trial_seconds > 0
    assert settings.try_out().advice == ""
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError):
        example_of(kind).unusable.try_out()


@KINDS
def test_stored_chunk_is_found_by_every_engine_of_the_namespace(kind, opened):
    tier, other = opened(kind), opened(kind)
    assert not tier.contains([key(1)])[0]
    assert fetch(tier, 1) is GetOutcome.ABSENT
    assert tier.put(key(1), GROUP, body(1)) is PutOutcome.STORED
    assert tier.put(key(1), GROUP, body(1)) is PutOutcome.PRESENT
    assert tier.contains([key(1), key(2)]).tolist() == [True, False]
    assert (fetch(tier, 1), fetch(other, 1)) == (GetOutcome.HIT, GetOutcome.HIT)
    later = opened(kind)
    assert later.contains([key(1), key(2)]).tolist() == [True, False]
    stranger = opened(kind, OTHER)
    assert not stranger.contains([key(1)])[0]
    assert fetch(stranger, 1) is GetOutcome.ABSENT
    later.mark_used([key(1), key(2)])
    later.usage()


@KINDS
def test_outcomes_are_counted(kind, opened):
    tier = opened(kind)
    for _ in range(2):
        tier.put(key(1), GROUP, body(1))
    fetch(tier, 1)
    fetch(tier, 2)
    assert tier.stats.puts == {PutOutcome.STORED: 1, PutOutcome.PRESENT: 1}
    assert tier.stats.gets == {GetOutcome.HIT: 1, GetOutcome.ABSENT: 1}
    assert tier.stats.stored_bytes > len(body(1)), "header and body"


@KINDS
def test_a_damaged_chunk_is_a_miss_and_is_forgotten(kind, opened, tmp_path):
    tier = opened(kind)
    tier.put(key(1), GROUP, body(1))
    example_of(kind).damage(tmp_path)
    assert fetch(tier, 1) is GetOutcome.CORRUPT
    assert not tier.contains([key(1)])[0]
    assert tier.put(key(1), GROUP, body(1)) is PutOutcome.STORED
    assert fetch(tier, 1) is GetOutcome.HIT


@KINDS
def test_a_chunk_of_another_group_is_no_hit(kind, opened):
    other = ChunkGroup("window", GROUP.tokens, (ChunkSection("k", 4, 7 << 10), ChunkSection("v", 4, 7 << 10)))
    tier = opened(kind)
    tier.put(key(1), GROUP, body(1))
    assert fetch(tier, 1, other) is GetOutcome.OTHER_SHAPE
    assert not tier.contains([key(1)])[0]


@KINDS
def test_memory_of_another_length_is_refused(kind, opened):
    tier = opened(kind)
    with pytest.raises(ChunkError):
        tier.put(key(1), GROUP, body(1)[:-1])
    with pytest.raises(ChunkError):
        tier.get(key(1), GROUP, whole_pages(4096))
    assert tier.stats.puts == tier.stats.gets == {}


def test_the_protocol_itself_is_no_kind():
    assert StorageSettings not in STORAGE_TIERS.values()
