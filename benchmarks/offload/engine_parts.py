"""Run the parts of `benchmarks offload` that need a real engine, which is started once for both."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoint import token_bytes, write_checkpoint
from benchmarks.offload import first_token, tier_hooks
from benchmarks.offload.first_token import FirstToken
from benchmarks.offload.tier_hooks import HookCost
from benchmarks.served import SteppedEngine, tiered

HOOKS, TTFT = "hooks", "ttft"


@dataclass(frozen=True, slots=True)
class EngineRequests:
    """The requests to the engine.

    Attributes:
        prompt_tokens: length of the prompts whose time to first token is measured, in tokens.
        rounds: number of such prompts.
        steps: number of decoding steps whose hooks are timed.
        model: changes to the checkpoint's configuration, as pairs of name and value.
    """

    prompt_tokens: int = 16_384
    rounds: int = 3
    steps: int = 64
    model: tuple[tuple[str, int], ...] = ()


def measure(
    asked: EngineRequests, parts: Collection[str], path: Path, progress: Callable[[str], None]
) -> tuple[HookCost | None, FirstToken | None]:
    """Start an engine, run the given parts, and return their results; None for a part that is not given.

    Args:
        asked: requests to the engine.
        parts: `HOOKS`, `TTFT` or both.
        path: folder for the checkpoint and the chunks, which are removed at the end.
        progress: function that is called with a line of text before each step.

    Raises:
        TransferError: the engine does not answer, or a prompt was not found where it should be.
    """
    progress("starting an engine")
    batch = tier_hooks.REQUESTS * (tier_hooks.PROMPT_TOKENS + asked.steps + 256)
    longest = max(asked.prompt_tokens + 256, tier_hooks.PROMPT_TOKENS + asked.steps + 256)
    each = token_bytes(dict(asked.model))
    prompt_bytes = asked.prompt_tokens * each
    with TemporaryDirectory(prefix="bench-", dir=path) as folder:
        model = write_checkpoint(Path(folder, "model"), longest, dict(asked.model))
        chunks = Path(folder, "chunks")
        chunks.mkdir()
        # An eighth of host memory holds a prompt that is prefetched.
        room = max(2 * max(batch, longest) * each, 8 * prompt_bytes) + (64 << 20)
        tiers = [
            {"type": "host", "capacity": room},
            {"type": "file", "path": str(chunks), "capacity": room + asked.rounds * prompt_bytes},
        ]
        with closing(
            SteppedEngine(model, longest, tier_hooks.REQUESTS, room, tiered(tiers, hint_share=0.25))
        ) as served:
            hooks = tier_hooks.measure(served, asked.steps, progress) if HOOKS in parts else None
            first = (
                first_token.measure(served, asked.prompt_tokens, prompt_bytes, asked.rounds, progress)
                if TTFT in parts
                else None
            )
    return hooks, first
