"""Forecasts of the chunks of a prompt that the tiers store, and of the prefixes that other prompts can load.

A *chunk* holds a fixed number of tokens of one KV cache group, or one *snapshot* (recurrent state at one
position). The decisions come from the code that stores and loads chunks in an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm
from kvferry.plan.snapshots import SnapshotSteps
from kvferry.planning.coverage import Bools, ChunkedPrompt, chunks_to_load
from kvferry.planning.retention import keeps_chunk, keeps_snapshot, last_prefix_ends

_THINNED = (16, 128)
"""Distances in chunks between the positions at which windows are stored, for alternatives with fewer."""


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The storage that a prompt's KV takes in a tier under given settings.

    Attributes:
        steps: settings of the engine that decide at which positions it takes snapshots (recurrent states).
        snapshot_tokens: number of tokens between the positions at which sliding windows and snapshots are
            stored.
        snapshots: number of snapshots that are stored.
        bytes: total size of all chunk files, in bytes.
        gap_tokens: largest distance in tokens between the ends of two successive loadable prefixes. The start
            and the end of the prompt also count as ends. If another prompt shares a prefix with this prompt,
            the engine recomputes at most `gap_tokens` tokens of the shared prefix.
    """

    steps: SnapshotSteps
    snapshot_tokens: int
    snapshots: int
    bytes: int
    gap_tokens: int


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose KV the tiers store, in chunks with a fixed number of tokens.

    Attributes:
        canonical: format in which chunks are stored.
        file_bytes: size in bytes of a chunk's file, for each KV cache group.
        tokens: length of the prompt in tokens.
        placed: positions in tokens at which kvferry has the engine take snapshots, for shared prefixes.
    """

    canonical: CanonicalForm
    file_bytes: tuple[int, ...]
    tokens: int
    placed: tuple[int, ...] = ()

    @property
    def without_placed(self) -> StoredPrompt:
        """The same prompt with only the snapshots that the engine takes by itself."""
        return replace(self, placed=())

    @property
    def has_state(self) -> bool:
        """True if the model has recurrent state."""
        return any(group.kind is GroupKind.STATE for group in self.canonical.groups)

    def loadable_prefixes(self, steps: SnapshotSteps, every: int) -> list[int]:
        """Return the lengths, in tokens, of the prompt's loadable prefixes, ascending.

        Args:
            steps: settings of the engine that decide at which positions it takes snapshots.
            every: number of tokens between the positions at which sliding windows and snapshots are stored.
        """
        return [*self._loadable_prefixes(self._kept_chunks(steps, every))]

    def choices(self, steps: SnapshotSteps, every: int) -> tuple[StorageChoice, ...]:
        """Return the storage that the prompt takes under the given settings and under alternative settings.

        Under the alternative settings, the engine takes more snapshots (recurrent states). If the model has
        no recurrent state, sliding windows are stored at fewer positions instead. An alternative is left out
        if it has the same `bytes` and `gap_tokens` as the preceding settings.

        Args:
            steps: settings of the engine that decide at which positions it takes snapshots.
            every: number of tokens between the positions at which sliding windows and snapshots are stored.
                Snapshots at other positions are not stored.

        Returns:
            The storage under the given settings, followed by the alternatives.
        """
        settings = (
            [(one, every) for one in settings_with_more_snapshots(steps)]
            if self.has_state
            else self._with_fewer_windows(steps, every)
        )
        found = [self._choice(*each) for each in settings]
        sizes = [(one.bytes, one.gap_tokens) for one in found]
        return tuple(one for n, one in enumerate(found) if n == 0 or sizes[n] != sizes[n - 1])

    def _with_fewer_windows(self, steps: SnapshotSteps, every: int) -> Iterator[tuple[SnapshotSteps, int]]:
        """Yield the given settings, then settings under which sliding windows are stored at fewer positions.

        Args:
            steps: settings of the engine that decide at which positions it takes snapshots. They are the
                same in all settings.
            every: number of tokens between the positions at which sliding windows are stored.

        Yields:
            (steps, every).
        """
        yield steps, every
        if any(group.attention_span for group in self.canonical.groups):
            thinned = (chunks * self.canonical.chunk_tokens for chunks in _THINNED)
            yield from ((steps, tokens) for tokens in thinned if tokens > every)

    def _choice(self, steps: SnapshotSteps, every: int) -> StorageChoice:
        kept_chunks = self._kept_chunks(steps, every)
        kept = kept_chunks.sum(axis=1).tolist()
        tail = 0 if self.has_state or self.tokens % self.canonical.chunk_tokens == 0 else 1
        total = sum((count + tail) * each for count, each in zip(kept, self.file_bytes, strict=True))
        state = [group.kind is GroupKind.STATE for group in self.canonical.groups]
        snapshots = sum(count for count, is_state in zip(kept, state, strict=True) if is_state)
        ends = [0, *self._loadable_prefixes(kept_chunks), self.tokens]
        return StorageChoice(steps, every, snapshots, total, max(high - low for low, high in pairwise(ends)))

    def _kept_chunks(self, steps: SnapshotSteps, every: int) -> Bools:
        """Return a mask that is True for the prompt's stored chunks, bool of shape (groups, chunks).

        An incomplete chunk at the prompt's end has no entry. In a group of recurrent state, the entry is
        True if a snapshot at the end of the chunk is stored.

        Args:
            steps: settings of the engine that decide at which positions it takes snapshots.
            every: number of tokens between the positions at which sliding windows and snapshots are stored.
                Snapshots at other positions are not stored.
        """
        chunk = self.canonical.chunk_tokens
        ends = last_prefix_ends(self.tokens, chunk, steps.block_tokens if self.has_state else 0)
        found = np.zeros((len(self.canonical.groups), self.tokens // chunk), np.bool_)
        for row, group in zip(found, self.canonical.groups, strict=True):
            if group.kind is GroupKind.STATE:
                taken = steps.positions(self.tokens, placed=self.placed)
                left = (n for n in taken if keeps_snapshot(n, chunk, every, ends))
                row[[n // chunk - 1 for n in left]] = True
            else:
                row[:] = [keeps_chunk(group, n, chunk, every, ends) for n in range(len(row))]
        return found

    def _loadable_prefixes(self, kept_chunks: Bools) -> Iterator[int]:
        """Yield the lengths, in tokens, of the prompt's loadable prefixes, shortest first.

        A prefix is loadable if the chunks that it needs are stored in every group.

        Args:
            kept_chunks: mask that is True for stored chunks, bool of shape (groups, chunks).
        """
        tokens = kept_chunks.shape[1] * self.canonical.chunk_tokens
        cut = ChunkedPrompt(tokens, self.canonical.chunk_tokens, tokens + 1)
        for end in cut.boundaries.tolist():
            takes = chunks_to_load(self.canonical.groups, cut, end)
            if all(row[numbers].all() for row, numbers in zip(kept_chunks, takes, strict=True)):
                yield end


def settings_with_more_snapshots(steps: SnapshotSteps) -> tuple[SnapshotSteps, ...]:
    """Return the given settings, then settings under which an engine takes more snapshots (recurrent states).

    Args:
        steps: settings of the engine that decide at which positions it takes snapshots.
    """
    dense = replace(steps, retention=None)
    quarter = max(steps.aligned_step_tokens // 4 // steps.block_tokens, 1) * steps.block_tokens
    finer = (replace(dense, step_tokens=tokens) for tokens in (quarter, steps.block_tokens))
    return (steps, dense, *finer)
