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
from kvferry.connector.config import parse_config
from kvferry.connector.content import namespace_of_facts
from kvferry.connector.engine import CacheGroup, EngineFacts, PlainRequest, PlainStep
from kvferry.connector.events import EventStream, Listener
from kvferry.connector.messages import EndedRequests
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.connector.worker import WorkerHalf
from kvferry.transport.messages import Facts

_POLL_SECONDS = 0.001


@dataclass(slots=True, kw_only=True)
class Request(PlainRequest):
    """Request to the example engine.

    Attributes:
        max_tokens: number of tokens of the answer.
        tables: block tables of the request.
    """

    max_tokens: int
    tables: Tables

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, and generate only one token, because a peer continues the request.

        Returns:
            True if the token was dropped; False if the request is unchanged.
        """
        trimmed = PlainRequest.trim_prompt(self)
        if trimmed:
            self.max_tokens = 1
        return trimmed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a prompt, and where the prompt's KV came from.

    Attributes:
        token_ids: token ids of the answer.
        loaded: number of loaded prompt tokens, by source: the name of a tier, or ``peer``.
        computed: number of prompt tokens that the engine computed.
        kv_transfer_params: offer of the prompt's KV to another engine; None if the request did not ask for an
            offer.
    """

    token_ids: list[int]
    loaded: Mapping[str, int] = field(default_factory=dict)
    computed: int
    kv_transfer_params: Any = None


class Engine:
    """Minimal LLM engine: a transformers model, a paged KV cache, and kvferry's connector. Not thread-safe.

    Attributes:
        pages: K and V of all layers.
        pool: block pool.
        lent: block tables of ended requests that peers may still read, by request id.
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
            checkpoint: folder of a checkpoint. All layers must have full or sliding-window attention.
            settings: settings of the connector, as in vLLM's ``kv_connector_extra_config``.
            name: name of this engine.
            num_blocks: number of blocks in the pool, the null block included.
            block_tokens: number of tokens per block.
            listener: receiver of the connector's events; None for no receiver.

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
        self._worker = WorkerHalf()
        info = self._worker.start(name, self.pages.geometry, parsed)
        facts = facts_of(checkpoint, config)
        self._half = SchedulerHalf(
            about,
            parsed,
            [info],
            self.pool,
            events=events,
            facts=lambda incarnation: Facts(name, incarnation, "kvferry's example over transformers", facts),
            namespace=lambda canonical: namespace_of_facts(facts, canonical, checkpoint.name),
        )
        self.lent: dict[str, Tables] = {}
        self._numbers = count()

    def generate(self, prompt: list[int], max_tokens: int, kv_transfer_params: Any = None) -> Answer:
        """Compute a prompt, or load its KV, and generate an answer greedily.

        Args:
            prompt: token ids of the prompt.
            max_tokens: number of tokens of the answer.
            kv_transfer_params: ``{"do_remote_decode": True}`` to compute the prompt for another engine. Or
                the offer of another engine that has computed the prompt. None for neither.

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
        """Finish all stores, wait until peers have released the blocks that they read, and stop threads."""
        self.finish_stores()
        while self.lent:
            self._step()
            time.sleep(_POLL_SECONDS)
        self._half.shutdown()
        self._worker.shutdown()

    def finish_stores(self) -> None:
        """Run steps until the tiers have stored, or refused, every chunk that was computed so far."""
        while self._half.busy:
            self._step()
            time.sleep(_POLL_SECONDS)

    def load(self, request: Request) -> Counter[str]:
        """Load the prompt prefix that the connector chooses into the request's blocks.

        If the load fails, the connector may choose another source.

        Returns:
            Number of tokens loaded, by source: the name of a tier, or ``peer``. Empty if nothing was loaded.
        """
        while True:
            while (tokens := self._half.admission.matched(request, 0)) is None:
                self._step()  # a source is still looking
                time.sleep(_POLL_SECONDS)
            # The last token is computed even if its K and V are loaded, so it needs the blocks of its window.
            request.tables.cover(max(tokens, 1), min(tokens, request.num_tokens - 1))
            self._half.admission.allocated(request, request.tables.blocks, tokens)
            if not tokens:
                return Counter()
            places = self._half.admission.origins(request.request_id)
            while request.request_id not in (ended := self._step()).received:
                time.sleep(_POLL_SECONDS)
            if request.request_id not in ended.failed:
                request.num_computed_tokens = min(tokens, request.num_tokens - 1)
                return places
            request.tables.free()  # the connector holds blocks that a load may still write

    def _compute(self, request: Request) -> None:
        """Compute the KV of all tokens of a request that have no KV yet, and the next token of the answer."""
        local_tokens, total = request.num_computed_tokens, request.num_tokens
        request.tables.cover(total, local_tokens)
        self._step(request)
        request.num_computed_tokens = total

    def _step(self, request: Request | None = None) -> EndedRequests:
        """Run one step of the engine: call the connector's hooks in order, and compute `request` if given.

        Args:
            request: request to compute; None for a step that only lets the connector make progress.

        Returns:
            Ids of requests whose transfers have ended.
        """
        step = PlainStep(tokens={})
        if request is not None:
            new = request.num_tokens - request.num_computed_tokens
            step = PlainStep(
                tokens={request.request_id: new}, tables={request.request_id: request.tables.get_block_ids()}
            )
        orders = self._half.orders(step)
        self._worker.raise_words(orders)
        self._worker.begin(orders)
        if request is not None:
            self._forward(request)
        self._worker.save(orders, lambda: None)  # on a CPU, the forward is over by now
        ended = self._worker.ended()
        if (reports := self._worker.take_reports()) is not None:
            self._half.take_reports(reports)
        self._half.sent(set(ended.sent))
        for name in ended.sent:
            self.lent.pop(name).free()
        self._half.step_done()
        return ended

    def _forward(self, request: Request) -> None:
        """Run the model over a request's tokens that have no KV yet.

        Writes the KV of these tokens to the request's blocks, and appends the most likely next token to its
        answer.
        """
        local_tokens = request.num_computed_tokens
        cache = self.pages.cache(request.tables.get_block_ids(), local_tokens)
        ids = torch.tensor([request.all_token_ids[local_tokens:]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        request.answer_token_ids.append(int(logits[0, -1].argmax()))

    def _finish(self, request: Request) -> Any:
        """End a request, and return the offer of its KV for another engine; None without an offer.

        If there is an offer, the blocks stay allocated until the other engine releases them.
        """
        request.is_complete = True
        lent, params = self._half.finished(request, request.tables.get_block_ids())
        if lent:
            self.lent[request.request_id] = request.tables
        else:
            request.tables.free()
        return params
