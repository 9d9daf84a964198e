"""The hints that clients send with the requests of a trace, as ``--hint`` describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.connector import Hints, parse_hints
from kvferry.tools.replay.trace.base import MAX_SECONDS, TraceRequest

# Tenant and session id. Both are names in the trace.
SessionName: TypeAlias = tuple[str, str]

MOST_SHARE = 0.25
"""Maximum of the setting ``hint_share``."""

_EXAMPLES = (
    "write retain_seconds=600,priority=10,end=4096 or store=false,start=4096, both also with "
    "prompt_below=1024, or ends_session, or prefetch=session,lead_seconds=10"
)
_SPAN_KEYS = ("start", "end", "store", "retain_seconds", "priority")


class _Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_below: Annotated[int, msgspec.Meta(ge=1)] | None = None
    lead_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] | None = None


@dataclass(frozen=True, slots=True)
class HintRule:
    """A hint that clients send: as the API takes it, and with which requests.

    Attributes:
        hints: at most one span, or the end of the session, with its last request, or a prefetch of the
            session, before each of its turns.
        prompt_below: the hint comes with prompts of fewer tokens only; None for all.
        lead_seconds: time from a prefetch to the turn that needs it.
    """

    text: str
    hints: Hints
    prompt_below: int | None = None
    lead_seconds: float = 0.0

    @property
    def needs_sessions(self) -> bool:
        return self.hints.ends_session or self.hints.prefetch is not None


def parse_hint(text: str) -> HintRule:
    """Parse a hint, or raise ConfigError. The words are those of ``hints`` in ``kv_transfer_params``.

    >>> parse_hint("retain_seconds=600,end=4096").hints.spans
    (HintSpan(start=0, end=4096, store=True, retain_seconds=600.0, priority=0),)
    >>> parse_hint("prefetch=session,lead_seconds=5").lead_seconds
    5.0
    """
    values: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        values[name] = _value(value) if equals else True
    span = {name: values.pop(name) for name in _SPAN_KEYS if name in values}
    request = {name: values.pop(name) for name in ("prefetch", "ends_session") if name in values}
    try:
        hints = parse_hints({**request, **({"spans": [span]} if span else {})})
        condition = msgspec.convert(values, _Condition)
    except (KVFerryError, msgspec.ValidationError) as error:
        raise ConfigError(f"--hint {text!r}: {str(error).partition(';')[0]}; {_EXAMPLES}") from error
    is_span = any(one.retain_seconds or not one.store for one in hints.spans)
    is_prefetch = hints.prefetch == "session"
    needs_span = bool(span) or condition.prompt_below is not None
    needs_prefetch = hints.prefetch is not None or condition.lead_seconds is not None
    if is_span + is_prefetch + hints.ends_session != 1 or (needs_span, needs_prefetch) != (
        is_span,
        is_prefetch,
    ):
        raise ConfigError(f"--hint {text!r} is not one hint that a replay knows; {_EXAMPLES}")
    return HintRule(text, hints, condition.prompt_below, condition.lead_seconds or 0.0)


def _value(text: str) -> object:
    try:
        found: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return found


@dataclass(frozen=True, slots=True)
class HintSetting:
    """The hints that clients send with a trace, and what they may take.

    Attributes:
        share: the setting ``hint_share``.
        most_seconds: the setting ``hint_seconds``.
        turns: number of requests of each session, if a hint is about sessions.
    """

    rules: tuple[HintRule, ...]
    share: float
    most_seconds: float
    turns: Mapping[SessionName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= MOST_SHARE:
            raise ConfigError(f"--hint-share is {self.share:g}; give a share from 0 to {MOST_SHARE:g}")

    @property
    def needs_sessions(self) -> bool:
        return any(rule.needs_sessions for rule in self.rules)

    @property
    def lead_seconds(self) -> float | None:
        """Time from a prefetch to the turn that needs it; None if there are none."""
        leads = [rule.lead_seconds for rule in self.rules if rule.hints.prefetch is not None]
        return max(leads, default=None)


def session_name(request: TraceRequest) -> SessionName | None:
    """Return the name of a request's session; None without a session."""
    return (request.tenant, request.session) if request.session else None


def count_turns(name: str, requests: Iterable[TraceRequest]) -> Counter[SessionName]:
    """Return the number of requests of each session in a trace, or raise ConfigError if it has no sessions.

    Args:
        name: name of the trace, for the message.
    """
    turns = Counter(one for each in _all_turns(requests) if (one := session_name(each)) is not None)
    if not turns:
        raise ConfigError(
            f"{name} has no sessions, and ends_session and prefetch are about sessions; give a trace with "
            "sessions, such as AIPerf's, or a table with a column session, or leave these hints out"
        )
    return turns


def _all_turns(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    for request in requests:
        yield request
        yield from _all_turns(request.later)
        for branch in request.branches:
            yield from _all_turns(branch.turns)


class ClientHints:
    """The hints that clients send with the requests of a trace."""

    def __init__(self, setting: HintSetting) -> None:
        self._rules = setting.rules
        self._left = Counter(setting.turns)
        self._ends = any(rule.hints.ends_session for rule in setting.rules)

    def of(self, request: TraceRequest) -> Hints:
        """Return the hints of a request that has ended. Call this once for each."""
        spans = [
            span
            for rule in self._rules
            if rule.prompt_below is None or request.prompt_tokens < rule.prompt_below
            for span in rule.hints.spans
        ]
        is_last = False
        if (name := session_name(request)) is not None and name in self._left:
            self._left[name] -= 1
            if is_last := not self._left[name]:
                del self._left[name]
        return Hints(spans=tuple(spans), ends_session=is_last and self._ends)
