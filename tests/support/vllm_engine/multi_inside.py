"""What is done to an engine with several connectors, in its own process: functions of `inside`."""

from __future__ import annotations

import time
from typing import Any

from support.vllm_engine.parts import ferries, half_of, only_worker, scheduler


def _multi(engine: Any) -> Any:
    return scheduler(engine).connector


def chosen(engine: Any) -> list[tuple[str, int]]:
    """(child, tokens) of every load begun since the last call; the first call begins."""
    admission = _multi(engine)._admission
    if not hasattr(engine, "chosen"):
        engine.chosen = []
        inner = admission._admit

        def admit(name: str, wish: Any, blocks: Any, external: int) -> int | None:
            place = inner(name, wish, blocks, external)
            if place is not None:
                engine.chosen.append((admission._names[place], external))
            return place

        admission._admit = admit
    seen, engine.chosen = engine.chosen, []
    return seen


def slow_answers(engine: Any, seconds: float, of: int) -> None:
    """Let that child be looking for so long, from the first time that it is asked about a request."""
    child = _multi(engine)._connectors[of]
    if not hasattr(child, "answer_seconds"):
        inner, first = child.get_num_new_matched_tokens, dict[str, float]()

        def late(request: Any, local_tokens: int) -> tuple[int | None, bool]:
            answer, now = inner(request, local_tokens), time.monotonic()
            asked = first.setdefault(request.request_id, now)
            return (None, False) if now < asked + child.answer_seconds else answer

        child.get_num_new_matched_tokens = late
    child.answer_seconds = seconds


def story_of_last(engine: Any, of: int = 0) -> list[str]:
    """What that child of kvferry's own tells of the request that came last."""
    from kvferry.tools.explain.timeline import timeline

    ours = ferries(_multi(engine))[of]
    return [line.text for line in timeline(next(ours._explaining._traces.last()))]


def forget_speeds(engine: Any) -> None:
    """How fast children load, as if they had not for long; not how fast the engine computes."""
    _multi(engine)._admission._chooser.speeds._lines.clear()


def still_known(engine: Any) -> dict[str, int]:
    """What the connector still knows of requests, and is not nothing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    ours = _multi(engine)
    worker = get_kv_transfer_group() if has_kv_transfer_group() else None  # of one rank, it is here
    counts = {
        "requests": len(ours._admission),
        "holders": len(ours._block_holders._holders),
        "expected": len(worker._completions) if worker else 0,
        "pending": sum(ours._admission.counts.pending.values()),
    }
    return {name: count for name, count in counts.items() if count}


def spoil_child(engine: Any, name: str | None) -> None:
    """Change signs in every group's first block of what this child loads, as it reports it; None stops."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from support.vllm_engine.pages import negate

    group, scheduler = get_kv_transfer_group(), engine.llm_engine.engine_core.engine_core.scheduler
    if not hasattr(engine, "spoilt_child"):
        inner = group._completions.join

        def join(reports: list[Any]) -> Any:
            loads = dict(group._completions._loads)
            results = inner(reports)
            for request in results.finished_recving - results.failed_recving:
                if group._names[loads[request]] == engine.spoilt_child:
                    tables = scheduler.kv_cache_manager.get_block_ids(request)
                    worker = half_of(only_worker(ferries(group)[0]))
                    for ids, described in zip(tables, worker.geometry.groups, strict=True):
                        for layer in described.layers:
                            negate(worker, layer, next(number for number in ids if number))
            return results

        group._completions.join = join
    engine.spoilt_child = name


def metrics(engine: Any, prefix: str) -> dict[str, float]:
    """Samples of this process's metrics, by name and the value of the label ``connector`` and others."""
    from prometheus_client import REGISTRY

    found = {}
    for metric in REGISTRY.collect():
        if not metric.name.startswith(prefix):
            continue
        for sample in metric.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")}
            found[" ".join([sample.name, *(labels[k] for k in sorted(labels))])] = sample.value
    return found
