"""`kvferry explain`: what became of a request, as the engines of this machine remember it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.printed import complain
from kvferry.errors import ConfigError, KVFerryError

if TYPE_CHECKING:
    from kvferry.explain.asking import Answers, Told

_MOST_STORIES = 16


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST-ID]",
            help="The id of an answer, its X-Request-Id, or how either begins; by default the last ones.",
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, max=1000, help="How many requests of each engine to list.")
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every event as JSON; times in seconds.")
    ] = False,
) -> None:
    """Say where the KV of a request came from, and why.

    Also tells how long each step took. Without a request id, lists the last requests. Asks every engine of
    this user on this machine.
    """
    from kvferry.explain.asking import ask
    from kvferry.explain.show import show, show_list
    from kvferry.observe.wire import MAX_QUESTION_BYTES, Question

    if request_id is not None and not 0 < len(request_id.encode()) < MAX_QUESTION_BYTES // 8:
        raise ConfigError("the id of a request has 1 to 511 bytes; see kvferry explain for those there are")
    answers = ask(Question("", last) if request_id is None else Question(request_id, _MOST_STORIES))
    for silent in answers.silent:
        complain(silent)
    told = answers.told()
    if not told:
        raise KVFerryError(_nothing(answers, request_id))
    if as_json:
        print(json.dumps([_plain(one) for one in told]))
    elif request_id is None:
        print(show_list(told, time.time()))
    else:
        print("\n\n".join(show(one) for one in told))


def _nothing(answers: Answers, request_id: str | None) -> str:
    """Why there is nothing to say."""
    engines = [answer.engine for answer in answers.answers]
    if not engines:
        return (
            "no engine of this user runs on this machine; run kvferry explain as the engine's user, on its "
            "machine, and check that its explain_requests is not 0"
        )
    if request_id is None:
        return "no request has come yet"
    remembered = ", ".join(str(one.remembered) for one in engines)
    return (
        f"no request {request_id!r} is remembered by {len(engines)} engine{'s' * (len(engines) > 1)} "
        f"(of their last requests: {remembered}); kvferry explain lists them, explain_requests sets how many"
    )


def _plain(told: Told) -> dict[str, Any]:
    from kvferry.observe.wire import trace_to_dict

    engine = told.answer.engine
    return {
        "engine": {
            "engine_id": engine.engine_id,
            "model": engine.model,
            "pid": engine.pid,
            "role": engine.role,
            "connector": engine.connector,
            "kvferry": engine.kvferry,
        },
        "came": told.came,
        **trace_to_dict(told.trace),
    }
