"""A prefill engine and a decode engine, and what a test does with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.vllm_engine import backends
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.drafts import speculation
from support.vllm_engine.inside import distance
from support.vllm_engine.process import Engine
from support.vllm_engine.runners import SLOWNESS

VOCABULARY = 1000
SOON = 20.0
"""Seconds that what ends by itself within moments may take on a busy machine."""


def connector(**extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with these settings of the connector."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def prompt(length: int, seed: int) -> list[int]:
    """A prompt of random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


TEXTS = tuple(prompt(n, n) for n in (2, 40, 128, 129, 256, 300, 512, 700))
"""Shorter than a block, whole blocks and one more, longer than the window (64) and than a step (256)."""
TOGETHER = tuple(prompt(n, 1000 + n) for n in (30, 130, 260, 333, 500))
"""Prompts that are asked all at once."""


@dataclass(frozen=True)
class Setup:
    """A pair to be started.

    Attributes:
        family: of `checkpoints`.
        label: tells setups of one family apart.
        options: of both engines, on top of the family's own.
        exact: the engine agrees with itself to the last bit, so must the pair. If it does not on this
            processor, the pair may be twice as far from it as it is from itself.
        connector: settings of both connectors.
        prefill_options, decode_options: of one engine, on top of those of both.
        layouts: the connectors' ``layout``, (prefill, decode), of engines whose backend takes any layout;
            None for engines as they are.
        drafts: how each engine speculates, (prefill, decode): a method of `drafts.speculation`; empty: not.
        asynchronous: both engines schedule a step while the one before runs, as on a GPU.
        environment: of both engines' processes.
        environments: of each, on top of that.
        hosts: network namespaces of both.
    """

    family: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    connector: dict[str, Any] = field(default_factory=dict)
    prefill_options: dict[str, Any] = field(default_factory=dict)
    decode_options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, str] | None = None
    drafts: tuple[str, str] = ("", "")
    asynchronous: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    environments: tuple[dict[str, str], dict[str, str]] = ({}, {})
    hosts: tuple[str | None, str | None] = (None, None)

    def engine_options(self, model: str) -> Iterator[dict[str, Any]]:
        """Options of the prefill and of the decode engine."""
        for number, own in enumerate((self.prefill_options, self.decode_options)):
            layout = {"layout": self.layouts[number]} if self.layouts else {}
            drafts = (
                {"speculative_config": found} if (found := speculation(self.drafts[number], model)) else {}
            )
            yield {
                "model": model,
                **family_of(self.family).engine_options(),
                **self.options,
                "any_layout": bool(self.layouts) and not backends.TRITON,
                "async_scheduling": self.asynchronous,
                "kv_transfer_config": connector(**self.connector, **layout),
                **drafts,
                **own,
            }

    def __str__(self) -> str:
        return f"{self.family}-{self.label}" if self.label else self.family


class Pair:
    """Two engines of one model, started together."""

    def __init__(self, setup: Setup, folder: Path, checkpoints: Path) -> None:
        self.setup = setup
        model = str(checkpoint_of(setup.family, checkpoints))
        self.prefill, self.decode = (
            Engine(folder / f"{name}.log", {**setup.environment, **environment}, host, **options)
            for name, environment, host, options in zip(
                ("prefill", "decode"),
                setup.environments,
                setup.hosts,
                setup.engine_options(model),
                strict=True,
            )
        )
        try:
            self.about = self.prefill.ready()
            self.about_decode = self.decode.ready()
            assert self.about["addresses"].isdisjoint(self.about_decode["addresses"]), "copies lie alike"
        except BaseException:
            self.close()
            raise
        self._gap: float | None = None

    def turned(self) -> Pair:
        """The same engines in each other's place."""
        turned = copy(self)
        turned.prefill, turned.decode = self.decode, self.prefill
        turned.about, turned.about_decode = self.about_decode, self.about
        turned._gap = None
        return turned

    @property
    def prefix_caching(self) -> bool:
        return bool(self.about["prefix_caching"])

    @property
    def gap(self) -> float:
        """How far a single engine is from itself over the texts that are tried, measured once."""
        if self._gap is None:
            texts = [*TEXTS, *TOGETHER]
            self._gap = float(self.prefill.call("own_gap", texts, timeout=280.0 * SLOWNESS))
        return self._gap

    @property
    def floor(self) -> float:
        """How far the pair may be from a single engine that agrees with itself."""
        return 0.0 if self.setup.exact else 1e-5

    def reference(self, prompts: list[list[int]], tokens: int = 8) -> list[dict[str, Any]]:
        """What a single engine says, from nothing cached, one prompt at a time."""
        answers = []
        for each in prompts:
            self.prefill.call("reset_prefix_cache")
            answers += self.prefill.call("generate", [each], tokens=tokens)
        self.prefill.call("reset_prefix_cache")
        return answers

    def own_words(self, text: list[int], tokens: int = 8) -> tuple[list[int], dict[str, Any]]:
        """`text` with a single engine's next token, and what that engine goes on to say.

        It has computed the text at once and its own token by itself, which is how a pair computes the two
        together: what a pair says to them is the same to the last bit, in any dtype and of any family.
        """
        (said,) = self.reference([text], tokens + 1)
        rest = {name: said[name][1:] for name in ("tokens", "logprobs")}
        return text + said["tokens"][:1], rest

    def through(
        self, prompts: list[list[int]], tokens: int = 8, prefill: str = "prefill"
    ) -> list[dict[str, Any]]:
        """The same through both engines; checks that what was loaded is what the producer has.

        Returns:
            The decode engine's answers, each with ``moved``: digests of what was loaded, by layer and field.
        """
        offers = [answer["params"] for answer in self.prefill.call(prefill, prompts)]
        answers = self.decode.call("generate", prompts, offers, tokens)
        loaded = self.decode.call("loaded")
        for answer, offer in zip(answers, offers, strict=True):
            moved = next((d for name, d in loaded.items() if name.split("-")[0] == answer["request_id"]), {})
            answer["moved"], answer["offer"] = moved, offer
            if moved:
                theirs = self.prefill.call("digests_of_offer", offer)
                lacking = moved.keys() - theirs.keys()  # layers of a draft that the producer does not have
                assert all(" of draft " in part for part in lacking), lacking
                answer["moved"] = moved = {part: moved[part] for part in moved if part not in lacking}
                for part, digests in moved.items():
                    # A prefix that was already there is missing from what was loaded, at its front.
                    assert len(digests) <= len(theirs[part]), part
                    assert digests == theirs[part][len(theirs[part]) - len(digests) :], part
        self.prefill.call("step", SOON)
        return answers

    def agree(self, answer: dict[str, Any], reference: dict[str, Any]) -> None:
        """Assert that an answer is the single engine's, within that engine's own gap."""
        assert answer["finish"] == "length"
        if self.setup.exact:
            assert answer["tokens"] == reference["tokens"]
        apart = distance(answer, reference)
        if apart > self.floor:  # only then is the gap measured, which takes seconds
            assert apart <= self.floor + 2 * self.gap, f"{apart} apart, the engine's own gap is {self.gap}"

    def spoiled(self, text: list[int], group: int) -> dict[str, Any]:
        """The answer through both engines if what is loaded of that KV cache group is spoiled."""
        self.decode.call("spoil", group)
        try:
            answer = self.through([text])[0]
        finally:
            self.decode.call("spoil", None)
        self.forget()
        return answer

    def forget(self) -> None:
        """Both engines forget all prefixes."""
        self.prefill.call("step", SOON)
        assert self.prefill.call("reset_prefix_cache")
        assert self.decode.call("reset_prefix_cache")

    def close(self) -> None:
        """Stop both."""
        self.prefill.part()
        self.decode.part()
        self.prefill.close()
        self.decode.close()
