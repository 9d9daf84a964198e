"""Steps in which no chunk becomes complete.

Most steps of a busy engine compute one token for each of the same requests. A chunk of one of them becomes
complete once in hundreds of steps. The other steps are recognized without a look at each request.
"""

from __future__ import annotations

from collections.abc import Mapping


class QuietSteps:
    """Counts down the steps until a chunk may become complete.

    `start` begins the count after a look at all requests. It holds while each step computes exactly one token
    for each of the same requests.
    """

    def __init__(self) -> None:
        """Begin without a count, so that the first step is not quiet."""
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
