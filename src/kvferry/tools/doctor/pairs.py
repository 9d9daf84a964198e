"""Check whether one engine can read another's KV, with the same functions as the engines' handshake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations

from kvferry.common.errors import ConfigError, Incompatible
from kvferry.common.units import counted, format_bytes, format_seconds
from kvferry.geometry import GroupKind
from kvferry.planning import (
    Costs,
    Template,
    absent_layer_names,
    build_templates,
    choose_method,
    transfer_methods,
    window_mismatches,
)
from kvferry.tools.doctor.finding import Finding, ReportSection, State, bad, note, ok, run_check
from kvferry.tools.doctor.http_engine import ExaminedEngine
from kvferry.tools.doctor.identity import EngineIdentity
from kvferry.tools.serving.role import Role
from kvferry.transport import compare_facts, is_loopback

_PAIR_SECONDS = 60.0
# A request of typical length, and the default of the setting staging_mib.
_CELLS = 64
_IMAGE_BYTES = 64 << 20
_UNVERIFIED = "unverified"
# By the name of the fact that differs (`engines.vllm.identity`).
_ADVICE = {
    "weights": "give both the same checkpoint",
    "model configuration": "give both the same config.json and --hf-overrides, and a --max-model-len that "
    "has the same effect",
    "built model": "give both the same --hf-overrides, and a --max-model-len that has the same effect",
    "model dtype": "give both the same --dtype",
    "KV cache dtype": "give both the same --kv-cache-dtype",
    "recurrent state dtypes": "give both the same --mamba-cache-dtype and --mamba-ssm-cache-dtype",
    "quantization": "give both the same --quantization",
    "multimodal processor": "give both the same preprocessor_config.json and --mm-processor-kwargs",
    "engine settings": "give both the same value of the engine argument that is named",
}
_OTHERWISE = "start both with the same model, dtypes, attention backend and cache manager"


def differences(there: EngineIdentity, here: EngineIdentity) -> list[str]:
    """Return the reasons why engine `here` cannot read KV from engine `there`; empty if it can."""
    found = dict.fromkeys(compare_facts(there.facts.must_agree, here.facts.must_agree))
    peer = [card.geometry for card in there.ranks]
    for card in here.ranks:
        try:
            build_templates(peer, card.geometry)
        except Incompatible as error:
            found |= dict.fromkeys(error.differences)
        found |= dict.fromkeys(window_mismatches(peer, card.geometry))
    return list(found)


def check(engines: Sequence[ExaminedEngine], costs: Costs, local: str = "") -> list[ReportSection]:
    """Check, for every pair of engines whose roles allow it, whether one can read KV from the other.

    Args:
        engines: all examined engines. Those without a description of themselves are skipped.
        local: text with the measured speed of READs between two processes of this machine; empty if it was
            not measured.

    Returns:
        One section per direction, or one for both directions if their findings are the same.
    """
    identity = [(seen, seen.identity) for seen in engines if seen.identity is not None]
    found: dict[tuple[str, str], tuple[Finding, ...]] = {}
    for (source, there), (reader, here) in permutations(identity, 2):
        if source.role is not Role.DECODE and reader.role is not Role.PREFILL and there.facts != here.facts:
            check_pair = partial(_check_pair, there, here, costs, local)
            found[source.name, reader.name] = tuple(run_check("pair", _PAIR_SECONDS, check_pair))
    sections, reported = list[ReportSection](), set[tuple[str, str]]()
    for (one, other), findings in found.items():
        back = found.get((other, one))
        if (other, one) in reported:
            continue
        alike = back is not None and _without_direction(findings) == _without_direction(back)
        sections.append(ReportSection(f"{one} (there) {'<->' if alike else '->'} {other} (here)", findings))
        if alike:
            reported.add((one, other))
    return sections


def _without_direction(findings: Sequence[Finding]) -> set[tuple[str, State, str]]:
    """Return the findings about two engines in a form that is equal for both directions of transfer.

    In the findings, “there” is the engine that has the KV, and “here” is the engine that reads it.

    >>> one, other = "dtype: a there, b here", "dtype: b there, a here"
    >>> _without_direction([note("x", one)]) == _without_direction([note("x", other)])
    True
    """
    return {(one.subject, one.state, re.sub(r"[^:,;]* (there|here)", r" \1", one.found)) for one in findings}


def _check_pair(there: EngineIdentity, here: EngineIdentity, costs: Costs, local: str) -> Iterator[Finding]:
    different = differences(there, here)
    for text in different:
        yield bad("difference", text, _ADVICE.get(_fact_of(text), _OTHERWISE))
    if is_loopback(there.address[0]) and not is_loopback(here.address[0]):
        yield bad(
            "address",
            f"the first advertises {there.address[0]}, at which the second reaches only its own machine",
            "set host (or advertise_host) of the first to an address that peers can reach",
        )
    if not different:
        yield ok("compatible", _describe_transfers(there, here, costs))
        yield from _check_draft_layers(there, here)
        yield from _check_windows(there, here)
    weights = [str(one.facts.must_agree.get("weights")) for one in (there, here)]
    if any(one.startswith(_UNVERIFIED) for one in weights):
        yield note(
            "weights",
            "are compared by the model's name alone, because a checkpoint is not on its engine's disk",
            "load the checkpoint from a folder, so that its content is compared",
        )
    if there.facts.software != here.facts.software:
        both = f"{there.facts.software} there, {here.facts.software} here"
        yield note("software", f"{both}; this alone does not prevent transfers")
    yield _describe_link(there, here, local)


def _fact_of(difference: str) -> str:
    """Return the name of the fact that a message is about.

    >>> _fact_of("built model, RotaryEmbedding.base: 10000 there, 500 here")
    'built model'
    """
    return difference.partition(":")[0].partition(",")[0]


def _describe_link(there: EngineIdentity, here: EngineIdentity, local: str) -> Finding:
    # In one order for both directions, so that their findings can be equal.
    times = sorted((there.round_trip_seconds, here.round_trip_seconds))
    took = " and ".join(map(format_seconds, times))
    channel = f"control channels answer in {took}, measured from here"
    if there.address[0] == here.address[0]:
        place = f"one machine; two processes on the doctor's machine read {local}" if local else "one machine"
    else:
        place = "two machines; neither the speed between them nor UCX's transport there was measured"
    return ok("link", f"{place}; {channel}")


def _describe_transfers(there: EngineIdentity, here: EngineIdentity, costs: Costs) -> str:
    """Return a text with the number of ranks, the transfer strategies and the sizes of contiguous runs."""
    ranks = f"{counted(len(there.ranks), 'rank')} there, {len(here.ranks)} here"
    peer = [card.geometry for card in there.ranks]
    templates = [t for card in here.ranks for t in build_templates(peer, card.geometry)]
    try:
        strategies = sorted(_strategies(templates, costs))
    except ConfigError as error:
        return f"{ranks}; {error}"
    runs = [copy.run for t in templates for route in t.routes for copy in route.copies]
    ends = dict.fromkeys((format_bytes(min(runs)), format_bytes(max(runs))))
    return f"{ranks}; strategy {' and '.join(strategies)}, runs of {' to '.join(ends)}"


def _strategies(templates: Sequence[Template], costs: Costs) -> set[str]:
    """Return the names of the strategies that the planner would choose for a request of typical length."""
    routes = [route for template in templates for route in template.routes]
    choices = [transfer_methods(route, costs, _IMAGE_BYTES) for route in routes]
    return {str(each[choose_method(each, _CELLS, costs)].strategy) for each in choices}


def _check_draft_layers(there: EngineIdentity, here: EngineIdentity) -> Iterator[Finding]:
    peer, ours = ([card.geometry for card in identity.ranks] for identity in (there, here))
    # Loads set the KV of the missing layers to zero.
    if names := absent_layer_names(peer, ours):
        yield note(
            "draft model",
            f"the engine there lacks {counted(len(names), 'layer')} of the draft model here, such as "
            f"{names[0]}: the model's own layers are transferred without them, and fewer drafts are accepted",
            "run both with the same draft model (--speculative-config) if that matters",
        )


def _check_windows(there: EngineIdentity, here: EngineIdentity) -> Iterator[Finding]:
    theirs, ours = _window_block_tokens(there), _window_block_tokens(here)
    if 0 < theirs < ours:
        yield note(
            "windows",
            f"blocks of {counted(theirs, 'token')} there, {ours} here: a load may fill only part of the "
            "block in which a window begins, and such a block serves one request",
            "use the same block size on both where prompts share prefixes",
        )


def _window_block_tokens(engine: EngineIdentity) -> int:
    kinds = (GroupKind.SLIDING, GroupKind.CHUNKED)
    groups = [group for card in engine.ranks for group in card.geometry.groups]
    return max((group.block_tokens for group in groups if group.kind in kinds), default=0)
