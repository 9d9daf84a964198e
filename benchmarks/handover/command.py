"""`python -m benchmarks handover`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.handover.model import MODELS
from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import parse_names, progress_line

if TYPE_CHECKING:
    from benchmarks.handover.measure import Load, Start

_ALL_MODELS = ",".join(one.name for one in MODELS)
_MOST_PEERS = "nixl,nixl+"


def handover(
    models: Annotated[str, typer.Option(help="Model families, separated by commas.")] = _ALL_MODELS,
    loads: Annotated[
        str, typer.Option(help="Loads, separated by commas: tokens of a prompt, x, requests at once.")
    ] = "512x1,2048x1,8192x1,16384x1,512x8,2048x8,512x32",
    peers: Annotated[
        str,
        typer.Option(
            help="Connectors to compare with: nixl, or nixl+ (sleeping progress thread, huge pages)."
        ),
    ] = _MOST_PEERS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 9,
    served: Annotated[
        bool, typer.Option("--served", help="Run the engines as servers, and measure over HTTP; no stages.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: times of all requests, seconds.")
    ] = False,
) -> None:
    """Hand requests over between two engines, beside NixlConnector.

    Measures the time from a request's arrival at the decode engine to its first token, and its stages. Every
    connector has two vLLM engines of its own. The pairs take turns; the pairs that wait are paused.
    With --served, the engines are vLLM's OpenAI-compatible servers, and the time is that from sending the
    decode request to its answer.
    """
    from rich.console import Console

    from benchmarks.handover import report
    from benchmarks.handover.in_process import engine_pair
    from benchmarks.handover.measure import measure
    from benchmarks.handover.served import server_pair

    names = parse_names(models, [one.name for one in MODELS], "models")
    connectors = ["kvferry", *parse_names(peers, _MOST_PEERS.split(","), "peers")]
    start: Start = server_pair if served else engine_pair
    console, found = Console(highlight=False), {}
    for model in [one for one in MODELS if one.name in names]:
        with tempfile.TemporaryDirectory() as folder, progress_line() as progress:
            found[model.name] = measure(
                model,
                parse_loads(loads),
                connectors,
                start,
                rounds=rounds,
                folder=Path(folder),
                progress=progress,
            )
        if not as_json:
            report.show(model, found[model.name], console, served=served)
    if as_json:
        print(json.dumps(report.as_json(found, served=served)))


def parse_loads(text: str) -> list[Load]:
    """Parse loads such as ``512x1,2048x8``: tokens per prompt, and number of requests.

    Raises:
        ConfigError: the text has another form.
    """
    from benchmarks.handover.measure import Load

    found = []
    for one in text.split(","):
        tokens, _, requests = one.partition("x")
        if not (tokens.isdecimal() and requests.isdecimal() and int(tokens) > 1 and int(requests) > 0):
            raise ConfigError(f"--loads {one} is not tokens, x and requests, such as 2048x8")
        found.append(Load(int(tokens), int(requests)))
    return found
