"""Connect to engines at given addresses, and return findings that check and describe each engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from kvferry.common.errors import ConfigError
from kvferry.common.units import counted, format_seconds
from kvferry.tools.doctor import http_engine, ports
from kvferry.tools.doctor.finding import Finding, ReportSection, bad, note, ok, run_all_within
from kvferry.tools.doctor.http_engine import ExaminedEngine, OfferedKv
from kvferry.tools.doctor.identity import EngineIdentity, IdentifyError, identify, release_ticket
from kvferry.tools.fetch import http_address
from kvferry.tools.serving.role import Role
from kvferry.transport import Address, Keys, compare_facts, is_local_address, is_loopback

_SCHEME = "kvferry"
_CONTROL_SECONDS = 5.0
_HTTP_SECONDS = 20.0
_ENGINE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Target:
    """An engine or router to examine.

    Attributes:
        name: address as the user or a router gave it, without credentials.
        url: base URL of the HTTP endpoint; None if no URL is given.
        control: host and port of the control channel, or of an HTTP endpoint if the name has no scheme; None
            with a URL.
    """

    name: str
    role: Role = Role.BOTH
    url: str | None = None
    control: Address | None = None


def parse_target(text: str, role: Role = Role.BOTH) -> Target:
    """Parse the address of an engine or router.

    >>> parse_target("http://127.0.0.1:8100/v1").url  # without /v1 or /metrics at the end
    'http://127.0.0.1:8100'
    >>> parse_target("kvferry://10.0.0.7:5600").control, parse_target("[::1]:5600").control
    (('10.0.0.7', 5600), ('::1', 5600))

    Raises:
        ConfigError: the text is not an address.
    """
    if (url := http_address(text)) is not None:
        netloc = urlsplit(text).netloc
        shown = text.replace(netloc, netloc.rpartition("@")[2])  # hide credentials
        return Target(shown, role, url=url)
    try:
        parts = urlsplit(text if "://" in text else f"{_SCHEME}://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host and port and parts.scheme == _SCHEME and not parts.path.strip("/"):
        return Target(text, role, control=(host, port))
    raise ConfigError(
        f"{text!r} is not an engine's address; give http://host:port of its OpenAI endpoint, or "
        "kvferry://host:port (remote_host and remote_port of its kv_transfer_params)"
    )


def examine_engines(
    targets: Sequence[Target], keys: Keys | None
) -> tuple[list[ReportSection], list[ExaminedEngine]]:
    """Examine all targets concurrently, then the engines behind each target that is a router.

    Returns:
        (sections, engines). `sections` are about the targets and the routers' engines. `engines` lacks those
        whose examination raised an error or took longer than `_ENGINE_SECONDS`.
    """
    found, seen = list[ReportSection](), list[ExaminedEngine]()
    known: set[tuple[str, str]] = set()
    waiting = list(targets)
    while waiting:
        answers = run_all_within(_ENGINE_SECONDS, [partial(_examine_target, one, keys) for one in waiting])
        further: list[Target] = []
        for one, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, BaseException):
                why = str(answer) or type(answer).__name__
                advice = "check whether the engine or the network hangs"
                found.append(_section(one, [bad("engine", f"cannot be checked: {why}", advice)]))
                continue
            for url, role in answer.backends:
                try:
                    further.append(parse_target(url, role))
                except ConfigError as error:
                    answer.bad(
                        "router",
                        f"lists an engine with the URL {url!r}: {error}",
                        "give engine URLs such as http://host:port to that router",
                    )
            found.append(_section(one, answer.findings))
            if not answer.backends and (one.name, one.role) not in known:
                seen.append(answer)
            known.add((one.name, one.role))
        # Routers may list each other, or engines that were given, too: each is examined once.
        waiting = [one for one in further if (one.name, one.role) not in known]
    return found, seen


def _section(one: Target, findings: Sequence[Finding]) -> ReportSection:
    role = "engine" if one.role is Role.BOTH else f"{one.role} engine"
    return ReportSection(f"{role} {one.name}", tuple(findings))


def _examine_target(one: Target, keys: Keys | None) -> ExaminedEngine:
    seen = ExaminedEngine(one.name, one.role)
    control = one.control
    url = one.url or _find_http_endpoint(one)
    if url is not None:
        http_engine.examine_url(url, _HTTP_SECONDS, seen)
        if seen.offered is None:
            return seen
        control = seen.offered.address
        seen.findings += _check_advertised(url, control)
    assert control is not None  # noqa: S101 - a target has either a URL or this
    try:
        seen.identity = _identify_and_release(control, keys, seen.offered)
        seen.findings += [*_describe(seen.identity), *_check_ports(seen.identity)]
    except IdentifyError as error:
        seen.bad("control channel", f"{_format_address(control)}: {error}", error.advice)
    seen.findings += _check_ranks(seen, keys)
    return seen


def _find_http_endpoint(one: Target) -> str | None:
    """Return the URL of a target that is given by host and port alone, if an HTTP server answers there."""
    # Users copy host and port from either endpoint; a scheme says which one it is.
    if one.control is None or "://" in one.name:
        return None
    url = f"http://{_format_address(one.control)}"
    return url if http_engine.is_http_server(url, _CONTROL_SECONDS) else None


def _identify_and_release(control: Address, keys: Keys | None, offered: OfferedKv | None) -> EngineIdentity:
    """Return an engine's description of itself, and release the KV blocks of the test prompt, if any.

    Blocks are not released without `keys`.

    Raises:
        IdentifyError: no engine, or a different engine, answers at the address.
    """
    identity = identify(control, keys, _CONTROL_SECONDS)
    if offered is None or keys is None:
        return identity
    if offered.engine_id != identity.facts.engine_id:
        raise IdentifyError(
            f"engine {offered.engine_id} advertises this address, but "
            f"engine {identity.facts.engine_id} answers there",
            "set the connector's host to an address at which peers reach its machine",
        )
    # The engine has computed the test prompt for a peer: it would keep the blocks until the lease expires.
    release_ticket(control, keys, offered.ticket, http_engine.PROBE_TOKENS)
    return identity


def _check_ranks(seen: ExaminedEngine, keys: Keys | None) -> list[Finding]:
    """Check that an engine's other data-parallel ranks answer and have the settings of the first."""
    if seen.offered is None or not seen.other_ranks:
        return []
    found, known = list[Finding](), {seen.offered.engine_id}
    for number, offered in enumerate(seen.other_ranks, 1):
        rank = f"data-parallel rank {number}"
        if offered is None or offered.engine_id in known:
            what = "offers no KV" if offered is None else "does not answer: another rank answers in its place"
            advice = "check it by its control channel, kvferry://host:port"
            found.append(note(rank, f"it {what}, so it was not checked", advice))
            continue
        known.add(offered.engine_id)
        try:
            other = _identify_and_release(offered.address, keys, offered)
        except IdentifyError as error:
            found.append(bad(rank, f"{_format_address(offered.address)}: {error}", error.advice))
            continue
        if seen.identity is not None and (different := _rank_differences(seen.identity, other)):
            advice = "start all ranks with the same settings"
            found.append(bad(rank, f"it differs from rank 0: {different}", advice))
    if found:
        return found
    ranks = counted(len(seen.other_ranks) + 1, "rank")
    if seen.identity is None:
        what = f"{ranks}; the others answer, but rank 0 does not, so settings were not compared"
        return [note("data-parallel", what, "see 'control channel' above")]
    return [ok("data-parallel", f"{ranks}; all answer and have the same settings")]


def _rank_differences(one: EngineIdentity, other: EngineIdentity) -> str:
    """Return the differences as text; empty if there are none."""
    facts = compare_facts(one.facts.must_agree, other.facts.must_agree)
    if _shape(one) != _shape(other):
        facts = [*facts, "other workers, groups or block sizes"]
    return "; ".join(facts)


def _shape(identity: EngineIdentity) -> list[tuple[object, ...]]:
    ranks = [card.geometry for card in identity.ranks]
    return [
        (rank.tp_size, rank.pp_size, *((group.label, group.block_tokens) for group in rank.groups))
        for rank in ranks
    ]


def _check_advertised(url: str, control: Address) -> list[Finding]:
    """Return a note if an engine of another machine advertises a loopback address to peers."""
    host = urlsplit(url).hostname or ""
    if not is_loopback(control[0]) or is_loopback(host):
        return []
    return [
        note(
            "control channel",
            f"it advertises {control[0]} to peers: only engines on its own machine can exchange KV with it",
            "set the connector's host to an address that peers can reach, and give all engines the same "
            "secret_file",
        )
    ]


def _describe(identity: EngineIdentity) -> list[Finding]:
    first = identity.ranks[0].geometry
    alike = Counter(f"{group.label} in blocks of {group.block_tokens}" for group in first.groups)
    groups = ", ".join(f"{count} x {label}" for label, count in alike.items())
    agree = identity.facts.must_agree
    dtypes = f"{agree.get('model dtype', '?')}, KV cache {agree.get('KV cache dtype', '?')}"
    return [
        ok(
            "control channel",
            f"{_format_address(identity.address)}, encrypted, "
            f"answers in {format_seconds(identity.round_trip_seconds)}",
        ),
        ok("who", f"{identity.facts.engine_id}, {identity.facts.software}"),
        ok(
            "ranks",
            f"TP{first.tp_size} PP{first.pp_size}, {counted(first.num_blocks, 'block')}; groups: {groups}",
        ),
        ok("content", f"weights {agree.get('weights', '?')}; {dtypes}"),
    ]


def _check_ports(identity: EngineIdentity) -> list[Finding]:
    """Check who can reach the listening ports of an engine; empty if its processes cannot be inspected."""
    host, port = identity.address
    if not is_local_address(host):
        return []
    gather = {card.outgoing.port: "gather channel" for card in identity.ranks if card.outgoing}
    return ports.findings(ports.engine_of(host, port), {port: "control channel", **gather})


def _format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
