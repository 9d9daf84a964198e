"""An engine, or a router, at the address of its OpenAI endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvferry.doctor.finding import Finding, bad, note, ok
from kvferry.engines.vllm.version import TESTED, is_tested
from kvferry.serving.role import Role
from kvferry.serving.router.bodies import handed_over, prefill_body
from kvferry.serving.router.upstream import says
from kvferry.transport.handshake import Address

_PROMPT = [11, 12, 13, 14]
"""Token ids that any vocabulary has; the engine drops the last one."""
_CONNECT_SECONDS = 5.0
_RANK = "X-data-parallel-rank"
"""The header by which vLLM lets a data-parallel rank be chosen."""
_ENGINE = re.compile(r'^vllm:num_requests_running\{[^}]*\bengine="(\d+)"', re.MULTILINE)
_METRICS = {"kvferry_": "KVFerryConnector", "vllm:nixl_": "NixlConnector"}


@dataclass(frozen=True, slots=True)
class Offered:
    """Where an engine says that it keeps what it has just computed.

    Attributes:
        address: of its control channel.
        engine_id: of the engine.
        lease: the name under which it keeps it.
    """

    address: Address
    engine_id: str
    lease: str


@dataclass(slots=True)
class AtUrl:
    """What an HTTP address has shown.

    Attributes:
        findings: about it.
        behind: engines behind a router, with their roles.
        offered: by an engine that exchanges KV; of a data-parallel one, by its first rank.
        others: the same by its other ranks, None of one that does not.
    """

    findings: list[Finding] = field(default_factory=list)
    behind: tuple[tuple[str, Role], ...] = ()
    offered: Offered | None = None
    others: tuple[Offered | None, ...] = ()


def look(url: str, seconds: float, environment: Mapping[str, str] = os.environ) -> AtUrl:
    """Ask what is at `url`. An engine is given a prompt of four tokens, to be computed for another engine.

    Args:
        url: without a path.
        seconds: for each answer.
        environment: ``VLLM_API_KEY`` is sent where it is set, as vLLM reads it.
    """
    key = environment.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
    with httpx.Client(base_url=url, timeout=timeout, trust_env=False, headers=headers) as client:
        seen = AtUrl()
        try:
            if router := _router(client):
                return _behind(router)
            if _is_engine(client, seen):
                _ask_for_kv(client, seen, _connector(client, seen))
        except httpx.HTTPError as error:
            seen.findings.append(
                bad(
                    "HTTP",
                    f"{url} does not answer: {says(error)}",
                    "see that it is up, and reachable from here",
                )
            )
        return seen


def _router(client: httpx.Client) -> dict[str, Any] | None:
    """What a router says of its engines; None if this is none."""
    health = _json(client.get("/health"))
    return health if isinstance(health, dict) and {"prefill", "decode"} <= health.keys() else None


def _behind(health: dict[str, Any]) -> AtUrl:
    try:
        seen = AtUrl(
            behind=tuple(
                (str(one["url"]), role) for role in (Role.PREFILL, Role.DECODE) for one in health[role]
            )
        )
        down = [one for role in (Role.PREFILL, Role.DECODE) for one in health[role] if not one.get("up")]
    except (TypeError, KeyError, AttributeError):
        seen = AtUrl()
        seen.findings.append(bad("router", "its /health is not that of kvferry's router", "see what it is"))
        return seen
    seen.findings.append(
        ok("router", f"{len(seen.behind)} engines behind it, {len(seen.behind) - len(down)} of them up")
    )
    seen.findings += [
        bad("router", f"{one['url']} is down: {one.get('reason') or 'no reason given'}", "see to that engine")
        for one in down
    ]
    return seen


def _is_engine(client: httpx.Client, seen: AtUrl) -> bool:
    """Whether it is vLLM, which says its version."""
    answer = _json(client.get("/version"))
    version = answer.get("version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        seen.findings.append(
            bad(
                "HTTP",
                "something answers there that is no vLLM: it has no /version",
                "give an engine's own address",
            )
        )
    elif is_tested(version):
        seen.findings.append(ok("vLLM", version))
    else:
        seen.findings.append(bad("vLLM", f"{version}; kvferry is tested with {TESTED}", f"run vLLM {TESTED}"))
    return isinstance(version, str)


def _connector(client: httpx.Client, seen: AtUrl) -> int:
    """Whose metrics it shows; several API servers show none of a counter that never counted.

    Returns:
        How many data-parallel ranks it shows metrics of; 1 where that cannot be seen.
    """
    answer = client.get("/metrics")
    shown = [name for prefix, name in _METRICS.items() if prefix in answer.text] if answer.is_success else []
    if not answer.is_success:
        seen.findings.append(
            note("metrics", f"/metrics answers {answer.status_code}", "let it be asked, to see what moves")
        )
    elif _METRICS["kvferry_"] in shown:
        seen.findings.append(ok("metrics", "kvferry's are on its /metrics"))
    else:
        others = f", but {' and '.join(shown)}'s are" if shown else ""
        seen.findings.append(note("metrics", f"none of kvferry's on its /metrics{others}"))
    return max(1, len(set(_ENGINE.findall(answer.text)))) if answer.is_success else 1


def _ask_for_kv(client: httpx.Client, seen: AtUrl, engines: int) -> None:
    """Compute a short prompt for another engine, on every rank: answers say where control channels are."""
    models = _json(listed := client.get("/v1/models"))
    try:
        model = models["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        denied = listed.status_code in (401, 403)
        advice = "set VLLM_API_KEY" if denied else "give an engine's own address"
        seen.findings.append(
            bad("HTTP", f"/v1/models answers {listed.status_code} and names no model", advice)
        )
        return
    body = prefill_body({"model": model, "prompt": _PROMPT, "temperature": 0})

    def compute(rank: int) -> httpx.Response:
        chosen = {_RANK: str(rank)} if engines > 1 else {}
        return client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json", **chosen}
        )

    answer = compute(0)
    if not answer.is_success:
        seen.findings.append(
            bad(
                "completion",
                f"a prompt of {len(_PROMPT)} tokens is answered {answer.status_code}",
                "see its log",
            )
        )
        return
    seen.findings.append(ok("model", str(model)))
    seen.offered = _offered(handed_over(answer.content))
    if seen.offered is not None:
        others = [compute(rank) for rank in range(1, engines)]
        seen.others = tuple(_offered(handed_over(one.content)) if one.is_success else None for one in others)
    else:
        other = handed_over(answer.content) or {}
        what = (
            "offers KV, but not as kvferry does"
            if other.get("remote_block_ids")
            else "offers no KV of a prompt"
        )
        seen.findings.append(
            bad(
                "connector",
                f"{what}: it does not run KVFerryConnector, or not with transfer on",
                'start it with --kv-transfer-config "$(kvferry config --role ...)"; --transfer with tiers',
            )
        )


def _offered(params: dict[str, Any] | None) -> Offered | None:
    if not params or "remote_lease" not in params:
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id, lease = params.get("remote_engine_id"), params.get("remote_request_id")
    if not (isinstance(host, str) and isinstance(port, int)):
        return None
    return Offered((host, port), str(engine_id), str(lease))


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
