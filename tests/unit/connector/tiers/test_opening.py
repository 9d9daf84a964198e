"""Opening storage tiers: a tier that cannot be opened is left out and logged."""

import logging
from unittest import mock

import pytest

from kvferry.common.errors import Unnameable
from kvferry.connector.config import read_tiers
from kvferry.connector.tiers.tiering import open_tiers
from kvferry.tiers.index import KeyTable
from kvferry.tiers.shares.tier import ShareTier
from support.stores import NAMESPACE


@pytest.fixture
def opened(tmp_path):
    """Opens tiers by their settings, over folders a, b and c, and closes them."""
    for name in "abc":
        (tmp_path / name).mkdir()
    found = []

    def open_configured(*tiers, get_namespace=lambda: NAMESPACE):
        found[:] = open_tiers(read_tiers(list(tiers)).slow, get_namespace, KeyTable())
        return found

    yield open_configured
    for behind, _ in found:
        behind.close(5.0)


def test_tiers_of_one_kind_are_numbered_in_their_order(opened, tmp_path):
    found = opened(
        {"type": "file", "path": f"{tmp_path}/a", "load_weight": 0.5},
        {"type": "object", "url": f"file://{tmp_path}/c"},
        {"type": "file", "path": f"{tmp_path}/b", "write": "back"},
    )
    assert [(behind.name, weight) for behind, weight in found] == [
        ("file", 0.5),
        ("object", 1.0),
        ("file.2", 1.0),
    ]
    assert [behind.write_back for behind, _ in found] == [False, False, True]


def test_a_tier_that_cannot_be_opened_is_left_out_and_its_number_is_free(opened, tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        found = opened({"type": "file", "path": "/dev/null/none"}, {"type": "file", "path": f"{tmp_path}/a"})
    assert [behind.name for behind, _ in found] == ["file"]
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("file tier: /dev/null/none")
    assert said.endswith("; this engine serves on without that tier")


def test_a_directory_under_a_second_name_is_left_out(opened, tmp_path, caplog):
    (tmp_path / "link").symlink_to("a")
    first = {"type": "file", "path": f"{tmp_path}/a"}
    found = opened(first, {**first, "path": f"{tmp_path}/link"})
    assert len(found) == 1
    assert f"{tmp_path}/link and {tmp_path}/a, which is a tier already, are one directory" in caplog.text


def test_an_engine_on_several_machines_has_no_fleet_tier(tmp_path, caplog):
    exchange = mock.Mock(lost="")
    tiers = [{"type": "fleet"}, {"type": "file", "path": str(tmp_path)}]
    found = open_tiers(read_tiers(tiers).slow, lambda: NAMESPACE, KeyTable(), exchange=exchange)
    assert [behind.name for behind, _ in found] == ["file"]
    assert isinstance(found[0][0].tier, ShareTier)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert said.startswith("fleet tier: the ranks of this engine run on several machines")
    assert said.endswith("leave the fleet tier out; this engine serves on without that tier")
    for behind, _ in found:
        behind.close(5.0)


def test_all_tiers_share_one_table_and_one_namespace(opened, tmp_path):
    asked = []

    def named():
        asked.append(1)
        return NAMESPACE

    found = opened(
        {"type": "file", "path": f"{tmp_path}/a"},
        {"type": "file", "path": f"{tmp_path}/b"},
        get_namespace=named,
    )
    assert len(asked) == 1
    assert len({id(behind.tier.keys.table) for behind, _ in found}) == 1


def test_an_engine_whose_chunks_have_no_name_has_no_storage_tier(opened, tmp_path, caplog):
    def unnamed():
        raise Unnameable("the weights are not on a disk")

    assert opened({"type": "file", "path": f"{tmp_path}/a"}, get_namespace=unnamed) == []
    assert "the weights are not on a disk; this engine serves on without that tier" in caplog.text
