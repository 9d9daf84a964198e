"""An engine that hands prompts over, and also decodes many requests step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.handover.engine import HandoverEngine
from kvferry.common.errors import TransferError


class LayoutEngine(HandoverEngine):
    """A vLLM engine whose decode steps and prefills are timed."""

    _answers: dict[str, Sequence[int]]

    def fill(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Add requests, and run steps until each of them decodes.

        Args:
            prompts: token ids of each prompt.
            tokens: length of each answer, in tokens. It must be longer than all steps that follow.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - slow

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self._answers = {f"d{number}": () for number in range(len(prompts))}
        for name, prompt in zip(self._answers, prompts, strict=True):
            self._engine.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        while not all(self._answers.values()):
            self._decode_step()

    def decode_steps(self, number: int) -> list[float]:
        """Run some steps in which all requests decode; return the seconds of each.

        Raises:
            TransferError: a request got no token in a step.
        """
        found = []
        for _ in range(number):
            began = time.perf_counter()
            decoded = self._decode_step()
            found.append(time.perf_counter() - began)
            if decoded != len(self._answers):
                raise TransferError(f"{decoded} of {len(self._answers)} requests got a token in a step")
        return found

    def end_requests(self) -> list[list[int]]:
        """Abort all requests that decode; return the answer of each, as token ids."""
        self._engine.llm_engine.abort_request(list(self._answers))
        self.settle()
        return [list(answer) for answer in self._answers.values()]

    def use_threads(self, number: int) -> None:
        """Compute with this many threads from now on, at most as many as at the start."""
        import torch  # noqa: PLC0415 - slow

        torch.set_num_threads(number)

    def timed_prefill(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        """Compute a prompt; return the seconds, and ``kv_transfer_params`` to continue it elsewhere."""
        began = time.perf_counter()
        (params,) = self.prefill([prompt])
        return time.perf_counter() - began, params

    def _decode_step(self) -> int:
        """Run a step, and keep what the requests have answered so far; return the number of outputs."""
        outputs = self._engine.llm_engine.step()
        self._answers |= {output.request_id: tuple(output.outputs[0].token_ids) for output in outputs}
        return len(outputs)
