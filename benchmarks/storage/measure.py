"""Store prompts and load them again with each variant in turn, and time the first tokens.

Each variant has an engine in a process of its own. The engines that are not measured are paused. In each
round, every variant gets the same new prompts, and the order of the variants is random. A round with short
prompts comes first and is not counted. A prompt is two tokens longer than a whole number of chunks, because
ExampleConnector loads whole blocks of all tokens but the last two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoint import VOCABULARY, token_bytes, write_checkpoint
from benchmarks.engine_process import EngineProcess
from benchmarks.served import FirstAnswer
from benchmarks.storage import stored_files
from benchmarks.storage.answers import agree
from benchmarks.storage.engine import COMPUTE, EXAMPLE, FILE, HOST, VARIANTS, Setup, StorageEngine
from benchmarks.storage.peers import try_peers
from benchmarks.storage.rounds import Measured, PromptRounds, VariantRound
from kvferry.common.errors import TransferError

SPARE_TOKENS = 2
MODEL = {"num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.1}
"""Changes to the checkpoint: 32 KiB of KV per token, and answers that depend on the whole prompt."""

_CACHED_PROMPTS = 5  # stores hold a quarter of the blocks, and one step computes a whole prompt


def measure(lengths: Sequence[int], rounds: int, path: Path, progress: Callable[[str], None]) -> Measured:
    """Measure all variants, and return their times.

    Args:
        lengths: numbers of tokens to store and load, multiples of 512.
        rounds: number of counted rounds.
        path: folder for the checkpoint and the stored KV, which are removed at the end.
        progress: function that is called with a line of text before each step.

    Raises:
        TransferError: an engine does not start or answer, a prompt was not loaded, or a first token is wrong.
    """
    with TemporaryDirectory(prefix="bench-", dir=path) as made, ExitStack() as stack:
        folder = Path(made)
        peers = try_peers(folder, progress)
        progress(f"starting {len(VARIANTS)} engines")
        engines = _start(stack, folder, max(lengths))
        progress("checking that another prompt's KV is noticed")
        _check_control(engines, folder / EXAMPLE, min(lengths))
        chance = random.Random(1)  # noqa: S311 - no secret
        _round(engines, folder, min(lengths), chance)
        found: dict[int, list[Mapping[str, VariantRound]]] = {tokens: [] for tokens in lengths}
        for number, tokens in product(range(rounds), lengths):
            progress(f"{tokens:,} tokens, round {number + 1} of {rounds}")
            found[tokens].append(_round(engines, folder, tokens, chance))
        return Measured(
            prompts=tuple(
                PromptRounds(tokens, tokens * token_bytes(MODEL), tuple(each))
                for tokens, each in found.items()
            ),
            peers=peers,
            direct_io=stored_files.has_direct_io(path),
        )


def _start(stack: ExitStack, folder: Path, tokens: int) -> dict[str, EngineProcess]:
    """Start an engine of each variant, and pause them all."""
    longest = tokens + SPARE_TOKENS + 1
    each = token_bytes(MODEL)
    model = write_checkpoint(folder / "model", longest, MODEL)
    engines = {}
    for variant in VARIANTS:
        stored = folder / variant
        stored.mkdir()
        setup = Setup(model, variant, longest, _CACHED_PROMPTS * longest * each, longest * each, stored)
        engines[variant] = stack.enter_context(EngineProcess(variant, StorageEngine, setup))
    for one in engines.values():
        one.wait_ready()
        one.stand_still()
    return engines


def _round(
    engines: Mapping[str, EngineProcess], folder: Path, tokens: int, chance: random.Random
) -> dict[str, VariantRound]:
    """Let each variant store a new prompt, load it, and compute one that shares its first half.

    Args:
        engines: engines of all variants, paused.
        folder: folder with a subfolder of files for each variant. That of ExampleConnector is empty before
            and after.
        tokens: number of tokens to store and load.
        chance: source of the order and of the prompts.
    """
    whole = _prompt(tokens + SPARE_TOKENS, chance)
    half = whole[: tokens // 2] + _prompt(tokens - tokens // 2 + SPARE_TOKENS, chance)
    times: dict[str, VariantRound] = {}
    answers: dict[str, Sequence[FirstAnswer]] = {}
    for variant in chance.sample(VARIANTS, len(VARIANTS)):
        engines[variant].go_on()
        times[variant], answers[variant] = _variant(variant, engines[variant], folder / variant, whole, half)
        engines[variant].stand_still()
    stored_files.remove_all(folder / EXAMPLE)
    _check(times, tokens)
    computed, computed_half = answers[COMPUTE]
    for variant, (*same, other) in answers.items():
        if not (all(agree(computed, one) for one in same) and agree(computed_half, other)):
            raise TransferError(f"{variant} gave another first token than computing: please report this")
    return times


def _variant(
    variant: str, engine: EngineProcess, files: Path, whole: list[int], half: list[int]
) -> tuple[VariantRound, Sequence[FirstAnswer]]:
    """Measure one variant. Return its times, and its answers: those to `whole`, then the one to `half`.

    Raises:
        TransferError: the engine does not answer, or has loaded some of a new prompt.
    """
    new, stored = engine.call("compute", whole)
    if new.hit_tokens:
        raise TransferError(f"{variant} loaded {new.hit_tokens} tokens of a new prompt: please report this")
    if variant == COMPUTE:
        other, _ = engine.call("compute", half)
        return VariantRound(new=new.seconds, shared=other.seconds), (new, other)
    engine.call("refresh")
    loaded, flushed, cold = engine.call("load", whole), None, None
    if variant == EXAMPLE:
        flushed = stored + stored_files.flush(files)
    if variant in (EXAMPLE, FILE):
        stored_files.drop_from_page_cache(files)
        cold = engine.call("load", whole)
    other = engine.call("load", half)
    if variant == EXAMPLE:
        stored_files.flush(files)  # else the kernel would write while the next variant is measured
    times = VariantRound(
        new=new.seconds, stored=stored, flushed=flushed, load=loaded.seconds,
        disk_load=cold.seconds if cold else None, load_tokens=loaded.hit_tokens,
        shared=other.seconds, shared_tokens=other.hit_tokens,
    )  # fmt: skip
    return times, (new, loaded, *([cold] if cold else []), other)


def _check(times: Mapping[str, VariantRound], tokens: int) -> None:
    """Check that every prompt was loaded as far as it can be.

    Raises:
        TransferError: fewer tokens were loaded.
    """
    for variant in (EXAMPLE, FILE, HOST):
        if times[variant].load_tokens < tokens:
            raise TransferError(f"{variant} loaded {times[variant].load_tokens} of {tokens} tokens")
    for variant in (FILE, HOST):
        if times[variant].shared_tokens != tokens // 2:
            raise TransferError(f"{variant} loaded {times[variant].shared_tokens}, not {tokens // 2} tokens")


def _check_control(engines: Mapping[str, EngineProcess], example: Path, tokens: int) -> None:
    """Check that loading the KV of another prompt changes the first token.

    Raises:
        TransferError: the first token is the same, so it would prove nothing.
    """
    chance = random.Random(0)  # noqa: S311 - no secret
    prompt, other = (_prompt(tokens + SPARE_TOKENS, chance) for _ in range(2))
    engine = engines[EXAMPLE]
    engine.go_on()
    computed, _ = engine.call("compute", prompt)
    [folder] = example.iterdir()
    engine.call("compute", other)
    [other_folder] = set(example.iterdir()) - {folder}
    stored_files.overwrite(folder, other_folder)
    loaded = engine.call("load", prompt)
    engine.stand_still()
    stored_files.remove_all(example)
    if loaded.hit_tokens < tokens or agree(computed, loaded):
        raise TransferError("the first token does not depend on what is loaded: please report this")


def _prompt(tokens: int, chance: random.Random) -> list[int]:
    return [chance.randrange(1, VOCABULARY) for _ in range(tokens)]
