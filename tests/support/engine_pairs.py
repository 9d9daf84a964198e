"""Engines twice: simulated, and with the code that serves. Both serve the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock, patch

import msgspec
import numpy as np
from hypothesis import strategies as st

from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.connector.choosing import LocalPrefix
from kvferry.connector.config import read_tenants
from kvferry.connector.hints import NO_HINTS, Hints, HintSpan
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import canonical_form_of
from kvferry.keys.chunk import ChunkKeys
from kvferry.keys.tenant import tenant_of
from kvferry.tiers import write_filter
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from kvferry.tools.plan.blocks import SnapshotSteps
from kvferry.tools.plan.kept import StoredForm
from kvferry.tools.replay.content import RequestKeys, keys_of_each
from kvferry.tools.replay.engine import NO_PREFIX, Hit
from kvferry.tools.replay.hints import HintSetting, parse_hint
from kvferry.tools.replay.lookup import SimulatedTier
from kvferry.tools.replay.settings import (
    ADMIT_ALL,
    AdmissionSetting,
    BlockGroup,
    ReplaySettings,
    ServedModel,
    TierSetting,
)
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import TraceRequest
from support.models import model
from support.served_engine import BLOCKS, OthersMemory, ServedEngine, served_engine


def small_model(
    stores: Sequence[LayerCache],
    *,
    chunk_tokens: int,
    block_tokens: int,
    step_tokens: int,
    retention: int | None = None,
    snapshot_tokens: int | None = None,
    first_snapshot_tokens: int = 0,
) -> tuple[ServedModel, RankGeometry]:
    """A model with one layer for each of these caches, as the simulation and as a rank describe it."""
    shape = EngineShape(1, (len(stores),), block_tokens, "LBHNC", BLOCKS)
    (rank,) = lay_out(model(*stores), shape)
    canonical = canonical_form_of([rank], chunk_tokens)
    assert [group.label for group in rank.groups] == [group.label for group in canonical.groups]
    form = StoredForm(
        canonical=canonical,
        steps=SnapshotSteps(block_tokens, step_tokens, retention),
        snapshot_tokens=snapshot_tokens or chunk_tokens,
        first_tokens=chunk_tokens,
        requested_first=first_snapshot_tokens,
    )
    groups = (BlockGroup(one.kind, one.attention_span, block_tokens, 1) for one in canonical.groups)
    return ServedModel("small", form, tuple(groups), rank.regions[0].length // BLOCKS), rank


@dataclass(frozen=True)
class Turn:
    """A request: token ids of its prompt and of its answer, and what the engine's prefix cache has."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    local: LocalPrefix = NO_PREFIX
    tenant: str = ""
    session: str = ""
    hints: Hints = NO_HINTS
    at: float = 0.0  # seconds at which it begins and ends
    prefetched: bool = False  # True if the chunks of its session's last request are brought to host memory


class GivenCache:
    """In place of a simulated prefix cache: it has what a test says."""

    def __init__(self, model: ServedModel) -> None:
        self.local, self._model = NO_PREFIX, model

    def keys_of_each(self, requests: list[TraceRequest]) -> tuple[list[RequestKeys], list[RequestKeys]]:
        keys = keys_of_each(requests, self._model.chunk_tokens, len(self._model.groups))
        return keys, keys

    def keep(self, *of: object) -> None:
        pass

    def look_up(self, prompt: int, keys: RequestKeys) -> LocalPrefix:
        return self.local


class Both:
    """Simulated engines and as many that serve, with equal settings."""

    def __init__(
        self, served: Sequence[ServedEngine], simulation: Simulation, model: ServedModel, unit: int
    ) -> None:
        self.served, self.simulation, self._model, self._unit = served, simulation, model, unit
        self._cache = GivenCache(model)
        for engine in simulation.engines:
            engine.cache = self._cache
        self._names: dict[bytes, bytes] = {}  # key in the simulation: key where requests are served

    def serve(self, turn: Turn, engine: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Serve a request twice. Return the tokens found in the engine and each tier, simulated and real."""
        hits: list[Hit] = []
        request = self._request(turn)
        self._cache.local = turn.local
        if turn.prefetched:
            self._prefetch(turn, engine)
        self.simulation._client_hints = (
            Mock(of=lambda _: turn.hints) if self.simulation.settings.hints else None
        )
        self.simulation._on_hit = lambda _, hit: hits.append(hit)
        self.simulation._route = lambda *_: engine
        self.simulation.run([request])
        self.served[engine].now = turn.at
        real = self.served[engine].serve(
            [*turn.prompt],
            [*turn.answer],
            turn.local,
            cache_salt=turn.tenant or None,
            session_id=turn.session or None,
            hints=None if turn.hints is NO_HINTS else msgspec.to_builtins(turn.hints),
        )
        (hit,) = hits
        return (hit.local_tokens, *hit.tier_tokens), (real.local_tokens, *real.tier_tokens)

    def held(self) -> list[tuple[set[bytes], set[bytes]]]:
        """Return the keys of the chunks in each tier that stores, simulated and real."""
        found = []
        for simulated, served in zip(self.simulation.engines, self.served, strict=True):
            real = [served.host, *(tier.held for tier in served.tiers if not isinstance(tier, OthersMemory))]
            storing = [tier for tier in simulated.tiers.tiers if isinstance(tier, SimulatedTier)]
            for tier, theirs in zip(storing, real, strict=True):
                found.append(({self._names[key] for key in tier.held}, theirs))
        return found

    def retained(self) -> list[tuple[set[bytes], set[bytes]]]:
        """Return the keys of the retained chunks, simulated and real."""
        found = []
        for simulated, served in zip(self.simulation.engines, self.served, strict=True):
            served.hinting._retained.check_integrity()
            mine, theirs = simulated.hints.retained._chunks, served.hinting._retained._chunks
            found.append(({self._names[key] for key in mine}, set(theirs)))
        return found

    def _prefetch(self, turn: Turn, engine: int) -> None:
        self.simulation.engines[engine].set_time(turn.at)
        self.simulation.engines[engine].hints.prefetch((turn.tenant, turn.session), 1e9)
        self.served[engine].now = turn.at
        self.served[engine].prefetch_session((turn.tenant, turn.session))

    def _request(self, turn: Turn) -> TraceRequest:
        """Make the request of a trace, and learn the names of its chunks."""
        tokens, prompt, size = [*turn.prompt, *turn.answer], len(turn.prompt), self._model.chunk_tokens
        groups = range(len(self._model.groups))
        request = trace_request(turn, self._unit)
        made = keys_of_each([request], size, len(groups))[0]
        tenant = tenant_of(turn.tenant, None)
        real = PromptChunks(self._model.groups, ChunkKeys(size, tokens, salt=turn.tenant, tenant=tenant))
        for group in groups:
            names = {key: real.key(group, number) for number, key in enumerate(made.whole[group])}
            if prompt % size:
                names[made.tail(prompt)[group]] = real.tail(group, prompt)
            for key, name in names.items():
                assert self._names.setdefault(key, name) == name, "a trace has one name for each content"
        return request


def trace_request(turn: Turn, unit_tokens: int) -> TraceRequest:
    """Return the request as a trace has it, with identities made from its token ids."""
    units = ChunkKeys(unit_tokens, [*turn.prompt, *turn.answer]).chunks()
    return TraceRequest(
        arrival=turn.at,
        prompt_tokens=len(turn.prompt),
        output_tokens=len(turn.answer),
        unit_tokens=unit_tokens,
        prefix_ids=np.array([_first_bytes(key) for key in units], np.uint64),
        prompt_id=_first_bytes(ChunkKeys(unit_tokens, turn.prompt).at(len(turn.prompt))),
        session=turn.session,
        tenant=turn.tenant,
    )


def _first_bytes(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


@contextmanager
def both(
    model: ServedModel,
    rank: RankGeometry,
    *,
    host_bytes: int,
    policy: str = "lru",
    slow: Mapping[str, int],
    admission: AdmissionSetting = ADMIT_ALL,
    unit_tokens: int = 1,
    engines: int = 1,
    hint_share: float | None = None,
    hint_seconds: float = 3600.0,
    tenants: Mapping[str, object] | None = None,
    files: Path | None = None,
) -> Iterator[Both]:
    """Start engines twice, each with tiers of these capacities in bytes. `hint_share` None: no hints.

    With `files`, the file tier of the engine that serves is a real one, in this directory.
    """
    capacities = {"host": host_bytes, **slow}
    tiers = [
        TierSetting(kind=kind, capacity_bytes=capacity, shared=False, bytes_per_second=1e9)
        for kind, capacity in capacities.items()
    ]
    settings = ReplaySettings(
        tiers=tuple(tiers),
        policy=policy,
        engines=engines,
        admission=admission,
        hints=None
        if hint_share is None
        else HintSetting((parse_hint("ends_session"),), hint_share, hint_seconds),
        tenants=read_tenants(tenants),
    )
    more = {} if hint_share is None else {"hint_share": hint_share, "hint_seconds": hint_seconds}
    simulation, served = Simulation(model, settings, unit_tokens), list[ServedEngine]()
    with ExitStack() as started:
        # Two of 8 MiB for each engine would be kept until the next collection of garbage.
        started.enter_context(patch.object(write_filter, "COLUMNS", 1 << 14))
        for _ in range(engines):
            one = served_engine(
                model,
                rank,
                host_bytes=host_bytes,
                policy=policy,
                slow=slow,
                admission=admission,
                fleet=served,
                files=files,
                tenants=tenants,
                **more,
            )
            served.append(started.enter_context(one))
        yield Both(served, simulation, model, unit_tokens)


@st.composite
def conversations(
    draw: st.DrawFn, *, most_tokens: int, block_tokens: int = 0, requests: int = 12
) -> list[Turn]:
    """Requests that continue, repeat or branch off from earlier ones, or are new.

    Args:
        draw: given by hypothesis.
        most_tokens: maximum tokens of a prompt with its answer.
        block_tokens: tokens per block of the engine, whose prefix cache then has any prefix; 0 for an engine
            without prefix caching.
        requests: maximum number of requests.
    """
    shares, lengths = st.integers(0, 8), st.integers(0, most_tokens)
    fresh = st.one_of(st.sampled_from([0, 0, 1, 7, 8, 9, 16]), lengths)
    answers = st.sampled_from([0, 0, 1, 2, 8, 9, 17, 25])
    shape = st.tuples(st.integers(0, 99), shares, fresh, answers, shares, shares)
    seen: list[tuple[int, ...]] = [()]
    turns: list[Turn] = []
    for number, (base, share, new, more, attention, state) in enumerate(
        draw(st.lists(shape, min_size=2, max_size=requests))
    ):
        if turns and share == 8 and state > 3:  # the same prompt with the same answer
            turns.append(turns[base % len(turns)])
            continue
        before, own = seen[base % len(seen)], range(1000 * number, 1000 * number + 999)
        kept = before if share > 3 else before[: len(before) * share // 4]
        prompt = (*kept, *own[:new])[: most_tokens - more] or (7,)
        local = NO_PREFIX
        if block_tokens and attention > 2:
            blocks = (len(prompt) - 1) // block_tokens * attention // 8
            tokens = blocks if state > 4 else blocks * state // 4
            local = LocalPrefix(blocks * block_tokens, tokens * block_tokens)
        turns.append(Turn(prompt, tuple(own[500 : 500 + more]), local))
        seen += [prompt, (*prompt, *turns[-1].answer)]
    return turns


def hinted(turns: Sequence[Turn], tenants: Sequence[str] = ("", "a", "b")) -> st.SearchStrategy[list[Turn]]:
    """The same requests at growing times, some with sessions, tenants and hints."""
    position = st.sampled_from([0, 8, 12, 20, 40])
    spans = st.builds(
        HintSpan,
        start=position,
        end=st.one_of(st.none(), st.sampled_from([8, 17, 30, 64])),
        store=st.sampled_from([True, True, True, False]),
        retain_seconds=st.sampled_from([0.0, 3.0, 1000.0, 1000.0]),
        priority=st.sampled_from([0, 0, 5]),
    )
    hints = st.one_of(
        st.just(NO_HINTS),
        st.builds(
            Hints,
            spans=st.lists(spans, max_size=2).map(tuple),
            ends_session=st.sampled_from([False, False, True]),
        ),
    )
    each = st.tuples(
        st.sampled_from(tenants), st.sampled_from(["", "s", "t"]), hints, st.floats(0, 2), st.booleans()
    )

    def made(drawn: list[tuple[str, str, Hints, float, bool]]) -> list[Turn]:
        found, now = list[Turn](), 0.0
        for turn, (tenant, session, hint, gap, prefetched) in zip(turns, drawn, strict=True):
            now += gap
            more = {"session": session, "hints": hint, "at": now, "prefetched": prefetched and bool(session)}
            found.append(replace(turn, tenant=tenant, **more))
        return found

    return st.lists(each, min_size=len(turns), max_size=len(turns)).map(made)
