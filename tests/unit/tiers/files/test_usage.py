"""What lies around a namespace: how full its directory is, and who else is called by its model's name."""

from __future__ import annotations

from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.files.tier import UsageReader
from kvferry.tiers.storage_tier import StoreUsage
from support.stores import NAMESPACE, OTHER, keep, open_store


def test_usage_counts_the_chunks_of_all_processes(tmp_path) -> None:
    store = open_store(tmp_path, capacity=1 << 20)
    keep(store, 1)
    other = open_store(tmp_path)
    capacity, used = read_ledger(str(tmp_path))
    assert store.usage() == other.usage() == StoreUsage(used, 1 << 20, "")
    assert capacity == 1 << 20
    keep(other, 2)
    assert store.usage().used > used
    (tmp_path / "ledger").write_bytes(b"torn")
    assert store.usage().capacity == 1 << 20, "as it was"


def named(like: Namespace, name: str) -> Namespace:
    return Namespace(like.text, name)


def test_a_stranger_has_the_same_name_and_other_content_and_is_told_while_there_is_nothing_of_ours(
    tmp_path,
) -> None:
    theirs = named(OTHER, "llama")
    open_store(tmp_path, namespace=theirs, capacity=1 << 20)
    ours = open_store(tmp_path, namespace=named(NAMESPACE, "llama"))
    assert ours.usage().same_name_namespace == theirs.digest.hex()
    keep(ours, 1)
    assert ours.usage().same_name_namespace == ""
    assert UsageReader(str(tmp_path), named(NAMESPACE, "qwen")).read(empty=True).same_name_namespace == ""
    assert UsageReader(str(tmp_path), named(NAMESPACE, "")).read(empty=True).same_name_namespace == ""


def test_a_note_that_cannot_be_read_is_nobodys(tmp_path) -> None:
    theirs = named(OTHER, "llama")
    open_store(tmp_path, namespace=theirs, capacity=1 << 20)
    (tmp_path / theirs.digest.hex() / "namespace.json").write_text("{")
    (tmp_path / ("z" * 64)).mkdir()
    assert UsageReader(str(tmp_path), named(NAMESPACE, "llama")).read(empty=True).same_name_namespace == ""
    assert UsageReader(str(tmp_path), named(NAMESPACE, "")).read(empty=True).same_name_namespace == ""
