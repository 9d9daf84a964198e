"""Time all hooks of a connector in each step of a vLLM engine that decodes many requests.

Every public method of the connector's two instances is timed, whoever calls it. A method that another method
calls counts once. The engines take turns, each for some steps.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import VOCABULARY, write_checkpoint
from benchmarks.engine_process import EngineProcess
from benchmarks.served import prepare_process
from kvferry.common.errors import TransferError

_KVFERRY = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
}
CONNECTORS: Mapping[str, Mapping[str, Any]] = {
    "empty": {
        "kv_connector": "EmptyConnector",
        "kv_connector_module_path": "benchmarks.steps.empty_connector",
    },
    "nixl": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "kvferry": _KVFERRY,
    "kvferry with tiers": {
        **_KVFERRY,
        "kv_connector_extra_config": {"tiers": [{"type": "host", "capacity": "256MiB"}]},
    },
}
"""Transfer configuration of each connector, by name."""

_PROMPT_TOKENS, _SPARE_STEPS = 20, 64
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        connector: name of the connector, one of `CONNECTORS`.
        requests: number of requests that the engine decodes at a time.
        steps: number of steps that will be timed.
    """

    model: Path
    connector: str
    requests: int
    steps: int


class SteppingEngine:
    """A vLLM engine that decodes requests, and times its connector in each step."""

    def __init__(self, setup: Setup) -> None:
        """Start the engine, and compute all prompts."""
        prepare_process(OMP_NUM_THREADS="1")
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - slow, and reads the environment set above
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        tokens = setup.steps + _SPARE_STEPS
        self._engine = LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_PROMPT_TOKENS + tokens,
            kv_cache_memory_bytes=1 << 30,
            max_num_seqs=setup.requests,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_transfer_config=KVTransferConfig(
                kv_role="kv_both", kv_load_failure_policy="recompute", **CONNECTORS[setup.connector]
            ),
        )
        scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        self._seconds, self._inside = 0.0, False
        for half in (scheduler.connector, get_kv_transfer_group()):
            self._watch(half)
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        for number in range(setup.requests):
            prompt = [1 + (number * 31 + at) % (VOCABULARY - 1) for at in range(_PROMPT_TOKENS)]
            self._engine.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        for _ in range(_SPARE_STEPS // 2):
            self._engine.llm_engine.step()
        if len(scheduler.running) != setup.requests:
            raise TransferError(f"{len(scheduler.running)} requests run, not {setup.requests}")

    def steps(self, number: int) -> list[float]:
        """Run some steps, and return the seconds inside the connector's hooks in each."""
        found = []
        for _ in range(number):
            self._seconds = 0.0
            self._engine.llm_engine.step()
            found.append(self._seconds)
        return found

    def close(self) -> None:
        """Stop the engine."""
        self._engine.llm_engine.engine_core.shutdown()

    def _watch(self, half: Any) -> None:
        """Time every public method of a connector's instance, in place."""
        for name, member in inspect.getmembers(type(half)):
            static = inspect.getattr_static(type(half), name)
            if callable(member) and name[0] != "_" and not isinstance(static, classmethod | staticmethod):
                setattr(half, name, self._timed(getattr(half, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self._seconds += time.perf_counter() - began
                self._inside = False

        return timed


def measure(
    requests: int,
    rounds: int,
    steps: int,
    *,
    folder: Path,
    progress: Callable[[str], None],
) -> dict[str, Sequence[Sequence[float]]]:
    """Time the hooks of each connector; return the seconds of each step, by connector and round.

    Args:
        requests: number of requests that each engine decodes.
        rounds: number of rounds. In each, every engine runs `steps` steps.
        steps: number of steps of a round.
        folder: folder for the checkpoint.
        progress: function that is called with a line of text for each stage.

    Raises:
        TransferError: an engine does not start, or does not answer.
    """
    progress(f"starting {len(CONNECTORS)} engines")
    total = rounds * steps
    model = write_checkpoint(folder / "model", _PROMPT_TOKENS + total + _SPARE_STEPS, _SMALL)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                EngineProcess(name, SteppingEngine, Setup(model, name, requests, total))
            )
            for name in CONNECTORS
        }
        for one in engines.values():
            one.wait_ready()
            one.stand_still()  # NixlConnector's progress thread never rests
        found: dict[str, list[list[float]]] = {name: [] for name in engines}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for name, one in engines.items():
                one.go_on()
                found[name].append(one.call("steps", steps))
                one.stand_still()
        return {name: tuple(each) for name, each in found.items()}
