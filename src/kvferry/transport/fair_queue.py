"""Messages that the engine has not taken yet: few of each sender, so that none crowds out another."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_PER_SENDER = 256
MAX_MESSAGES = 8192

_Message = TypeVar("_Message")


class FairQueue(Generic[_Message]):
    """A queue between two threads, with a limit for every sender and one for all.

    Attributes:
        dropped: messages that found no room.
    """

    def __init__(self, per_sender: int = MAX_PER_SENDER, total: int = MAX_MESSAGES) -> None:
        """Begin empty.

        Args:
            per_sender: messages of one sender.
            total: messages of all.
        """
        self.dropped = 0
        self._per_sender, self._total = per_sender, total
        self._waiting: deque[tuple[bytes, _Message]] = deque()
        self._of: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[_Message]:
        """Iterate over the messages, oldest first, without taking them."""
        return iter([message for _, message in list(self._waiting)])

    def put(self, sender: bytes, message: _Message, *, force: bool = False) -> bool:
        """Append a message; return False, and count it, if there is no room for it.

        Args:
            sender: who sent it.
            message: what is appended.
            force: take it beyond the limits, because it is lost for good if it is dropped. Only for messages
                whose number is bounded otherwise.
        """
        with self._lock:
            full = self._of[sender] >= self._per_sender or len(self._waiting) >= self._total
            if full and not force:
                self.dropped += 1
                return False
            self._of[sender] += 1
            self._waiting.append((sender, message))
            return True

    def popleft(self) -> _Message:
        """Take the oldest message; IndexError if there is none."""
        with self._lock:
            sender, message = self._waiting.popleft()
            self._of[sender] -= 1
            if not self._of[sender]:
                del self._of[sender]
            return message

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._waiting.clear()
            self._of.clear()
