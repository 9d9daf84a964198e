"""Examine an engine or a router through its HTTP endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import msgspec

from kvferry.common.errors import ProtocolError
from kvferry.common.units import counted
from kvferry.engines.vllm import is_supported, supported_text
from kvferry.tools.doctor import engine_metrics
from kvferry.tools.doctor.finding import Finding, bad, note, ok
from kvferry.tools.doctor.identity import EngineIdentity
from kvferry.tools.fetch import Health, HttpReply, client, fetch
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.bodies import kv_params_of, prefill_body
from kvferry.transport import Address

# Token ids that exist in any vocabulary.
_PROMPT = [11, 12, 13, 14]
PROBE_TOKENS = _PROMPT[:-1]
"""Token ids whose KV an engine offers for the test request: all but the last, which the reader computes."""
# vLLM's header that chooses a data-parallel rank.
_RANK = "X-data-parallel-rank"
# kvferry sends a ticket under the key that vLLM's NixlConnector uses for a request id, which looks otherwise.
_TICKET = re.compile(r"[0-9a-f]{32}")
_ENGINE = re.compile(r'^vllm:num_requests_running\{[^}]*\bengine="(\d+)"', re.MULTILINE)
_METRICS = {"kvferry_": "KVFerryConnector", "vllm:nixl_": "NixlConnector"}
# Only engines with tiers have this metric, once they have run a step.
_TIERS = "kvferry_tier_capacity_bytes{"
_TIER_POLLS, _TIER_POLL_SECONDS = 5, 0.2

_Ask: TypeAlias = Callable[..., Awaitable[HttpReply]]


@dataclass(frozen=True, slots=True)
class OfferedKv:
    """The KV of a test prompt, as the engine that computed it offers it. `ticket` has 16 bytes."""

    address: Address
    engine_id: str
    ticket: bytes


@dataclass(slots=True)
class ExaminedEngine:
    """An engine or router, and what was found. Each check adds to it."""

    name: str  # address as the user or a router gave it, without credentials
    role: Role  # role of the engine: PREFILL, DECODE, or BOTH if it is unknown
    findings: list[Finding] = field(default_factory=list)
    # Description that the engine's control channel sent; None if the channel could not be reached.
    identity: EngineIdentity | None = None
    backends: tuple[tuple[str, Role], ...] = ()
    # KV that the engine's first data-parallel rank offers; None if it offers none.
    offered: OfferedKv | None = None
    # KV that each other data-parallel rank offers; None for a rank that offers none.
    other_ranks: tuple[OfferedKv | None, ...] = ()

    def ok(self, subject: str, found: str) -> None:
        self.findings.append(ok(subject, found))

    def note(self, subject: str, found: str, advice: str = "") -> None:
        self.findings.append(note(subject, found, advice))

    def bad(self, subject: str, found: str, advice: str) -> None:
        self.findings.append(bad(subject, found, advice))


def examine_url(
    url: str, seconds: float, seen: ExaminedEngine, environment: Mapping[str, str] = os.environ
) -> None:
    """Examine the HTTP server at a URL, which may be an engine or a router.

    An engine is asked to compute a prompt of four tokens and to offer the KV. The API key is the value of
    ``VLLM_API_KEY`` in `environment`, if it is set.
    """
    key = environment.get("VLLM_API_KEY")
    anyio.run(_examine, url, seconds, {"Authorization": f"Bearer {key}"} if key else {}, seen)


def is_http_server(url: str, seconds: float) -> bool:
    """Return whether a server at a URL answers HTTP requests, with whatever status."""

    async def ask() -> bool:
        async with client() as http:
            try:
                await fetch(http, f"{url}/health", seconds)
            except ProtocolError:
                return False
            return True

    return anyio.run(ask)


async def _examine(url: str, seconds: float, headers: Mapping[str, str], seen: ExaminedEngine) -> None:
    async with client(headers) as http:

        async def ask(
            path: str, post: bytes | None = None, chosen: Mapping[str, str] | None = None
        ) -> HttpReply:
            return await fetch(http, f"{url}{path}", seconds, post, chosen)

        try:
            health = (await ask("/health")).json
            if isinstance(health, dict) and {"prefill", "decode"} <= health.keys():
                _list_backends(health, seen)
            elif _is_engine(await ask("/version"), seen):
                engines = _check_metrics(await ask("/metrics"), seen)
                await _request_kv(ask, seen, engines)
                # Read again: the prompt may have been the engine's first, before which it has few metrics.
                seen.findings += engine_metrics.of_metrics((await ask("/metrics")).text)
        except ProtocolError as error:
            seen.bad(
                "HTTP",
                f"no answer: {error}",
                "check that it is an engine, that it is up, and that this machine can reach it",
            )


def _list_backends(body: dict[str, Any], seen: ExaminedEngine) -> None:
    """Add the engines in a router's ``/health``, and findings on their state, to `seen`."""
    try:
        health = msgspec.convert(body, Health)
    except msgspec.ValidationError as error:
        seen.bad(
            "router",
            f"its /health is not a kvferry router's: {error}",
            "give the address of a kvferry router, or of an engine",
        )
        return
    # Without prefill engines, those that serve alone are listed as decode engines.
    serving = Role.DECODE if health.prefill else Role.BOTH
    roles = dict.fromkeys((one.url for one in health.prefill), Role.PREFILL)
    for one in health.decode:
        roles[one.url] = Role.BOTH if one.url in roles else serving
    seen.backends = tuple(roles.items())
    engines = {one.url: one for one in (*health.prefill, *health.decode)}
    down = [one for one in engines.values() if not one.up]
    seen.ok("router", f"{counted(len(engines), 'engine')} behind it, {len(engines) - len(down)} of them up")
    for one in down:
        seen.bad("router", f"{one.url} is down: {one.reason or 'no reason given'}", "read that engine's log")


def _is_engine(answer: HttpReply, seen: ExaminedEngine) -> bool:
    """Return whether a server is a vLLM engine by its ``/version``, and add a finding on it to `seen`."""
    body = answer.json
    version = body.get("version") if isinstance(body, dict) else None
    if not isinstance(version, str):
        seen.bad("HTTP", "the server is not vLLM: it has no /version", "give an engine's own address")
    elif is_supported(version):
        seen.ok("vLLM", version)
    else:
        supported = supported_text()
        seen.bad("vLLM", f"{version}; kvferry works with {supported}", f"run vLLM {supported}")
    return isinstance(version, str)


def _check_metrics(answer: HttpReply, seen: ExaminedEngine) -> int:
    """Add a finding on ``/metrics`` to `seen`, and return the data-parallel ranks; 1 if it is unknown."""
    if not answer.fine:
        advice = "allow GET /metrics, so that transfers can be observed"
        seen.note("metrics", f"/metrics answers {answer.status}", advice)
        return 1
    shown = [name for prefix, name in _METRICS.items() if prefix in answer.text]
    if _METRICS["kvferry_"] in shown:
        seen.ok("metrics", "/metrics has kvferry's metrics")
    else:
        # Only a note: with several API servers, an engine exports a counter only after its first increment.
        others = f", but has those of {' and '.join(shown)}" if shown else ""
        seen.note("metrics", f"/metrics has none of kvferry's metrics{others}")
    return max(1, len(set(_ENGINE.findall(answer.text))))


async def _request_kv(ask: _Ask, seen: ExaminedEngine, engines: int) -> None:
    """Have every data-parallel rank compute a test prompt, and add the KV that the ranks offer to `seen`.

    If the first rank fails or offers no KV, the other ranks are not asked.
    """
    listed = await ask("/v1/models")
    try:
        model = listed.json["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        denied = listed.status in (401, 403)
        advice = "set VLLM_API_KEY" if denied else "give an engine's own address"
        seen.bad("HTTP", f"/v1/models answers {listed.status} and names no model", advice)
        return
    body = prefill_body({"model": model, "prompt": _PROMPT, "temperature": 0})

    async def compute(rank: int) -> HttpReply:
        return await ask("/v1/completions", body, {_RANK: str(rank)} if engines > 1 else {})

    answer = await compute(0)
    if not answer.fine:
        prompt = f"a prompt of {counted(len(_PROMPT), 'token')}"
        seen.bad("completion", f"{prompt} gets status {answer.status}", "read the engine's log")
        return
    seen.ok("model", str(model))
    params = kv_params_of(answer.body) or {}
    seen.offered = _parse_offer(params)
    if seen.offered is not None:
        others = [await compute(rank) for rank in range(1, engines)]
        seen.other_ranks = tuple(_parse_offer(kv_params_of(one.body)) if one.fine else None for one in others)
    elif params or not await _has_tiers(ask):
        what = (
            "offers KV, but not as kvferry does"
            if params.get("remote_block_ids")
            else "offers no KV for a prompt"
        )
        seen.bad(
            "connector",
            f"{what}: it does not run KVFerryConnector, or its transfer setting is off",
            'start it with --kv-transfer-config "$(kvferry config --role ...)"; with tiers, add --transfer',
        )
    elif seen.role is Role.BOTH:
        seen.ok("connector", "keeps KV in tiers, and exchanges none with other engines (transfer is off)")
    else:
        seen.bad(
            "connector",
            f"keeps KV in tiers, but exchanges none (transfer is off), so it is no {seen.role} engine",
            f"start it with kvferry config --role {seen.role}, or add --transfer",
        )


async def _has_tiers(ask: _Ask) -> bool:
    # The API server counts a step shortly after it has sent the answer.
    for _ in range(_TIER_POLLS):
        if _TIERS in (await ask("/metrics")).text:
            return True
        await anyio.sleep(_TIER_POLL_SECONDS)
    return False


def _parse_offer(params: Mapping[str, Any] | None) -> OfferedKv | None:
    if not params or "remote_block_ids" in params:
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id, ticket = params.get("remote_engine_id"), params.get("remote_request_id")
    if not (isinstance(host, str) and isinstance(port, int) and _TICKET.fullmatch(str(ticket))):
        return None
    return OfferedKv((host, port), str(engine_id), bytes.fromhex(str(ticket)))
