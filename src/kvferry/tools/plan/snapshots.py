"""The positions at which vLLM 0.32 leaves snapshots of recurrent state, derived from engine settings.

In `align` mode, which is prefix caching for models with recurrent layers, every prefill step ends at a block
boundary. vLLM keeps the state only at the end of a step (`Scheduler._mamba_block_aligned_split`). An
additional step ends at the last boundary that leaves a prompt token to compute. The prefix cache retains some
of these snapshots, and vLLM offers the retained ones to connectors (`MambaManager.reachable_block_mask`,
``boundary_state_offloads``).

The positions are those of a request that runs alone. Other requests in the same step leave it fewer tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.units import parse_count

# Default of ``max_num_batched_tokens`` of an API server on a GPU with at least 70 GiB of memory. vLLM takes
# 16,384 from 160 GiB on, and 2,048 on smaller GPUs and on an A100 (`EngineArgs.get_batch_defaults`).
STEP_TOKENS = 8192

# Default of ``prefix_cache_retention_interval``: only the last snapshot is retained.
LAST_ONLY = 0

_EVERY = ("none", "")


@dataclass(frozen=True, slots=True)
class SnapshotSteps:
    """The settings of an engine that decide at which positions it takes snapshots.

    In the example, an engine with blocks of 128 tokens computes a prompt of 2,000 tokens under three
    settings. The first computes it in one step. The second has steps of 512 tokens: 600, rounded down to
    whole blocks. The third has the same steps, and retains snapshots every 1,024 tokens and at the end.

    >>> settings = ((2048, 0), (600, None), (600, 1024))
    >>> [list(SnapshotSteps(128, step, retention).positions(2000)) for step, retention in settings]
    [[1920], [512, 1024, 1536, 1920], [1024, 1920]]

    Attributes:
        block_tokens: number of tokens per block, one size for all groups of a model with recurrent state.
        step_tokens: maximum number of tokens per step (``max_num_batched_tokens``).
        retention: as in `plan.kept.KeptSettings`.
    """

    block_tokens: int
    step_tokens: int = STEP_TOKENS
    retention: int | None = LAST_ONLY

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ConfigError(f"--step-tokens is {self.step_tokens}; a step has at least 1")
        if self.retention is not None and self.retention % self.block_tokens:
            raise ConfigError(
                f"--retention is {self.retention}; vLLM takes 0, None or multiples of a block, which has "
                f"{self.block_tokens} tokens"
            )

    @property
    def aligned_step_tokens(self) -> int:
        """Number of tokens that a prefill step computes: whole blocks, at least one."""
        return max(self.step_tokens // self.block_tokens, 1) * self.block_tokens

    def positions(
        self, prompt: int, start: int = 0, shared: int = 0, placed: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield, in ascending order, the positions in a prompt at which vLLM takes and retains a snapshot.

        Args:
            start: position in tokens at which the engine begins to compute.
            shared: position at the end of a block up to which the engine has the attention blocks of another
                prompt but no snapshot; 0 if there is none. vLLM ends a step there and retains the snapshot.
            placed: ends of blocks at which kvferry has vLLM do the same (`planning.snapshots`).
        """
        last = self.last_boundary(prompt)
        for end in self.step_ends(prompt, start, shared, placed):
            if end == prompt:
                if prompt % self.block_tokens == 0 and self.retains(prompt):
                    yield prompt
            elif end % self.block_tokens == 0 and (end in (last, shared, *placed) or self.retains(end)):
                yield end

    def last_boundary(self, prompt: int) -> int:
        """Return the position of the last end of a block that leaves a token of the prompt to compute."""
        return (prompt - 1) // self.block_tokens * self.block_tokens

    def step_ends(
        self, prompt: int, start: int = 0, shared: int = 0, placed: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield the positions at which the prefill steps of a prompt end; the last one is its length."""
        last = self.last_boundary(prompt)
        while start < prompt:
            end = start - start % self.block_tokens + self.aligned_step_tokens
            if start % self.block_tokens:
                end = start - start % self.block_tokens + self.block_tokens
            start = min([end, prompt, *(stop for stop in (last, shared, *placed) if start < stop)])
            yield start

    def retains(self, tokens: int) -> bool:
        """Return whether the prefix cache retains a snapshot for its position alone, inside any prompt."""
        return self.retention is None or (self.retention > 0 and tokens % self.retention == 0)


def parse_retention(text: str) -> int | None:
    """Parse the value of vLLM's option ``--prefix-cache-retention-interval``; None to retain all snapshots.

    >>> parse_retention("0"), parse_retention("8448"), parse_retention("None")
    (0, 8448, None)

    Raises:
        ConfigError: the text is neither a number of tokens nor "None".
    """
    if text.lower() in _EVERY:
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise ConfigError(
            f"--retention is {text!r}; give a number of tokens, 0 for the last only, or None"
        ) from error
