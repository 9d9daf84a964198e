"""The simulated prefix cache against a model of vLLM's block pool, block by block."""

from __future__ import annotations

from hypothesis import given, note, strategies as st

from kvferry.tools.replay.engine import EngineCache
from support.engine_pairs import Turn, conversations, small_model, trace_request
from support.examples import examples
from support.models import attention

BLOCK, LONGEST = 4, 48
MODEL, _ = small_model([attention()], chunk_tokens=8, block_tokens=BLOCK, step_tokens=16)


class BlockPool:
    """vLLM's `BlockPool`, `FreeKVCacheBlockQueue` and `FullAttentionManager`, for one request at a time.

    A block is a number. The free queue begins with the block that is taken next.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(1, num_blocks))  # block 0 is the null block
        self._hashes: dict[int, bytes] = {}

    def look_up(self, keys: list[bytes], prompt: int) -> list[int]:
        """Blocks of the longest prefix that leaves a token to compute."""
        found: list[int] = []
        for key in keys[: (prompt - 1) // BLOCK]:
            block = next((block for block, cached in self._hashes.items() if cached == key), None)
            if block is None:
                break
            found.append(block)
        return found

    def serve(self, keys: list[bytes], prompt: int, computed: int) -> None:
        """Touch the blocks found, compute the other tokens, and free all blocks from the last one on."""
        table = self.look_up(keys, prompt)
        for block in table:
            self._free.remove(block)
        while len(table) * BLOCK < computed:
            block = self._free.pop(0)
            self._hashes.pop(block, None)
            table.append(block)
        for block, key in zip(table, keys[: computed // BLOCK], strict=False):
            self._hashes.setdefault(block, key)
        uncached = [block for block in reversed(table) if block not in self._hashes]
        cached = [block for block in reversed(table) if block in self._hashes]
        self._free = uncached + self._free + cached


@examples(60)
@given(
    turns=conversations(most_tokens=LONGEST, requests=20),
    num_blocks=st.integers(LONGEST // BLOCK + 2, 24),
)
def test_engine_cache_finds_the_same_prefix_as_vllm(turns, num_blocks):
    cache, pool = EngineCache(MODEL, num_blocks, BLOCK), BlockPool(num_blocks)
    for number, turn in enumerate(turns):
        # vLLM keeps a second copy of a block that it computes again. No block is computed again if
        # prompts end inside blocks and no answer is given twice.
        prompt = turn.prompt if len(turn.prompt) % BLOCK else turn.prompt[:-1] or (7,)
        answer = tuple(10**6 * (number + 1) + n for n in range(len(turn.answer)))
        request = trace_request(Turn(prompt, answer), BLOCK)
        _, (keys,) = cache.keys_of_each([request])
        names = keys.whole[0]
        found = cache.look_up(len(prompt), keys)
        note(f"{len(prompt)} + {len(answer)} tokens: {found.tokens}")
        assert found.resumable_tokens == found.tokens == BLOCK * len(pool.look_up(names, len(prompt)))
        cache.keep(request, keys, [], 0)
        pool.serve(names, len(prompt), len(prompt) + max(len(answer) - 1, 0))
