"""A vLLM engine with a connector in this process, which stamps the stages of each hand-over."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.cpu_layouts import declare_layouts
from benchmarks.handover.cores import bind_thread, core_environment
from benchmarks.handover.nixl_plus import favour_nixl
from benchmarks.runners import prepare_runner
from benchmarks.served import Rest, prepare_process
from kvferry.common.errors import TransferError
from kvferry.connector.events import Event, LoadEnded, LoadOutcome
from kvferry.memory.pages import PAGES_THREAD
from kvferry.tools.serving.router.bodies import ASK_FOR_KV

_PATIENCE_SECONDS = 300.0
_KVFERRY = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
}
_NIXL = {"kv_connector": "NixlConnector"}
AGGREGATED = "aggregated"
STEP_TOKENS = 2048
"""Maximum number of tokens that a step of an engine computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        connector: ``kvferry``, ``nixl`` (NixlConnector as its users run it), or ``nixl+`` (with a progress
            thread that sleeps, huge pages and queues that are not polled without a rest, all of which kvferry
            has), or ``aggregated``, for one server that prefills and decodes.
        port: port of NixlConnector's side channel; 0 before the engine has one.
        longest: length of the longest request, in tokens.
        requests: maximum number of requests at a time.
        cache_bytes: size of the KV cache, in bytes.
        engine: further keyword arguments of `vllm.LLM`.
        threads: number of computing threads. One leaves a core to the threads that move KV.
        layout: value of kvferry's setting ``layout``; with any other value than ``auto``, the CPU backend
            accepts all of `CPU_LAYOUTS`.
        device: ``cpu`` or ``cuda``, where NixlConnector reads KV to.
        ranks: number of tensor-parallel ranks. Only a server can have several.
    """

    model: Path
    connector: str
    port: int = 0
    longest: int
    requests: int
    cache_bytes: int
    engine: dict[str, Any]
    threads: int = 1
    layout: str = "auto"
    device: str = "cpu"
    ranks: int = 1

    def transfer(self) -> dict[str, Any] | None:
        """Return the engine's ``--kv-transfer-config``; None if no KV is transferred."""
        if self.connector == AGGREGATED:
            return None
        connector: dict[str, Any] = {**_NIXL, "kv_buffer_device": self.device}
        if self.connector == "kvferry":
            connector = {**_KVFERRY, "kv_connector_extra_config": {"layout": self.layout}}
        return {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **connector}


@dataclass(slots=True)
class Stamps:
    """The times of one request's stages, in seconds of `time.perf_counter`; 0 for a stage not reached.

    Attributes:
        added: the request was given to the engine.
        asked: the scheduler first asked the connector for its tokens.
        allocated: the scheduler allocated the blocks that the load writes.
        started: the worker's hook began the step that starts the load.
        received: the worker reported the end of the load.
        answered: the engine gave the first token.
        transfer_seconds: time of the transfer itself, if the connector reports it.
        check_seconds: time of the check of the lease word, if the connector reports it.
    """

    added: float = 0.0
    asked: float = 0.0
    allocated: float = 0.0
    started: float = 0.0
    received: float = 0.0
    answered: float = 0.0
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0


@dataclass(slots=True)
class _Watch:
    """The stamps of the requests under way, by the engine's request id."""

    stamps: dict[str, Stamps] = field(default_factory=dict)
    starting: list[str] = field(default_factory=list)

    def of(self, request_id: str) -> Stamps | None:
        """Return the stamps of a request. vLLM appends a suffix to the id that the request was added with."""
        return self.stamps.get(request_id.partition("-")[0])


class HandoverEngine:
    """A vLLM engine on this machine that computes prompts for another engine, or continues them."""

    def __init__(self, setup: Setup) -> None:
        """Start the engine, which takes tens of seconds."""
        prepare_process(
            OMP_NUM_THREADS=str(setup.threads),
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(setup.port),
            **core_environment(first=False, threads=setup.threads),
        )
        prepare_runner()
        if setup.device == "cpu" and setup.connector != "nixl":
            bind_thread()
        if setup.connector == "nixl+":
            favour_nixl()
        if setup.layout != "auto":
            declare_layouts()
        from vllm import LLM  # noqa: PLC0415 - slow, and reads the environment set above
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        self._rest = Rest()
        self._engine = LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            max_model_len=setup.longest,
            kv_cache_memory_bytes=setup.cache_bytes,
            max_num_seqs=setup.requests,
            max_num_batched_tokens=STEP_TOKENS,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=KVTransferConfig(**(setup.transfer() or {})),
            **setup.engine,
        )
        self._numbers = count()
        self._core = self._engine.llm_engine.engine_core.engine_core
        self._watch = _Watch()
        scheduler, worker = self._core.scheduler.connector, get_kv_transfer_group()
        _watch_scheduler(scheduler, self._watch)
        _watch_worker(worker, self._watch)
        if setup.connector == "kvferry":
            scheduler.half.events.subscribe(self._on_event)
            # The pair is paused between rounds, so its cache would move to huge pages in all of them.
            wait_for_huge_pages()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Compute prompts; return the ``kv_transfer_params`` with which another engine continues each."""
        names = [self._add(prompt, dict(ASK_FOR_KV), 1) for prompt in prompts]
        return [output.kv_transfer_params for output in self._run(names)]

    def decode(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]
    ) -> list[tuple[Stamps, int]]:
        """Continue prompts that another engine computed, all at once; return (stamps, token) of each.

        Args:
            prompts: token ids of each prompt.
            params: ``kv_transfer_params`` of each, from `prefill` of the other engine.
        """
        # A second token, so that the end of the request is no part of the wait for the first one.
        names = [self._add(*each, 2) for each in zip(prompts, params, strict=True)]
        outputs = self._run(names)
        return [
            (self._watch.stamps.pop(name), output.outputs[0].token_ids[0])
            for name, output in zip(names, outputs, strict=True)
        ]

    def alone(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the first token of each prompt, computed by this engine and not handed over."""
        outputs = self._run([self._add(prompt, {}, 1) for prompt in prompts])
        return [output.outputs[0].token_ids[0] for output in outputs]

    def runner(self) -> int:
        """Return the number of vLLM's model runner: 1 or 2."""
        return 2 if self._engine.llm_engine.vllm_config.use_v2_model_runner else 1

    def settle(self) -> int:
        """Run steps until no request and no block is held; return the number of free blocks."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._core.scheduler.has_requests():
            if time.monotonic() > until:
                raise TransferError("an engine kept blocks for minutes after the hand-over")
            self._step()
        self._engine.reset_prefix_cache()
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        """Stop the engine."""
        self._engine.llm_engine.engine_core.shutdown()

    def _add(self, prompt: Sequence[int], params: dict[str, Any], tokens: int) -> str:
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        )
        name = f"r{next(self._numbers)}"
        self._watch.stamps[name] = Stamps(added=time.perf_counter())
        self._engine.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def _run(self, names: Sequence[str]) -> list[Any]:
        done: dict[str, Any] = {}
        until = time.monotonic() + _PATIENCE_SECONDS
        while len(done) < len(names):
            if time.monotonic() > until:
                raise TransferError(f"an engine gave no token within {_PATIENCE_SECONDS:g} s")
            for output in self._step():
                stamps = self._watch.stamps[output.request_id]
                stamps.answered = stamps.answered or time.perf_counter()
                if output.finished:
                    done[output.request_id] = output
        return [done[name] for name in names]

    def _step(self) -> list[Any]:
        """Run one step. Rest after a step without work, as the loop of a served engine does."""
        outputs: list[Any] = self._engine.llm_engine.step()
        if not outputs and not self._core.scheduler.running:
            self._rest.take()
        return outputs

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, LoadEnded) or event.outcome is not LoadOutcome.READY:
            return
        if (stamps := self._watch.of(event.request_id)) is not None:
            stamps.transfer_seconds = event.figures.transfer_seconds
            stamps.check_seconds = event.figures.check_seconds


def wait_for_huge_pages() -> None:
    """Wait until kvferry has moved this process's KV cache to huge pages."""
    for thread in threading.enumerate():
        if thread.name == PAGES_THREAD:
            thread.join()


def _watch_scheduler(connector: Any, watch: _Watch) -> None:
    """Stamp the calls of a connector's scheduler half, in place."""
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def get_num_new_matched_tokens(request: Any, *rest: Any, **named: Any) -> Any:
        if (stamps := watch.of(request.request_id)) is not None and not stamps.asked:
            stamps.asked = time.perf_counter()
        return matched(request, *rest, **named)

    def update_state_after_alloc(request: Any, blocks: Any, tokens: int, **named: Any) -> Any:
        if (stamps := watch.of(request.request_id)) is not None and tokens:
            stamps.allocated = time.perf_counter()
            watch.starting.append(request.request_id)
        return allocated(request, blocks, tokens, **named)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc


def _watch_worker(connector: Any, watch: _Watch) -> None:
    """Stamp the calls of a connector's worker half, in place."""
    start, results = connector.start_load_kv, connector.get_transfer_results

    def start_load_kv(*rest: Any, **named: Any) -> Any:
        for name in watch.starting:
            if (stamps := watch.of(name)) is not None:
                stamps.started = time.perf_counter()
        watch.starting.clear()
        return start(*rest, **named)

    def get_transfer_results(*rest: Any, **named: Any) -> Any:
        found = results(*rest, **named)
        for name in found.finished_recving or ():
            if (stamps := watch.of(name)) is not None and name not in (found.failed_recving or ()):
                stamps.received = time.perf_counter()
        return found

    connector.start_load_kv = start_load_kv
    connector.get_transfer_results = get_transfer_results
