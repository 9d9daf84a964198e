"""Tenants: cache salts and adapters keep them apart, in transfers, in earlier turns and in tiers.

Each tenant asks with the same tokens. What one has computed is found by that tenant alone, whichever way it
travels; a last test hides salts and adapters from the connector and sees all of it found. Tenants share the
tiers of the prefill engine by weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.keys import tenant_of
from support.explain import events, explain
from support.lora import random_adapter
from support.vllm_engine.both import loads
from support.vllm_engine.checkpoints import checkpoint_of
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, Pair, Setup, connector, prompt
from support.vllm_engine.process import Engine

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
SALT = "salt-of-one-tenant-that-must-not-be-seen"
WEIGHTS = {"salt": {"salt_digest": tenant_of(SALT, None).hex(), "weight": 2}}
CHUNK, LENGTH, ANSWER = 64, 512, 70
FLOOD, LONG = 16, 1000
"""Prompts of a flood and their length: more chunks than either tier has room for."""
NEAR = 1e-4

pytestmark = pytest.mark.engine


class Tenants:
    """A pair with tiers on either side, whose decode engine keeps turns.

    Attributes:
        each: how every tenant asks, by name.
        folder: of all that both engines write.
    """

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self.folder = folder
        self._transfers, self._checkpoints, self._model = folder / "transfers", checkpoints, ""
        self._start()
        model = checkpoint_of("qwen3", checkpoints)
        adapters = [random_adapter(model, folder / f"adapter {n}", n) for n in (1, 2)]
        self.each: dict[str, dict[str, Any]] = {
            "nobody": {},
            "salt": {"salt": SALT},
            "other salt": {"salt": SALT + "!"},
            "adapter": {"adapter": adapters[0]},
            "other adapter": {"adapter": adapters[1]},
            "adapter and salt": {"adapter": adapters[0], "salt": SALT},
        }

    def _start(self) -> None:
        def settings(name: str, **more: Any) -> dict[str, Any]:
            path = self.folder / name
            path.mkdir(exist_ok=True)
            tiers = [
                {"type": "host", "capacity": "16MiB"},
                {"type": "file", "path": str(path), "capacity": "20MiB"},
            ]
            log = str(self.folder / f"{name} transfers")
            more |= {
                "transfer": True,
                "chunk_tokens": CHUNK,
                "tiers": tiers,
                "transfer_log": log,
            }
            return {"kv_transfer_config": connector(**more)}

        options = {"max_num_batched_tokens": 256, **LORA}
        turns = {"turn_seconds": 600.0, "turn_share": 0.5}
        setup = Setup(
            "qwen3",
            "tenants",
            options,
            prefill_options=settings("prefill", tenants=WEIGHTS),
            decode_options=settings("decode", **turns),
        )
        self.pair = Pair(setup, self.folder, self._checkpoints)
        self.prefill, self.decode = self.pair.prefill, self.pair.decode
        self.prefill.call("wait_for_turns", SOON)
        self.decode.call("number_from", 100_000)

    def restart(self) -> None:
        """Both engines are started anew on their directories."""
        self.settle()
        self.pair.close()
        self._start()

    def settle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.call("settle_tiers")
            engine.call("step", SOON)

    def others_than(self, owner: str) -> list[str]:
        return [who for who in self.each if who != owner]

    def offered(self, text: list[int], who: str) -> dict[str, Any]:
        return self.prefill.call("prefill", [text], **self.each[who])[0]["params"]

    def say(
        self, engine: Engine, text: list[int], who: str, offer: dict[str, Any] | None = None, tokens: int = 4
    ) -> dict[str, Any]:
        """An engine's answer to a tenant, with ``hit``: tokens that were loaded, per admission."""
        loads(engine)
        (answer,) = engine.call("generate", [text], [offer], tokens, **self.each[who])
        answer["hit"] = [tokens for tokens in loads(engine) if tokens]
        return answer

    def forget(self, *, host: bool = False) -> None:
        """Both engines forget prefixes, turns and host memory if asked to; not their directories."""
        self.settle()
        self.decode.call("reset_connector")
        for engine in (self.prefill, self.decode):
            engine.call("step", SOON)
            if host:
                engine.call("forget_host_memory")
            assert engine.call("reset_prefix_cache")

    def forget_chunks(self, engine: Engine) -> None:
        """An engine forgets prefixes and chunks, so that a request waits for what a peer has.

        From then on the engine gives chunks other names, so that it does not find them after a restart.
        """
        self.settle()
        engine.call("reset_connector")
        engine.call("step", SOON)
        assert engine.call("reset_prefix_cache")


@pytest.fixture(scope="module")
def tenants(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    running.close()
    tenants = Tenants(tmp_path_factory.mktemp("tenants"), checkpoints)
    yield tenants
    tenants.pair.close()


OWNERS = ("salt", "adapter")


@pytest.mark.parametrize("owner", OWNERS)
def test_ticket_of_one_tenant_is_refused_for_another(tenants: Tenants, owner: str) -> None:
    text = prompt(LENGTH, len(owner))
    alone = {who: tenants.say(tenants.prefill, text, who) for who in tenants.each}
    tenants.forget()
    assert distance(alone["nobody"], alone["adapter"]) > NEAR, "the adapter changes nothing"
    offer = tenants.offered(text, owner)
    for who in tenants.others_than(owner):
        answer = tenants.say(tenants.decode, text, who, offer)
        assert answer["hit"] == [], who
        assert distance(answer, alone[who]) < NEAR, who
        refused = [event for name, event in events(answer["request_id"]) if name == "SourceRefused"]
        assert len(refused) == 1, who
    answer = tenants.say(tenants.decode, text, owner, offer)
    assert answer["hit"] == [LENGTH - 1], "the thieves have taken it away"
    assert distance(answer, alone[owner]) < NEAR
    tenants.forget()


@pytest.mark.parametrize(
    "restarted",
    [
        pytest.param(False, id="host memory"),
        pytest.param(True, id="a directory, after a restart", marks=pytest.mark.long),
    ],
)
def test_chunks_of_one_tenant_are_not_found_by_another(tenants: Tenants, restarted: bool) -> None:
    texts = {owner: prompt(LENGTH, 20 + 2 * number + restarted) for number, owner in enumerate(OWNERS)}
    before = {owner: tenants.say(tenants.prefill, text, owner) for owner, text in texts.items()}
    if restarted:
        tenants.restart()
    else:
        tenants.forget()
    for owner, text in texts.items():
        for who in [*tenants.others_than(owner), owner]:
            answer = tenants.say(tenants.prefill, text, who)
            assert answer["hit"] == ([LENGTH] if who == owner else []), who
            if who == owner:
                assert distance(answer, before[owner]) < NEAR
            else:
                said = " ".join(explain(answer["request_id"]).stdout.split())
                assert "tiers bids nothing, not stored: chunk 0 of" in said, who
    tenants.forget()


@pytest.mark.parametrize("owner", OWNERS)
def test_earlier_turn_of_one_tenant_is_not_found_by_another(tenants: Tenants, owner: str) -> None:
    text = prompt(LENGTH, 10 + len(owner))
    first = tenants.say(tenants.decode, text, owner, tenants.offered(text, owner), ANSWER)
    tenants.settle()
    following = text + first["tokens"] + prompt(20, 1)
    tenants.prefill.call("new_loads")
    for who in [*tenants.others_than(owner), owner]:
        tenants.forget_chunks(tenants.prefill)
        answer = tenants.say(tenants.prefill, following, who)
        found = {source for source, _, _ in tenants.prefill.call("new_loads")}
        assert ("peer" in found) == (who == owner), explain(answer["request_id"]).stdout
    tenants.forget(host=True)


def test_kv_of_a_replaced_adapter_is_not_used(tenants: Tenants) -> None:
    """Its name and number stay, while a ticket, an earlier turn and chunks of the old weights are there."""
    text, offered = prompt(LENGTH, 50), prompt(LENGTH, 51)
    who, other = "other adapter", "adapter"
    old, new, answer = (
        tenants.say(tenants.prefill, *of) for of in ((text, who), (text, other), (offered, other))
    )
    assert distance(old, new) > NEAR
    tenants.forget()
    first = tenants.say(tenants.decode, text, who, tenants.offered(text, who), ANSWER)
    offer = tenants.offered(offered, who)
    for engine in (tenants.prefill, tenants.decode):  # without waiting for the end of the offer's lease
        engine.call("settle_tiers")
    tenants.decode.call("step", SOON)
    for engine in (tenants.prefill, tenants.decode):
        engine.call("replace_adapter", tenants.each[who]["adapter"], tenants.each[other]["adapter"])
    by_ticket = tenants.say(tenants.decode, offered, who, offer)
    assert by_ticket["hit"] == []
    assert distance(by_ticket, answer) < NEAR
    tenants.prefill.call("release_all")
    assert tenants.prefill.call("reset_prefix_cache")
    by_chunks = tenants.say(tenants.prefill, text, who)
    assert by_chunks["hit"] == []
    assert distance(by_chunks, new) < NEAR
    tenants.prefill.call("new_loads")
    tenants.say(tenants.prefill, text + first["tokens"] + prompt(20, 3), who)
    assert tenants.prefill.call("new_loads") == [], "the earlier turn is of the old weights"
    tenants.forget(host=True)


def flood(tenants: Tenants, who: str, first: int) -> None:
    for number in range(first, first + FLOOD):
        tenants.say(tenants.prefill, prompt(LONG, number), who, tokens=1)
    tenants.forget()


def test_a_flood_of_one_tenant_evicts_nothing_of_another_unless_shares_are_taken_away(
    tenants: Tenants,
) -> None:
    engine, text = tenants.prefill, prompt(LENGTH, 60)
    before = engine.call("counted")
    first = tenants.say(engine, text, "salt")
    flood(tenants, "other salt", 600)
    answer = tenants.say(engine, text, "salt")
    assert answer["hit"] == [LENGTH], "in host memory"
    assert distance(answer, first) < NEAR
    assert "Its tenant is salt (digest" in explain(answer["request_id"]).stdout
    after = engine.call("counted")
    for tier in ("host", "file"):
        name = f"tenant_evicted_chunks {tier} others"
        assert after[name] - before.get(name, 0) > LENGTH // CHUNK, "it was no flood"
    assert after["tenant_hit_tokens salt host"] - before.get("tenant_hit_tokens salt host", 0) == LENGTH
    tenants.forget(host=True)
    answer = tenants.say(engine, text, "salt")
    assert answer["hit"] == [LENGTH], "in files"
    assert distance(answer, first) < NEAR
    engine.call("forget_shares")
    flood(tenants, "other salt", 700)
    assert tenants.say(engine, text, "salt")["hit"] == []
    tenants.forget(host=True)


def test_salt_is_in_no_file_log_or_metric(tenants: Tenants) -> None:
    text = prompt(LENGTH, 30)
    first = tenants.say(tenants.decode, text, "salt", tenants.offered(text, "salt"), ANSWER)
    second = tenants.say(tenants.prefill, text + first["tokens"], "salt")
    refused = tenants.say(tenants.decode, text, "other salt", tenants.offered(text, "salt"))
    tenants.prefill.call("release_all")
    tenants.settle()
    written = [path for path in tenants.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in written} >= {".kv", ".log"}
    assert any("transfers" in path.name for path in written)
    told = [explain(one["request_id"], "--json").stdout for one in (first, second, refused)]
    told += [str(engine.call("counted")) for engine in (tenants.prefill, tenants.decode)]
    assert all(first["request_id"] in text for text in told[:1])
    for path in written:
        assert SALT.encode() not in path.read_bytes(), path
        assert SALT not in path.name
    assert not [text for text in told if SALT in text]
    tenants.forget(host=True)


def test_kv_of_every_tenant_is_found_if_the_connector_ignores_tenants(tenants: Tenants) -> None:
    for engine in (tenants.prefill, tenants.decode):
        engine.call("treat_tenants_alike")
    text = prompt(LENGTH, 40)
    offer = tenants.offered(text, "salt")
    first = tenants.say(tenants.decode, text, "other salt", offer, ANSWER)
    assert first["hit"] == [LENGTH - 1], "by ticket"
    tenants.forget()
    # The prefill engine left out the last token, so it stored no chunk with that.
    assert tenants.say(tenants.prefill, text, "nobody")["hit"] == [LENGTH - CHUNK], "in tiers"


def test_turn_of_every_tenant_is_found_if_the_connector_ignores_tenants(tenants: Tenants) -> None:
    for engine in (tenants.prefill, tenants.decode):
        engine.call("treat_tenants_alike")
    text = prompt(LENGTH, 41)
    first = tenants.say(tenants.decode, text, "other salt", tenants.offered(text, "salt"), ANSWER)
    tenants.settle()
    tenants.prefill.call("new_loads")
    tenants.forget_chunks(tenants.prefill)
    answer = tenants.say(tenants.prefill, text + first["tokens"] + prompt(20, 2), "adapter")
    found = {source for source, _, _ in tenants.prefill.call("new_loads")}
    assert "peer" in found, explain(answer["request_id"]).stdout
