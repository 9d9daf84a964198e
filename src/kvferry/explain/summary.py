"""Summarize a request: the sources of its tokens, and its time until it was scheduled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.connector import events
from kvferry.connector.events import DecisionReason, LoadOutcome
from kvferry.observe.metrics_listener import trim_parts
from kvferry.observe.traces import RequestTrace


@dataclass(slots=True)
class Summary:
    """Numbers of a request up to the first time that the engine scheduled it.

    Attributes:
        tokens: length of the prompt.
        places: tokens by origin: a tier, ``peer``, ``prefix cache``, ``another connector`` or ``computed``;
            empty until the request is scheduled.
        failed: number of failed loads.
        seconds: time from arrival until it was scheduled; None until then.
        loading, looking: seconds of it in which loads were under way, or a source was still looking.
    """

    tokens: int
    places: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    seconds: float | None = None
    loading: float = 0.0
    looking: float = 0.0

    @property
    def queued(self) -> float:
        """Return the part of `seconds` that is neither loading nor looking."""
        return max(0.0, (self.seconds or 0.0) - self.loading - self.looking)


def summary(trace: RequestTrace) -> Summary:
    """Summarize a trace that begins with the arrival of its request."""
    came = trace.events[0]
    assert isinstance(came, events.Arrived)  # noqa: S101 - by construction
    found, looks_since, begun = Summary(came.tokens), None, dict[str, events.LoadBegan]()
    brought: list[events.LoadBegan] = []
    broken, loading = set[str](), dict[str, float]()
    for event in trace.events:
        if (
            isinstance(event, events.SourcesAsked | events.LoadBegan | events.Scheduled)
            and looks_since is not None
        ):
            found.looking, looks_since = found.looking + event.at - looks_since, None
        if isinstance(event, events.SourcesAsked) and event.why is DecisionReason.LOOKING:
            looks_since = event.at
        elif isinstance(event, events.LoadBegan):
            begun[event.load] = event
        elif isinstance(event, events.LoadEnded):
            began = begun.get(event.load)
            attempt = event.load if began is None else began.attempt
            loading[attempt] = max(loading.get(attempt, 0.0), event.seconds)  # parts come beside each other
            if event.outcome is LoadOutcome.READY:
                brought += [] if began is None else [began]
            elif event.outcome is not LoadOutcome.DROPPED:
                found.failed += 1
                broken.add(attempt)
        elif isinstance(event, events.Scheduled):
            found.seconds = event.at - came.at
            found.places = _places([load for load in brought if load.attempt not in broken], event)
            break
    found.loading = sum(loading.values())
    return found


def _places(brought: list[events.LoadBegan], went_on: events.Scheduled) -> Counter[str]:
    places: Counter[str] = Counter()
    for load in brought:
        for part in trim_parts(load.parts, load.end - load.begin):
            places[part.place] += part.tokens
    here = went_on.cached_tokens - went_on.other_connector_tokens - places.total()
    places.update(
        {
            "prefix cache": max(0, here),
            "another connector": went_on.other_connector_tokens,
            "computed": went_on.tokens - went_on.cached_tokens,
        }
    )
    return +places
