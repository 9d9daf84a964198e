"""The progress of storing the chunks of running requests, and the steps in which none becomes complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvferry.connector.engine import Request


@dataclass(slots=True)
class Progress:
    """The progress of storing the chunks of one running request.

    Attributes:
        request: request whose chunks are stored.
        computed: number of tokens that will have been computed when all steps scheduled so far have run.
        preemptions: number of times the request had been preempted when it was last admitted; -1 before its
            first step.
        found: number of tokens that came from the engine's prefix cache or from a load when the request was
            last admitted.
        chunks: number of whole chunks that `take` has returned.
        tail: True if `take` has returned the shorter last chunk of the prompt, or there is none to store.
        due: number of computed tokens at which the next chunk is complete.
        needed: for each KV cache group, the chunks that later prompts are likely to need
            (`retention.needed_chunks`); empty before the first chunk is stored.
    """

    request: Request
    computed: int = 0
    preemptions: int = -1
    found: int = 0
    chunks: int = 0
    tail: bool = False
    due: int = 0
    needed: tuple[Collection[int] | None, ...] = ()

    def step(self, tokens: int) -> bool:
        """Add the tokens that the coming step computes. Return True if the step may complete a chunk."""
        request = self.request
        # The request was admitted anew: what it has now was found in a cache or loaded.
        if self.preemptions != request.num_preemptions:
            self.preemptions, self.found = request.num_preemptions, request.num_computed_tokens
        self.computed = request.num_computed_tokens + tokens
        return self.computed >= self.due

    def end(self) -> bool:
        """Record that the request has ended. Return True if its blocks still hold the computed KV."""
        # While a load is under way, its tokens are not in the blocks yet.
        self.computed = min(self.computed, self.request.num_computed_tokens)
        return self.preemptions == self.request.num_preemptions  # a preemption frees its blocks

    def take(self, chunk_tokens: int) -> tuple[range, bool]:
        """Return the complete chunks that have not been returned before.

        Returns:
            (indices, tail). `indices` are the indices of whole chunks, counted from the start of the request.
            `tail` is True if the shorter last chunk of the prompt is complete and is returned now.
        """
        prompt = self.request.num_prompt_tokens
        # Drafts of the coming step count as computed, but may be rejected.
        until = min(self.computed, self.request.num_tokens)
        whole = range(self.chunks, max(self.chunks, until // chunk_tokens))
        self.chunks = whole.stop
        self.tail |= prompt % chunk_tokens == 0
        with_tail = not self.tail and until >= prompt
        self.tail |= with_tail
        self.due = (self.chunks + 1) * chunk_tokens
        if not self.tail:
            self.due = min(self.due, prompt)
        return whole, with_tail

    def is_cold(self, group: int, number: int, chunk_tokens: int) -> bool:
        """Return True if later prompts are unlikely to need a chunk, so that it is evicted before all others.

        Args:
            group: index of the KV cache group.
            number: index of the chunk in the request.
            chunk_tokens: number of tokens per chunk.
        """
        needed = self.needed[group]
        # A chunk with generated tokens may turn out to be the last one, so it is not cold while the request
        # runs.
        of_prompt = (number + 1) * chunk_tokens <= self.request.num_prompt_tokens
        return of_prompt and needed is not None and number not in needed


class QuietSteps:
    """Counts down the steps until a chunk may become complete, so that others need no look at each request.

    Most steps of a busy engine compute one token for each of the same requests. A chunk of one of them
    becomes complete once in hundreds of steps.
    """

    def __init__(self) -> None:
        self._tokens: Mapping[str, int] = {}
        self._left = 0

    def start(self, tokens: Mapping[str, int], steps: int) -> None:
        """Begin to count after a step.

        Args:
            tokens: number of tokens that the step computes, by request id. It must not change afterwards.
            steps: number of steps that complete no chunk, if each computes one token for each of these
                requests; not positive if there is none.
        """
        self._tokens, self._left = tokens, steps

    def stop(self) -> None:
        """End the count: the next step is not quiet."""
        self._left = 0

    def count(self, tokens: Mapping[str, int], num_tokens: int) -> bool:
        """Count a step, and return True if it completes no chunk.

        Args:
            tokens: number of tokens that the step computes, by request id.
            num_tokens: sum of these numbers.

        >>> quiet, one_each = QuietSteps(), {"a": 1, "b": 1}
        >>> quiet.start({"a": 30, "b": 1}, 2)
        >>> quiet.count(one_each, 2), quiet.count(one_each, 2), quiet.count(one_each, 2)
        (True, True, False)
        """
        # A comparison of all keys takes a few microseconds for hundreds of requests.
        if self._left < 1 or num_tokens != len(tokens) or tokens.keys() != self._tokens.keys():
            return False
        self._left -= 1
        return True
