"""How far the chunks of a running request have been considered for storing."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.engine import Request


@dataclass(slots=True)
class Progress:
    """The progress of one request, which hands out every chunk once.

    Attributes:
        request: the request.
        computed: tokens that the steps so far compute.
        preemptions: how often it had been preempted when it was last admitted; -1 before.
        found: tokens that it then had without computing them: from the engine's own cache, or loaded.
        chunks: how many of its chunks were taken.
        tail: its prompt's last, shorter chunk was taken, or there is none.
        due: tokens computed at which there may be something to take.
    """

    request: Request
    computed: int = 0
    preemptions: int = -1
    found: int = 0
    chunks: int = 0
    tail: bool = False
    due: int = 0

    def step(self, tokens: int) -> bool:
        """Note the tokens of the coming step; return whether a chunk may be complete then."""
        request = self.request
        if self.preemptions != request.num_preemptions:
            self.preemptions, self.found = request.num_preemptions, request.num_computed_tokens
        self.computed = request.num_computed_tokens + tokens
        return self.computed >= self.due

    def end(self) -> bool:
        """Note that the request has ended; return whether its blocks still hold what it has computed."""
        # Of a load that is under way, what the engine counts as computed is not there yet.
        self.computed = min(self.computed, self.request.num_computed_tokens)
        return self.preemptions == self.request.num_preemptions  # preempted, its blocks were given back

    def take(self, chunk_tokens: int) -> tuple[range, bool]:
        """Take the complete chunks that are left; return them, and whether the prompt's tail is one."""
        prompt = self.request.num_prompt_tokens
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
