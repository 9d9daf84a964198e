"""Tenants in a directory: who gives way for new files, by the bytes that all processes have counted."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from kvferry.keys.tenant import NOBODY, key_of_chunk, tenant_of, tenant_of_key
from kvferry.tiers.files import space
from kvferry.tiers.files.ledger import LEDGER_BYTES, Ledger, read_used_by_tenant
from kvferry.tiers.files.tenant_table import TenantTable
from kvferry.tiers.names import PutOutcome
from kvferry.tiers.paths import keys_of, quarantine_name, temporary_path, tenant_of_path
from kvferry.tiers.tenants import Tenant, Tenants, TenantUsage
from support.examples import examples
from support.stores import FILE_BYTES, GROUP, NAMESPACE, Clock, body, open_store

A, B, C = (tenant_of(name, None) for name in ("a", "b", "c"))
EQUAL = Tenants({})
BODY = body(0)


def key_of(number, tenant=NOBODY):
    return key_of_chunk((number << 8).to_bytes(32, "big"), tenant, 0)


class Engine:
    """An engine with a tier of its own on a directory."""

    def __init__(self, path, clock, tenants=EQUAL, files=20, **options):
        self.clock = clock
        # Room for marker, note, ledger and its table.
        self.store = open_store(path, capacity=files * FILE_BYTES + 3000, clock=clock, **options)
        if tenants is not None:
            self.store.use_tenants(tenants)

    def keep(self, number, tenant=NOBODY):
        self.clock.now += 60
        return self.store.put(key_of(number, tenant), GROUP, BODY)


def files(path):
    names = [name for _, _, names in os.walk(path) for name in names]
    return Counter(tenant_of_key(key) for key in keys_of(names))


def check_ledger(path):
    """The ledger has the bytes of each tenant, and of all files."""
    expected = Counter()
    for file in path.rglob("*"):
        if file.is_file() and file.name != "ledger":
            expected[tenant_of_path(str(file))] += file.stat().st_size
    assert read_used_by_tenant(str(path)) == {one: size for one, size in expected.items() if size and one}
    with Ledger(str(path)).held() as held:
        assert held.used == sum(expected.values()) + LEDGER_BYTES + held.tenants.size
        assert os.fstat(held.fd).st_size == LEDGER_BYTES + held.tenants.size


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("tenants", [EQUAL, Tenants({A: Tenant("a", 3), B: Tenant("b")}), None])
def test_a_flood_leaves_the_share_of_another_tenant_and_without_shares_nothing(tmp_path, clock, tenants):
    engine = Engine(tmp_path, clock, tenants)
    for number in range(20):
        assert engine.keep(number, A) is PutOutcome.STORED
    for number in range(100, 160):
        assert engine.keep(number, B) is PutOutcome.STORED
    share = 0 if tenants is None else 15 if tenants.named else 10
    assert files(tmp_path)[A] == share
    assert files(tmp_path).total() in (19, 20)
    check_ledger(tmp_path)


def test_what_a_small_tenant_leaves_is_shared_by_the_others(tmp_path, clock):
    engine = Engine(tmp_path, clock)
    for number in range(20):
        engine.keep(number, C if number < 2 else A)
    for number in range(100, 140):
        assert engine.keep(number, B) is PutOutcome.STORED
    assert files(tmp_path) == {A: 9, B: 9, C: 2}


def test_a_flood_through_one_engine_leaves_the_share_of_a_tenant_of_another(tmp_path, clock):
    flooding, other = Engine(tmp_path, clock), Engine(tmp_path, clock)
    for number in range(10):
        assert other.keep(number, A) is PutOutcome.STORED
        assert flooding.keep(100 + number, B) is PutOutcome.STORED
    for number in range(200, 240):
        assert flooding.keep(number, B) is PutOutcome.STORED
    assert files(tmp_path)[A] == 10
    # The other engine stores more of A: it knows what the first has stored since it last walked.
    for number in range(300, 340):
        assert other.keep(number, A) is PutOutcome.STORED
    assert abs(files(tmp_path)[A] - files(tmp_path)[B]) <= 1
    check_ledger(tmp_path)


@examples(25)
@given(
    puts=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from((A, B, C, NOBODY))), min_size=40, max_size=120
    ),
    weights=st.tuples(*[st.integers(1, 4)] * 4),
    listed=st.integers(1, 40),
)
def test_no_file_within_a_fair_share_is_evicted_for_another_tenant(tmp_path_factory, puts, weights, listed):
    path, clock = tmp_path_factory.mktemp("files"), Clock()
    tenants = Tenants({t: Tenant(t.hex(), w) for t, w in zip((A, B, C, NOBODY), weights, strict=True)})
    engines = [Engine(path, clock, tenants, 12, max_listed=listed) for _ in range(2)]
    for number, (engine, tenant) in enumerate(puts):
        before = read_used_by_tenant(str(path))
        here = files(path)
        assert engines[engine].keep(number, tenant) is PutOutcome.STORED
        lost = here - files(path)
        before[tenant] = before.get(tenant, 0) + FILE_BYTES
        mean = sum(before.values()) / sum(tenants.of(one).weight for one in before)
        for one in lost - Counter({tenant: 99}):
            assert before[one] / tenants.of(one).weight > mean
    check_ledger(path)


def test_a_tenant_over_its_limit_evicts_its_own_although_there_is_room(tmp_path, clock):
    engine = Engine(tmp_path, clock, Tenants({A: Tenant("a", limit=0.26)}))
    engine.keep(0, B)
    for number in range(1, 12):
        assert engine.keep(number, A) is PutOutcome.STORED
    assert files(tmp_path) == {A: 5, B: 1}
    for number in range(100, 130):
        engine.keep(number, B)
    assert engine.keep(50, A) is PutOutcome.STORED, "at its limit, and far below half of its share"
    assert files(tmp_path)[A] == 5
    check_ledger(tmp_path)


def test_files_are_listed_for_many_tenants_in_few_walks(tmp_path, clock, monkeypatch):
    engine = Engine(tmp_path, clock, files=60, max_listed=40)
    walks, walk = [], space.walk
    for number in range(30):
        engine.keep(number, number.to_bytes(6, "big"))
    monkeypatch.setattr(space, "walk", lambda root: walks.append(root) or walk(root))
    for number in range(100, 220):
        assert engine.keep(number, A) is PutOutcome.STORED
    assert sum(count for tenant, count in files(tmp_path).items() if tenant != A) == 30
    # 90 files of the one tenant that uses half of all were evicted, 20 by each walk.
    assert len(walks) <= 6


def test_usage_is_by_name(tmp_path, clock):
    engine = Engine(tmp_path, clock, Tenants({A: Tenant("a")}))
    for number in range(25):
        engine.keep(number, A)
    engine.keep(100, B)
    used = engine.store.usage().tenants
    assert used["a"] == TenantUsage(files(tmp_path)[A] * FILE_BYTES, 26 - files(tmp_path).total())
    assert used["others"] == TenantUsage(FILE_BYTES, 0)
    assert Engine(tmp_path, clock, None).store.usage().tenants == {}


def test_a_lost_ledger_is_counted_anew_by_tenant(tmp_path, clock):
    engine = Engine(tmp_path, clock)
    for number, tenant in enumerate((A, A, B, NOBODY)):
        engine.keep(number, tenant)
    (tmp_path / "ledger").unlink()
    engine.keep(9, B)
    check_ledger(tmp_path)
    (tmp_path / "ledger").write_bytes((tmp_path / "ledger").read_bytes()[:-5])
    Engine(tmp_path, clock)
    check_ledger(tmp_path)


@pytest.mark.parametrize("tenant", [A, NOBODY])
def test_the_name_of_a_file_has_its_tenant(tenant):
    key = key_of(5, tenant)
    final = f"/kv/{NAMESPACE.digest.hex()}/00/{key.hex()}.kv"
    for path in (final, temporary_path(final, 100), f"/kv/{quarantine_name(NAMESPACE.digest, key)}"):
        assert tenant_of_path(path) == tenant
    for path in ("/kv/ledger", "/kv/kvferry.json", temporary_path("/kv/kvferry.json", 5)):
        assert tenant_of_path(path) is None


@examples(60)
@given(
    st.lists(
        st.tuples(st.binary(min_size=6, max_size=6) | st.sampled_from((A, B, NOBODY)), st.integers(-50, 99))
    )
)
def test_a_table_has_what_was_added(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("table") / "ledger"
    path.write_bytes(b"x" * LEDGER_BYTES)
    fd, expected = os.open(path, os.O_RDWR), Counter()
    try:
        table = TenantTable(fd, LEDGER_BYTES)
        for tenant, size in changes:
            grows = table.growth(tenant)
            before = table.size
            table.add(tenant, size)
            assert table.size == before + grows
            expected[tenant] = max(0, expected[tenant] + size)
            assert TenantTable(fd, LEDGER_BYTES).used() == table.used() == dict(+expected)
        os.truncate(path, path.stat().st_size + 5)
        table = TenantTable(fd, LEDGER_BYTES)
        assert table.used() == dict(+expected)
        table.replace(expected)
        assert path.stat().st_size == LEDGER_BYTES + 16 * len(+expected)
        assert TenantTable(fd, LEDGER_BYTES).used() == dict(+expected)
        assert path.read_bytes()[:LEDGER_BYTES] == b"x" * LEDGER_BYTES
    finally:
        os.close(fd)


@examples(100)
@given(st.data())
def test_those_who_give_way_are_above_the_mean_the_highest_first(data):
    names = [A, B, C, NOBODY]
    weights = data.draw(st.lists(st.integers(1, 5), min_size=4, max_size=4))
    tenants = Tenants({n: Tenant(n.hex(), w) for n, w in zip(names, weights, strict=True)})
    used = {n: data.draw(st.integers(1, 50)) for n in names}
    storing = data.draw(st.sampled_from(names))
    found = tenants.give_way(used, storing, 1000)
    levels = {n: used[n] / tenants.of(n).weight for n in names}
    mean = sum(used.values()) / sum(weights)
    assert storing in found
    others = [n for n in found if n != storing]
    assert set(others) == {n for n in names if n != storing and levels[n] > mean * (1 + 1e-9)}
    above = [levels[n] for n in found if levels[n] > mean]
    assert above == sorted(above, reverse=True)
