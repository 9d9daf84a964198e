"""A message queue with a limit per sender, so that no sender can fill the queue alone."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_PER_SENDER = 256
MAX_MESSAGES = 8192

_Message = TypeVar("_Message")


class FairQueue(Generic[_Message]):
    """A FIFO queue for messages from one thread to another, with a limit per sender and one for all senders.

    Attributes:
        dropped: number of messages dropped because of a limit.
    """

    def __init__(self, per_sender: int = MAX_PER_SENDER, total: int = MAX_MESSAGES) -> None:
        self.dropped = 0
        self._per_sender, self._total = per_sender, total
        self._waiting: deque[tuple[bytes, _Message]] = deque()
        self._of: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    @property
    def senders(self) -> int:
        return len(self._of)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[_Message]:
        """Iterate over the queued messages, oldest first, without removing them."""
        return iter([message for _, message in list(self._waiting)])

    def put(self, sender: bytes, message: _Message, *, force: bool = False) -> bool:
        """Append a message and return True. If a limit is reached, drop the message and return False.

        Args:
            force: True to ignore the limits, for messages that are sent only once and whose number is limited
                elsewhere.
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
        """Remove and return the oldest message. Raise IndexError if the queue is empty."""
        with self._lock:
            sender, message = self._waiting.popleft()
            self._of[sender] -= 1
            if not self._of[sender]:
                del self._of[sender]  # anyone with the key can be any number of senders
            return message

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._of.clear()
