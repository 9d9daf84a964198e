"""`python -m benchmarks handover`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from benchmarks.handover.model import MODELS
from benchmarks.runners import RUNNERS, use_runner
from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import parse_names, progress_line

if TYPE_CHECKING:
    from benchmarks.handover.measure import Start

_Work = TypeVar("_Work")

_ALL_MODELS = ",".join(one.name for one in MODELS)
_MOST_PEERS, _MIX_PEERS = "nixl,nixl+", "nixl+,aggregated"
_LOADS, _MIX = "512x1,2048x1,8192x1,16384x1,512x8,2048x8,512x32", "48x8"


def handover(
    models: Annotated[
        str | None, typer.Option(help="Model families, separated by commas. [default: all]")
    ] = None,
    loads: Annotated[
        str | None,
        typer.Option(
            help=f"Loads, separated by commas: tokens of a prompt, x, requests at once. [default: {_LOADS}]"
        ),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            help="A mix of requests in place of loads: number of requests, x, clients, such as "
            f"{_MIX}. Implies --served."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Connectors to compare with: nixl, nixl+ (progress thread that sleeps, huge pages, rests "
            "between polls), or, for a mix, aggregated: one server that prefills and decodes, with rests. "
            f"[default: {_MOST_PEERS}; of a mix: {_MIX_PEERS}]"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds to count, per sitting. [default: 9; of a mix: 2]")
    ] = None,
    sittings: Annotated[
        int | None, typer.Option(min=1, help="Number of times that each pair of servers starts. [default: 2]")
    ] = None,
    served: Annotated[
        bool, typer.Option("--served", help="Run the engines as servers, and measure over HTTP; no stages.")
    ] = False,
    ranks: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel ranks of the prefill and of the decode server, such as 1:2. Other numbers "
            "than 1:1 imply --served."
        ),
    ] = "1:1",
    hybrid: Annotated[
        bool, typer.Option("--hybrid/--no-hybrid", help="vLLM's hybrid KV cache manager.")
    ] = True,
    runner: Annotated[
        int,
        typer.Option(
            min=RUNNERS[0], max=RUNNERS[-1], help="vLLM's model runner; 2 needs `make .venv/.triton`."
        ),
    ] = RUNNERS[0],
    quick: Annotated[
        bool, typer.Option("--quick", help="See that it runs: one model, one load, few rounds.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: times of all requests, seconds.")
    ] = False,
) -> None:
    """Hand requests over between two engines, beside NixlConnector.

    Measures the time from a request's arrival at the decode engine to its first token, and its stages. Every
    connector has two vLLM engines of its own. The pairs take turns; the pairs that wait are paused.
    With --served, the engines are vLLM's OpenAI-compatible servers, and the time is that from sending the
    decode request to its answer. Only one pair of servers runs at a time. With --mix, clients stream answers
    from the servers; the report has the throughput and the waits for tokens.
    """
    from rich.console import Console

    from benchmarks.handover import report
    from benchmarks.handover.in_process import engine_pair
    from benchmarks.handover.measure import Load, Turns, measure
    from benchmarks.handover.mix import Mix
    from benchmarks.handover.served import server_pair

    use_runner(runner)
    both = parse_ranks(ranks)
    served = served or mix is not None or both != (1, 1)
    names = parse_names(models or ("qwen3" if quick else _ALL_MODELS), [one.name for one in MODELS], "models")
    if mix is None:
        works: list[Any] = parse_pairs(loads or ("512x1" if quick else _LOADS), "loads", Load)
    else:
        works = parse_pairs(mix, "mix", Mix)
        if loads is not None:
            works += parse_pairs(loads, "loads", Load)
    known = _MOST_PEERS if mix is None else f"{_MOST_PEERS},aggregated"
    connectors = parse_names(peers or (_MOST_PEERS if mix is None else _MIX_PEERS), known.split(","), "peers")
    rounds = rounds or (2 if quick or mix is not None else 9)
    turns = Turns(rounds, (sittings or (1 if quick else 2)) if served else 0)
    start: Start = partial(server_pair, ranks=both) if served else engine_pair
    console, found = Console(highlight=False), {}
    for model in [one for one in MODELS if one.name in names]:
        engine = dict(model.engine) if hybrid else {**model.engine, "disable_hybrid_kv_cache_manager": True}
        with tempfile.TemporaryDirectory() as folder, progress_line() as progress:
            found[model.name] = measure(
                replace(model, engine=engine),
                works,
                ["kvferry", *connectors],
                start,
                turns=turns,
                folder=Path(folder),
                progress=progress,
            )
        if not as_json:
            report.show(model, found[model.name], console, served=served)
    if as_json:
        print(json.dumps(report.as_json(found, served=served)))


def parse_pairs(text: str, option: str, make: Callable[[int, int], _Work]) -> list[_Work]:
    """Parse pairs of numbers such as ``512x1,2048x8``.

    Args:
        text: text of the option.
        option: name of the option, for the message.
        make: function of the two numbers.

    Raises:
        ConfigError: the text has another form.
    """
    units = {"loads": "tokens, x and requests", "mix": "requests, x and clients"}[option]
    found = []
    for one in text.split(","):
        first, _, second = one.partition("x")
        if not (first.isdecimal() and second.isdecimal() and int(first) > 1 and int(second) > 0):
            raise ConfigError(f"--{option} {one} is not {units}, such as 2048x8")
        found.append(make(int(first), int(second)))
    return found


def parse_ranks(text: str) -> tuple[int, int]:
    """Parse two numbers of ranks such as ``1:2``.

    Raises:
        ConfigError: the text has another form.
    """
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) > 0 and int(decode) > 0):
        raise ConfigError(f"--ranks {text} is not two numbers of ranks, such as 1:2")
    return int(prefill), int(decode)
