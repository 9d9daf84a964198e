"""`kvferry explain`: show the trace of a request, which the engines on this machine keep in memory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.common.units import counted
from kvferry.tools.cli.options import argument, command, flag, option, print_error

if TYPE_CHECKING:
    from kvferry.tools.explain.client import AllAnswers, EngineTrace

# The beginning of an id may fit many requests.
_MAX_TRACES = 16
_ENGINE = ("engine_id", "model", "pid", "role", "connector", "kvferry")
"""What the JSON says of an engine."""


@dataclass(frozen=True)
class ExplainOptions:
    """The options of `kvferry explain`."""

    request_id: str | None = argument(
        "REQUEST-ID", "Id of an answer, its X-Request-Id, or the beginning of either.", None
    )
    last: int = option(20, "COUNT", "Number of requests to list per engine.", min=1, max=1000)
    as_json: bool = flag("--json", "Print every event as JSON; times in seconds.")


@command
def explain(options: ExplainOptions) -> None:
    """Show where the KV of a request came from, and why.

    Shows every decision about the request, and how long each step took. Without a request id, lists the last
    requests. Asks all engines of this user on this machine.
    """
    from kvferry.observe import MAX_QUESTION_BYTES, Question
    from kvferry.tools.explain.client import ask_engines
    from kvferry.tools.explain.timeline import render, render_list

    request_id = options.request_id
    # The question is JSON of limited length, in which one byte of an id can take six.
    if request_id is not None and not 0 < len(request_id.encode()) < MAX_QUESTION_BYTES // 8:
        raise ConfigError("a request id has 1 to 511 bytes; run kvferry explain to list the last requests")
    answers = ask_engines(
        Question("", options.last) if request_id is None else Question(request_id, _MAX_TRACES)
    )
    # An engine that does not answer must not hide what others say.
    for silent in answers.problems:
        print_error(silent)
    traces = answers.traces
    if not traces:
        raise KVFerryError(_not_found_message(answers, request_id))
    if options.as_json:
        print(json.dumps([_trace_json(one) for one in traces]))
    elif request_id is None:
        print(render_list(traces, time.time()))
    else:
        print("\n\n".join(render(one) for one in traces))


def _not_found_message(answers: AllAnswers, request_id: str | None) -> str:
    engines = answers.engines
    if not engines:
        return (
            "no engine of this user runs on this machine; run kvferry explain as the engine's user, on its "
            "machine, and check that its explain_requests is not 0"
        )
    if request_id is None:
        return "no request has arrived yet"
    remembered = ", ".join(str(one.remembered) for one in engines)
    return (
        f"no request {request_id!r} is remembered by {counted(len(engines), 'engine')} "
        f"(of their last requests: {remembered}); kvferry explain lists them, and the setting "
        "explain_requests limits their number"
    )


def _trace_json(engine_trace: EngineTrace) -> dict[str, Any]:
    from kvferry.observe import trace_to_dict

    engine = engine_trace.engine
    return {
        "engine": {name: getattr(engine, name) for name in _ENGINE},
        "arrived": engine_trace.arrived,
        **trace_to_dict(engine_trace.trace),
    }
