"""The engine: one request at a time, greedy decoding, and the connector's two halves in one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.transformers_engine.blocks import Pool, Tables
from examples.transformers_engine.identity import facts_of
from examples.transformers_engine.pages import Pages
from kvferry.connector.adapters import Adapters
from kvferry.connector.agreement import namespace_of_facts
from kvferry.connector.config import parse_config
from kvferry.connector.engine import CacheGroup, EngineFacts
from kvferry.connector.messages import EndedRequests
from kvferry.connector.plain import PlainRequest, PlainStep
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.connector.stream import EventStream, Listener
from kvferry.connector.worker.half import WorkerHalf
from kvferry.transport.messages import Facts

_POLL_SECONDS = 0.001


@dataclass(slots=True, kw_only=True)
class Request(PlainRequest):
    """A request.

    Attributes:
        max_tokens: tokens of the answer.
        tables: its blocks.
    """

    max_tokens: int
    tables: Tables

    def trim_prompt(self) -> bool:
        """Drop the last prompt token and answer with one token only, for a peer that continues."""
        trimmed = PlainRequest.trim_prompt(self)
        if trimmed:
            self.max_tokens = 1
        return trimmed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        token_ids: the tokens.
        loaded: loaded tokens of the prompt, by the place that they came from.
        computed: computed tokens of the prompt.
        kv_transfer_params: offer of the prompt's KV for the engine that continues; None if not asked for.
    """

    token_ids: list[int]
    loaded: Mapping[str, int] = field(default_factory=dict)
    computed: int
    kv_transfer_params: Any = None


class Engine:
    """A model, its paged cache, and the connector. Not thread-safe.

    Attributes:
        pages: K and V of all layers.
        pool: the block pool.
        lent: blocks of ended requests that peers may still read, by request.
    """

    def __init__(
        self,
        checkpoint: Path,
        settings: Mapping[str, Any],
        *,
        name: str = "transformers",
        num_blocks: int = 512,
        block_tokens: int = 16,
        listener: Listener | None = None,
    ) -> None:
        """Load a checkpoint and start the connector.

        Args:
            checkpoint: folder of a checkpoint whose layers all have attention, full or with a window.
            settings: of the connector, as ``kv_connector_extra_config`` in vLLM.
            name: of this engine.
            num_blocks: blocks of the pool, the null block included.
            block_tokens: tokens of a block.
            listener: receives the connector's events.

        Raises:
            ConfigError: the settings cannot be used.
        """
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        config = self._model.config
        self.pages, self.pool = Pages.allocate(config, num_blocks, block_tokens), Pool(num_blocks)
        self._groups = tuple(
            CacheGroup(kind=group.kind, attention_span=group.attention_span, block_tokens=block_tokens)
            for group in self.pages.geometry.groups
        )
        longest = int(config.max_position_embeddings)
        about = EngineFacts(
            engine_id=name,
            groups=self._groups,
            num_blocks=num_blocks,
            longest_request=longest,
            steps_in_flight=1,
            tokens_in_flight=longest,
            step_tokens=longest,
        )
        parsed = parse_config(settings)
        events = EventStream() if listener is None else EventStream(listener)
        self._half = SchedulerHalf(about, parsed, Adapters(), events)
        self._worker = WorkerHalf()
        info = self._worker.start(name, self.pages.geometry, parsed)
        facts = facts_of(checkpoint, config)
        self._half.start(
            [info],
            self.pool,
            facts=Facts(name, self._half.incarnation, "kvferry's example over transformers", facts),
            namespace=lambda canonical: namespace_of_facts(facts, canonical, checkpoint.name),
        )
        self.lent: dict[str, Tables] = {}
        self._numbers = count()

    def generate(self, prompt: list[int], max_tokens: int, kv_transfer_params: Any = None) -> Answer:
        """Continue a prompt greedily.

        Args:
            prompt: token ids.
            max_tokens: tokens of the answer.
            kv_transfer_params: ``{"do_remote_decode": True}`` to compute the prompt for another engine, or
                the offer of an engine that has computed it.

        Raises:
            KVFerryError: the pool has too few blocks.
        """
        request = Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=prompt,
            kv_transfer_params=kv_transfer_params,
            max_tokens=max_tokens,
            tables=Tables(self.pool, self._groups),
        )
        self._half.on_new_request(request)
        loaded = self.load(request)
        computed = request.num_tokens - request.num_computed_tokens
        while len(request.answer_token_ids) < request.max_tokens:
            self._compute(request)
        return Answer(
            token_ids=request.answer_token_ids,
            loaded=loaded,
            computed=computed,
            kv_transfer_params=self._finish(request),
        )

    def close(self) -> None:
        """Finish all stores, wait until peers have released what they read, and end all threads."""
        while self._half.busy or self.lent:
            self._step()
            time.sleep(_POLL_SECONDS)
        self._half.shutdown()
        self._worker.shutdown()

    def load(self, request: Request) -> Counter[str]:
        """Load as much of the prompt as a source has; return the tokens by the place they came from."""
        while True:
            while (tokens := self._half.admission.matched(request, 0)) is None:
                self._step()  # a source is still looking
                time.sleep(_POLL_SECONDS)
            # The last token is computed even if its K and V are loaded, so its window must be here.
            request.tables.cover(max(tokens, 1), min(tokens, request.num_tokens - 1))
            self._half.admission.allocated(request, request.tables, tokens)
            if not tokens:
                return Counter()
            places = self._half.admission.origins(request.request_id)
            while request.request_id not in (ended := self._step()).received:
                time.sleep(_POLL_SECONDS)
            if request.request_id not in ended.failed:
                request.num_computed_tokens = min(tokens, request.num_tokens - 1)
                return places
            request.tables.free()  # the connector holds what may still be written

    def _compute(self, request: Request) -> None:
        """Compute all tokens that have no KV yet, and the next token of the answer."""
        local_tokens, total = request.num_computed_tokens, request.num_tokens
        request.tables.cover(total, local_tokens)
        self._step(request)
        request.num_computed_tokens = total

    def _step(self, request: Request | None = None) -> EndedRequests:
        """Run one step of the engine, with all hooks of the connector in their order."""
        step = PlainStep(tokens={})
        if request is not None:
            new = request.num_tokens - request.num_computed_tokens
            step = PlainStep(
                tokens={request.request_id: new}, tables={request.request_id: request.tables.get_block_ids()}
            )
        orders = self._half.orders(step)
        self._worker.begin(orders)
        if request is not None:
            self._forward(request)
        self._worker.save(orders, lambda: lambda: None)  # on a CPU, the forward is over by now
        ended = self._worker.ended()
        if (reports := self._worker.take_reports()) is not None:
            self._half.take_reports(reports)
        self._half.sent(set(ended.sent))
        for name in ended.sent:
            self.lent.pop(name).free()
        self._half.step_done()
        return ended

    def _forward(self, request: Request) -> None:
        """Run the model over the tokens without KV; write their KV, and append the likeliest next token."""
        local_tokens = request.num_computed_tokens
        cache = self.pages.cache(request.tables.get_block_ids(), local_tokens)
        ids = torch.tensor([request.all_token_ids[local_tokens:]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        request.answer_token_ids.append(int(logits[0, -1].argmax()))

    def _finish(self, request: Request) -> Any:
        """End a request; return its offer for another engine, which has its blocks until it releases them."""
        request.is_complete = True
        lent, params = self._half.finished(request, request.tables.get_block_ids())
        if lent:
            self.lent[request.request_id] = request.tables
        else:
            request.tables.free()
        return params
