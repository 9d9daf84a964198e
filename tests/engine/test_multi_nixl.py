"""vLLM's NixlConnector and kvferry's tiers in one engine: either serves, and rightly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.tools.serving.devices import free_ports
from support.vllm_engine.inside import distance
from support.vllm_engine.multi import child, multi
from support.vllm_engine.pair import SOON, Pair, Setup, prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]

NIXL, TIERS = "NixlConnector", "KVFerryConnector"


class Mixed(Pair):
    """A pair that hands over by NixlConnector, and each of which has tiers."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        connectors = multi(
            {"kv_connector": NIXL, "kv_buffer_device": "cpu", "load_weight": 0.5},
            child(tiers=[{"type": "host", "capacity": "64MiB"}], chunk_tokens=64),
        )
        options = {"block_size": 64, "disable_log_stats": False}
        own = {"kv_transfer_config": connectors}
        environments = tuple(
            {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            for port in free_ports(2)
        )
        setup = Setup(
            "qwen3", options=options, prefill_options=own, decode_options=own, environments=environments
        )
        super().__init__(setup, folder, checkpoints)
        self.decode.call("chosen")

    def forget(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.call("settle_tiers")
            engine.call("forget_host_memory")
        super().forget()

    def through(self, text: list[int], **wrong: object) -> dict:
        """The decode engine's answer to what the prefill engine offers, and what it loaded for it."""
        (offer,) = [answer["params"] for answer in self.prefill.call("prefill", [text])]
        (answer,) = self.decode.call("generate", [text], [{**offer, **wrong}])
        answer["loaded"] = self.decode.call("chosen")
        self.prefill.call("step", 0.1 if wrong else SOON)  # what nobody reads is kept for minutes
        return answer


@pytest.fixture(scope="module")
def mixed(running: object, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    running.close()
    pair = Mixed(tmp_path_factory.mktemp("mixed"), checkpoints)
    pair.through(prompt(100, 1))  # to meet, NixlConnector takes five seconds, or gives that request up
    yield pair
    pair.close()


@pytest.mark.parametrize(("kept", "loader", "tokens"), [(0, NIXL, 700), (256, NIXL, 700), (512, TIERS, 512)])
def test_the_better_bid_is_loaded_and_a_spoilt_block_of_it_changes_the_answer(
    mixed: Mixed, kept: int, loader: str, tokens: int
) -> None:
    text = prompt(700, kept)
    (reference,) = mixed.reference([text])

    def ask() -> dict:
        mixed.forget()
        if kept:
            mixed.decode.call("generate", [text[:kept]])
            mixed.decode.call("settle_tiers")
            assert mixed.decode.call("reset_prefix_cache")
        mixed.decode.call("chosen")
        return mixed.through(text)

    answer = ask()
    assert answer["loaded"] == [(loader, tokens)]
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < 1e-4
    mixed.decode.call("spoil_child", loader)
    spoilt = ask()
    mixed.decode.call("spoil_child", None)
    assert spoilt["loaded"] == [(loader, tokens)]
    assert distance(spoilt, reference) > 1e-2
    mixed.forget()
    for engine in (mixed.prefill, mixed.decode):
        assert engine.call("still_known") == {}
        assert engine.call("requests_left") == 0


def test_simultaneous_requests_are_answered_correctly_and_counted(mixed: Mixed) -> None:
    texts = [prompt(n, n) for n in (40, 130, 260, 333, 500, 640)]
    references = mixed.reference(texts)
    mixed.forget()
    mixed.decode.call("generate", texts[:3])
    mixed.decode.call("settle_tiers")
    assert mixed.decode.call("reset_prefix_cache")
    mixed.decode.call("chosen")
    before = mixed.decode.call("metrics", "kvferry_multi")
    offers = [answer["params"] for answer in mixed.prefill.call("prefill", texts)]
    answers = mixed.decode.call("generate", texts, offers)
    for answer, reference in zip(answers, references, strict=True):
        assert answer["tokens"] == reference["tokens"]
    loads = mixed.decode.call("chosen")
    assert {name for name, _ in loads} == {NIXL, TIERS}
    after = mixed.decode.call("metrics", "kvferry_multi")
    for name in (NIXL, TIERS):
        more = {
            metric: after[f"kvferry_multi_{metric} {name}"] - before.get(f"kvferry_multi_{metric} {name}", 0)
            for metric in ("queries_total", "hits_total", "hit_tokens_total")
        }
        assert more["queries_total"] == len(texts)
        assert more["hits_total"] == sum(loader == name for loader, _ in loads)
        assert more["hit_tokens_total"] == sum(tokens for loader, tokens in loads if loader == name)
        assert after[f"kvferry_multi_pending_loads {name}"] == 0
    assert mixed.decode.call("metrics", "vllm:nixl_bytes")[f"vllm:nixl_bytes_transferred_sum {NIXL}"] > 0
    hits = mixed.decode.call("metrics", "kvferry_hit_tokens")
    assert hits[f"kvferry_hit_tokens_total {TIERS} tiers host"] > 0


def test_tiers_serve_if_the_peer_is_unreachable(mixed: Mixed) -> None:
    text = prompt(700, 5)
    (reference,) = mixed.reference([text])
    mixed.forget()
    mixed.decode.call("generate", [text[:256]])
    mixed.decode.call("settle_tiers")
    assert mixed.decode.call("reset_prefix_cache")
    mixed.decode.call("chosen")
    (nowhere,) = free_ports(1)
    failed = f"kvferry_multi_loads_total {NIXL} failed"
    before = mixed.decode.call("metrics", "kvferry_multi").get(failed, 0)
    answer = mixed.through(text, remote_port=nowhere, remote_engine_id="nobody")
    assert answer["loaded"] == [(NIXL, 700), (TIERS, 256)]
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < 1e-4
    assert mixed.decode.call("metrics", "kvferry_multi")[failed] == before + 1
