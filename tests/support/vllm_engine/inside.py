"""What runs inside an engine's process: every function takes the engine first."""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry.connector.events import LoadBegan
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.planning.select import LoadSpan
from kvferry.tiers.names import TIERS
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.redeem import Grant
from kvferry.transport.seal import SealBinding, seal_grant
from support.vision import noise
from support.vllm_engine import (
    any_layout,
    backends,
    copied,
    kernel_blocks,
    overlapped,
    pages,
    parts,
    runners,
    sleeping,
)
from support.vllm_engine.agree_inside import facts, restart_other  # noqa: F401 - called by name
from support.vllm_engine.batches import sizes_of_steps  # noqa: F401 - called by name
from support.vllm_engine.multi_inside import (  # noqa: F401 - called by name
    chosen,
    forget_speeds,
    metrics,
    slow_answers,
    spoil_child,
    still_known,
    story_of_last,
)
from support.vllm_engine.on_the_way import spoil_on_the_way  # noqa: F401 - called by name
from support.vllm_engine.pages import Digests, digests_of, negate
from support.vllm_engine.parts import ferries, half, worker_half
from support.vllm_engine.sleeping import fall_asleep, pause, wake_up  # noqa: F401 - called by name
from support.vllm_engine.tiers_inside import (  # noqa: F401 - called by name
    abort_at_random,
    ask_for,
    failed_reads,
    fleet_server,
    go_on,
    hang,
    hanging,
    held,
    learned,
    reset_all,
    slow_copies,
    slow_files,
    slow_prompts,
    slow_reads,
    spoil_host_memory,
    spoil_reads,
    stuck,
    tier_stats,
    wait_for_ledgers,
    wait_for_tiers,
)


def start(settings: dict[str, Any]) -> Any:
    """Start an engine; installs the witness if it has a connector."""
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    defaults: dict[str, Any] = {
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
        "enforce_eager": True,
        "seed": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "disable_log_stats": True,
        "dtype": "float32",
    }
    settings = {**defaults, **settings}
    _stand_in(settings)
    settings["async_scheduling"] = asynchronous = runners.is_asynchronous(settings)
    if asynchronous:
        overlapped.declare()
    if settings.get("tensor_parallel_size", 1) > 1:
        copied.declare()
    transfer = settings.pop("kv_transfer_config", None)
    if transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    if (published := settings.pop("kv_events_config", None)) is not None:
        settings["kv_events_config"] = KVEventsConfig(**published)
    engine = LLM(**settings)
    engine.finished = {}
    overlapped.check(engine, wanted=asynchronous)
    runners.check(engine)
    backends.check(engine)
    worker = worker_half(engine)
    _count_drafts(engine)
    if worker is not None:
        engine.witness = Witness(worker, half(engine).admission)
    if ferries(parts.scheduler(engine).connector):
        book = parts.tickets(engine)
        engine.granted = {} if book is None else _grants(book)
        _note_parts(engine)
        engine.fold = MetricsListener()
        half(engine).events.subscribe(engine.fold)
        engine.begun = []
        half(engine).events.subscribe(
            lambda event: engine.begun.append(event) if isinstance(event, LoadBegan) else None
        )
    return engine


def _stand_in(settings: dict[str, Any]) -> None:
    """Stand in for devices and kernels that a CPU lacks, as settings of the tests ask; takes these out."""
    if settings.pop("test_device", False):
        _make_test_device()
    if settings.pop("any_layout", False):
        any_layout.declare()
    if settings.pop("sleeps", False):
        sleeping.declare()
    if tokens := settings.pop("kernel_tokens", 0):
        kernel_blocks.declare(tokens)


def _make_test_device() -> None:
    """Let vLLM's block copy operation work on CPU, as if the cache were on an unregistered device."""
    from vllm.platforms.cpu import CpuPlatform

    def copy(cls: Any, source: Any, target: Any, source_ids: Any, target_ids: Any) -> None:
        target[target_ids] = source[source_ids]

    CpuPlatform.insert_blocks_to_device = classmethod(copy)
    CpuPlatform.swap_out_blocks_to_host = classmethod(copy)


def start_another(engine: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Start a second engine in this process."""
    engine.other = start(settings)
    return about(engine.other)


def other(engine: Any, name: str, *args: Any) -> Any:
    """Run a function with the second engine of this process."""
    return globals()[name](engine.other, *args)


def stop(engine: Any) -> None:
    """Shut the connector and the engine down."""
    engine.llm_engine.engine_core.shutdown()


def about(engine: Any) -> dict[str, Any]:
    """What the engine decided."""
    config = engine.llm_engine.vllm_config
    core = engine.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    worker = worker_half(engine)
    return {
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "hybrid": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "groups": [
            (type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size, len(g.layer_names)) for g in groups
        ],
        "num_blocks": core.scheduler.kv_cache_config.num_blocks,
        "layout": worker.layout if worker else None,
        "kernel_tokens": pages.kernel_tokens(worker) if worker else None,
        "addresses": {region.address for region in worker.geometry.regions} if worker else set(),
    }


def generate(
    engine: Any,
    prompts: list[list[int]],
    params: list[dict[str, Any] | None] | None = None,
    tokens: int = 8,
    salt: str | None = None,
    adapter: str | None = None,
    image: int | None = None,
) -> list[dict[str, Any]]:
    """Greedy continuations with logprobs, all prompts at once.

    Args:
        engine: vLLM's LLM.
        prompts: token ids.
        params: ``kv_transfer_params`` of each.
        tokens: of each continuation.
        salt: of the engine's prefix cache.
        adapter: folder of a LoRA adapter; or its name, "=", and the folder.
        image: seed of an image that goes with every prompt.
    """
    from vllm import SamplingParams

    more: dict[str, Any] = {"cache_salt": salt} if salt else {}
    if image is not None:
        more["multi_modal_data"] = {"image": noise(image)}
    params = params or [None] * len(prompts)
    sampling = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": dict(p)} if p else None,
        )
        for p in params
    ]
    texts = [{"prompt_token_ids": list(p), **more} for p in prompts]
    outputs = engine.generate(texts, sampling, use_tqdm=False, lora_request=lora_of(adapter))
    outputs = outputs[: len(prompts)]  # what `add` added has higher numbers
    return [_answer(output) for output in outputs]


def lora_of(adapter: str | None) -> Any:
    """vLLM's request for a LoRA adapter: its folder, or its name, "=", and the folder; None for none."""
    from vllm.lora.request import LoRARequest

    named, _, folder = (adapter or "").rpartition("=")
    return LoRARequest(named or folder, 1 + zlib.crc32(folder.encode()) % 1000, folder) if folder else None


def _answer(output: Any) -> dict[str, Any]:
    """What an engine has said, as plain values."""
    said = output.outputs[0]
    return {
        "request_id": output.request_id,
        "tokens": list(said.token_ids),
        "logprobs": [{t: lp.logprob for t, lp in step.items()} for step in said.logprobs],
        "finish": said.finish_reason,
        "cached": output.num_cached_tokens,
        "params": output.kv_transfer_params,
    }


def samples(engine: Any, text: list[int], params: dict[str, Any], count: int, tokens: int) -> dict[str, Any]:
    """Several samples of one prompt, as one request; all of them say what is likeliest."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=count,
        max_tokens=tokens,
        temperature=1.0,
        top_k=1,
        ignore_eos=True,
        extra_args={"kv_transfer_params": dict(params)},
    )
    (output,) = engine.generate([{"prompt_token_ids": list(text)}], sampling, use_tqdm=False)
    return {
        "tokens": [list(each.token_ids) for each in output.outputs],
        "params": output.kv_transfer_params,
    }


def prefill(
    engine: Any, prompts: list[list[int]], salt: str | None = None, adapter: str | None = None, **how: Any
) -> list[dict[str, Any]]:
    """Compute prompts for another engine."""
    return generate(engine, prompts, [ASK_FOR_KV] * len(prompts), 1, salt, adapter, **how)


def own_gap(engine: Any, prompts: list[list[int]], tokens: int = 8) -> float:
    """How far this engine is from itself: largest difference of a logprob for one and the same text.

    Each continuation is decoded, then computed again with ever more of it as part of the prompt; and all
    prompts are continued at once. The first is what happens to a prompt that another engine computed, the
    second what several requests do to each other.
    """
    alone = []
    for prompt in prompts:
        reset_prefix_cache(engine)
        alone += generate(engine, [prompt], tokens=tokens)
    reset_prefix_cache(engine)
    gap = max(distance(a, b) for a, b in zip(alone, generate(engine, prompts, tokens=tokens), strict=True))
    for prompt, decoded in zip(prompts, alone, strict=True):
        for n in range(1, tokens):
            reset_prefix_cache(engine)
            longer = generate(engine, [prompt + decoded["tokens"][:n]], tokens=tokens - n)[0]
            rest = {"tokens": decoded["tokens"][n:], "logprobs": decoded["logprobs"][n:]}
            gap = max(gap, distance(rest, longer))
    reset_prefix_cache(engine)
    return gap


def distance(answer: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest difference of a logprob, over the steps in which both continue the same text."""
    largest = 0.0
    for n, (step, expected) in enumerate(zip(answer["logprobs"], reference["logprobs"], strict=True)):
        largest = max(largest, difference(step, expected))
        if answer["tokens"][n] != reference["tokens"][n]:
            break
    return largest


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest difference of two steps' logprobs over tokens that both rank; 10 if they share none."""
    shared = a.keys() & b.keys()
    return max((abs(a[t] - b[t]) for t in shared), default=10.0)


def add(
    engine: Any, prompts: list[list[int]], params: list[dict[str, Any] | None], tokens: int = 8
) -> list[str]:
    """Add requests without stepping; their ids. `answers` has what they say."""
    from vllm import SamplingParams

    engine.count = getattr(engine, "count", 1_000_000)
    names = []
    for text, p in zip(prompts, params, strict=True):
        engine.count += 1
        names.append(str(engine.count))
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": dict(p)} if p else None,
        )
        engine.llm_engine.add_request(names[-1], {"prompt_token_ids": list(text)}, sampling)
    return names


def answers(engine: Any, names: list[str]) -> list[dict[str, Any]]:
    """Step until requests of `add` have finished; what they say, as `generate` returns it."""
    done = engine.finished
    while not done.keys() >= set(names):
        done |= {o.request_id: o for o in engine.llm_engine.step() if o.finished}
        time.sleep(0.002)
    return [_answer(done.pop(name)) for name in names]


def redeemed(engine: Any) -> int:
    """Tickets of requests here whose leases are claimed, and which have not been released."""
    return sum(one.granted for one in list(parts.client(engine)._redemptions._asked.values()))


def say_again(engine: Any) -> None:
    """Log the next refusals, whatever has been logged within the last minute."""
    half(engine)._peering.source._events._refusals._said.clear()


def steps(engine: Any, count: int) -> list[str]:
    """Step the engine so many times; requests that finished."""
    finished = {}
    for _ in range(count):
        finished |= {o.request_id: o for o in engine.llm_engine.step() if o.finished}
        time.sleep(0.002)
    engine.finished |= finished
    return list(finished)


def prefill_among_others(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Like `prefill`, with whatever else the engine is doing; returns as soon as these are done."""
    names = add(engine, prompts, [ASK_FOR_KV] * len(prompts), 1)
    done: dict[str, Any] = {}
    while not done.keys() >= set(names):
        done |= {o.request_id: o.kv_transfer_params for o in engine.llm_engine.step() if o.finished}
    return [{"params": done[name]} for name in names]


def abort(engine: Any, names: list[str]) -> None:
    """Abort requests, as a client that went away would."""
    engine.llm_engine.abort_request(names)


def ordered_parts(engine: Any) -> dict[str, list[tuple[int, int]]]:
    """Token ranges of the reads that were begun here since the last call, by id of the request."""
    found, engine.parts = engine.parts, {}
    return found


def _note_parts(engine: Any) -> None:
    """Note which parts of loads from peers are begun."""
    engine.parts, worker = {}, worker_half(engine)
    if worker is None:  # it runs in another process
        return
    add = worker._loads.add

    def noted(part: Any) -> Any:
        load = add(part)
        if load is not None and isinstance(part.work, ReadOrder):
            name, span = load.request_id.split("-")[0], part.work.span
            engine.parts.setdefault(name, []).append((span.begins, span.ends))
        return load

    worker._loads.add = noted


def waiting_for_kv(engine: Any) -> int:
    """Requests that wait for a load."""
    return sum(r.status.name == "WAITING_FOR_REMOTE_KVS" for r in parts.scheduler(engine).requests.values())


def preemptions(engine: Any) -> int:
    """How often requests have been preempted so far; counts from the first call on."""
    scheduler = parts.scheduler(engine)
    if not hasattr(engine, "preempted"):
        engine.preempted = 0
        inner = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            engine.preempted += 1
            return inner(*args, **kwargs)

        scheduler._preempt_request = counted
    return int(engine.preempted)


def replace_adapter(engine: Any, folder: str, other: str) -> None:
    """Load another adapter's weights in place of one that `generate` knows by its folder."""
    from vllm.lora.request import LoRARequest

    number = lora_of(folder).lora_int_id
    assert engine.llm_engine.add_lora(LoRARequest(folder, number, other, load_inplace=True))


def reload_weights(engine: Any, checkpoint: str) -> None:
    """Load another checkpoint's weights into the running engine, as a trainer does."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})


def move_cache(engine: Any, how: str) -> None:
    """Have the layers compute in other memory than vLLM has registered with the connector.

    Args:
        engine: vLLM's LLM.
        how: "clone" for new memory with the same content, "shift" for the same memory, a block further on.
    """
    import torch

    def moved(cache: torch.Tensor) -> torch.Tensor:
        return cache.clone() if how == "clone" else cache[1:]

    config = engine.llm_engine.vllm_config
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(bound := getattr(layer, "kv_cache", None), torch.Tensor):
            layer.kv_cache = moved(bound)
        elif bound is not None:
            layer.kv_cache = type(bound)(map(moved, bound))


def register_again(engine: Any) -> None:
    """Register the tensors that vLLM has registered with the connector again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvferry.engines.vllm.compat.connectors import as_current_config

    with as_current_config(engine.llm_engine.vllm_config):
        connector = get_kv_transfer_group()
        connector.register_kv_caches(connector.worker._caches)


def reset_prefix_cache(engine: Any) -> bool:
    """Forget all cached prefixes, after steps that were scheduled ahead, which may hold blocks."""
    ahead = engine.llm_engine.engine_core.engine_core.batch_queue
    steps(engine, len(ahead or ()))
    return bool(engine.reset_prefix_cache())


def preempt(engine: Any, name: str) -> None:
    """Preempt a running request, as for want of blocks."""
    scheduler = parts.scheduler(engine)
    request = next(one for one in scheduler.running if one.request_id.split("-")[0] == name)
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def step(engine: Any, seconds: float) -> None:
    """Keep the engine stepping, as a server with something left to do would."""
    until = time.monotonic() + seconds
    core = engine.llm_engine.engine_core.engine_core
    while time.monotonic() < until and core.scheduler.has_requests():
        engine.llm_engine.step()
        time.sleep(0.002)


def bids(engine: Any) -> list[int]:
    """Tokens that the connector offered to load, at every admission since the last call.

    The first call begins. Who is asked a second time did not load what was offered first.
    """
    if not hasattr(engine, "bids"):
        engine.bids = []
        admission = parts.scheduler(engine).connector.half.admission
        inner = admission.matched

        def matched(request: Any, local_tokens: int) -> int | None:
            tokens = inner(request, local_tokens)
            if tokens is not None:
                engine.bids.append(tokens)
            return tokens

        admission.matched = matched
    seen, engine.bids = engine.bids, []
    return seen


def limit_admissions(engine: Any, most: int) -> None:
    """Raise in the engine's step when a request is admitted more often: it is not to go on for ever."""
    if hasattr(engine, "admissions"):
        return
    connector = parts.scheduler(engine).connector
    inner, engine.admissions = connector.update_state_after_alloc, {}

    def counted(request: Any, blocks: Any, external: int) -> None:
        name = request.request_id
        engine.admissions[name] = engine.admissions.get(name, 0) + 1
        if engine.admissions[name] > most + request.num_preemptions:
            raise RuntimeError(f"request {name} of {request.num_tokens} tokens is admitted again and again")
        inner(request, blocks, external)

    connector.update_state_after_alloc = counted


def settle_tiers(engine: Any, seconds: float = 120.0, of: int = 0) -> None:
    """Step until the tiers have nothing left to do, as a server does."""
    ours = half(engine, of)
    until = time.monotonic() + seconds
    cache, core = ours._tiering._cache, engine.llm_engine.engine_core.engine_core
    # A step under way may be all that keeps the blocks of requests that have ended.
    while ours.busy or core.batch_queue or cache.incoming or any(len(one) for one in cache.slow_tiers):
        assert time.monotonic() < until, "the tiers are still busy"
        cache.poll()
        engine.llm_engine.step()
        time.sleep(0.002)


def forget_host_memory(engine: Any, of: int = 0) -> None:
    """What is in the tiers' host memory; what is behind it stays, and is looked at anew."""
    cache = parts.cache(engine, of)
    cache.clear()
    for queue in cache.slow_tiers:
        queue.tier.refresh()


def forget_shares(engine: Any) -> None:
    """Evict from now on without regard to tenants, as without the setting ``tenants``. Clears host memory."""
    cache = parts.cache(engine, 0)
    cache.host._make_policy = cache.host._make_policy.keywords["policy"]
    cache.clear()
    for queue in cache.slow_tiers:
        queue.tier._space._tenants = None
        queue.tier._space._oldest = {}


def counted(engine: Any) -> dict[str, float]:
    """Metrics since the start, by name and labels; of histograms, how many samples."""
    found = engine.fold.take()
    engine.fold._counted = found  # it is counted on
    seen = {series: len(samples) for series, samples in found.samples.items()}
    every = (*found.counters.items(), *found.gauges.items(), *seen.items())
    return {" ".join([name, *map(str, of)]): value for (name, of), value in every}


def loads_of(engine: Any, source: str) -> dict[str, float]:
    """How many loads of a source ended in which way."""
    start = f"loads {source} "
    return {name.removeprefix(start): n for name, n in counted(engine).items() if name.startswith(start)}


def new_loads(engine: Any) -> list[tuple[str, int, int]]:
    """(source, first token, last token) of the loads that have begun since the last call."""
    seen, engine.begun[:] = list(engine.begun), []
    return [(event.source, event.begin, event.end) for event in seen]


def operations(engine: Any) -> list[str]:
    """Names of vLLM's libraries of operations in this process."""
    return sorted(set(re.findall(r"/vllm/(_C\w*)\.", Path("/proc/self/maps").read_text())))


def tier_counts(engine: Any) -> dict[str, Any]:
    """What the tiers have done so far."""
    tiering = parts.tiering(engine)
    cache = tiering._cache
    return {
        "stored": cache.counts.stored,
        "failed": cache.counts.failed,
        "fetched": dict(cache.counts.fetched),
        "missed": {f"{name} {what}": n for (name, what), n in cache.counts.missed.items()},
        "dropped": dict(tiering._stores.dropped),
        "loads": loads_of(engine, "tiers"),
        "lost": [writing.lost for writing in cache.slow_tiers],
    }


def forget_peers_after(engine: Any, seconds: float) -> None:
    """Of nothing being read from them."""
    from kvferry.connector.peers import source

    source.UNUSED_SECONDS = seconds


def peers(engine: Any) -> int:
    """How many the worker knows."""
    return len(parts.lanes(engine)[0]._links._links)


def requests_left(engine: Any) -> int:
    """Requests the scheduler still knows, finished ones whose blocks are kept included."""
    return len(parts.scheduler(engine).requests)


def busy(engine: Any) -> bool:
    """The connector wants the engine to go on stepping, or the engine does."""
    return bool(half(engine).busy or parts.scheduler(engine).has_requests())


def _grants(book: Any) -> dict[str, list[list[int]]]:
    """Block tables of every ticket to come, by its hex digits; they stay when it has ended."""
    found: dict[str, list[list[int]]] = {}
    publish, advance = book.publish, book.advance

    def noted(ticket: bytes, lease: str, tokens: int, content: Any, grant: Any, **ready: Any) -> None:
        found[ticket.hex()] = [ids.tolist() for ids in grant.block_ids]
        publish(ticket, lease, tokens, content, grant, **ready)

    def more(lease: str, grant: Any) -> None:
        if (ticket := book._tickets.get(lease)) is not None:  # its readers may have left
            found[ticket.hex()] = [ids.tolist() for ids in grant.block_ids]
        advance(lease, grant)

    book.publish, book.advance = noted, more
    return found


def answer_slowly(engine: Any, seconds: float) -> None:
    """Let the control channel take so long to redeem a ticket."""
    book = parts.tickets(engine)
    redeem = type(book).redeem

    def slow(message: Any) -> Any:
        time.sleep(seconds)
        return redeem(book, message)

    book.redeem = slow


def hold_answers(engine: Any) -> None:
    """Let the control channel answer no ticket until `release_answers`."""
    book, engine.answers_may_go = parts.tickets(engine), threading.Event()
    redeem = type(book).redeem

    def waiting(message: Any) -> Any:
        engine.answers_may_go.wait()
        return redeem(book, message)

    book.redeem = waiting


def release_answers(engine: Any) -> None:
    engine.answers_may_go.set()


def granted(engine: Any, offer: dict[str, Any]) -> list[list[int]]:
    """The block tables that this engine keeps for an offer."""
    return engine.granted[offer["remote_request_id"]]


def regrant(engine: Any, offer: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Have the grant of an offer's ticket say this instead. Return the offer with that grant, sealed."""
    found = parts.tickets(engine)._open[bytes.fromhex(offer["remote_request_id"])]
    now, word = found.grant, asdict(found.grant.word)
    tables = changes.pop("tables", now.block_ids)
    found.grant = Grant.of(LeaseWord(**{**word, **changes}), now.tokens, tables)
    address, named = (offer["remote_host"], offer["remote_port"]), bytes.fromhex(offer["remote_request_id"])
    binding = SealBinding(address, named, found.tokens, found.content)
    sealed = seal_grant(parts.server(engine).seal_key, found.grant, binding)
    return {**offer, "remote_sealed_grant": sealed}


def kept_turns(engine: Any) -> list[tuple[list[list[int]], int]]:
    """(tables, tokens) of the turns that are kept."""
    turns = parts.producer(engine).turns._turns.values()
    return [([ids.tolist() for ids in turn.kept.grant.block_ids], turn.kept.grant.tokens) for turn in turns]


def reset_connector(engine: Any) -> None:
    """What it keeps is not to be used again, as after an update of the weights."""
    half(engine).reset()
    half(engine)._peering._names._epoch = ""  # but what comes is


def number_from(engine: Any, first: int) -> None:
    """Requests to come are numbered from there on: every engine begins at 0."""
    engine.request_counter.counter = first


def treat_tenants_alike(engine: Any) -> None:
    """Hide cache salts and adapters from the connector; the engine itself still knows them."""
    ours = half(engine)
    told = ours.on_new_request

    def on_new_request(request: Any) -> None:
        request.raw.cache_salt = None  # vLLM has digested it
        told(request)

    ours.on_new_request = on_new_request
    parts.scheduler(engine).connector._adapters.name = lambda _: ""


def ask_for_turns(engine: Any, *, asks: bool) -> None:
    """Whether peers are asked for earlier turns."""
    parts.turn_finder(engine)._keepers = (lambda: parts.server(engine).keepers) if asks else dict


def wait_for_turns(engine: Any, seconds: float) -> None:
    """Have every request wait until its peers have said what they keep, for so many seconds.

    A tiny model computes sooner than a peer answers, and a busy machine makes peers look silent.
    """
    from kvferry.transport import turns
    from kvferry.transport.handshake import Pending

    turns.ASK_SECONDS = seconds
    finder = parts.turn_finder(engine)

    def found(request: Any, search: Any) -> Any:
        while isinstance(answer := type(finder).found(finder, request, search), Pending):
            time.sleep(0.001)
        return answer

    finder.found = found


def ask_ranks(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """What every rank answers to a method of `ranks.RankWitness`."""
    return engine.collective_rpc(method, args=tuple(json.dumps(each) for each in arguments))


def free_blocks(engine: Any) -> int:
    """Blocks free in the pool."""
    return int(parts.scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks())


def digests_of_offer(engine: Any, offer: dict[str, Any]) -> Digests:
    """What this engine keeps for an offer."""
    return digests(engine, granted(engine, offer), offer["remote_num_tokens"])


def digests(engine: Any, tables: list[list[int]], tokens: int, local_tokens: int = 0) -> Digests:
    """What a continuation after `tokens` tokens needs, as `pages.digests_of` has it."""
    return digests_of(worker_half(engine), tables, LoadSpan(local_tokens, tokens, tokens + 1))


class Witness:
    """Sees every load of an engine at the moment its bytes are believed: looks at them, or spoils them."""

    def __init__(self, worker: Any, admission: Any) -> None:
        self.loaded: dict[str, Digests] = {}
        self.admitted: list[tuple[str, int, int | None]] = []
        self.spoil_group: int | None = None
        self.left: list[float] = []
        self._loads: dict[str, Any] = {}
        self._worker = worker
        self._begin, self._results = worker.begin, worker.ended
        worker.begin, worker.ended = self._begun, self._watched
        self._matched = admission.matched
        admission.matched = self._asked

    def _asked(self, request: Any, local_tokens: int) -> int | None:
        tokens = self._matched(request, local_tokens)
        if tokens is not None:
            self.admitted.append((request.request_id, local_tokens, tokens))
        return tokens

    def _begun(self, orders: Any) -> None:
        self._loads |= {load.key: load for load in orders.loads if load.source != TIERS}
        self._begin(orders)

    def _watched(self) -> Any:
        results = self._results()
        for key, load in list(self._loads.items()):
            if load.request_id in results.received:
                del self._loads[key]
                if load.request_id not in results.failed:
                    self._believed(load)
        return results

    def _believed(self, load: Any) -> None:
        self.loaded[load.request_id] = digests_of(self._worker, load.tables, load.span)
        self.left = list(self._left(load))
        if self.spoil_group is not None:
            ids = self._worker.needed(load.span, load.tables)[self.spoil_group]
            for layer in self._worker.geometry.groups[self.spoil_group].layers if len(ids) else ():
                negate(self._worker, layer, int(ids[-1]))

    def _left(self, load: Any) -> Any:
        blocks = self._worker.geometry.num_blocks
        each = zip(self._worker.geometry.groups, self._worker.needed(load.span, load.tables), strict=True)
        for group, ids in each:
            for layer in group.layers:
                cache = self._worker.caches[layer.name]
                if layer.draft and len(ids):
                    yield float(cache.view(blocks, -1)[ids.tolist()].abs().max())


def _count_drafts(engine: Any) -> None:
    """Count drafts and those of them that are accepted; vLLM does where statistics are logged."""
    scheduler, engine.drafts, engine.proposals = parts.scheduler(engine), [0, 0], []
    update = scheduler.update_draft_token_ids

    def count(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **_: Any) -> Any:
        engine.drafts = [engine.drafts[0] + num_draft_tokens, engine.drafts[1] + num_accepted_tokens]
        return stats

    def hear(found: Any) -> None:
        for name, tokens in zip(found.req_ids, found.draft_token_ids, strict=True):
            if name in scheduler.requests and not scheduler.requests[name].is_prefill_chunk:
                engine.proposals.append([int(token) for token in tokens])
        update(found)

    scheduler.make_spec_decoding_stats, scheduler.update_draft_token_ids = count, hear
    if (speculator := runners.speculator_of(engine)) is not None:
        propose = speculator.propose

        def tell(batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafted, num_sampled = propose(batch, *args, **kwargs), args[4]
            engine.proposals += [found for found, n in zip(drafted.tolist(), num_sampled, strict=True) if n]
            return drafted

        speculator.propose = tell


def drafts(engine: Any) -> tuple[int, int]:
    """Tokens that were drafted since the last call, and those of them that were accepted."""
    found, engine.drafts = engine.drafts, [0, 0]
    return tuple(found)


def proposals(engine: Any) -> list[list[int]]:
    """Tokens that were drafted since the last call, per step.

    The first runner keeps them from an asynchronous scheduler.
    """
    found, engine.proposals = engine.proposals, []
    return found


def layers(engine: Any) -> list[list[str]]:
    """Identities of each group's layers."""
    return [[layer.identity for layer in group.layers] for group in worker_half(engine).geometry.groups]


def draft_layers(engine: Any) -> list[str]:
    """Identities of the layers that a draft model keeps."""
    groups = worker_half(engine).geometry.groups
    return [layer.identity for group in groups for layer in group.layers if layer.draft]


def of_drafts(engine: Any, tables: list[list[int]], tokens: int) -> Digests:
    """The part of `digests` that is a draft's."""
    names = draft_layers(engine)
    return {
        part: found
        for part, found in digests(engine, tables, tokens).items()
        if part.startswith(tuple(names))
    }


def fill_drafts(engine: Any, value: float) -> None:
    """Fill every block but the null block of a draft's layers."""
    worker = worker_half(engine)
    for group in worker.geometry.groups:
        for layer in group.layers:
            cache = worker.caches[layer.name]
            if layer.draft:
                cache[cache.shape[0] // worker.geometry.num_blocks :] = value


def left_in_drafts(engine: Any) -> list[float]:
    """The largest value that the last load left in the blocks of each layer of a draft."""
    return engine.witness.left


def release_all(engine: Any) -> None:
    """Take back what is offered."""
    parts.producer(engine).reset()
    step(engine, 20.0)


def loaded(engine: Any) -> dict[str, Digests]:
    """Digests of what was loaded, by request, since the last call."""
    seen, engine.witness.loaded = engine.witness.loaded, {}
    return dict(seen)


def admitted(engine: Any) -> list[tuple[str, int, int]]:
    """(request, tokens cached locally, tokens to be loaded) of every admission since the last call."""
    seen, engine.witness.admitted = engine.witness.admitted, []
    return list(seen)


def spoil(engine: Any, group: int | None) -> None:
    """Spoil the last block of this group in every load to come; None stops it."""
    engine.witness.spoil_group = group


def spoil_cached(engine: Any, group: int) -> int:
    """Spoil all blocks of this group in the engine's own prefix cache; their number."""
    worker, ids = worker_half(engine), _cached(engine, group)
    for layer in worker.geometry.groups[group].layers:
        for block in ids:
            negate(worker, layer, block)
    return len(ids)


def evict_states(engine: Any) -> int:
    """Evict all snapshots of recurrent state from the engine's own prefix cache; their number."""
    groups = enumerate(worker_half(engine).geometry.groups)
    return _evict(engine, [n for n, group in groups if group.kind == "state"])


def evict_prefixes(engine: Any) -> int:
    """Evict all blocks from the engine's own prefix cache, also those in use; their number."""
    return _evict(engine, range(len(worker_half(engine).geometry.groups)))


def _evict(engine: Any, groups: Iterable[int]) -> int:
    ids = {block for group in groups for block in _cached(engine, group)}
    parts.scheduler(engine).kv_cache_manager.block_pool.evict_blocks(ids)
    return len(ids)


def _cached(engine: Any, group: int) -> list[int]:
    """Blocks of a group in the engine's own prefix cache."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    blocks = parts.scheduler(engine).kv_cache_manager.block_pool.blocks
    return [one.block_id for one in blocks if one.block_hash and get_group_id(one.block_hash) == group]


def counters(engine: Any) -> dict[str, Any]:
    """Inner counts of the connector."""
    ours, peering = half(engine), half(engine)._peering
    return {
        "leases": len(peering.producer._book) if peering else 0,
        "expired": peering.producer._book.expired if peering else 0,
        "pins": len(ours.admission.loads),
        "pulls": len(peering.source) if peering else 0,
    }


def contents(engine: Any) -> list[tuple[str, str, list[str]]]:
    """(kind, content id, field names) of every layer, group by group."""
    groups = worker_half(engine).geometry.groups
    return [
        (str(group.kind), layer.page.content, [field.name for field in layer.page.fields])
        for group in groups
        for layer in group.layers
    ]


def believed_if_it_were(engine: Any, adapter: str) -> list[str]:
    """Why attention layers' pages would not be believed under another adapter; empty where they would."""
    from kvferry.engines.vllm.compat.model import attention_layer
    from kvferry.engines.vllm.compat.specs import spec_of_layer
    from kvferry.engines.vllm.content import Shard, adapters, probe
    from kvferry.engines.vllm.content.strides import strides_of
    from kvferry.geometry import GroupKind

    config = engine.llm_engine.vllm_config
    cache = parts.scheduler(engine).kv_cache_config
    worker = worker_half(engine)
    found = []
    for group, described in zip(cache.kv_cache_groups, worker.geometry.groups, strict=True):
        if described.kind is GroupKind.STATE:
            continue
        name = described.layers[0].name
        spec, tensor = spec_of_layer(group.kv_cache_spec, name), worker.caches[name]
        s = strides_of(tensor, spec, cache.num_blocks)
        written = getattr(adapters, adapter)(s, Shard(0, 1, 0, s.heads))
        layer = attention_layer(config, name)
        found.append(probe.find_mismatch(layer, tensor, s, written, tensor.dtype))
    return found


def registered_is_the_cache(engine: Any) -> bool:
    """The memory that peers read and write is the engine's own cache, not a host buffer."""
    worker = worker_half(engine)
    own = {t.untyped_storage().data_ptr() for t in worker.caches.values()}
    return own == {region.address for region in worker.geometry.regions}


def poison(engine: Any) -> None:
    """Fill the free pool with what must not be looked at: NaN, where the engine clears blocks before use.

    Where it does not (all groups are attention), NaN never gets into the pool, and would break the engine.
    """
    scheduler = parts.scheduler(engine)
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    clears = scheduler.kv_cache_config.needs_kv_cache_zeroing
    pages.poison(worker_half(engine), float("nan") if clears else 1e4)


def kept(engine: Any) -> list[list[tuple[str, str, int, int]]]:
    """By group, what every layer keeps: its name, kind, window or chunk, bytes of a token or snapshot."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs

    core = engine.llm_engine.engine_core.engine_core
    found = []
    for group in core.scheduler.kv_cache_config.kv_cache_groups:
        (spec,) = iter_layer_specs(group.kv_cache_spec)
        state = hasattr(spec, "shapes")
        size = spec.real_page_size_bytes // (1 if state else spec.block_size)
        attention_span = (
            getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
        )
        kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
        found.append([(name, kind, attention_span, size) for name in group.layer_names])
    return found
