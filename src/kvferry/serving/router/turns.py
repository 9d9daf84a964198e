"""Remember the last prompt of each session, to find out what a decode engine has already."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.prompts import PromptPrefix

_MAX_SESSIONS = 10_000


@dataclass(frozen=True, slots=True)
class _Turn:
    """The last prompt of a session, and how often the decode engine that got it had been down by then."""

    backend: Backend
    losses: int
    prompt: PromptPrefix


class Turns:
    """The last prompt of each session, as a digest. The least recently used session is dropped."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._turns: OrderedDict[int, _Turn] = OrderedDict()

    def remember(self, session: int, backend: Backend, path: str, body: dict[str, Any]) -> None:
        """Record that a decode engine has the prompt of a request."""
        self._turns[session] = _Turn(backend, backend.losses, PromptPrefix.of(path, body))
        self._turns.move_to_end(session)
        if len(self._turns) > self._max_sessions:
            self._turns.popitem(last=False)

    def new_tokens(self, session: int, backend: Backend, path: str, body: dict[str, Any]) -> int | None:
        """Return about how many tokens a request adds to the session's last prompt.

        Return None if the engine has not got that prompt, was down since then, or if the prompt of the
        request does not begin with it.
        """
        turn = self._turns.get(session)
        if turn is None or turn.backend is not backend or turn.losses != backend.losses:
            return None
        return turn.prompt.new_tokens(path, body)
