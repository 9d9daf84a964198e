"""`kvferry size`: how much memory or disk a hit rate takes, and whether it is worth it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli import plan_options, replay_options as opt
from kvferry.cli.options import check_folder, count_option, write_file
from kvferry.cli.progress import progress, workload_progress
from kvferry.cli.replay import open_for_curve, print_notes, served_model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvferry.replay.trace.request import TraceRequest


TraceOption = Annotated[
    str | None, typer.Option(metavar="TRACE", help="Trace as for `kvferry replay`; else describe a workload.")
]
TargetHit = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of the prompt tokens that need not be computed.")
]
Users = Annotated[int, count_option("Workload: users who hold conversations.")]
PerSecond = Annotated[
    float, typer.Option(metavar="COUNT", help="Workload: requests of all users per second.")
]
SharedTokens = Annotated[int, count_option("Workload: tokens that every prompt begins with.")]
Turns = Annotated[int, count_option("Workload: requests of a conversation.")]
PromptTokens = Annotated[int, count_option("Workload: mean new tokens of a prompt.")]
OutputTokens = Annotated[int, count_option("Workload: mean generated tokens.")]
Hours = Annotated[float, typer.Option(metavar="COUNT", help="Workload: hours of requests to simulate.")]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="SIZE", help="Host memory in front of the disk; by default 1/16 of the disk."
    ),
]
DiskWrites = Annotated[
    float,
    typer.Option(metavar="COUNT", help="Full writes per day that the disk endures for five years."),
]


def size(
    model: opt.Model,
    trace: TraceOption = None,
    target_hit: TargetHit = 0.5,
    users: Users = 1000,
    requests_per_second: PerSecond = 10.0,
    shared_prompt_tokens: SharedTokens = 1000,
    turns: Turns = 5,
    prompt_tokens: PromptTokens = 500,
    output_tokens: OutputTokens = 300,
    hours: Hours = 0.5,
    prefill_tokens_per_second: opt.PrefillSpeed = 0.0,
    host: HostMemory = None,
    disk_writes_per_day: DiskWrites = 1.0,
    tp: opt.Tp = 1,
    block_size: opt.BlockSize = None,
    engine_blocks: opt.EngineBlocks = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    dtype: opt.Dtype = "auto",
    step_tokens: opt.StepTokens = None,
    retention: opt.Retention = "0",
    chunk_tokens: opt.ChunkTokens = None,
    snapshot_tokens: opt.SnapshotTokens = None,
    first_snapshot_tokens: plan_options.FirstSnapshot = None,
    unit_tokens: opt.UnitTokens = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    html: opt.Html = None,
) -> None:
    """Say how much memory or disk a hit rate takes.

    Replays a trace, or a workload that you describe, with many capacities. Nothing is run, and no weights are
    read.
    """
    check_folder(html)
    from kvferry.replay.pool import block_pool
    from kvferry.replay.recorded_engine import recorded_engine
    from kvferry.replay.sizing import SizeQuestion, size as answer
    from kvferry.tiers.sizes import parse_size

    question = SizeQuestion(
        target=target_hit,
        prefill_tokens_per_second=prefill_tokens_per_second,
        host_bytes=parse_size(host) if host else None,
        disk_writes_per_day=disk_writes_per_day,
    )
    opened = None
    if trace is None:
        from kvferry.replay.workload import Workload

        workload = Workload(
            users=users,
            requests_per_second=requests_per_second,
            shared_prompt_tokens=shared_prompt_tokens,
            turns=turns,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            duration_seconds=hours * 3600,
            seed=seed,
        )
        name, unit = "a described workload", workload.unit_tokens
        requests: Callable[[str], Iterable[TraceRequest]] = partial(workload_progress, workload)
    else:
        opened = open_for_curve(trace, unit_tokens, "kvferry size")
        name, unit, requests = opened.name, opened.unit_tokens, partial(progress, opened)
    recorded = recorded_engine(name, {} if opened is None else opened.header)
    served = served_model_of(
        model,
        recorded,
        dtype=dtype,
        tp=tp,
        block_size=block_size,
        step_tokens=step_tokens,
        retention=retention,
        chunk_tokens=chunk_tokens,
        snapshot_tokens=snapshot_tokens,
        first_snapshot_tokens=first_snapshot_tokens,
    )
    pool = block_pool(served, engine_blocks, recorded.num_blocks, kv_cache_memory)
    found = answer(requests, served, pool, question, unit)
    if opened is not None:
        print_notes(opened)
    if html is not None:
        from kvferry.replay.page import size_page

        write_file(html, size_page(found, name))
    if as_json:
        from kvferry.replay.show_size import size_as_json

        print(json.dumps(size_as_json(found)))
    else:
        from kvferry.replay.show_size import show_size
        from kvferry.report import Report

        show_size(found, Report.to_stdout())
