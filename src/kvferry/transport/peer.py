"""What is prepared for one peer, and the descriptors of one read from it.

At connect, every rank of the peer that supplies anything gets a pair of prepared lists, ours and its own,
that pair entry by entry; a read is then two index arrays per rank. Its lease words are one more such pair.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry, Region
from kvferry.planning.pieces import Int64s
from kvferry.planning.request import Indices, Tally, as_indices, tally
from kvferry.planning.select import Span, select_cells
from kvferry.planning.template import Template, build_templates
from kvferry.transport.agent import Agent
from kvferry.transport.lease import Ticket
from kvferry.transport.messages import RankCard

WORD_BYTES = 8
MAX_DESCRIPTORS = 1 << 26
"""Entries of one prepared list: indices are int32, and NIXL keeps some tens of bytes for each."""

MAX_SOURCES = 256
"""Ranks of a peer that one rank may read from."""


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """One request's blocks, to be read.

    Attributes:
        key: names this attempt; no other attempt has it.
        peer: name under which the peer was connected.
        span: how much of the prompt.
        src_tables, dst_tables: block ids by position per group of each side, int64 arrays.
        ticket: the producer's promise.
    """

    key: str
    peer: str
    span: Span
    src_tables: tuple[Int64s, ...]
    dst_tables: tuple[Int64s, ...]
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RankRead:
    """What one read takes from one rank of the peer."""

    source: SourceRank
    indices: Indices


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All of one read.

    Attributes:
        ranks: per rank of the peer that supplies anything.
        bytes_by_group: useful bytes per group of ours.
        tally: totals.
        seconds: what planning took.
    """

    ranks: tuple[RankRead, ...]
    bytes_by_group: tuple[int, ...]
    tally: Tally
    seconds: float


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of the peer, prepared.

    Attributes:
        agent: the transport's name for it.
        template: what we read from it.
        src_bases, dst_bases: per route, where its descriptors start in the lists.
        local, remote: the prepared lists, None if nothing is ever read from it.
        local_words, remote_words: prepared lists of lease words: our landing place, its words.
        words: number of its lease words.
        incarnation: the high half of them.
    """

    agent: str
    template: Template
    src_bases: tuple[int, ...]
    dst_bases: tuple[int, ...]
    local: Any
    remote: Any
    local_words: Any
    remote_words: Any
    words: int
    incarnation: int


class Peer:
    """A peer that can be read from."""

    def __init__(self, agent: Agent, ours: RankGeometry, cards: Sequence[RankCard], landing: Region) -> None:
        """Prepare all lists.

        Args:
            agent: the transport.
            ours: our rank.
            cards: all ranks of the peer.
            landing: registered memory for lease words, as many words as reads may be in flight.

        Raises:
            Incompatible: we cannot read from it.
            TransferError: the transport cannot reach it.
        """
        if len(cards) > MAX_SOURCES:
            raise TransferError(f"the peer has {len(cards)} ranks, at most {MAX_SOURCES} can be read from")
        self._ours = ours
        templates = build_templates([card.geometry for card in cards], ours)
        self.sources = tuple(
            _prepare(agent, ours, card, template, landing)
            for card, template in zip(cards, templates, strict=True)
        )
        self.src_groups = len(cards[0].geometry.groups)
        self._agent = agent

    def plan(self, order: ReadOrder) -> ReadPlan:
        """The descriptors of a read.

        Raises:
            TransferError: the tables do not fit, or name blocks that do not exist.
        """
        started = time.perf_counter()
        self._check(order)
        by_group = [0] * len(self._ours.groups)
        ranks, tallies = [], []
        for source in self.sources:
            parts = []
            for route, src_base, dst_base in zip(
                source.template.routes, source.src_bases, source.dst_bases, strict=True
            ):
                group = self._ours.groups[route.dst_group]
                cells = select_cells(
                    route, group.kind, group.reach, order.span,
                    order.src_tables[route.src_group], order.dst_tables[route.dst_group],
                )  # fmt: skip
                counted = tally(route, cells)
                by_group[route.dst_group] += counted.bytes
                tallies.append(counted)
                if len(cells):
                    parts.append(as_indices(route, cells, src_base, dst_base))
            if parts:
                ranks.append(RankRead(source, _joined(parts)))
        return ReadPlan(tuple(ranks), tuple(by_group), _summed(tallies), time.perf_counter() - started)

    def close(self) -> None:
        """Give the lists back and forget the peer. Nothing may be in flight."""
        for source in self.sources:
            for handle in (source.local, source.remote, source.local_words, source.remote_words):
                if handle is not None:
                    self._agent.release_list(handle)
            self._agent.drop_peer(source.agent)

    def _check(self, order: ReadOrder) -> None:
        if len(order.src_tables) != self.src_groups or len(order.dst_tables) != len(self._ours.groups):
            raise TransferError(
                f"block tables for {len(order.src_tables)} and {len(order.dst_tables)} groups, "
                f"the engines have {self.src_groups} and {len(self._ours.groups)}"
            )
        fewest = min(source.words for source in self.sources)
        if not 0 <= order.ticket.slot < fewest:
            raise TransferError(f"lease slot {order.ticket.slot} does not exist, the peer has {fewest}")


def _prepare(
    agent: Agent, ours: RankGeometry, card: RankCard, template: Template, landing: Region
) -> SourceRank:
    name = agent.add_peer(card.agent)
    words = Region(card.words_address, card.words * WORD_BYTES)
    src_rows, dst_rows, src_bases, dst_bases = [], [], [], []
    src_at = dst_at = 0
    for route in template.routes:
        rows = route.rows
        src_bases.append(src_at)
        dst_bases.append(dst_at)
        src_at += len(rows) * route.src_blocks
        dst_at += len(rows) * route.dst_blocks
        src_rows.append(_table(rows.src, rows.length, route.src_stride, route.src_blocks))
        dst_rows.append(_table(rows.dst, rows.length, route.dst_stride, route.dst_blocks))
    if max(src_at, dst_at) > MAX_DESCRIPTORS:
        raise TransferError(
            f"{max(src_at, dst_at)} descriptors would be prepared, at most {MAX_DESCRIPTORS} may be"
        )
    return SourceRank(
        name,
        template,
        tuple(src_bases),
        tuple(dst_bases),
        agent.prepare(None, ours.regions[0], np.concatenate(dst_rows)) if dst_rows else None,
        agent.prepare(name, card.geometry.regions[0], np.concatenate(src_rows)) if src_rows else None,
        agent.prepare(None, landing, _word_rows(landing)),
        agent.prepare(name, words, _word_rows(words)),
        card.words,
        card.incarnation,
    )


def _table(address: Int64s, length: Int64s, stride: int, count: int) -> Int64s:
    table = np.empty((len(address), 4), np.int64)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = address, length, stride, count
    return table


def _word_rows(region: Region) -> Int64s:
    return np.array([[region.address, WORD_BYTES, WORD_BYTES, region.length // WORD_BYTES]], np.int64)


def _joined(parts: Sequence[Indices]) -> Indices:
    if len(parts) == 1:
        return parts[0]
    return Indices(np.concatenate([p.src for p in parts]), np.concatenate([p.dst for p in parts]))


def _summed(tallies: Sequence[Tally]) -> Tally:
    return Tally(
        sum(t.bytes for t in tallies),
        sum(t.pages for t in tallies),
        sum(t.descriptors for t in tallies),
        max((t.largest_run for t in tallies), default=0),
    )
