"""Faults of the file tier and the fleet tier that are injected inside an engine's process."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.common.errors import ChunkError
from kvferry.planning.select import windows_survive_load
from kvferry.tiers.paths import chunk_name
from support.chunk_files import verify_bytes
from support.vllm_engine import parts
from support.vllm_engine.parts import half
from support.vllm_engine.tiers_inside import fleet_tier


def files_of(engine: Any, text: list[int], salt: str, adapter: str = "", namespace: str = "") -> list[str]:
    """Paths of the chunks of a prompt that are in the file tier, in the engine's namespace or this one."""
    store, chunks = _store(engine), _chunks_of(engine, text, salt, adapter)
    of = bytes.fromhex(namespace) if namespace else store._namespace
    paths = (f"{store._root}/{chunk_name(of, key)}" for key in chunks.all_keys(len(text)))
    return [path for path in paths if Path(path).exists()]


def tokens_at_hand(engine: Any, text: list[int], salt: str, adapter: str = "") -> int:
    """Tokens of a prompt that the tiers would offer now to an engine that has none of them."""
    tiering = parts.tiering(engine)
    return (
        _chunks_of(engine, text, salt, adapter)
        .look_up(
            len(text),
            0,
            tiering._cache.tier_numbers,
            in_full=windows_survive_load(tiering.source._groups, len(text)),
        )
        .tokens
    )


def _chunks_of(engine: Any, text: list[int], salt: str, adapter: str) -> Any:
    from kvferry.cache.prompt_chunks import PromptChunks
    from kvferry.connector.content import keys_of
    from kvferry.connector.engine import PlainRequest
    from support.vllm_engine.inside import lora_of

    prompts = parts.prompts(engine)
    request = PlainRequest(request_id="", prompt_token_ids=text, adapter=lora_of(adapter), cache_salt=salt)
    keys = keys_of(request, text, prompts._canonical.chunk_tokens, prompts._adapters, prompts._epoch)
    return PromptChunks(prompts._canonical.groups, keys)


def tiers_are_idle(engine: Any) -> bool:
    """Whether everything stored so far is written."""
    cache = parts.cache(engine)
    cache.poll()
    return not half(engine).busy and not any(len(one) for one in cache.slow_tiers)


def clear_host(engine: Any) -> None:
    """Forget host memory, and not what is known of storage."""
    parts.cache(engine).clear()


def limit_files(engine: Any, size: int) -> None:
    """Have the kernel refuse to make files of this process larger than so many bytes; negative: any size."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else most, most))


def fail_files(engine: Any, call: str, number: int, times: int) -> None:
    """Let the next so many calls of the file tier ("_write_chunk" or "_get") fail with an errno."""
    store, hooks = _store(engine), engine.hooks
    inner = getattr(store, call)
    hooks.armed[f"errno {call}", ""] = times

    def failing(*args: Any) -> Any:
        if hooks.take(f"errno {call}"):
            raise OSError(number, os.strerror(number))
        return inner(*args)

    setattr(store, call, failing)


def hang_files(engine: Any, call: str) -> None:
    """Let calls of the file tier ("get", "put" or "_write_chunk") hang until `unhang_files`."""
    hooks = engine.hooks
    owner, attribute = parts.call_of(parts.queue_of(engine, "file"), call)
    hooks.gate = threading.Event()
    hooks.injected[f"hang {call}", ""] = 0
    inner = getattr(owner, attribute)
    hooks.armed[f"hang {call}", ""] = 1 << 30

    def hanging(*args: Any, **options: Any) -> Any:
        if hooks.take(f"hang {call}"):
            hooks.gate.wait()
        return inner(*args, **options)

    setattr(owner, attribute, hanging)
    hooks.unhang = partial(setattr, owner, attribute, inner)


def hung_files(engine: Any, call: str) -> int:
    """How many calls hang, or have hung."""
    return int(engine.hooks.injected[f"hang {call}", ""])


def unhang_files(engine: Any, call: str) -> int:
    """Let them go on; return how many hung."""
    engine.hooks.gate.set()
    engine.hooks.armed[f"hang {call}", ""] = 0
    engine.hooks.unhang()
    return int(engine.hooks.injected[f"hang {call}", ""])


def fail_copies(engine: Any, times: int) -> None:
    """Let the next so many copies between blocks and host memory fail."""
    mover, hooks = parts.mover(engine), engine.hooks
    hooks.armed["copy", ""] = times
    inner = type(mover)._copy

    def do(key: str, what: Any) -> Any:
        return inner(mover, key, _raise if hooks.take("copy") else what)

    mover._copy = do


def _raise(_: Any) -> tuple[int, ...]:
    raise OSError(errno.EIO, "injected: the copy failed")


def search_fleet(engine: Any, text: list[int], salt: str, adapter: str, hints: list[Any]) -> int:
    """Search for a prompt's chunks in the fleet, and name these engines. Return how many are known there."""
    tier, keys = fleet_tier(engine), _chunks_of(engine, text, salt, adapter).all_keys(len(text))
    search = tier.find(keys, [tuple(address) for address in hints])
    while search is not None and not search.over:
        time.sleep(1e-3)
    return int(tier.contains(keys).sum())


def believe_holder(engine: Any, text: list[int], salt: str, adapter: str, holder: tuple[str, int]) -> None:
    """Believe that an engine has a prompt's chunks in host memory, as if somebody had said so."""
    keys = _chunks_of(engine, text, salt, adapter).all_keys(len(text))
    fleet_tier(engine)._holders.add(keys, holder)


def hold_fleet_reads(engine: Any) -> None:
    """Hold back all READs of other engines' host memory until `let_fleet_reads_go`."""
    hooks, reader = engine.hooks, fleet_tier(engine)._reader
    hooks.fleet_gate, hooks.injected["hold in the fleet", ""] = threading.Event(), 0
    hooks.armed["hold in the fleet", ""] = 1 << 30
    read, gate = type(reader).read.__get__(reader), hooks.fleet_gate

    def held(*where: int) -> None:
        if hooks.take("hold in the fleet"):
            gate.wait()
        read(*where)

    reader.read = held


def held_fleet_reads(engine: Any) -> int:
    """How many READs have been held back since `hold_fleet_reads`."""
    return int(engine.hooks.injected["hold in the fleet", ""])


def let_fleet_reads_go(engine: Any) -> None:
    """Let them go on."""
    engine.hooks.armed["hold in the fleet", ""] = 0
    engine.hooks.fleet_gate.set()


def fetched_in_fleet(engine: Any) -> int:
    """How many chunks were read in other engines' host memory."""
    return int(parts.cache(engine).counts.fetched["fleet"])


def share_names(engine: Any) -> None:
    """Name chunks as engines do that were never reset: after a reset, others find nothing."""
    parts.prompts(engine)._epoch = ""


def reuse_slots(engine: Any, text: list[int], salt: str, adapter: str) -> int:
    """Evict a prompt's chunks from host memory. Return how many slots of them were filled with others."""
    cache = parts.cache(engine)
    keys = _chunks_of(engine, text, salt, adapter).all_keys(len(text))
    chunks = [chunk for key in keys if (chunk := cache.host.peek(key)) is not None and not chunk.holds]
    for chunk in chunks:
        cache.host.evict(chunk.key)
    filled = 0
    for chunk in chunks:
        slot = cache.host.reserve(os.urandom(31) + chunk.key[-1:], chunk.group)
        # What a chunk has left there, with other signs. Random bytes may be no numbers.
        np.frombuffer(cache._memory_at(slot.offset, slot.size), np.uint8)[3::4] ^= 0x80
        cache.host.commit(slot)
        filled += any(
            one.offset < slot.offset + slot.size and slot.offset < one.offset + one.size for one in chunks
        )
    return filled


def evict_chunks(engine: Any, text: list[int], salt: str, adapter: str) -> int:
    """Evict a prompt's chunks from host memory. Return how many there were."""
    host = parts.cache(engine).host
    keys = _chunks_of(engine, text, salt, adapter).all_keys(len(text))
    held = [key for key in keys if host.peek(key) is not None]
    for key in held:
        host.evict(key)
    return len(held)


def directory_entries(engine: Any, text: list[int], salt: str, adapter: str) -> tuple[bytes, list[bytes]]:
    """This engine's run, and the names in the directory of a prompt's chunks."""
    directory = fleet_tier(engine)._directory
    keys = _chunks_of(engine, text, salt, adapter).all_keys(len(text))
    return directory.run, [directory._chunk_name(key) for key in keys]


def directory_run(engine: Any, run: bytes) -> bytes:
    """The name in the directory of a run of an engine."""
    return bytes(fleet_tier(engine)._directory._run_name(run))


def try_directory(engine: Any) -> None:
    """Let pauses after failures of the directory be over."""
    directory = fleet_tier(engine)._directory
    for breaker in (directory._publishing, directory._seeking):
        breaker._until = 0.0


def directory_failures(engine: Any) -> int:
    """How many look-ups in the directory have failed since the last that did not."""
    return int(fleet_tier(engine)._directory._seeking._failures)


def missed(engine: Any) -> dict[str, int]:
    """Chunks that storage did not give, by why."""
    counts = parts.cache(engine).counts
    return {f"{name} {what}": n for (name, what), n in counts.missed.items()}


def dropped(engine: Any) -> dict[str, int]:
    """Chunks that storage did not take, by why."""
    return {str(what): n for what, n in _store(engine).stats.puts.items() if n}


def evicted(engine: Any) -> int:
    """Chunks that the engine evicted from its directory."""
    return int(_store(engine).stats.evicted)


def unsound_files(root: str) -> list[str]:
    """Chunk files that do not hold what their name says, or are half written."""
    found = []
    for path in Path(root).rglob("*"):
        if path.suffix == ".tmp":
            found.append(f"half written: {path}")
        elif path.suffix == ".kv" and path.is_file():
            found += _problem(str(path), path.read_bytes())
    return found


def _problem(path: str, image: bytes) -> list[str]:
    try:
        header = verify_bytes(image)
    except ChunkError as error:
        return [f"{path}: {error}"]
    named = path.endswith(f"{header.chunk.key.hex()}.kv")
    return [] if named else [f"{path}: another key"]


def _store(engine: Any) -> Any:
    return parts.queue_of(engine, "file").tier
