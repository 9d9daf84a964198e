"""An engine that serves all the time, in a process of its own, while faults are injected into it.

`serve` steps the engine whenever it has something to do, and between steps runs the commands that come
through the pipe: functions of this package's modules that run inside engines, or of `inside`, by name.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any
from unittest import mock

from support.vllm_engine import parts
from support.vllm_engine.process import begin

IDLE_SECONDS = 0.02


def serve(
    pipe: Any, log: str, environment: dict[str, str], settings: dict[str, Any], host: str | None = None
) -> None:
    """Start an engine and serve until None comes through the pipe.

    Messages in: (number, name, arguments). Messages out: ("value" or "error", number, result);
    ("done", name of a request, answer); ("died", 0, traceback), the last one.
    """
    inside, engine = begin(pipe, log, environment, settings, host)
    from faults import hooks, mutants, tier_hooks

    modules = [globals(), vars(hooks), vars(tier_hooks), vars(mutants), vars(inside)]
    commands = {name: one for module in reversed(modules) for name, one in module.items()}
    hooks.install(engine)
    try:
        while _turn(pipe, engine, commands):
            pass
    except BaseException:  # noqa: BLE001 - an engine that dies says so
        traceback.print_exc()
        pipe.send(("died", 0, traceback.format_exc()))
        os._exit(1)
    with mock.patch("gc.collect"):  # nobody is left to use what it would free
        inside.stop(engine)
    os._exit(0)


def _turn(pipe: Any, engine: Any, commands: dict[str, Any]) -> bool:
    """Run the commands that have come, and step; return whether to go on."""
    active = commands["busy"](engine)
    while pipe.poll(0 if active else IDLE_SECONDS):
        message = pipe.recv()
        if message is None:
            return False
        number, name, arguments = message
        try:
            pipe.send(("value", number, commands[name](engine, *arguments)))
        except Exception as error:  # noqa: BLE001 - told to the campaign
            traceback.print_exc()
            pipe.send(("error", number, f"{name}: {type(error).__name__}: {error}"))
        active = True
    if active:
        outputs = engine.llm_engine.step()
        for output in outputs:
            if output.finished:
                pipe.send(("done", output.request_id, _answer(output)))
        if not outputs:
            time.sleep(0.001)  # as a server between steps without work
    return True


def _answer(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "logprobs": [{t: lp.logprob for t, lp in step.items()} for step in first.logprobs or ()],
        "finish": first.finish_reason,
        "params": output.kv_transfer_params,
    }


def ask(
    engine: Any,
    name: str,
    text: list[int],
    params: dict[str, Any] | None,
    tokens: int,
    salt: str,
    adapter: str = "",
) -> None:
    """Add a request; its answer is sent when it has ended."""
    from vllm import SamplingParams

    from support.vllm_engine.inside import lora_of

    sampling = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=5,
        extra_args={"kv_transfer_params": params} if params is not None else None,
    )
    salted = {"cache_salt": salt} if salt else {}
    engine.llm_engine.add_request(
        name, {"prompt_token_ids": list(text), **salted}, sampling, lora_request=lora_of(adapter)
    )


def known(engine: Any, name: str) -> str:
    """The state of a request in the scheduler; empty if it knows none of that name."""
    for inner, request in parts.scheduler(engine).requests.items():
        if inner.split("-")[0] == name:
            return str(request.status.name)
    return ""


def named(engine: Any, name: str) -> int:
    """How many requests of this name are in the scheduler, each under a name of its own there."""
    return sum(inner.split("-")[0] == name for inner in parts.scheduler(engine).requests)


def under_way(engine: Any) -> int:
    """How many requests are in the scheduler."""
    return len(parts.scheduler(engine).requests)


def forget_prefixes(engine: Any) -> int:
    """Forget every cached block that no request uses; return how many there were."""
    pool = parts.scheduler(engine).kv_cache_manager.block_pool
    return sum(pool._maybe_evict_cached_block(block) for block in pool.free_block_queue.get_all_free_blocks())


def take_blocks(engine: Any) -> int:
    """Take every free block of the pool away until `give_blocks`; return how many."""
    pool = parts.scheduler(engine).kv_cache_manager.block_pool
    engine.taken = pool.get_new_blocks(pool.get_num_free_blocks())
    return len(engine.taken)


def give_blocks(engine: Any) -> None:
    """Give them back."""
    pool = parts.scheduler(engine).kv_cache_manager.block_pool
    pool.free_blocks(engine.taken)
    engine.taken = []


def runs(engine: Any, least: int) -> bool:
    """Whether so many requests run, or more."""
    return len(parts.scheduler(engine).running) >= least


def has_preempted(engine: Any, before: int) -> bool:
    """Whether the engine has preempted more often than so."""
    from support.vllm_engine.inside import preemptions

    return preemptions(engine) > before


def at_rest(engine: Any) -> dict[str, int]:
    """Whatever is held by requests, loads, stores, leases or pins, and is not nothing."""
    from support.vllm_engine.inside import counters
    from support.vllm_engine.tiers_inside import held

    parts.cache(engine).poll()  # what threads have done since the last step
    return held(engine) | {
        name: count for name, count in counters(engine).items() if count and name != "expired"
    }
