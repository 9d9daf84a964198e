"""Examine an engine or a router through its HTTP endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import msgspec

from kvferry.doctor import drops, read_speed, snapshots
from kvferry.doctor.finding import Finding, bad, note, ok
from kvferry.engines.vllm.version import is_supported, supported_text
from kvferry.errors import ProtocolError
from kvferry.observe.fetch import Health, HttpReply, client, fetch
from kvferry.serving.role import Role
from kvferry.serving.router.bodies import kv_params_of, prefill_body
from kvferry.transport.handshake import Address
from kvferry.units import counted


class _Ask(Protocol):
    """A function that sends a request to a path of the examined server."""

    async def __call__(
        self, path: str, post: bytes | None = None, chosen: Mapping[str, str] | None = None
    ) -> HttpReply:
        """Send a request and return the answer.

        Args:
            path: path of the URL.
            post: JSON body of a POST request; None for a GET request.
            chosen: headers to add to this request, such as the one that chooses a data-parallel rank; None to
                add none.
        """


_PROMPT = [11, 12, 13, 14]
"""Prompt of the test request: token ids that exist in any vocabulary."""
PROBE_TOKENS = _PROMPT[:-1]
"""Token ids whose KV an engine offers for the test request: all but the last, which the reader computes."""
_RANK = "X-data-parallel-rank"
"""Name of vLLM's header that chooses a data-parallel rank."""
_TICKET = re.compile(r"[0-9a-f]{32}")
"""Pattern of a ticket, the random id that claims the lease on offered blocks.

kvferry sends the ticket under the key that vLLM's NixlConnector uses for a request id.
"""
_ENGINE = re.compile(r'^vllm:num_requests_running\{[^}]*\bengine="(\d+)"', re.MULTILINE)
_METRICS = {"kvferry_": "KVFerryConnector", "vllm:nixl_": "NixlConnector"}
_TIERS = "kvferry_tier_capacity_bytes{"
"""Beginning of a metric that only engines with tiers have, once they have run a step."""
_TIER_POLLS, _TIER_POLL_SECONDS = 5, 0.2


@dataclass(frozen=True, slots=True)
class OfferedKv:
    """The KV of a test prompt, as the engine that computed it offers it to other engines.

    Attributes:
        address: host and port of the engine's control channel.
        engine_id: id of the engine.
        ticket: random id of 16 bytes. An engine that presents it receives the lease on the blocks with this
            KV.
    """

    address: Address
    engine_id: str
    ticket: bytes


@dataclass(slots=True)
class UrlFindings:
    """The result of examining the server at a URL. Each check adds to it.

    Attributes:
        findings: findings in the order of the checks.
        backends: URL and role of each engine behind the server if it is a router; empty otherwise.
        offered: KV that the engine's first data-parallel rank offers; None if it offers none.
        other_ranks: KV that each other data-parallel rank offers; None for a rank that offers none.
        only_tiers: True if the engine offers no KV but has tiers.
    """

    findings: list[Finding] = field(default_factory=list)
    backends: tuple[tuple[str, Role], ...] = ()
    offered: OfferedKv | None = None
    other_ranks: tuple[OfferedKv | None, ...] = ()
    only_tiers: bool = False


def examine_url(url: str, seconds: float, environment: Mapping[str, str] = os.environ) -> UrlFindings:
    """Examine the HTTP server at a URL, which may be an engine or a router.

    If the server is an engine, it is asked to compute a prompt of four tokens and to offer the KV.

    Args:
        url: base URL without a trailing slash.
        seconds: time limit for each answer.
        environment: environment variables. The value of ``VLLM_API_KEY`` is sent as the API key if it is set.
    """
    key = environment.get("VLLM_API_KEY")
    return anyio.run(_examine, url, seconds, {"Authorization": f"Bearer {key}"} if key else {})


def is_http_server(url: str, seconds: float) -> bool:
    """Return whether a server at a URL answers HTTP requests, with whatever status.

    Args:
        url: base URL without a trailing slash.
        seconds: time limit for the answer.
    """

    async def ask() -> bool:
        async with client() as http:
            try:
                await fetch(http, f"{url}/health", seconds)
            except ProtocolError:
                return False
            return True

    return anyio.run(ask)


async def _examine(url: str, seconds: float, headers: Mapping[str, str]) -> UrlFindings:
    """Examine the server at a URL, and return the result.

    Args:
        url: base URL without a trailing slash.
        seconds: time limit for each answer.
        headers: HTTP headers to send with every request.
    """
    seen = UrlFindings()
    async with client(headers) as http:

        async def ask(
            path: str, post: bytes | None = None, chosen: Mapping[str, str] | None = None
        ) -> HttpReply:
            return await fetch(http, f"{url}{path}", seconds, post, chosen)

        try:
            if router := _parse_router_health(await ask("/health")):
                return _list_backends(router)
            if _is_engine(await ask("/version"), seen):
                engines = _check_metrics(await ask("/metrics"), seen)
                await _request_kv(ask, seen, engines)
                metrics = (await ask("/metrics")).text
                for check in (snapshots, drops, read_speed):
                    seen.findings += check.of_metrics(metrics)
        except ProtocolError as error:
            seen.findings.append(
                bad(
                    "HTTP",
                    f"no answer: {error}",
                    "check that it is an engine, that it is up, and that this machine can reach it",
                )
            )
    return seen


def _parse_router_health(health: HttpReply) -> dict[str, Any] | None:
    """Return the JSON object of a router's ``/health``; None if the server is not a router.

    Args:
        health: answer of the server to ``/health``.
    """
    body = health.json
    return body if isinstance(body, dict) and {"prefill", "decode"} <= body.keys() else None


def _list_backends(body: dict[str, Any]) -> UrlFindings:
    """Return the URL and role of each engine behind a router, and findings about the engines' state.

    If the JSON object does not have the form of a router's ``/health``, return no engines, and a BAD finding.

    Args:
        body: JSON object of the router's ``/health``.
    """
    seen = UrlFindings()
    try:
        health = msgspec.convert(body, Health)
    except msgspec.ValidationError as error:
        seen.findings.append(
            bad(
                "router",
                f"its /health is not a kvferry router's: {error}",
                "give the address of a kvferry router, or of an engine",
            )
        )
        return seen
    # Without prefill engines, those that serve alone are listed as decode engines.
    serving = Role.DECODE if health.prefill else Role.BOTH
    engines = [(one, Role.PREFILL) for one in health.prefill] + [(one, serving) for one in health.decode]
    seen.backends = tuple((one.url, role) for one, role in engines)
    down = [one for one, _ in engines if not one.up]
    seen.findings.append(
        ok("router", f"{counted(len(engines), 'engine')} behind it, {len(engines) - len(down)} of them up")
    )
    seen.findings += [
        bad("router", f"{one.url} is down: {one.reason or 'no reason given'}", "read that engine's log")
        for one in down
    ]
    return seen


def _is_engine(answer: HttpReply, seen: UrlFindings) -> bool:
    """Return True if the server is a vLLM engine, and add a finding on its version to `seen`.

    Args:
        answer: answer of the server to ``/version``.
        seen: result of the examination so far. Mutated.
    """
    body = answer.json
    version = body.get("version") if isinstance(body, dict) else None
    if not isinstance(version, str):
        seen.findings.append(
            bad(
                "HTTP",
                "the server is not vLLM: it has no /version",
                "give an engine's own address",
            )
        )
    elif is_supported(version):
        seen.findings.append(ok("vLLM", version))
    else:
        supported = supported_text()
        seen.findings.append(
            bad("vLLM", f"{version}; kvferry works with {supported}", f"run vLLM {supported}")
        )
    return isinstance(version, str)


def _check_metrics(answer: HttpReply, seen: UrlFindings) -> int:
    """Check that an engine exports kvferry's metrics, and add the finding to `seen`.

    If they are missing, the finding is only a note, because this can be normal: an engine with several API
    servers does not export a counter before its first increment.

    Args:
        answer: answer of the engine to ``/metrics``.
        seen: result of the examination so far. Mutated.

    Returns:
        Number of data-parallel ranks with metrics; 1 if it is unknown.
    """
    shown = [name for prefix, name in _METRICS.items() if prefix in answer.text] if answer.fine else []
    if not answer.fine:
        seen.findings.append(
            note(
                "metrics",
                f"/metrics answers {answer.status}",
                "allow GET /metrics, so that transfers can be observed",
            )
        )
    elif _METRICS["kvferry_"] in shown:
        seen.findings.append(ok("metrics", "/metrics has kvferry's metrics"))
    else:
        others = f", but has those of {' and '.join(shown)}" if shown else ""
        seen.findings.append(note("metrics", f"/metrics has none of kvferry's metrics{others}"))
    return max(1, len(set(_ENGINE.findall(answer.text)))) if answer.fine else 1


async def _request_kv(ask: _Ask, seen: UrlFindings, engines: int) -> None:
    """Have every data-parallel rank compute a test prompt, and add the KV that the ranks offer to `seen`.

    If the first rank fails or offers no KV, a BAD finding is added, and the other ranks are not asked.

    Args:
        ask: function that sends an HTTP request to the engine.
        seen: result of the examination so far. Mutated.
        engines: number of vLLM's engines behind the URL, one per data-parallel rank.
    """
    listed = await ask("/v1/models")
    try:
        model = listed.json["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        denied = listed.status in (401, 403)
        advice = "set VLLM_API_KEY" if denied else "give an engine's own address"
        seen.findings.append(bad("HTTP", f"/v1/models answers {listed.status} and names no model", advice))
        return
    body = prefill_body({"model": model, "prompt": _PROMPT, "temperature": 0})

    async def compute(rank: int) -> HttpReply:
        return await ask("/v1/completions", body, {_RANK: str(rank)} if engines > 1 else {})

    answer = await compute(0)
    if not answer.fine:
        seen.findings.append(
            bad(
                "completion",
                f"a prompt of {counted(len(_PROMPT), 'token')} gets status {answer.status}",
                "read the engine's log",
            )
        )
        return
    seen.findings.append(ok("model", str(model)))
    seen.offered = _parse_offer(kv_params_of(answer.body))
    if seen.offered is not None:
        others = [await compute(rank) for rank in range(1, engines)]
        seen.other_ranks = tuple(_parse_offer(kv_params_of(one.body)) if one.fine else None for one in others)
        return
    params = kv_params_of(answer.body) or {}
    if not params and await _has_tiers(ask):
        seen.only_tiers = True
        return
    what = (
        "offers KV, but not as kvferry does"
        if params.get("remote_block_ids")
        else "offers no KV for a prompt"
    )
    seen.findings.append(
        bad(
            "connector",
            f"{what}: it does not run KVFerryConnector, or its transfer setting is off",
            'start it with --kv-transfer-config "$(kvferry config --role ...)"; with tiers, add --transfer',
        )
    )


async def _has_tiers(ask: _Ask) -> bool:
    """Return whether the engine's metrics show tiers.

    The API server counts a step shortly after it has sent the answer, so the metrics are read several times.

    Args:
        ask: function that sends an HTTP request to the engine, which has computed a prompt.
    """
    for _ in range(_TIER_POLLS):
        if _TIERS in (await ask("/metrics")).text:
            return True
        await anyio.sleep(_TIER_POLL_SECONDS)
    return False


def _parse_offer(params: dict[str, Any] | None) -> OfferedKv | None:
    if not params or "remote_block_ids" in params:
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id, ticket = params.get("remote_engine_id"), params.get("remote_request_id")
    if not (isinstance(host, str) and isinstance(port, int) and _TICKET.fullmatch(str(ticket))):
        return None
    return OfferedKv((host, port), str(engine_id), bytes.fromhex(str(ticket)))
