"""Forecasts of the chunks of a prompt that the tiers store, and of the prefixes that other prompts can load.

The decisions come from the code that stores and loads chunks in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm
from kvferry.tools.plan.snapshots import SnapshotSteps
from kvferry.planning.coverage import Bools, ChunkedPrompt, chunks_to_load
from kvferry.planning.retention import keeps_chunk, keeps_snapshot, last_prefix_ends

# Distances in chunks between the positions at which windows are stored, for alternatives with fewer.
_THINNED = (16, 128)

# Lengths in tokens of the shared prefixes in the forecast.
SHARED_TOKENS = (2048, 8192, 32_768)


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The storage that a prompt's KV takes in a tier under given settings.

    Attributes:
        snapshot_tokens: number of tokens between the positions at which windows and snapshots are stored.
        snapshots: number of snapshots that are stored.
        bytes: total size of all chunk files.
        gap_tokens: largest distance in tokens between the ends of two successive loadable prefixes, with the
            start and the end of the prompt. Of a prefix shared with another prompt, the engine recomputes at
            most this many tokens.
    """

    steps: SnapshotSteps
    snapshot_tokens: int
    snapshots: int
    bytes: int
    gap_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The tokens that prompts load of a prefix that they share, from tiers with room for all prompts.

    Attributes:
        tokens: length of the shared prefix in tokens.
        second: number of these tokens that the second prompt with this prefix loads.
        third: the same for the third prompt and all later ones.
        without: the same for every prompt, if the setting `first_snapshot_tokens` is 0.
    """

    tokens: int
    second: int
    third: int
    without: int


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose KV the tiers store, in chunks with a fixed number of tokens.

    Attributes:
        file_bytes: size in bytes of a chunk's file, for each KV cache group.
        placed: positions in tokens at which kvferry has the engine take snapshots, for shared prefixes.
    """

    canonical: CanonicalForm
    file_bytes: tuple[int, ...]
    tokens: int
    placed: tuple[int, ...] = ()

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.canonical.groups)

    def loadable_prefixes(self, steps: SnapshotSteps, every: int) -> list[int]:
        """Return the lengths, in tokens, of the prompt's loadable prefixes, ascending."""
        return [*self._loadable_prefixes(self._kept_chunks(steps, every))]

    def choices(self, steps: SnapshotSteps, every: int) -> tuple[StorageChoice, ...]:
        """Return the storage that the prompt takes under the given settings, and under alternative settings.

        Under the alternatives, the engine takes more snapshots. Without recurrent state, windows are stored
        at fewer positions instead. An alternative with the same `bytes` and `gap_tokens` as the one before is
        left out.

        Args:
            every: number of tokens between the positions at which windows and snapshots are stored.
        """
        settings = (
            [(one, every) for one in settings_with_more_snapshots(steps)]
            if self.has_state
            else self._with_fewer_windows(steps, every)
        )
        found = [self._choice(*each) for each in settings]
        sizes = [(one.bytes, one.gap_tokens) for one in found]
        return tuple(one for n, one in enumerate(found) if n == 0 or sizes[n] != sizes[n - 1])

    def shared_prefixes(
        self, steps: SnapshotSteps, every: int, placed: Callable[[int, int, int], Iterable[int]]
    ) -> Iterator[SharedPrefix]:
        """Yield the tokens that prompts load of each of `SHARED_TOKENS` that is shorter than this prompt.

        Nothing without recurrent state: prompts then load all whole chunks of a shared prefix.

        Args:
            every: number of tokens between the positions at which snapshots are stored.
            placed: `StoredForm.placed`.
        """
        if not self.has_state:
            return
        alone = replace(self, placed=()).loadable_prefixes(steps, every)
        ends = self.loadable_prefixes(steps, every)
        for tokens in SHARED_TOKENS:
            if tokens < self.tokens:
                # The second prompt continues from the first one's last snapshot in the shared prefix, and
                # leaves one for the third where it departs from the first.
                second, without = (
                    max((end for end in of if end <= tokens), default=0) for of in (ends, alone)
                )
                left = [at for at in placed(self.tokens, second, tokens) if at <= tokens]
                yield SharedPrefix(tokens, second, max(left, default=second), without)

    def _with_fewer_windows(self, steps: SnapshotSteps, every: int) -> Iterator[tuple[SnapshotSteps, int]]:
        """Yield (steps, every) of the given settings, then of settings that store fewer windows."""
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

        An incomplete chunk at the prompt's end has no entry. In a group of recurrent state, an entry is that
        of the snapshot at the end of the chunk.
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
        """Yield the lengths of the prefixes whose chunks are stored in every group, shortest first."""
        tokens = kept_chunks.shape[1] * self.canonical.chunk_tokens
        cut = ChunkedPrompt(tokens, self.canonical.chunk_tokens, tokens + 1)
        for end in cut.boundaries.tolist():
            takes = chunks_to_load(self.canonical.groups, cut, end)
            if all(row[numbers].all() for row, numbers in zip(kept_chunks, takes, strict=True)):
                yield end


def settings_with_more_snapshots(steps: SnapshotSteps) -> tuple[SnapshotSteps, ...]:
    """Return the given settings, then settings under which an engine takes more snapshots."""
    dense = replace(steps, retention=None)
    quarter = max(steps.aligned_step_tokens // 4 // steps.block_tokens, 1) * steps.block_tokens
    finer = (replace(dense, step_tokens=tokens) for tokens in (quarter, steps.block_tokens))
    return (steps, dense, *finer)
