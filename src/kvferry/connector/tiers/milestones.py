"""Requests that a step must look at, found without a look at each running request.

A running request has something to do for the tiers only at some positions, its *milestones*: where a chunk is
complete, or where a snapshot is taken. Most steps compute one token for each of hundreds of requests, and
bring none of them to a milestone. So `Milestones` counts how many tokens the steps have computed for any one
request, and keeps the requests by the count at which they may reach their milestones. This is a calendar
queue over tokens instead of time (R. Brown, "Calendar queues", CACM 31(10), 1988).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.connector.engine import Request, Step

_LONGEST = 16
"""Number of tokens up to which a request's tokens of a step are counted for all. A request of which a step
computes more is due in any case: else the count would run far ahead of the requests that decode."""


class Milestones:
    """The running requests by the step in which they may reach their milestones. Not thread-safe.

    Attributes:
        due: requests of the coming step that may reach their milestones in it, by request id.
    """

    def __init__(self) -> None:
        self.due: dict[str, Request] = {}
        # Upper bound of the tokens that all steps so far have computed of any one request. Those of requests
        # that were due anyway are not counted.
        self._count = 0
        self._at: dict[str, int] = {}  # count at which each request is due
        self._requests: dict[int, dict[str, Request]] = {}  # by this count

    def __len__(self) -> int:
        return len(self._at)

    def set(self, request: Request, tokens: int) -> None:
        """Make a request due in the first step that may compute its `tokens`-th token from now on.

        Call this after `count` has counted the coming step. A request is due in the next step at the
        earliest, and in no step while it is not computed.
        """
        self.forget(request.request_id)
        at = self._count + max(tokens, 1)
        self._at[request.request_id] = at
        self._requests.setdefault(at, {})[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self.due.pop(request_id, None)
        if (at := self._at.pop(request_id, None)) is not None:
            requests = self._requests[at]
            del requests[request_id]
            if not requests:
                del self._requests[at]

    def clear(self) -> None:
        self.due.clear()
        self._at.clear()
        self._requests.clear()

    def count(self, step: Step) -> None:
        """Count the tokens of the coming step, and add the requests that it may bring to milestones to `due`.

        A due request must be `set` again. Call this once per step.
        """
        tokens = step.tokens
        if step.num_tokens == len(tokens):
            self._pass(1 if tokens else 0, tokens)
            return
        counts = set(tokens.values())
        short = [count for count in counts if count <= _LONGEST]
        if len(short) < len(counts):
            for request_id in [name for name, count in tokens.items() if count > _LONGEST]:
                if (at := self._at.get(request_id)) is not None:
                    self._take({request_id: self._requests[at][request_id]}, tokens)
        self._pass(max(short, default=0), tokens)

    def _pass(self, most: int, tokens: Mapping[str, int]) -> None:
        """Count `most` tokens, and take all requests that are due by then."""
        first = self._count + 1
        self._count += most
        for at in range(first, self._count + 1):
            if requests := self._requests.get(at):
                self._take(dict(requests), tokens)

    def _take(self, requests: Mapping[str, Request], tokens: Mapping[str, int]) -> None:
        for request_id, request in requests.items():
            self.forget(request_id)
            if request_id in tokens:
                self.due[request_id] = request
            # The engine has not scheduled it, so it has made no progress. A request without blocks is set
            # again when the engine computes it anew.
            elif not request.needs_blocks:
                self.set(request, 1)
