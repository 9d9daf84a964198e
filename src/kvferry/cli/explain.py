"""`kvferry explain`: show the trace of a request, which the engines on this machine keep in memory."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.output import print_error
from kvferry.errors import ConfigError, KVFerryError
from kvferry.units import counted

if TYPE_CHECKING:
    from kvferry.explain.client import AllAnswers, EngineTrace

_MAX_TRACES = 16


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST-ID",
            help="Id of an answer, its X-Request-Id, or the beginning of either.",
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(metavar="COUNT", min=1, max=1000, help="Number of requests to list per engine.")
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every event as JSON; times in seconds.")
    ] = False,
) -> None:
    """Show where the KV of a request came from, and why.

    Shows every decision about the request, and how long each step took. Without a request id, lists the last
    requests. Asks all engines of this user on this machine.
    """
    from kvferry.explain.client import ask_engines
    from kvferry.explain.text import render, render_list
    from kvferry.observe.wire import MAX_QUESTION_BYTES, Question

    if request_id is not None and not 0 < len(request_id.encode()) < MAX_QUESTION_BYTES // 8:
        raise ConfigError("a request id has 1 to 511 bytes; run kvferry explain to list the last requests")
    answers = ask_engines(Question("", last) if request_id is None else Question(request_id, _MAX_TRACES))
    for silent in answers.problems:
        print_error(silent)
    traces = answers.traces()
    if not traces:
        raise KVFerryError(_not_found_message(answers, request_id))
    if as_json:
        print(json.dumps([_trace_json(one) for one in traces]))
    elif request_id is None:
        print(render_list(traces, time.time()))
    else:
        print("\n\n".join(render(one) for one in traces))


def _not_found_message(answers: AllAnswers, request_id: str | None) -> str:
    """Return the error message for a request that no engine on this machine remembers.

    Args:
        answers: answers of all engines.
        request_id: id that the user asked for; None if the user asked for the last requests of all engines.
    """
    engines = [answer.engine for answer in answers.answers]
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
    """Return the trace of a request, and a description of its engine, as values that can be written as JSON.

    Args:
        engine_trace: trace (recorded events of the request) that an engine sent.
    """
    from kvferry.observe.wire import trace_to_dict

    engine = engine_trace.answer.engine
    return {
        "engine": {
            "engine_id": engine.engine_id,
            "model": engine.model,
            "pid": engine.pid,
            "role": engine.role,
            "connector": engine.connector,
            "kvferry": engine.kvferry,
        },
        "arrived": engine_trace.arrived,
        **trace_to_dict(engine_trace.trace),
    }
