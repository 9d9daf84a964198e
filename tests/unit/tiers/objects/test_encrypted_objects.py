"""The object tier with keys, over a real S3 server and over files."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.admin import verify_all
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.admin import BucketAdmin
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.paths import ENCRYPTION_MARKER, chunk_name
from support.chunk_files import key, verify_bytes
from support.encrypted import GROUP, PARTS, encrypted_chunk, keys, swap_segments, with_digests, write_keys
from support.object_server import Line, Server
from support.objects import get, known, open_objects, put, warnings
from support.stores import NAMESPACE, body, sections

MISSES = {GetOutcome.CORRUPT, GetOutcome.OTHER_KEY}
ENCRYPTED = "its chunks are encrypted, and the tier has no key_file; set key_file, or use another URL"
NOT_ENCRYPTED = (
    "its chunks are not encrypted, and the tier has a key_file; use another URL, or remove the chunks with "
    "kvferry cache clear"
)


def opened(place, *ids: str, **options) -> ObjectTier:
    return open_objects(*place, encryption=keys(*ids) if ids else None, **options)


def name(number: int) -> str:
    return chunk_name(NAMESPACE.digest, key(number))


def content(bucket: BucketClient, path: str) -> bytearray:
    found = bucket.get(path)
    return bytearray(found.read(0, found.size))


def names(bucket: BucketClient) -> set[str]:
    return {one.path for page in bucket.list() for one in page}


@pytest.fixture
def stored(place, bucket) -> bytearray:
    """The object of chunk 1, encrypted with key `a`."""
    assert put(opened(place, "a"), 1, GROUP) is PutOutcome.STORED
    return content(bucket, name(1))


def test_a_chunk_comes_back_and_nothing_of_it_is_in_the_bucket(place, bucket, stored):
    store = opened(place, "a")
    assert known(store, 1, 2) == [True, False]
    assert put(store, 1, GROUP) is PutOutcome.PRESENT
    assert get(store, 1, GROUP) is GetOutcome.HIT
    assert verify_bytes(stored).chunk == encrypted_chunk(1)
    objects = [content(bucket, one) for one in names(bucket)]
    for part in sections(GROUP, body(1, GROUP)):
        assert not any(part[at : at + 16] in one for at in range(0, len(part), 4096) for one in objects)


def test_a_chunk_of_one_segment_comes_back(place):
    small = ChunkGroup("full", 16, (ChunkSection("kv", 1, 10),))
    put(opened(place, "a"), 1, small)
    assert get(opened(place, "a"), 1, small) is GetOutcome.HIT


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_changed_byte_anywhere_is_a_miss(place, bucket, stored, part, forged):
    data = bytearray(stored)
    data[PARTS[part]] ^= 1
    if forged:
        with_digests(data)
    if data == stored:
        assert part in ("digest", "digest of the header"), "a forger puts the right digest back"
        return
    bucket.put(name(1), [bytes(data)])
    store = opened(place, "a")
    assert get(store, 1, GROUP) in MISSES
    assert put(store, 1, GROUP) is PutOutcome.STORED
    assert get(store, 1, GROUP) is GetOutcome.HIT


@pytest.mark.parametrize(
    "change", ["swapped", "cut off", "another chunk's", "another chunk's, forged", "plain"]
)
def test_what_was_put_in_its_place_is_a_miss(place, bucket, stored, change, tmp_path):
    data, number = bytearray(stored), 1
    if change == "swapped":
        swap_segments(data)
        with_digests(data)
    elif change == "cut off":
        del data[-4096:]
    elif change == "plain":
        folder = tmp_path / "plain"
        folder.mkdir()
        plain = (f"file://{folder}", None)
        put(opened(plain), 1, GROUP)
        data = content(BucketClient(plain[0], {}, 4.0), name(1))
    else:
        number = 2
        if change.endswith("forged"):
            data[65:81] = key(2)
            with_digests(data)
    bucket.put(name(number), [bytes(data)])
    assert get(opened(place, "a"), number, GROUP) in MISSES


def test_keys_are_rotated(place, bucket, stored, caplog):
    both = opened(place, "b", "a")
    assert get(both, 1, GROUP) is GetOutcome.HIT
    put(both, 2, GROUP)
    assert verify_bytes(content(bucket, name(2))).encryption.key_id == "b"
    caplog.clear()
    new = opened(place, "b")
    assert get(new, 2, GROUP) is GetOutcome.HIT
    for _ in range(2):
        assert get(new, 1, GROUP) is GetOutcome.OTHER_KEY
    assert new.stats.gets[GetOutcome.OTHER_KEY] == 2
    [said] = warnings(caplog)
    assert "is encrypted with key 'a', which key_file does not have" in said
    assert content(bucket, name(1)) == stored, "other engines may have the key"
    new.refresh()
    assert known(new, 1) == [False]
    assert put(new, 1, GROUP) is PutOutcome.STORED
    assert get(new, 1, GROUP) is GetOutcome.HIT


@pytest.mark.parametrize(("ids", "said"), [(("a",), ENCRYPTED), ((), NOT_ENCRYPTED)])
def test_engines_with_and_without_a_key_do_not_mix(place, bucket, ids, said):
    other = () if ids else ("a",)
    put(opened(place, *ids), 1)
    assert (ENCRYPTION_MARKER in names(bucket)) is bool(ids)
    with pytest.raises(ConfigError) as caught:
        opened(place, *other)
    assert str(caught.value) == f"object tier: {place[0]}: {said}"
    BucketAdmin(place[0], place[1].options if place[1] else {}).clear()
    assert names(bucket) == set()
    assert put(opened(place, *other), 1) is PutOutcome.STORED
    with pytest.raises(ConfigError, match="encrypted, and the tier has"):
        opened(place, *ids)


def test_an_empty_url_with_objects_of_others_can_be_encrypted(place, bucket):
    bucket.put("mine/notes.txt", [b"mine"])
    assert put(opened(place, "a"), 1) is PutOutcome.STORED
    assert get(opened(place, "a"), 1) is GetOutcome.HIT


def test_a_chunk_that_was_stored_in_the_meantime_does_not_refuse_an_engine(place, bucket, monkeypatch):
    def listed(self, prefix=""):
        # Another engine marks the empty URL and stores a chunk after the first look.
        monkeypatch.undo()
        put(opened(place, "a"), 1)
        yield from self.list(prefix)

    monkeypatch.setattr(BucketClient, "list", listed)
    assert get(opened(place, "a"), 1) is GetOutcome.HIT


@pytest.mark.parametrize("ids", [(), ("a",)])
def test_a_store_of_a_chunk_asks_for_no_marker(place, monkeypatch, ids):
    def get(self, path):
        raise AssertionError(path)

    store = opened(place, *ids)
    monkeypatch.setattr(BucketClient, "get", get)
    assert put(store, 1) is PutOutcome.STORED


@pytest.mark.slow
@pytest.mark.parametrize(("ids", "fault"), [(("a",), Fault.ENCRYPTED), ((), Fault.NOT_ENCRYPTED)])
def test_an_engine_that_could_not_look_at_its_start_stores_nothing_before_it_did(
    s3_server, s3_url, caplog, ids, fault
):
    put(opened((s3_url, s3_server), *ids), 1)
    bucket = BucketClient(s3_url, s3_server.options, 4.0)
    before = names(bucket)
    with Line(s3_server) as line:
        line.whole.clear()
        store = opened((s3_url, line.server), *(() if ids else ("a",)))
        line.whole.set()
        for number in (1, 2):
            assert put(store, number) is PutOutcome.IO_ERROR
        assert store.faults[fault] == 2
    assert names(bucket) == before
    assert len([one for one in warnings(caplog) if f"{fault}; {fault.advice}" in one]) == 1


@pytest.mark.slow
def test_an_engine_stores_once_the_store_answers(s3_server, s3_url):
    with Line(s3_server) as line:
        line.whole.clear()
        store = opened((s3_url, line.server), "a")
        line.whole.set()
        assert put(store, 1) is PutOutcome.STORED
    with pytest.raises(ConfigError, match="its chunks are encrypted"):
        opened((s3_url, s3_server))


def test_only_a_tier_without_a_key_warns_of_a_network_that_is_not_encrypted(caplog):
    for ids in ((), ("a",)):
        elsewhere = Server(1).options | {"endpoint": "http://192.0.2.1:9"}
        opened(("s3://b/p",), *ids, options=elsewhere, timeout_seconds=0.2)
    assert len([one for one in warnings(caplog) if "is spoken to without encryption" in one]) == 1


def test_operators_check_a_bucket_without_the_key(place, bucket, stored):
    admin = BucketAdmin(place[0], place[1].options if place[1] else {})
    assert verify_all(admin).bad == ()
    assert {entry.namespace for entry in admin.entries()} == {NAMESPACE.digest.hex(), ""}
    stored[PARTS["second segment"]] ^= 1
    bucket.put(name(1), [bytes(stored)])
    [bad] = verify_all(admin).bad
    assert bad.why == "encrypted segment 1 is damaged: its checksum differs"


def test_the_settings_name_the_key_file(place, tmp_path_factory):
    url, server = place
    file = write_keys(tmp_path_factory.mktemp("keys") / "keys", "a")
    settings = ObjectSettings(url=url, options=server.options if server else {}, key_file=str(file))
    put(settings.open(NAMESPACE, KeyTable(), []), 1, GROUP)
    assert get(opened(place, "a"), 1, GROUP) is GetOutcome.HIT


def test_a_trial_tells_of_a_conflict_and_leaves_nothing(place, bucket, tmp_path_factory):
    url, server = place
    file = write_keys(tmp_path_factory.mktemp("keys") / "keys", "a")
    plain = ObjectSettings(url=url, options=server.options if server else {})
    encrypted = ObjectSettings(url=url, options=plain.options, key_file=str(file))
    assert (plain.try_out().advice, encrypted.try_out().advice) == ("", "")
    assert names(bucket) == set()
    put(opened(place, "a"), 1)
    assert encrypted.try_out().advice == ""
    assert plain.try_out().found == f"{url}: {Fault.ENCRYPTED}"
    file.chmod(0o644)
    for call in (encrypted.try_out, encrypted.check_storage):
        with pytest.raises(ConfigError, match=r"key_file .* can be used by others"):
            call()
