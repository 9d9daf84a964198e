"""The process that a connector runs in: logging, cores, ranks, address, traces, sleep and fixed memory."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import wraps
from queue import Queue
from types import FrameType
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.tracing import SpanAttributes, extract_trace_context, is_tracing_available
from vllm.utils.network_utils import get_ip
from vllm.v1.engine import EngineCoreRequestType, core as engine_core
from vllm.v1.engine.core import EngineCore

import kvferry
from kvferry.common.errors import ConfigError
from kvferry.connector.events import Listener
from kvferry.engines.vllm.compat.model import patch_once, worker_of
from kvferry.engines.vllm.compat.requests import external_id
from kvferry.observe.spans import SpanListener, TraceSpan

# With 20 us and three ranks on two cores, control messages were still delayed in 4 of 10 runs.
_SLEEP_SECONDS = 500e-6

# Limits how long a lost wake-up would keep the blocks of a released lease.
_LONGEST_REST_SECONDS = 10.0

# The same attribute, with the same id, as in vLLM's own spans, so that tools join them.
_REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID

_SHARES_CARDS = "_set_kv_connector_handshake_metadata"
"""Method of vLLM 0.33's EngineCore that passes the workers' handshakes to the scheduler's connector."""

_CACHE, _WEIGHTS = "kv_cache", "weights"
"""vLLM's tags of memory that a worker can give up and get back."""
_LOSES_WEIGHTS = 2
"""Level of sleep from which the weights are discarded."""

# torch uses the first of these variables that is set.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def share_logging() -> None:
    """Send kvferry's log lines to vLLM's handlers, with vLLM's format and level."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    # An application that has set up its own logging keeps it.
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def sleep_between_polls(vllm_config: VllmConfig) -> None:
    """Make an engine on CPUs sleep 0.5 ms between two checks of its message queues; no effect on GPUs."""
    if vllm_config.device_config.device_type == "cpu":
        # vLLM would call `sched_yield` in a loop and keep a core busy as long as the engine runs steps, also
        # while a peer holds a lease or a load is in flight. With two ranks on two cores (Linux 6.18), that
        # delayed control messages by 4 to 60 s.
        shm_broadcast.sched_yield = lambda: time.sleep(_SLEEP_SECONDS)


class WorkerRanks(NamedTuple):
    """Ranks of a worker in its groups: pipeline stages, tensor and context parallelism."""

    tp: int = 0
    pp: int = 0
    pcp: int = 0
    dcp: int = 0


def worker_ranks() -> WorkerRanks:
    """Return the ranks of the worker in this process."""
    groups = get_tp_group(), get_pp_group(), get_pcp_group(), get_dcp_group()
    return WorkerRanks(*(int(group.rank_in_group) for group in groups))


def node_address() -> str:
    """Return the IP address of this machine: ``VLLM_HOST_IP`` if set, else that of the default route."""
    return str(get_ip())


def is_traced(vllm_config: VllmConfig) -> bool:
    """Return True if the engine exports trace spans. OpenTelemetry then runs in the scheduler's process."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None and is_tracing_available()


def tracing() -> Listener:
    """Return an event listener that exports trace spans of requests. The engine must have tracing on."""
    from opentelemetry import trace  # noqa: PLC0415 - installed and needed only in an engine with tracing

    tracer = trace.get_tracer("kvferry", kvferry.__version__)

    def export(span: TraceSpan) -> None:
        # Spans are in wall time, and the wall clock may be set while the engine runs.
        zero = time.time_ns() - time.monotonic_ns()
        made = tracer.start_span(
            span.name,
            extract_trace_context(dict(span.parent)),
            trace.SpanKind.INTERNAL,
            {_REQUEST_ID: external_id(span.request_id), **span.attributes},
            start_time=zero + round(span.begin * 1e9),
        )
        if span.failure:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.failure))
        made.end(zero + round(span.end * 1e9))

    return SpanListener(export)


def tell_of_sleep() -> None:
    """Patch vLLM's `EngineCore` to tell its connector when the engine sleeps.

    It calls ``on_sleep()`` before the engine gives up the memory of its KV cache, and resets its caches for
    that, and ``on_asleep(failed)`` when it sleeps or has failed to.
    """

    def sleep(inner: Callable[..., Any], core: Any, level: int = 1, *arguments: Any, **named: Any) -> Any:
        if level < 1:  # it only pauses
            return inner(core, level, *arguments, **named)
        return _told(core, lambda: inner(core, level, *arguments, **named))

    def release(inner: Callable[..., None], core: Any) -> None:
        _told(core, lambda: inner(core))

    def wake_up(inner: Callable[..., bool], core: Any, tags: list[str] | None = None) -> bool:
        awake = inner(core, tags)
        if tags is None or _CACHE in tags:
            _share_cards(core)
        return awake

    patch_once(EngineCore, "sleep", sleep)
    patch_once(EngineCore, "release_kv_cache_memory", release)
    # After a wake-up, vLLM passes the handshakes to the connector again only since 0.33.
    if not hasattr(EngineCore, _SHARES_CARDS):
        patch_once(EngineCore, "wake_up", wake_up)


def _told(core: Any, sleep: Callable[[], Any]) -> Any:
    """Make an engine sleep, and tell its connector before and after. The function may return a future."""
    connector = core.scheduler.get_kv_connector()
    if not hasattr(connector, "on_sleep"):
        return sleep()
    connector.on_sleep()
    try:
        found = sleep()
    except BaseException:
        connector.on_asleep(failed=True)
        raise
    # vLLM first waits until requests have ended.
    if isinstance(found, Future):
        found.add_done_callback(lambda done: connector.on_asleep(failed=done.exception() is not None))
    else:
        connector.on_asleep(failed=False)
    return found


def _share_cards(core: Any) -> None:
    connector = core.scheduler.get_kv_connector()
    if not hasattr(connector, "on_sleep"):  # not one of kvferry's, which may not expect it
        return
    found = core.model_executor.get_kv_connector_handshake_metadata() or ()
    cards = {place: card for of_worker in found if of_worker is not None for place, card in of_worker.items()}
    if cards:
        connector.set_xfer_handshake_metadata_pp_aware(cards)


def find_waker() -> Callable[[], None]:
    """Return a function that makes the engine in whose start this is called run a step soon.

    The engine runs one if its connector then has work (``has_pending_push_work``), or if it has requests. The
    function also ends the rest of an engine between two steps (`_Rests`).
    """
    # vLLM gives a connector no reference to its EngineCoreProc, whose creation has led to this call.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        core: Any = frame.f_locals.get("self")
        if hasattr(core, "input_queue") and hasattr(core, "engines_running"):
            engine_core.time = _Rests(core)
            return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back
    # The engine lives in its client's process, where only the client runs steps.
    return lambda: None


class _Rests:
    """The module `time` for vLLM's `EngineCoreProc`, with a `sleep` that ends when the engine gets input.

    After a step that computes nothing, its loop sleeps 1 ms, so that threads which load can run. It would do
    so too if a request has just arrived, or if the step has reported that a load has ended.

    vLLM runs such steps as long as finished requests keep blocks. If these only wait for messages of peers,
    the sleep lasts until one arrives, or until a lease expires.
    """

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        longest = max(seconds, min(self._rest_seconds(), _LONGEST_REST_SECONDS))
        arrivals: Queue[Any] = self._core.input_queue
        with arrivals.not_empty:
            if not arrivals.queue:
                arrivals.not_empty.wait(longest)

    def _rest_seconds(self) -> float:
        core, scheduler = self._core, self._core.scheduler
        # With data parallelism, other engines may wait for this one in each of their steps.
        if core.engines_running or core.batch_queue:
            return 0.0
        if scheduler.finished_req_ids or any(scheduler.get_request_counts()):
            return 0.0
        return float(getattr(scheduler.get_kv_connector(), "rest_seconds", 0.0))


def check_fixed_memory(
    vllm_config: Any, *, transfers: bool, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise a ConfigError if peers read the KV cache (`transfers`) and torch may move its memory."""
    # Memory on CPUs is not torch's CUDA allocator's. vLLM's cumem allocator turns expandable segments off.
    if (
        not transfers
        or vllm_config.device_config.device_type == "cpu"
        or getattr(vllm_config.model_config, "enable_cumem_allocator", False)
    ):
        return
    name = next((name for name in _VARIABLES if environment.get(name)), "")
    for option in environment.get(name, "").split(","):
        key, _, value = option.partition(":")
        if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
            raise ConfigError(
                f"{name} has expandable_segments:True, with which the memory of the KV cache cannot be "
                "registered for peers reliably; take expandable_segments out of it"
            )


def hook_sleep(
    vllm_config: Any,
    *,
    release: Callable[[], None],
    restore: Callable[[], None],
    lose_weights: Callable[[], None],
) -> None:
    """Make a worker call functions when it gives up the memory of its KV cache and gets it back; mutates it.

    Args:
        release: called before the memory of the KV cache is given up. An exception prevents that.
        restore: called when the KV cache has memory again, at the same addresses.
        lose_weights: called before the weights are discarded.
    """
    worker = worker_of(vllm_config)
    # `/sleep`, `/release_kv_cache_memory` and `/wake_up` end in these methods. vLLM 0.33 has hooks of
    # connectors there (`unregister_kv_caches`, `restore_kv_caches`), but 0.32 lacks them, and they do not
    # tell whether the weights are lost.
    sleep, discard, wake_up = worker.sleep, worker.discard, worker.wake_up

    def give_up(tags: Collection[str]) -> None:
        # The cache first: `release` refuses while loads are under way, and then nothing has changed.
        if _CACHE in tags:
            release()
        if _WEIGHTS in tags:
            lose_weights()

    @wraps(sleep)
    def sleep_after_release(level: int = 1) -> None:
        give_up((_CACHE, _WEIGHTS) if level >= _LOSES_WEIGHTS else (_CACHE,))
        sleep(level=level)

    @wraps(discard)
    def discard_after_release(tags: tuple[str, ...]) -> None:
        give_up(tags)
        discard(tags)

    @wraps(wake_up)
    def wake_up_and_restore(tags: list[str] | None = None) -> None:
        wake_up(tags)
        # No tags stand for all memory.
        if tags is None or _CACHE in tags:
            restore()

    worker.sleep, worker.discard = sleep_after_release, discard_after_release
    worker.wake_up = wake_up_and_restore
