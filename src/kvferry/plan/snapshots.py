"""The positions at which vLLM 0.32 leaves snapshots of recurrent state, from the engine's settings.

In `align` mode (prefix caching of models with recurrent layers) a prefill step ends at a block boundary, and
vLLM keeps the state only at the end of a step (`Scheduler._mamba_block_aligned_split`). One more step ends at
the last boundary that leaves a token to compute. vLLM tells connectors about those of these snapshots that
the prefix cache retains (`MambaManager.reachable_block_mask`, ``boundary_state_offloads``).

The positions are those of a request that runs alone. Other requests in the same step take tokens from it,
which moves the ends of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import ConfigError

STEP_TOKENS = 8192
"""``max_num_batched_tokens`` of an API server on a GPU of 70 GiB or more; 16,384 from 160 GiB on, 2,048 on
smaller ones and on an A100 (`EngineArgs.get_batch_defaults`)."""

LAST_ONLY = 0
"""Default of ``prefix_cache_retention_interval``: only the last snapshot is kept."""

_EVERY = ("none", "")


@dataclass(frozen=True, slots=True)
class SnapshotSteps:
    """The settings of an engine that decide where it leaves snapshots.

    A prompt of 2,000 tokens in blocks of 128: in one step, in steps of 512, and of those every 1,024:

    >>> settings = ((2048, 0), (600, None), (600, 1024))
    >>> [list(SnapshotSteps(128, step, keep).positions(2000)) for step, keep in settings]
    [[1920], [512, 1024, 1536, 1920], [1024, 1920]]

    Attributes:
        block_tokens: tokens of a block in all groups, as vLLM sets it for models with recurrent state.
        step_tokens: ``max_num_batched_tokens``.
        retention: ``prefix_cache_retention_interval`` in tokens, 0 for the last one only, None for all.
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
    def apart(self) -> int:
        """Tokens between the ends of steps: whole blocks, at least one."""
        return max(self.step_tokens // self.block_tokens, 1) * self.block_tokens

    def positions(self, prompt: int) -> Iterator[int]:
        """Yield the positions, in tokens of a prompt, at which vLLM leaves a snapshot, ascending."""
        last = (prompt - 1) // self.block_tokens * self.block_tokens
        for tokens in range(self.apart, last, self.apart):
            if self._retains(tokens):
                yield tokens
        if last:
            yield last
        if prompt > last and prompt % self.apart == 0 and self._retains(prompt):
            yield prompt

    def _retains(self, tokens: int) -> bool:
        return self.retention is None or (self.retention > 0 and tokens % self.retention == 0)


def retention_of(text: str) -> int | None:
    """Return the value of vLLM's ``--prefix-cache-retention-interval`` from its text.

    >>> retention_of("0"), retention_of("8448"), retention_of("None")
    (0, 8448, None)

    Raises:
        ConfigError: the text is neither a number of tokens nor None.
    """
    if text.lower() in _EVERY:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--retention is {text!r}; give a number of tokens, 0 for the last only, or None")
    return int(text)
