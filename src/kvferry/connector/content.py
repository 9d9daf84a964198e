"""Names for the content of a prompt: digests of everything that determines its KV, and of its cache salt.

A peer gives the KV of a ticket only to a prompt of the same content (`transport.redeem`). Tiers keep chunks
under keys derived from their content (`keys.chunk`), which `Prompts` has for each request.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from kvferry.cache.prompt_chunks import ChunkBeginnings, PromptChunks
from kvferry.cache.weights import weights_of
from kvferry.common.errors import ConfigError, NotYetNamed, Unnameable
from kvferry.common.text import shown
from kvferry.common.threads import Thread
from kvferry.connector.engine import LoraAdapter, Request
from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys import prompt_digest
from kvferry.keys.chunk import ChunkKeys, Item
from kvferry.keys.namespace import Namespace
from kvferry.keys.tenant import tenant_of
from kvferry.tiers.format.chunk import VERSION
from kvferry.transport.messages import Fact
from kvferry.transport.redeem import MAX_ADAPTER, PromptContent
from kvferry.transport.turns import TurnContent

logger = logging.getLogger(__name__)

# Names of the facts that every engine states. Peers compare a fact only if both engines state it.
WEIGHTS, MODEL_DTYPE, CACHE_DTYPE = "weights", "model dtype", "KV cache dtype"

# Number of tokens per key of a turn: the same for all engines, whatever chunk length their tiers use.
CHUNK_TOKENS = 256

# Time after which the files of an adapter are read again if they could not be read.
AGAIN_SECONDS = 10.0
# Time that a call which starts to read files waits for the digest. Enough if the digest is cached.
_GRACE_SECONDS = 0.005

_NO_TOKENS = "the prompt is not made of token ids"

# (name, size in bytes, time of modification in ns) of each file of an adapter.
_FileStats: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Adapter:
    """The files of one LoRA adapter, and their digest once it is known.

    A thread reads the files. `done` is set when it has ended, with or without a digest.
    """

    file_stats: _FileStats  # those when the thread began
    again: float  # earliest time for another attempt, monotonic seconds
    done: threading.Event = field(default_factory=threading.Event)
    digest: str | None = None
    absent: bool = False  # there are no weights on disk

    def may_be_read_again(self, file_stats: _FileStats, now: float) -> bool:
        failed = self.done.is_set() and self.digest is None
        # Changed files are not read, because the engine may have loaded the earlier ones. If there were no
        # weights at the last attempt, there were none to load.
        return failed and now >= self.again and (self.absent or file_stats == self.file_stats)


class Adapters:
    """Gives each LoRA adapter of an engine a name: a digest of the adapter's files.

    The name becomes part of the keys of the KV that the adapter's requests compute. The engine may evict an
    adapter and load it from disk again. If the files have changed since they were first read, it is not known
    which version the engine computes with. From then on the adapter has no name, and the KV of its requests
    is not shared. Only the engine's thread calls this class.
    """

    def __init__(self, settings: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._replaced: set[int] = set()
        self._known: dict[str, _Adapter] = {}
        self._reading = threading.Lock()  # one thread reads at a time

    def on_load(self, lora: LoraAdapter) -> None:
        """Start to compute the digest of an adapter's files, because the engine is about to load it."""
        if lora.load_inplace:
            # It is not known which weights a request uses, so neither adapter gets a name.
            self._replaced.add(lora.lora_int_id)
        elif lora.lora_path not in self._known:
            self._read(lora, _stat_files(Path(lora.lora_path)))

    def is_current(self, lora: LoraAdapter | None) -> bool:
        """Return False if the engine has replaced the adapter's weights in place. True without an adapter."""
        # After a replacement, it is not known which weights computed the KV of a request.
        return lora is None or lora.lora_int_id not in self._replaced

    def name(self, lora: LoraAdapter | None) -> str:
        """Return the digest of an adapter's files, with the engine's LoRA settings; empty without an adapter.

        Raises:
            NotYetNamed: a thread is still reading the adapter's files.
            Unnameable: the adapter's weights cannot be read on this machine, have changed, or may change.
        """
        if lora is None:
            return ""
        if lora.load_inplace or not self.is_current(lora):
            raise Unnameable(
                f"LoRA {lora.lora_name} was loaded in place (load_inplace), so its weights may change; load "
                "it under a name of its own"
            )
        file_stats = _stat_files(Path(lora.lora_path))
        known = self._known.get(lora.lora_path)
        if known is None or known.may_be_read_again(file_stats, self._clock()):
            known = self._read(lora, file_stats)
        if not known.done.is_set():
            raise NotYetNamed(f"the files of LoRA {lora.lora_name} are still being read for their digest")
        if known.digest is None:
            raise Unnameable(
                f"the weights of LoRA {lora.lora_name} are not on this machine's disk, or cannot be read; "
                "give the engine's user a readable copy here"
            )
        if file_stats != known.file_stats:
            raise Unnameable(
                f"files of LoRA {lora.lora_name} have changed since it was first used; load it under another "
                "name or path"
            )
        return f"{known.digest} {self._settings}".rstrip()

    def _read(self, lora: LoraAdapter, file_stats: _FileStats) -> _Adapter:
        """Start a thread that computes the digest of an adapter's files, and wait a moment for it."""
        first = lora.lora_path not in self._known
        adapter = self._known[lora.lora_path] = _Adapter(file_stats, self._clock() + AGAIN_SECONDS)

        def read() -> None:
            with self._reading:
                try:
                    why = _read_into(adapter, Path(lora.lora_path))
                    if first and why:
                        name = shown(lora.lora_name)
                        logger.warning("LoRA %s: %s; its requests are not cached", name, shown(why, 300))
                finally:
                    adapter.done.set()

        Thread(read, "kvferry-adapter").start()
        adapter.done.wait(_GRACE_SECONDS)
        return adapter


def _stat_files(folder: Path) -> _FileStats:
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)


def _read_into(adapter: _Adapter, folder: Path) -> str:
    """Set the digest of an adapter from its weights and configuration. Return why it fails, or ""."""
    try:
        weights = weights_of(folder)
        if weights is None:
            adapter.absent = True
            return "its weights are not on this machine's disk"
        config = (folder / "adapter_config.json").read_bytes()
    except (ConfigError, OSError) as error:
        adapter.absent = not adapter.file_stats
        return str(error)
    adapter.digest = f"{weights} {blake2b(config, digest_size=16).hexdigest()}"
    return ""


def content_of(request: Request, tokens: int, adapters: Adapters) -> PromptContent:
    """Return digests of everything that determines the KV of a prompt's first `tokens` tokens.

    Raises:
        NotYetNamed: a thread is still reading the files of the request's LoRA adapter.
        Unnameable: the prompt, the LoRA adapter, or an image or clip cannot be identified for certain.
    """
    if request.prompt_token_ids is None:
        raise Unnameable(_NO_TOKENS)
    adapter = adapters.name(request.adapter)
    if len(adapter) > MAX_ADAPTER:
        raise Unnameable(f"the name of its LoRA adapter has {len(adapter)} characters, at most {MAX_ADAPTER}")
    salt = request.cache_salt
    items = sorted([(one.offset, one.length, one.name()) for one in request.items if one.offset < tokens])
    return PromptContent(
        prompt_digest(request.prompt_token_ids[:tokens]),
        prompt_digest((), [f"{name} at {at}+{length}" for at, length, name in items]) if items else "",
        adapter,
        prompt_digest((), [salt]) if salt else "",
    )


def tenant_of_request(request: Request) -> bytes:
    """Return the tenant of a request, which the keys of its chunks contain."""
    return tenant_of(request.cache_salt, None if request.adapter is None else request.adapter.lora_name)


def keys_of(
    request: Request, tokens: Sequence[int], chunk_tokens: int, adapters: Adapters, epoch: str
) -> ChunkKeys:
    """Return the keys under which tiers store the chunks of a request.

    Args:
        epoch: random text on which all keys depend, another one after each reset of the cache, so that
            chunks from before are not found again; empty before the first reset.

    Raises:
        NotYetNamed, Unnameable: as for `content_of`.
    """
    if request.prompt_token_ids is None:
        raise Unnameable(_NO_TOKENS)
    if request.arrives_in_parts:
        raise Unnameable("the prompt arrives in parts, and later parts may add images or other items")
    return ChunkKeys(
        chunk_tokens,
        tokens,
        items=[Item(one.offset, one.length, one.name()) for one in request.items],
        lora=adapters.name(request.adapter),
        salt=f"{epoch}{request.cache_salt or ''}",
        tenant=tenant_of_request(request),
    )


def namespace_of_facts(facts: Mapping[str, Fact], canonical: CanonicalForm, name: str) -> Namespace:
    """Return the namespace of the keys under which an engine stores its KV chunks.

    Engines share chunks only if all their facts and their chunk formats are equal.

    Args:
        facts: everything that affects the engine's KV, by name, with `WEIGHTS` (a digest of the weights),
            `MODEL_DTYPE` and `CACHE_DTYPE`.

    Raises:
        Unnameable: JSON cannot represent a fact exactly, or a required fact is an empty text.
    """
    model = dict(facts)
    weights, dtype, kv_dtype = (str(model.pop(fact)) for fact in (WEIGHTS, MODEL_DTYPE, CACHE_DTYPE))
    return Namespace.of(
        weights=weights,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales={},
        form=(f"chunk file, version {VERSION}", *canonical.describe()),
        name=name,
    )


class TurnNames:
    """Computes the names under which peers find turns: digests of content, the same in all engines.

    With `prompts_only`, generated tokens get no names, because their KV differs from the KV of equal tokens
    in a prompt.
    """

    def __init__(self, adapters: Adapters, *, prompts_only: bool = False) -> None:
        self._prompts_only = prompts_only
        self._adapters, self._epoch = adapters, ""

    def content(self, request: Request, tokens: int) -> TurnContent | None:
        """Return the names of a request's first `tokens` tokens; None if their KV has no certain name."""
        if self._prompts_only and tokens > request.num_prompt_tokens:
            return None
        ids = request.all_token_ids[:tokens]
        try:
            keys = keys_of(request, ids, CHUNK_TOKENS, self._adapters, self._epoch)
        except Unnameable:
            return None
        items = sorted(item.offset for item in request.items)
        return TurnContent(CHUNK_TOKENS, tuple(keys.chunks()), array("I", ids), tuple(items))

    def start_anew(self) -> None:
        """Give all content new names from now on, because the engine's cache was reset."""
        # Other engines do not know the number. So they find no KV from before the reset, nor KV that running
        # requests compute from it.
        self._epoch = f"{secrets.token_hex(16)} "


class Prompts:
    """The chunk keys of all requests whose KV may be stored in the tiers or loaded from them.

    A request has no keys if its content cannot be identified for certain (for example, embeddings as prompt).
    Its KV is neither stored nor looked up.
    """

    def __init__(
        self,
        canonical: CanonicalForm,
        adapters: Adapters,
        beginnings: ChunkBeginnings | None = None,
        *,
        prompts_only: bool = False,
    ) -> None:
        """Begin without requests.

        Args:
            beginnings: the tiers' chunks by their beginnings; None if prefixes end with chunks only.
            prompts_only: True to compute no keys for generated tokens, because their KV differs from the KV
                of equal tokens in a prompt.
        """
        self._canonical, self._adapters, self._prompts_only = canonical, adapters, prompts_only
        self._beginnings = beginnings
        self._known: dict[str, tuple[PromptChunks, str]] = {}  # with the cache salt of the request
        self._unnamed: dict[str, Unnameable] = {}
        self._epoch, self._suspended = "", ""
        self._salt_epochs: dict[str, str] = {}  # random text before each forgotten salt

    def add(self, request: Request) -> PromptChunks | None:
        """Compute the chunk keys of a new request and return its chunks; None if it has none, or none yet.

        `why_unnamed` then returns the reason.
        """
        self._unnamed.pop(request.request_id, None)
        try:
            chunks = self.chunks_of(request)
        except Unnameable as error:
            logger.debug("request %s: not cached: %s", shown(request.request_id), error)
            self._unnamed[request.request_id] = error
            return None
        self._known[request.request_id] = chunks, request.cache_salt or ""
        return chunks

    def get(self, request: Request) -> PromptChunks | None:
        """Return the chunks of a request's tokens so far, prompt and generated; None if it has no keys."""
        name = request.request_id
        if self._prompts_only and request.num_tokens > request.num_prompt_tokens:
            self.remove(name)
        if self.are_pending(name):
            self.add(request)
        if (found := self._known.get(name)) is None:
            return None
        chunks, _ = found
        try:
            # Blocks that the request has computed since the LoRA was replaced hold other KV than their keys
            # say.
            if not self._adapters.is_current(request.adapter):
                raise Unnameable("its LoRA was replaced in place since it came in")
            if any(one.is_ambiguous for one in request.items):
                raise Unnameable("an identifier of its items has stood for another")
            known = len(chunks.keys)
            if known < request.num_tokens:
                chunks.keys.extend(request.all_token_ids[known : request.num_tokens])
        except Unnameable as error:
            self.remove(name)
            self._unnamed[name] = error
            return None
        return chunks

    def are_pending(self, request_id: str) -> bool:
        """Return True while the digest of a request's LoRA adapter is computed: its keys may become known."""
        return isinstance(self._unnamed.get(request_id), NotYetNamed)

    def why_unnamed(self, request_id: str) -> str:
        return str(self._unnamed.get(request_id, self._suspended or "the cache was reset since it came in"))

    def remove(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._unnamed.pop(request_id, None)

    def start_anew(self) -> None:
        """Give all content new chunk keys from now on, because the engine's cache was reset. Ends `suspend`.

        KV of running requests is no longer stored or looked up.
        """
        # The number is random, so that other engines with a shared tier do not find chunks from after the
        # reset, nor this engine those from before. Running requests get no keys: their blocks mix KV from
        # before and after.
        self.suspend("")  # for no reason: keys are computed
        self._epoch = f"{secrets.token_hex(16)} "

    def suspend(self, why: str) -> None:
        """Drop the chunk keys of all requests, and compute none until `start_anew`, for this reason."""
        self._known.clear()
        self._unnamed.clear()
        self._suspended = why

    def forget_salt(self, salt: str) -> None:
        """Give content under a cache salt new chunk keys from now on, so that its chunks are not found again.

        KV of running requests with the salt is no longer stored or looked up. The salt is empty for requests
        without one.
        """
        self._salt_epochs[salt] = f"{secrets.token_hex(16)} "
        for name in [name for name, (_, one) in self._known.items() if one == salt]:
            self.remove(name)

    def chunks_of(self, request: Request) -> PromptChunks:
        """Return the chunks of a prompt, without remembering it. Raise Unnameable if it has no keys."""
        if self._suspended:
            raise Unnameable(self._suspended)
        epoch = self._epoch + self._salt_epochs.get(request.cache_salt or "", "")
        tokens = list(request.all_token_ids)
        keys = keys_of(request, tokens, self._canonical.chunk_tokens, self._adapters, epoch)
        return PromptChunks(self._canonical.groups, keys, self._beginnings)
