"""`kvferry bench`: what this machine reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kvferry.cli.options import given, write
from kvferry.cli.printed import check_output
from kvferry.errors import ConfigError

_REPEATS_HELP = "Rounds; each moves the bytes once in every way."
_MOST_DEPTH = 256
_LAYOUT_MODELS = "Llama-3.1-8B,Qwen3-0.6B,Qwen3-Next-80B-A3B"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(
        help="Measure how fast this machine moves and keeps KV.", no_args_is_help=True, callback=check_output
    )
    bench.command()(transfer)
    bench.command()(layout)
    bench.command()(calibrate)
    bench.command()(offload)
    bench.command()(choice)
    bench.command()(safety)
    bench.command()(redeem)
    app.add_typer(bench, name="bench")


def transfer(
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request that is moved.")] = 4096,
    layers: Annotated[int | None, typer.Option(min=1, help="Overrides the model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Overrides the model's.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Overrides the model's.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block; 16 by default.")] = None,
    dtype: Annotated[str, typer.Option(help="Element type: auto, float32, bfloat16, fp8, ...")] = "auto",
    order: Annotated[
        str, typer.Option(help="Block tables: scattered, as in a busy engine, or contiguous.")
    ] = "scattered",
    repeats: Annotated[int, typer.Option(min=7, help=_REPEATS_HELP)] = 9,
    transports: Annotated[
        str | None, typer.Option(help="UCX_TLS for both processes, e.g. tcp,self; by default unchanged.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Move KV cache over NIXL, beside raw NIXL and memcpy.

    Between two processes. kvferry's time is that of a request: from the moment its blocks are known until
    they may be used, with planning, posting, the lease check and the acknowledgement. Also measured:
    planning a long request, and the time spent inside an engine's hooks while transfers run.
    """
    from rich.console import Console

    from kvferry.bench import report
    from kvferry.bench.engines import ORDERS, read_geometry
    from kvferry.bench.transfer import Job, measure
    from kvferry.plan.side import Side

    if order not in ORDERS:
        raise ConfigError(f"--order {order} is not known; choose one of {', '.join(ORDERS)}")
    changes = given(num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    reading = read_geometry(geometry, changes, dtype)
    if len(set(reading.cache.layers)) > 1:
        raise ConfigError(
            f"--geometry {geometry} has layers of several kinds; bench layout measures those, this command "
            "models whose layers are alike"
        )
    with Console(stderr=True).status("starting") as status:
        measured = measure(
            Job(reading, Side(block_tokens=block_size), tokens, order, repeats, transports),
            lambda text: status.update(f"{text} ..."),
        )
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))


def layout(
    geometry: Annotated[
        str,
        typer.Option(
            help="Models whose KV cache to move, as `kvferry plan` takes them, separated by commas."
        ),
    ] = _LAYOUT_MODELS,
    layouts: Annotated[
        str, typer.Option(help="Orders of the axes in memory, the same on both sides.")
    ] = "LBNHC,LBHNC,BLHNC,BHLNC",
    parallel: Annotated[
        str, typer.Option(help="Tensor-parallel ranks of the producer, and of the reader.")
    ] = "1:1,2:1,1:2,4:2",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the request; by default as many as fill 128 MiB.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=7, help=_REPEATS_HELP)] = 9,
    transports: Annotated[
        str | None, typer.Option(help="UCX_TLS for both processes, e.g. tcp,self; by default unchanged.")
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, max=16, help="Reading threads.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="SVG file to write with a plot of the table.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Compare memory layouts, parallel sizes and strategies.

    A request with scattered blocks moves, over NIXL between two processes, from an engine to one rank of
    another: direct, over-read, staged, and as the planner chooses. Speeds are multiples of raw NIXL's at
    2 MiB in the same round.
    """
    from rich.console import Console

    from kvferry.bench import layout_report
    from kvferry.bench.engines import read_geometry
    from kvferry.bench.layout import Job, measure
    from kvferry.bench.layout_plot import picture
    from kvferry.bench.transfer import machine

    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot} is not an .svg file, which is the only kind that is written")
    readings = [read_geometry(name) for name in geometry.split(",")]
    job = Job(_layouts(layouts), _parallel(parallel), repeats, tokens, transports, lanes)
    with Console(stderr=True).status("starting") as status:
        tables = [measure(job, reading, lambda text: status.update(f"{text} ...")) for reading in readings]
    if plot is not None:
        write(plot, picture(tables))
    if as_json:
        print(json.dumps(layout_report.as_json(tables, machine())))
    else:
        layout_report.show(tables, machine(), repeats, Console(highlight=False))


def calibrate(
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default where kvferry looks for it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, write nothing.")] = False,
    repeats: Annotated[int, typer.Option(min=7, help="Rounds; each measures every size once.")] = 9,
    transports: Annotated[
        str | None, typer.Option(help="UCX_TLS for both processes, e.g. tcp,self; by default unchanged.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine's costs, and keep them for the planner.

    Of reading, copying and asking. The planner chooses between strategies by these costs. They are
    written to a file which kvferry reads wherever it plans transfers; without one it goes by built-in
    costs.
    """
    from datetime import UTC, datetime

    from rich.console import Console

    from kvferry.bench import calibrate_report
    from kvferry.bench.calibrate import Job, calibrate as measure
    from kvferry.bench.transfer import machine
    from kvferry.transport.costs import default_path, write_costs

    with Console(stderr=True).status("starting") as status:
        found = measure(Job(repeats, transports), lambda text: status.update(f"{text} ..."))
    path = None if dry_run else out or default_path()
    facts = calibrate_report.facts(machine(), found)
    if path is not None:
        write_costs(path, found.costs, datetime.now(UTC).isoformat(timespec="seconds"), facts)
    if as_json:
        print(json.dumps(calibrate_report.as_json(found, facts, path)))
    else:
        calibrate_report.show(found, path, Console(highlight=False))


def offload(
    parts: Annotated[
        str, typer.Option(help="Parts to measure, separated by commas: tiers, lookup, asking, hooks, ttft.")
    ] = "tiers,lookup",
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    layers: Annotated[int, typer.Option(min=1, help="Overrides the model's.")] = 16,
    layouts: Annotated[
        str, typer.Option(help="Orders of the axes in an engine's memory, for the host tier.")
    ] = "LBHNC,BHLNC",
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block; 16 by default.")] = None,
    depths: Annotated[str, typer.Option(help="Chunks in flight at a time.")] = "1,8,32",
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--object", metavar="URL", help="Object storage, such as s3://bucket/path."),
    ] = None,
    stored: Annotated[int, typer.Option(min=1, help="Chunks in the index for lookup.")] = 1_000_000,
    prompt: Annotated[int, typer.Option(min=512, help="Tokens of the prompt for ttft.")] = 16_384,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts to measure the time to first token with.")] = 3,
    repeats: Annotated[int, typer.Option(min=7, help=_REPEATS_HELP)] = 7,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Keep chunks in every tier and fetch them, beside raw storage.

    Host memory beside memcpy, files beside fio or threads with direct I/O, objects beside obstore. Also
    measured: how long a scheduler looks for the chunks of a long prompt, and asks five sources for it. With
    an engine, a real one on this machine's processors: time inside the connector's hooks per step, and a
    prompt's first token from every tier.
    """
    from rich.console import Console

    from kvferry.bench import offload_report
    from kvferry.bench.engine_parts import Asked
    from kvferry.bench.engines import read_geometry
    from kvferry.bench.offload import Job, measure
    from kvferry.plan.side import Side

    reading = read_geometry(geometry, given(num_hidden_layers=layers))
    with _folder(path) as folder, Console(stderr=True).status("starting") as status:
        measured = measure(
            Job(
                reading,
                _parts(parts),
                tuple(Side(layout=layout, block_tokens=block_size) for layout in _layouts(layouts)),
                _depths(depths),
                repeats,
                folder,
                url,
                stored=stored,
                asked=Asked(prompt, rounds),
            ),
            lambda text: status.update(f"{text} ..."),
        )
    if as_json:
        print(json.dumps(offload_report.as_json(measured)))
    else:
        offload_report.show(measured, Console(highlight=False))


def choice(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests that were recorded, in Mooncake's format: one JSON object per line. By default "
            "conversations that are drawn."
        ),
    ] = None,
    sources: Annotated[
        str, typer.Option(help="Between which: connectors, side by side, or tiers of one.")
    ] = "connectors",
    requests: Annotated[int, typer.Option(min=2, help="Requests of a replay.")] = 32,
    block: Annotated[int, typer.Option(min=16, max=512, help="Tokens of the trace's blocks, here.")] = 64,
    longest: Annotated[int, typer.Option(min=64, help="Tokens of a prompt, at most.")] = 2048,
    apart: Annotated[float, typer.Option(min=1, help="How many times as fast the near source is.")] = 20,
    near: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of all that is asked that the near source has room for."),
    ] = 0.25,
    rounds: Annotated[int, typer.Option(min=1, help="Replays by each policy, after one to learn.")] = 3,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all requests, in seconds and tokens.")
    ] = False,
) -> None:
    """Replay requests by every policy for choosing a source.

    Near are files with room for a part of what is asked, far an object store that has all of it and is many
    times slower. Real engines on this machine's processors, real tiers, a real server behind a narrow line.
    Says when the first token comes by each policy, and which source brought what.
    """
    from rich.console import Console

    from kvferry.bench import choice_report
    from kvferry.bench.choice import SOURCES, Job, measure
    from kvferry.bench.workload import cut, drawn, read_trace

    if sources not in SOURCES:
        raise ConfigError(f"--sources {sources} is not known; choose one of {', '.join(SOURCES)}")
    workload = (
        drawn(block, longest, requests)
        if trace is None
        else cut(trace.name, read_trace(trace), block, longest, requests)
    )
    with _folder(path) as folder, Console(stderr=True).status("starting") as status:
        measured = measure(
            Job(workload, sources, apart, near, rounds, folder),
            lambda text: status.update(f"{text} ..."),
        )
    if as_json:
        print(json.dumps(choice_report.as_json(measured)))
    else:
        choice_report.show(measured, Console(highlight=False))


def safety(
    parts: Annotated[
        str, typer.Option(help="Parts to measure, separated by commas: lease, checksum, curve.")
    ] = "lease,checksum,curve",
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    layers: Annotated[int, typer.Option(min=1, help="Overrides the model's.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request that is moved.")] = 4096,
    repeats: Annotated[int, typer.Option(min=7, help="Rounds; each with and without.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Measure what protections cost, on and off in one run.

    lease: a transfer between two processes, with the check that the producer still has the blocks, and
    without. checksum: a prompt loaded from files in memory into an engine's blocks. curve: what channels
    between engines say over ZeroMQ, encrypted and plain, and its share of a transfer.
    """
    from rich.console import Console

    from kvferry.bench import safety_report
    from kvferry.bench.engines import read_geometry
    from kvferry.bench.safety import PARTS, measure
    from kvferry.bench.safety_cost import Job

    chosen = tuple(parts.split(","))
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ConfigError(f"--parts {unknown[0]} is not known; choose of {', '.join(PARTS)}")
    reading = read_geometry(geometry, given(num_hidden_layers=layers))
    with Console(stderr=True).status("starting") as status:
        measured = measure(Job(chosen, reading, tokens, repeats), lambda text: status.update(f"{text} ..."))
    if as_json:
        print(json.dumps(safety_report.as_json(measured)))
    else:
        safety_report.show(measured, Console(highlight=False))


def redeem(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 131_072,
    rounds: Annotated[int, typer.Option(min=100, help="Tickets to redeem at each producer.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Redeem tickets between two processes.

    A decode engine exchanges a request's ticket for block tables before it reads. Measures how long that
    takes at a peer that it knows, how often a step waits for the answer, and how much it adds to meeting a
    new peer.
    """
    from rich.console import Console

    from kvferry.bench import redeem_report
    from kvferry.bench.redeeming import measure

    with Console(stderr=True).status("starting") as status:
        found = measure(rounds, tokens, lambda text: status.update(f"{text} ..."))
    if as_json:
        print(json.dumps(redeem_report.as_json(found, tokens)))
    else:
        redeem_report.show(found, tokens, Console(highlight=False))


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A folder to write to; one that was not asked for is removed."""
    if given is not None:
        if not given.is_dir():
            raise ConfigError(f"--path {given} is no folder; make it, or choose another")
        yield given
        return
    from kvferry.tiers.place import user_directory

    cache = Path(user_directory()).parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(prefix="bench-", dir=cache)
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder in {cache}: {error.strerror}; name one with --path"
        ) from error
    with made as folder:
        yield Path(folder)


def _parts(said: str) -> tuple[str, ...]:
    from kvferry.bench.offload import PARTS

    found = tuple(said.split(","))
    if unknown := [name for name in found if name not in PARTS]:
        raise ConfigError(f"--parts {unknown[0]} is not known; choose of {', '.join(PARTS)}")
    return found


def _depths(said: str) -> tuple[int, ...]:
    found = said.split(",")
    if wrong := [one for one in found if not one.isdecimal() or not 0 < int(one) <= _MOST_DEPTH]:
        raise ConfigError(f"--depths {wrong[0]} is not a number from 1 to {_MOST_DEPTH}")
    return tuple(sorted({int(one) for one in found}))


def _layouts(said: str) -> tuple[str, ...]:
    from kvferry.geometry.layout import LAYOUTS

    found = tuple(said.upper().split(","))
    if unknown := [name for name in found if name not in LAYOUTS]:
        raise ConfigError(f"--layouts {unknown[0]} is not known; choose of {', '.join(LAYOUTS)}")
    return found


def _parallel(said: str) -> tuple[tuple[int, int], ...]:
    found = []
    for pair in said.split(","):
        numbers = pair.split(":")
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(f"--parallel {pair} is not two numbers of ranks, like 2:1")
        found.append((int(numbers[0]), int(numbers[1])))
    return tuple(found)
