"""An engine with kvferry's connector in this process, for a conversation through two engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.served import prepare_process
from kvferry.common.errors import TransferError
from kvferry.connector.events import Event, LoadBegan, LoadEnded, LoadOutcome

_CONNECTOR = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_STEPS_AFTER = 20


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        options: arguments of `vllm.LLM`.
        shares: True if the engine shares attention blocks whose recurrent state a load brings; False for
            vLLM's own rule, by which it shares only what all KV cache groups have.
    """

    model: Path
    options: dict[str, Any]
    shares: bool


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer of an engine, and what it loaded for it.

    Attributes:
        tokens: token ids of the answer.
        params: ``kv_transfer_params`` of the answer, for the next engine.
        begin, end: range of the loaded tokens; both 0 if nothing was loaded.
        bytes_by_group: number of bytes that were read, by label of the KV cache group.
    """

    tokens: tuple[int, ...]
    params: dict[str, Any] | None
    begin: int = 0
    end: int = 0
    bytes_by_group: dict[str, int] = field(default_factory=dict)


class TurnsEngine:
    """An engine that answers the turns of a conversation."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start the engine, which takes tens of seconds."""
        prepare_process(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
        from vllm import LLM  # noqa: PLC0415 - slow, and reads the environment set above
        from vllm.config import KVTransferConfig  # noqa: PLC0415

        from kvferry.engines.vllm.connector import KVFerryConnector  # noqa: PLC0415

        if not setup.shares:
            KVFerryConnector.supports_divergent_local_hybrid_hits = property(lambda _: False)  # type: ignore[method-assign, assignment]
        self._engine = LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=4,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=KVTransferConfig(**_CONNECTOR),
            **setup.options,
        )
        scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        self._loads: list[Event] = []
        scheduler.connector.half.events.subscribe(self._loads.append)
        self._block_tokens = int(scheduler.block_size)

    def block_tokens(self) -> int:
        """Return the number of tokens in one of the engine's blocks."""
        return self._block_tokens

    def ask(self, prompt: Sequence[int], tokens: int, params: dict[str, Any] | None = None) -> TurnAnswer:
        """Compute a prompt and return the answer.

        Args:
            prompt: token ids.
            tokens: length of the answer in tokens.
            params: ``kv_transfer_params`` of the request; None for none.

        Raises:
            TransferError: the load of the prompt has failed.
        """
        from vllm import SamplingParams  # noqa: PLC0415

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self._loads.clear()
        (output,) = self._engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        for _ in range(_STEPS_AFTER):  # so that leases are released
            self._engine.llm_engine.step()
        said = tuple(output.outputs[0].token_ids)
        began = [event for event in self._loads if isinstance(event, LoadBegan)]
        ended = [event for event in self._loads if isinstance(event, LoadEnded)]
        if not began:
            return TurnAnswer(said, output.kv_transfer_params)
        if len(began) > 1 or ended[0].outcome is not LoadOutcome.READY:
            raise TransferError(f"a load has failed: {ended[0].failure}")
        moved = {each.group: each.size for each in ended[0].moved}
        return TurnAnswer(said, output.kv_transfer_params, began[0].begin, began[0].end, moved)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.llm_engine.engine_core.shutdown()
