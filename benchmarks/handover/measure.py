"""Time hand-overs from a prefill to a decode engine, up to the first token, with several connectors in turn.

For each connector there are two engines, each in a process of its own. Only the pair that is measured runs:
the others are paused, because NixlConnector's progress threads take processor time even when idle. In each
round, every connector hands over the same prompts once. The first round is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoint import VOCABULARY
from benchmarks.engine_process import EngineProcess
from benchmarks.handover.engine import HandoverEngine, Setup, Stamps
from benchmarks.handover.model import HandoverModel, write_model
from kvferry.errors import TransferError
from kvferry.serving.ports import free_ports

_MEET_TOKENS, _MEET_TRIES = 300, 10
_SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are handed over at once.

    Attributes:
        tokens: length of each prompt, in tokens.
        requests: number of requests.
    """

    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over of all requests of a load, in seconds.

    Attributes:
        stamps: stages of each request.
    """

    stamps: tuple[Stamps, ...]

    @property
    def seconds(self) -> float:
        """Return the mean time from a request's arrival at the decode engine to its first token."""
        return sum(one.answered - one.added for one in self.stamps) / len(self.stamps)

    def stages(self) -> dict[str, float]:
        """Return the mean seconds of each stage, by name. Together they are `seconds`."""
        each = [_stages(one) for one in self.stamps]
        return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def _stages(one: Stamps) -> dict[str, float]:
    return {
        "queue": one.asked - one.added,
        "look-up": one.started - one.asked,
        "transfer": one.transfer_seconds,
        "check": one.check_seconds,
        "other": one.received - one.started - one.transfer_seconds - one.check_seconds,
        "step": one.answered - one.received,
    }


def measure(
    model: HandoverModel,
    loads: Sequence[Load],
    connectors: Sequence[str],
    *,
    rounds: int,
    folder: Path,
    progress: Callable[[str], None],
) -> dict[Load, dict[str, tuple[Handover, ...]]]:
    """Hand over prompts with each connector in turn; return the hand-overs by load and connector.

    Args:
        model: model family.
        loads: loads to measure.
        connectors: names of the connectors, as in `Setup`.
        rounds: number of counted rounds.
        folder: folder for the checkpoint.
        progress: function that is called with a line of text before each load.

    Raises:
        TransferError: an engine does not start or does not answer, a connector did not load a prompt, or two
            connectors gave unequal first tokens.
    """
    longest = max(one.tokens for one in loads) + _SPARE_TOKENS
    progress(f"{model.name}: writing the checkpoint and starting {2 * len(connectors)} engines")
    path = write_model(model, folder / model.name, longest)
    common = Setup(
        model=path, connector="", port=0, longest=longest, requests=max(one.requests for one in loads),
        cache_bytes=_cache_bytes(loads), engine=dict(model.engine),
    )  # fmt: skip
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(start_pair(name, replace(common, connector=name)))
            for name in connectors
        }
        found: dict[Load, dict[str, tuple[Handover, ...]]] = {}
        for load in loads:
            progress(f"{model.name}: {load.requests} requests of {load.tokens} tokens")
            found[load] = _measured(pairs, load, rounds)
        return found


def _cache_bytes(loads: Sequence[Load]) -> int:
    """Return a size of the KV cache, in bytes, that holds every load with room to spare."""
    most = max(one.tokens * one.requests for one in loads)
    return max(256 << 20, most * (24 << 10)) + (256 << 20)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine with the same connector, each in a process of its own.

    Attributes:
        name: name of the connector.
        prefill, decode: the engines' processes.
    """

    name: str
    prefill: EngineProcess
    decode: EngineProcess

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let both engines run while the block runs."""
        for one in (self.prefill, self.decode):
            one.go_on()
        try:
            yield
        finally:
            for one in (self.prefill, self.decode):
                one.stand_still()

    def hand_over(self, prompts: list[list[int]]) -> tuple[Handover, list[int]]:
        """Compute prompts in one engine and continue them in the other; return the times and the tokens."""
        params = self.prefill.call("prefill", prompts)
        answers = self.decode.call("decode", prompts, params)
        self.decode.call("settle")
        self.prefill.call("settle")
        return Handover(tuple(stamps for stamps, _ in answers)), [token for _, token in answers]


@contextmanager
def start_pair(
    name: str, setup: Setup, make: Callable[[Setup], HandoverEngine] = HandoverEngine
) -> Iterator[Pair]:
    """Start two engines, let them hand over a first prompt, and pause them; end them when the block ends.

    Args:
        name: name of the pair, for messages.
        setup: configuration of both engines, without the port.
        make: class of the engines.

    Raises:
        TransferError: an engine does not start, or the engines do not hand over.
    """
    with ExitStack() as stack:
        engines = [
            stack.enter_context(EngineProcess(f"{name} {role}", make, replace(setup, port=port)))
            for role, port in zip(("prefill", "decode"), free_ports(2), strict=True)
        ]
        for one in engines:
            one.wait_ready()
        pair = Pair(name, *engines)
        with pair.running():
            _meet(pair)
        yield pair


def _meet(pair: Pair) -> None:
    """Hand over short prompts until one is loaded: the engines' first contact takes seconds."""
    for attempt in range(_MEET_TRIES):
        times, _ = pair.hand_over([draw_prompt(_MEET_TOKENS, attempt)])
        if all(one.received for one in times.stamps):
            return
    raise TransferError(f"the engines with {pair.name} loaded none of {_MEET_TRIES} prompts")


def _measured(pairs: dict[str, Pair], load: Load, rounds: int) -> dict[str, tuple[Handover, ...]]:
    found: dict[str, list[Handover]] = {name: [] for name in pairs}
    for number in range(rounds + 1):
        prompts = [draw_prompt(load.tokens, 1000 * number + one) for one in range(load.requests)]
        said = {}
        for name, pair in pairs.items():
            with pair.running():
                times, said[name] = pair.hand_over(prompts)
            if not all(one.received for one in times.stamps):
                raise TransferError(f"{name} did not load a prompt of {load.tokens} tokens")
            if number:
                found[name].append(times)
        # bfloat16 and batching may flip a token, so most of them must be equal, not all.
        for name, tokens in said.items():
            equal = sum(a == b for a, b in zip(tokens, next(iter(said.values())), strict=True))
            if 2 * equal < len(tokens) and load.requests > 1:
                raise TransferError(f"{name} gave other first tokens than {next(iter(said))}")
    return {name: tuple(times) for name, times in found.items()}


def draw_prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt of random token ids, always the same for a seed."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    return [drawn.randrange(1, VOCABULARY) for _ in range(tokens)]
