"""The chunks of sessions: which ones only one session has used, and those of its last request."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from kvferry.cache.retained import HoldingTier, RetainedChunks

SessionName: TypeAlias = tuple[str, str]
"""Cache salt and session id. Content under another salt has other keys, so tenants share no chunks."""

# The chunks of a request.
_Chunks = TypeVar("_Chunks")

MOST_KEYS = 1 << 18
"""Maximum number of chunk keys of all remembered sessions together."""


@dataclass(slots=True)
class _Session(Generic[_Chunks]):
    keys: dict[bytes, None] = field(default_factory=dict)  # in the order of their first use
    last: _Chunks | None = None


class Sessions(Generic[_Chunks]):
    """The remembered sessions, of which the least recently used are forgotten first. Not thread-safe."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys, self._count = most_keys, 0
        self._sessions: OrderedDict[SessionName, _Session[_Chunks]] = OrderedDict()
        self._users = Counter[bytes]()  # number of sessions by key of a chunk that they have used
        self._shared: set[bytes] = set()  # keys of `_users` that a request without a session has used

    def __len__(self) -> int:
        return len(self._sessions)

    def use(self, name: SessionName | None, keys: Sequence[bytes], chunks: _Chunks) -> None:
        """Record the chunks of an ended request. `name` is None for a request without a session."""
        if name is None:
            if self._users:
                self._shared.update(key for key in keys if key in self._users)
            return
        session = self._sessions.setdefault(name, _Session())
        self._sessions.move_to_end(name)
        new = [key for key in keys if key not in session.keys]
        session.keys.update(dict.fromkeys(new))
        session.last = chunks
        self._users.update(new)
        self._count += len(new)
        while self._count > self._most_keys:
            self._forget(next(iter(self._sessions)))

    def last(self, name: SessionName | None) -> _Chunks | None:
        """Return the chunks of the last request of a session; None if the session is not remembered."""
        session = None if name is None else self._sessions.get(name)
        return None if session is None else session.last

    def end(self, name: SessionName | None) -> list[bytes]:
        """Forget a session. Return the keys of the chunks that nobody else has used, the first one first."""
        if name is None or name not in self._sessions:
            return []
        own = [key for key in self._sessions[name].keys if self._is_own(key)]
        self._forget(name)
        return own

    def forget_tenant(self, tenant: str) -> None:
        for name in [name for name in self._sessions if name[0] == tenant]:
            self._forget(name)

    def clear(self) -> None:
        self._sessions.clear()
        self._users.clear()
        self._shared.clear()
        self._count = 0

    def _is_own(self, key: bytes) -> bool:
        return self._users[key] == 1 and key not in self._shared

    def _forget(self, name: SessionName) -> None:
        keys = self._sessions.pop(name).keys
        self._count -= len(keys)
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._shared.discard(key)


def end_session(
    name: SessionName | None, sessions: Sessions[_Chunks], retained: RetainedChunks, host: HoldingTier
) -> int:
    """Have the chunks that only this session has used evicted first. Return their number."""
    own = sessions.end(name)
    retained.release(own)
    host.make_cold(own[::-1])  # the end of a prompt before its start
    return len(own)
