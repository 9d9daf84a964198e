"""Hooks reach all children, and what they answer is joined."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from kvferry.common.errors import ConfigError
from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.engines.vllm.config import read_settings
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.children import check, children_of
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.engines.vllm.multi.stats import MultiEvents, MultiMeta, MultiStats, MultiWorkerMeta
from kvferry.engines.vllm.scheduler import sorted_cards
from kvferry.observe.metrics import MetricsDelta
from kvferry.tools.top.exposition import parse_page, window
from kvferry.tools.top.figures import compute_figures
from support.tiny_connectors import Hybrid, Tally

OURS = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.engines.vllm.connector"}
TIERS = {**OURS, "kv_connector_extra_config": {"tiers": [{"type": "host"}]}}


def entry(kind: str = "Hybrid", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": kind,
        "kv_connector_module_path": "support.tiny_connectors",
        "kv_connector_extra_config": extra,
    }


def config(*children: dict[str, Any], hybrid: bool = True, **more: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="FerryMultiConnector",
        kv_role="kv_both",
        **{"kv_load_failure_policy": "recompute", **more},
        kv_connector_extra_config={"connectors": list(children)},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        parallel_config=SimpleNamespace(world_size=2),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=None,
    )


def multi(*children: dict[str, Any], role: Any = KVConnectorRole.SCHEDULER, **more: Any) -> Any:
    return FerryMultiConnector(config(*children, **more), role, SimpleNamespace())


def request(name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, num_tokens=100)


# -- what children must agree on --------------------------------------------------------------------------


def test_children_have_the_engines_settings_unless_they_say_otherwise() -> None:
    whole = config(entry(), {**entry(), "kv_role": "kv_consumer"})
    first, second = children_of(whole)
    ours, theirs = first.config.kv_transfer_config, second.config.kv_transfer_config
    assert ours.engine_id == theirs.engine_id == whole.kv_transfer_config.engine_id
    assert (ours.kv_role, theirs.kv_role) == ("kv_both", "kv_consumer")
    assert ours.kv_load_failure_policy == "recompute"
    assert whole.kv_transfer_config.kv_connector == "FerryMultiConnector"


def test_a_child_of_kvferrys_own_fills_no_block_in_part() -> None:
    (child,) = children_of(config(TIERS))
    assert child.config.kv_transfer_config.kv_connector_extra_config["whole_blocks"]


def test_children_of_kvferrys_own_know_what_they_are_called() -> None:
    children = children_of(config(TIERS, {**TIERS, "name": "disk"}))
    assert [read_settings(child.config).name for child in children] == ["KVFerryConnector", "disk"]


@pytest.mark.parametrize(
    ("children", "more", "sentence"),
    [
        (
            [entry(), entry("Plain")],
            {},
            "Plain cannot do with the hybrid KV cache manager, which is on; start",
        ),
        ([entry("Nobody")], {}, "Nobody cannot be had: Class Nobody not found in support.tiny_connectors"),
        ([{"kv_connector": "Nobody"}], {}, "Nobody cannot be had: Unsupported connector type"),
        ([{**entry(), "kv_role": "both"}], {}, "Hybrid cannot be had: .*kv_role"),
        (
            [{**entry(), "kv_connector_module_path": "no.such"}],
            {},
            "Hybrid cannot be had: No module named 'no'",
        ),
        ([entry()], {"kv_load_failure_policy": "fail"}, "it must be 'recompute'"),
        ([OURS, {**OURS, "name": "other"}], {}, "KVFerryConnector and other would both hand KV over"),
        ([OURS, {"kv_connector": "NixlConnector"}], {}, "KVFerryConnector and NixlConnector would both hand"),
        ([OURS, {**OURS, "kv_connector_extra_config": {"laness": 1}}], {}, "did you mean 'lanes'"),
    ],
)
def test_children_that_do_not_go_together_are_an_error_at_start(children, more, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        multi(*children, **more)
    assert "\n" not in str(caught.value)


def test_an_engine_that_may_sleep_takes_only_children_that_follow_it(monkeypatch) -> None:
    engine = config(OURS, entry())
    engine.model_config = SimpleNamespace(enable_sleep_mode=True)
    for can in (True, False):
        monkeypatch.setattr(Hybrid, "supports_sleep_mode", lambda _, can=can: can, raising=False)
        with nullcontext() if can else pytest.raises(ConfigError, match="Hybrid cannot do with sleep mode"):
            check(children_of(engine), engine)


def test_without_the_hybrid_manager_every_child_will_do() -> None:
    ours = multi(entry(), entry("Plain"), hybrid=False)
    hybrid, plain = ours.sub_connectors
    ours.request_finished_all_groups(request(), ([1, 2],))
    assert hybrid.calls[-1] == ("request_finished_all_groups", ([1, 2],))
    assert plain.calls[-1] == ("request_finished", [1, 2])


def layout(*children: dict[str, Any]) -> str | None:
    return FerryMultiConnector.get_required_kvcache_layout(config(*children))


def test_children_agree_on_a_layout_or_both_are_named() -> None:
    assert layout(entry(), entry()) is None
    assert layout(entry(), entry(layout="LBHNC"), entry(layout="LBHNC")) == "LBHNC"
    with pytest.raises(ConfigError, match="Hybrid wants LBHNC, Hybrid-2 wants BHLNC"):
        layout(entry(layout="LBHNC"), entry(layout="BHLNC"))


def test_kvferrys_own_takes_the_layout_of_others_unless_it_was_told_which(monkeypatch) -> None:
    from kvferry.engines.vllm import layout as own

    monkeypatch.setattr(
        own, "requested_layout", lambda _, settings: {"auto": "BHLNC"}.get(settings.layout, settings.layout)
    )
    assert layout(TIERS) == "BHLNC"
    assert layout(TIERS, entry(layout="LBHNC")) == "LBHNC"
    told = {**OURS, "kv_connector_extra_config": {"layout": "BLHNC"}}
    with pytest.raises(ConfigError, match="KVFerryConnector wants BLHNC, Hybrid wants LBHNC"):
        layout(told, entry(layout="LBHNC"))


def test_children_have_as_many_workers_report_or_are_named() -> None:
    assert multi(entry(), entry()).get_finished_count() is None
    assert multi(entry(count=2), entry()).get_finished_count() == 2
    with pytest.raises(ConfigError, match="Hybrid has 1, Hybrid-2 has 2; the engine waits for one number"):
        multi(entry(count=1), entry()).get_finished_count()


def test_at_most_one_child_has_a_memory_pool() -> None:
    assert multi(entry()).get_mem_pool_context() is None
    assert multi(entry(), entry(pool=True)).get_mem_pool_context() is not None
    with pytest.raises(ConfigError, match="Hybrid and Hybrid-2 each want a memory pool"):
        multi(entry(pool=True), entry(pool=True)).get_mem_pool_context()


def test_graphs_are_piecewise_if_one_child_needs_them_so() -> None:
    needs = FerryMultiConnector.requires_piecewise_for_cudagraph
    assert needs({"connectors": [entry(), entry(piecewise=True)]})
    assert not needs({"connectors": [entry()]})


# -- a step -----------------------------------------------------------------------------------------------

STEP = SimpleNamespace(
    scheduled_cached_reqs=SimpleNamespace(req_ids=[]), total_num_scheduled_tokens=0, num_scheduled_tokens={}
)


def test_each_child_gets_its_own_part_of_the_metadata() -> None:
    scheduler, worker = multi(entry(), entry()), multi(entry(), entry(), role=KVConnectorRole.WORKER)
    for number, child in enumerate(scheduler.sub_connectors):
        child.said["build_connector_meta"] = f"meta {number}"
        child.said["get_num_new_matched_tokens"] = (number * 10, True)
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (10, True)
    scheduler.update_state_after_alloc(request(), SimpleNamespace(get_block_ids=lambda: ([1],)), 10)
    meta = scheduler.build_connector_meta(STEP)
    assert meta == MultiMeta(("meta 0", "meta 1"), {"r": 1}, {})
    worker.bind_connector_metadata(meta)
    assert worker.has_connector_metadata()
    assert [child._connector_metadata for child in worker.sub_connectors] == ["meta 0", "meta 1"]
    worker.handle_preemptions(meta)
    worker.start_load_kv("context", more=1)
    for number, child in enumerate(worker.sub_connectors):
        assert child.calls == [
            ("handle_preemptions", f"meta {number}"),
            ("start_load_kv", "context", {"more": 1}),
        ]
    worker.clear_connector_metadata()
    assert not worker.sub_connectors[0].has_connector_metadata()


def test_loads_leave_room_in_the_engines_pool_until_their_requests_are_scheduled() -> None:
    free = [7]
    pool = SimpleNamespace(get_num_free_blocks=lambda: free[0], blocks=range(100))
    told = SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=32)
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=16
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=window, layer_names=["one"])])
    given = SimpleNamespace(
        **{**vars(config(entry())), "num_speculative_tokens": 0, "scheduler_config": told}
    )
    ours = FerryMultiConnector(given, KVConnectorRole.SCHEDULER, groups)
    ours.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))
    ours.sub_connectors[0].said["get_num_new_matched_tokens"] = (48, True)
    assert ours.get_num_new_matched_tokens(request(), 0) == (48, True), "1 block, and 2 for the next step"
    ours.update_state_after_alloc(request(), SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 48)
    free[0] = 2
    assert ours.get_num_new_matched_tokens(request("s"), 0) == (None, False), "one goes on first"
    ours.build_connector_meta(SimpleNamespace(**{**vars(STEP), "num_scheduled_tokens": {"r": 1}}))
    assert ours.get_num_new_matched_tokens(request("t"), 0) == (48, True), "nobody waits"


class Said:
    def __init__(self, *words: str) -> None:
        self.words = words

    def aggregate(self, other: Said) -> Said:
        return Said(*self.words, *other.words)


def test_words_of_several_workers_are_joined_by_child_and_given_back_whole() -> None:
    ours = multi(entry(), entry())
    first, second = Said("a"), Said("b")
    both = MultiWorkerMeta((first, None)).aggregate(MultiWorkerMeta((second, first)))
    assert both.children[0].words == ("a", "b")
    output = KVConnectorOutput(kv_connector_worker_meta=both)
    ours.update_connector_output(output)
    assert output.kv_connector_worker_meta is both
    assert [child.calls[-1][1] for child in ours.sub_connectors] == list(both.children)
    ours.update_connector_output(KVConnectorOutput())
    assert ours.sub_connectors[0].calls[-1] == ("update_connector_output", None, None)


class Events:
    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def get_all_events(self) -> list[str]:
        return self.events

    def add_events(self, events: list[str]) -> None:
        self.events += events

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_number_of_workers(self) -> int:
        return self.workers


def test_events_of_several_workers_are_joined_by_child() -> None:
    whole = MultiEvents((Events("a"), None))
    for other in (MultiEvents((Events("b"), Events("c"))), MultiEvents((None, Events("d")))):
        whole.add_events(other.get_all_events())  # as vLLM's aggregator does
        whole.increment_workers(1)
    assert [(of.events, of.workers) for of in whole.children] == [(["a", "b"], 2), (["c", "d"], 2)]


def test_handshakes_reach_the_child_they_are_of() -> None:
    worker, scheduler = multi(entry(), entry(), entry()), multi(entry(), entry(), entry())
    assert worker.get_handshake_metadata() is None
    for number in (1, 2):
        worker.sub_connectors[number].said["get_handshake_metadata"] = f"card {number}"
    card = worker.get_handshake_metadata()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): card, (0, 1): card})
    assert [child.calls for child in scheduler.sub_connectors] == [
        [],
        [("set_xfer_handshake_metadata", {0: "card 1", 1: "card 1"})],
        [("set_xfer_handshake_metadata", {0: "card 2", 1: "card 2"})],
    ]


def test_the_handshake_of_another_connector_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"is a Said, not KVFerryConnector's: .* use FerryMultiConnector"):
        sorted_cards({(0, 0): Said()})


@pytest.mark.parametrize("hook", ["has_pending_block_frees", "has_pending_push_work"])
def test_the_engine_goes_on_while_any_child_has_something_left_to_do(hook: str) -> None:
    ours = multi(entry(), entry())
    assert not getattr(ours, hook)()
    setattr(ours.sub_connectors[1], hook, lambda: True)
    assert getattr(ours, hook)()


def test_the_engine_rests_as_long_as_every_child_lets_it() -> None:
    ours = multi(entry(), entry())
    ours.sub_connectors[0].rest_seconds = 3.0
    assert ours.rest_seconds == 0, "a child that does not tell may need every step"
    ours.sub_connectors[1].rest_seconds = 2.0
    assert ours.rest_seconds == 2


# -- the end of a request ---------------------------------------------------------------------------------


def test_blocks_are_kept_until_every_child_that_needs_them_is_done() -> None:
    scheduler, worker = multi(*[entry()] * 3), multi(*[entry()] * 3, role=KVConnectorRole.WORKER)
    for number in (0, 2):
        scheduler.sub_connectors[number].said["request_finished_all_groups"] = (True, None)
    scheduler.sub_connectors[1].said["register_finished_partial_tail"] = True
    assert scheduler.register_finished_partial_tail(request(), ([1],), [(0, 0, 1)])
    assert scheduler.request_finished_all_groups(request(), ([1],)) == (True, None)
    meta = scheduler.build_connector_meta(STEP)
    assert meta.holders == {"r": frozenset({0, 1, 2})}
    assert scheduler.build_connector_meta(STEP).holders == {}
    worker.bind_connector_metadata(MultiMeta((None,) * 3, {}, meta.holders))
    for number, told in ((2, set()), (2, set()), (0, set()), (1, {"r"})):
        for place, child in enumerate(worker.sub_connectors):
            sent = {"r"} if place == number else set()
            child.get_transfer_results = lambda _, sent=sent: KVConnectorTransferResults(sent)
        assert worker.get_transfer_results({"r"}).finished_sending == told


def test_callers_get_the_parameters_of_the_first_child_that_has_any(caplog) -> None:
    ours = multi(*[entry()] * 3)
    for number in (1, 2):
        ours.sub_connectors[number].said["request_finished_all_groups"] = (False, {"from": number})
    caplog.set_level("WARNING", "kvferry")
    for name in ("a", "b"):
        assert ours.request_finished_all_groups(request(name), ()) == (False, {"from": 1})
    said = [record.message for record in caplog.records if record.name.startswith("kvferry")]
    assert len(said) <= 1, "said at every request"
    assert not said or "those of Hybrid-2, the first in connectors" in said[0]


def test_all_children_are_shut_down_even_if_one_cannot_be() -> None:
    ours = multi(*[entry()] * 3)
    ours.sub_connectors[1].said["shutdown"] = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        ours.shutdown()
    assert [child.calls[-1] for child in ours.sub_connectors] == [("shutdown",)] * 3


# -- stats ------------------------------------------------------------------------------------------------


def with_stats(role: Any, *numbers: int) -> Any:
    ours = multi(*[entry()] * len(numbers), role=role)
    for child, n in zip(ours.sub_connectors, numbers, strict=True):
        child.said["get_kv_connector_stats"] = Tally({"n": n})
    return ours


def test_stats_of_out_of_tree_children_of_one_class_survive_the_way_between_processes() -> None:
    scheduler = with_stats(KVConnectorRole.SCHEDULER, 1, 2)
    scheduler.get_num_new_matched_tokens(request(), 0)
    scheduler.update_state_after_alloc(request(), SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    stats = with_stats(KVConnectorRole.WORKER, 10, 20).get_kv_connector_stats()
    stats = stats.aggregate(scheduler.get_kv_connector_stats())
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    arrived = FerryMultiConnector.build_kv_connector_stats(sent)
    assert {name: of.data for name, (_, of) in arrived.data["children"].items()} == {
        "Hybrid": {"n": 11},
        "Hybrid-2": {"n": 22},
    }
    again = arrived.aggregate(FerryMultiConnector.build_kv_connector_stats(sent))
    assert again.reduce() == {
        "Hybrid n": 22,
        "Hybrid-2 n": 44,
        **{f"{name} {what}": 2 for name in ("Hybrid", "Hybrid-2") for what in ("queries", "misses")},
    }
    assert FerryMultiConnector.build_kv_connector_stats().is_empty()
    with pytest.raises(ValueError, match="not registered"):
        MultiConnector.build_kv_connector_stats({"Hybrid": {"n": 1}})


def test_a_worker_does_not_count_what_only_the_scheduler_sees() -> None:
    assert with_stats(KVConnectorRole.WORKER, 0, 0).get_kv_connector_stats() is None


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"engine": "0", **labels})


def test_metrics_of_all_children_have_a_label_that_tells_them_apart() -> None:
    given = {kind: kind for kind in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    children = (
        entry(),
        {**TIERS, "name": "one"},
        {**TIERS, "name": "two"},
        entry(),
        {"kv_connector": "NixlConnector"},
    )
    for number in range(2):  # an engine, and another in the same process
        for collector in [c for c in REGISTRY._collector_to_names if "vllm:" in getattr(c, "_name", "")]:
            REGISTRY.unregister(collector)  # as vLLM does
        metrics = FerryMultiConnector.build_prom_metrics(config(*children), *given)
        scheduler = with_stats(KVConnectorRole.SCHEDULER, 3, 4)
        scheduler.get_num_new_matched_tokens(request(), 0)
        scheduler.update_state_after_alloc(request(), SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
        sent = scheduler.get_kv_connector_stats().to_dict()
        for name, tokens in (("one", 5), ("two", 6)):
            counted = MetricsDelta()
            counted.count("hit_tokens", "tiers", "host", by=tokens)
            sent["children"][name] = [["x", "y"], counted.plain()]
        moved = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
        nixl = {name: [8.0] for name in moved}
        failures = ("transfers", "notifications", "handshakes")
        nixl |= {f"num_failed_{what}": [] for what in failures}
        nixl |= {"num_kv_expired_reqs": [], "num_notifications_after_expiry": []}
        sent["children"]["NixlConnector"] = [["x", "y"], nixl]
        metrics.observe(sent, 0)
        assert sample("tiny_tally_total", connector="Hybrid", colour="red") == 3, number
        assert sample("tiny_tally_total", connector="Hybrid-2", colour="red") == 4
        assert sample("kvferry_hit_tokens_total", connector="one", source="tiers", tier="host") == 5
        assert sample("kvferry_hit_tokens_total", connector="two", source="tiers", tier="host") == 6
        assert sample("vllm:nixl_bytes_transferred_sum", connector="NixlConnector") == 8
        assert sample("kvferry_multi_queries_total", connector="Hybrid") == 1
        assert sample("kvferry_multi_misses_total", connector="Hybrid-2") == 1
        assert sample("kvferry_multi_pending_loads", connector="Hybrid") in (None, 0)
    assert isinstance(FerryMultiConnector.build_kv_connector_stats({**MultiStats().to_dict()}), MultiStats)


def test_usage_of_a_shared_directory_is_not_added_up_over_children() -> None:
    given = {kind: kind for kind in (Counter, Gauge, Histogram)}, ["model_name", "engine"], {0: ["m", "0"]}
    children = {**TIERS, "name": "one"}, {**TIERS, "name": "two"}
    metrics = FerryMultiConnector.build_prom_metrics(config(*children), *given)
    sent = MultiStats().to_dict()
    for name, host, used in (("one", 10, 600), ("two", 40, 610)):
        counted = MetricsDelta()
        for what, tier, to in (
            ("used", "host", host),
            ("capacity", "host", 100),
            ("used", "file", used),
            ("capacity", "file", 1000),
        ):
            counted.set(f"tier_{what}_bytes", tier, to=to)
        counted.set("pending_loads", "tiers", to=2)
        sent["children"][name] = [["x", "y"], counted.plain()]
    metrics.observe(sent, 0)
    page = parse_page(generate_latest(REGISTRY).decode(), 0.0)
    levels = compute_figures([window(None, page, "0")]).levels
    assert {tier: (room.used, room.capacity) for tier, room in levels.tiers.items()} == {
        "host": (40, 100),
        "file": (610, 1000),
    }
    assert levels.pending_loads == {"tiers": 4}, "these are their own"


class Waits(KVFerryConnector):
    """One of kvferry's own that waits for a bid."""

    def __init__(self, bid: Bid) -> None:
        admission = SimpleNamespace(awaited={"a": bid, "b": None}.get)
        self._half = SimpleNamespace(admission=admission)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return None, False


def test_only_kvferrys_own_children_tell_which_bid_they_wait_for() -> None:
    ours = multi(entry(), entry(name="other"))
    bid = Bid("peer", (PlaceTokens("peer", 70),), looking=True, promised=True)
    ours._admission._children = (Waits(bid), SimpleNamespace(get_num_new_matched_tokens=lambda *_: (None, 0)))
    for name, tokens, promised in (("a", 70, True), ("b", 98, False)):
        asked = SimpleNamespace(request_id=name, num_tokens=100)
        assert ours.get_num_new_matched_tokens(asked, 1)[0] is None
        bids = ours._admission._bids(asked, 1, [(None, False)] * 2)
        assert [(bid.tokens, bid.promised) for bid in bids] == [(tokens, promised), (98, False)]
