"""Workloads: requests that share prefixes, recorded in a trace or drawn at random.

A request is a list of numbers, one per block. Blocks with equal numbers have equal tokens. The format is that
of Mooncake's public traces (https://github.com/kvcache-ai/Mooncake), one JSON object per line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}

``hash_ids`` has one number per block of 512 tokens. The last block may be shorter. A small machine cannot
replay a trace unchanged, so `select_conversations` shortens the blocks and leaves out requests that are too
long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np

from kvferry.common.errors import ConfigError

RECORDED_BLOCK = 512
"""Number of tokens per block in a recorded trace."""

_SHARED_BLOCKS = 2
_SYSTEM_PROMPTS = 3
_SYSTEM_BLOCKS = (8, 14)
_TURN_BLOCKS = (1, 6)
_GOES_ON = 0.7
_OPEN_CONVERSATIONS = 24
_ZIPF = 0.8


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        blocks: number of each block's content. Equal numbers are equal tokens.
        tokens: length in tokens. The last block may be shorter than the others.
    """

    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts to replay.

    Attributes:
        name: origin of the workload, for reports.
        block_tokens: number of tokens per block.
        prompts: prompts in the order of their replay.
        of: number of requests from which the prompts were selected; 0 for a drawn workload.
    """

    name: str
    block_tokens: int
    prompts: tuple[Prompt, ...]
    of: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def distinct_blocks(self) -> int:
        """Return the number of blocks with different content."""
        return len({block for prompt in self.prompts for block in prompt.blocks})

    @property
    def repeated(self) -> float:
        """Return the share of blocks that an unlimited prefix cache would hit."""
        seen, hits = set[int](), 0
        for prompt in self.prompts:
            hits += next((n for n, one in enumerate(prompt.blocks) if one not in seen), len(prompt.blocks))
            seen.update(prompt.blocks)
        return hits / sum(len(prompt.blocks) for prompt in self.prompts)

    def token_ids(self, vocabulary: int, salt: int) -> Iterator[list[int]]:
        """Yield the token ids of each prompt.

        Args:
            vocabulary: exclusive upper bound of the ids.
            salt: non-negative number that determines the token ids of the blocks.
        """
        for prompt in self.prompts:
            drawn = [
                np.random.default_rng((salt, block)).integers(0, vocabulary, self.block_tokens)
                for block in prompt.blocks
            ]
            yield np.concatenate(drawn)[: prompt.tokens].tolist()


class _Line(msgspec.Struct, frozen=True):
    """The used fields of a line of a trace."""

    input_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a recorded trace.

    Raises:
        ConfigError: the file cannot be read, has no requests, or has a line that is not a request.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; name a file of Mooncake's format") from error
    read = msgspec.json.Decoder(_Line)
    found = [_prompt(read, line, f"--trace {path}, line {n}") for n, line in enumerate(lines, 1) if line]
    if not found:
        raise ConfigError(f"--trace {path} has no requests; name a file of Mooncake's format")
    return tuple(found)


def _prompt(read: msgspec.json.Decoder[_Line], line: bytes, where: str) -> Prompt:
    try:
        one = read.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{where} is no request ({error}); expected an object with "input_length" and "hash_ids", as in '
            "Mooncake's traces"
        ) from error
    expected = -(-one.input_length // RECORDED_BLOCK)
    if len(one.hash_ids) != expected or expected < 1 or min(one.hash_ids) < 0:
        raise ConfigError(
            f"{where} has {len(one.hash_ids)} hash_ids for {one.input_length} tokens; expected one, at least "
            f"0, for each {RECORDED_BLOCK} tokens, as in Mooncake's traces"
        )
    return Prompt(tuple(one.hash_ids), one.input_length)


def select_conversations(
    name: str, recorded: Sequence[Prompt], block_tokens: int, longest: int, requests: int
) -> Workload:
    """Return the first conversations of a trace that have more than one request, in the order of the trace.

    Before the selection, blocks are shortened to `block_tokens`, and prompts longer than `longest` are left
    out. A request belongs to the conversation of an earlier request if at least half of its blocks, and at
    least two, are a prefix of that conversation.

    Args:
        name: name of the workload, for reports.
        recorded: prompts of the trace.
        block_tokens: number of tokens per block.
        longest: maximum length of a prompt, in tokens.
        requests: number of requests to select.

    Raises:
        ConfigError: the selected conversations have fewer than `requests` requests.
    """
    short = [
        Prompt(one.blocks, (len(one.blocks) - 1) * block_tokens + _last(one, block_tokens))
        for one in recorded
    ]
    of = _conversations([one if one.tokens <= longest else None for one in short])
    sizes = Counter(of.values())
    found = [number for number, conversation in of.items() if sizes[conversation] > 1]
    if len(found) < requests:
        raise ConfigError(
            f"{name} has {len(found)} requests in conversations, of no more than {longest} tokens in blocks "
            f"of {block_tokens}; ask for no more --requests, raise --longest or lower --block"
        )
    chosen, count = set[int](), 0
    for number in found:
        if count < requests and of[number] not in chosen:
            chosen.add(of[number])
            count += sizes[of[number]]
    taken = [number for number in found if of[number] in chosen][:requests]
    return Workload(name, block_tokens, tuple(short[number] for number in taken), taken[-1] + 1)


def _conversations(prompts: Sequence[Prompt | None]) -> dict[int, int]:
    """Return, for the number of each request, the number of the first request of its conversation.

    Args:
        prompts: prompts by number; None for those that are left out.
    """
    begun, found = dict[int, int](), dict[int, int]()
    for number, prompt in enumerate(prompts):
        if prompt is None or len(prompt.blocks) < _SHARED_BLOCKS:
            continue
        beginnings = list(accumulate(prompt.blocks, _digest, initial=0))
        half = max(-(-len(prompt.blocks) // 2), _SHARED_BLOCKS)
        found[number] = next((begun[one] for one in reversed(beginnings[half:]) if one in begun), number)
        begun.update(dict.fromkeys(beginnings[_SHARED_BLOCKS:], found[number]))
    return found


def _digest(before: int, block: int) -> int:
    """Return a number that identifies the prefix that ends with a block.

    Args:
        before: number of the prefix before the block.
        block: number of the block's content.
    """
    return hash((before, block))


def _last(prompt: Prompt, block_tokens: int) -> int:
    """Return the number of tokens in a prompt's last block after the blocks were shortened."""
    of = prompt.tokens - (len(prompt.blocks) - 1) * RECORDED_BLOCK
    return -(-of * block_tokens // RECORDED_BLOCK)


def draw_workload(block_tokens: int, longest: int, requests: int, seed: int = 1) -> Workload:
    """Return a random workload of conversations that begin with a system prompt and grow with every request.

    Seven of ten requests continue a conversation, and the others begin a new one. The choice of the
    conversation (by how recent it is) and of the system prompt follow Zipf's law. A conversation that has
    become too long ends.

    Args:
        block_tokens: number of tokens per block.
        longest: maximum length of a prompt in tokens, at least 20 blocks for a system prompt and a turn.
        requests: number of requests.
        seed: seed of the random numbers.

    Raises:
        ConfigError: `longest` is too short.
    """
    if longest < (least := (_SYSTEM_BLOCKS[1] + _TURN_BLOCKS[1]) * block_tokens):
        raise ConfigError(f"--longest {longest} is less than {least}, 20 blocks of {block_tokens}: raise it")
    draw, fresh = np.random.default_rng(seed), iter(range(1 << 30))
    systems = [
        tuple(next(fresh) for _ in range(int(draw.integers(*_SYSTEM_BLOCKS, endpoint=True))))
        for _ in range(_SYSTEM_PROMPTS)
    ]
    spoken = list[tuple[int, ...]]()
    prompts = list[Prompt]()
    while len(prompts) < requests:
        turn = tuple(next(fresh) for _ in range(int(draw.integers(*_TURN_BLOCKS, endpoint=True))))
        goes_on = bool(spoken) and draw.random() < _GOES_ON
        before = spoken.pop(_zipf(draw, len(spoken))) if goes_on else systems[_zipf(draw, len(systems))]
        blocks = before + turn
        if len(blocks) * block_tokens > longest:
            continue
        spoken = [blocks, *spoken][:_OPEN_CONVERSATIONS]
        shorter = int(draw.integers(0, block_tokens))
        prompts.append(Prompt(blocks, len(blocks) * block_tokens - shorter))
    return Workload("drawn conversations", block_tokens, tuple(prompts))


def _zipf(draw: np.random.Generator, count: int) -> int:
    """Return a random number from 0 to `count` - 1 by Zipf's law: 0 is the most frequent."""
    weights = 1 / np.arange(1, count + 1) ** _ZIPF
    return int(draw.choice(count, p=weights / weights.sum()))
