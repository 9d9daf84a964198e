"""Remember requests during which engines died, so that a client that repeats one costs no further engines.

A request that makes an engine die looks like any other that was under way there. So both are remembered, by
a digest, and both are tried once more. A request is refused if two engines have died during it, and one that
is answered is forgotten.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.tools.serving.router.failures import Failures

REMEMBERED_SECONDS = 600.0
_MAX_REQUESTS = 1000
# Keys of a body that do not change what an engine computes.
_OF_THE_CALLER = frozenset(
    {"stream", "stream_options", "user", "metadata", "request_id", "safety_identifier", "store"}
)

# Time and description by (URL of the engine, how often it had been lost). Copies of a request that were under
# way at one engine have one death in common.
_Deaths = dict[tuple[str, int], tuple[float, str]]


class Suspects:
    """Requests during which engines died. The least recently remembered one is dropped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deaths)

    def begin(self, path: str, body: Mapping[str, Any]) -> Failures:
        """Return the failures of a request so far: the deaths of engines during equal ones."""
        since = self._clock() - REMEMBERED_SECONDS
        while self._deaths and max(at for at, _ in next(iter(self._deaths.values())).values()) <= since:
            self._deaths.popitem(last=False)
        # Digesting a long prompt costs time, and nearly always no engine has died.
        if not self._deaths:
            return Failures()
        deaths = self._deaths.get(_digest(path, body), {})
        return Failures(tuple(text for at, text in deaths.values() if at > since))

    def end(self, path: str, body: Mapping[str, Any], failures: Failures) -> None:
        """Remember a request during which an engine died, and forget one that was answered."""
        died = failures.deaths()
        if not died and not (failures.answered and self._deaths):
            return
        digest, now = _digest(path, body), self._clock()
        if failures.answered:
            self._deaths.pop(digest, None)
            return
        known = self._deaths.setdefault(digest, {})
        self._deaths.move_to_end(digest)
        known |= {death: (now, text) for death, text in died.items()}
        if len(self._deaths) > _MAX_REQUESTS:
            self._deaths.popitem(last=False)


def _digest(path: str, body: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in body.items() if key not in _OF_THE_CALLER}
    return hashlib.blake2b(json.dumps([path, kept], sort_keys=True).encode(), digest_size=16).digest()
