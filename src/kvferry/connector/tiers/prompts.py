"""The chunk keys of all requests whose KV the tiers may store or load."""

from __future__ import annotations

import logging
import secrets

from kvferry.cache.beginnings import ChunkBeginnings
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.connector.adapters import Adapters
from kvferry.connector.engine import Request
from kvferry.connector.prompt_content import keys_of
from kvferry.errors import NotYetNamed, Unnameable
from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.chunk import ChunkKeys
from kvferry.planning.coverage import widest_group
from kvferry.terminal import shown

logger = logging.getLogger(__name__)


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
        """Create an empty collection of chunk keys.

        Args:
            canonical: format in which chunks are stored.
            adapters: the engine's LoRA adapters.
            beginnings: the tiers' chunks by their beginnings; None if prefixes end with chunks only.
            prompts_only: True to compute no keys for generated tokens, because their KV differs from the KV
                of equal tokens in a prompt.
        """
        self._canonical, self._adapters, self._prompts_only = canonical, adapters, prompts_only
        self._beginnings = beginnings
        self._known: dict[str, PromptChunks] = {}
        self._unnamed: dict[str, Unnameable] = {}
        self._epoch, self._suspended = "", ""
        self._salt_of: dict[str, str] = {}  # cache salt of each known request
        self._salt_epochs: dict[str, str] = {}  # random text before each forgotten salt

    @property
    def widest_group(self) -> int:
        """Index, in the storage format, of the KV cache group that needs the most chunks to load a prefix."""
        return widest_group(self._canonical.groups)

    def add(self, request: Request) -> PromptChunks | None:
        """Compute the chunk keys of a new request and return its chunks; None if it has none, or none yet.

        `why_unnamed` then returns the reason.
        """
        self._unnamed.pop(request.request_id, None)
        try:
            keys = self._keys(request)
        except Unnameable as error:
            logger.debug("request %s: not cached: %s", shown(request.request_id), error)
            self._unnamed[request.request_id] = error
            return None
        self._salt_of[request.request_id] = request.cache_salt or ""
        chunks = self._known[request.request_id] = self._chunks_with(keys)
        return chunks

    def get(self, request: Request) -> PromptChunks | None:
        """Return the chunks of a request's tokens so far, prompt and generated; None if it has no chunk keys.

        Computes the keys of the tokens that were generated since the last call. A request loses its keys if
        its content can no longer be identified for certain.
        """
        if self._prompts_only and request.num_tokens > request.num_prompt_tokens:
            self.remove(request.request_id)
        if self.are_pending(request.request_id):
            self.add(request)
        # Blocks that the request has computed since the LoRA was replaced hold other KV than their keys say.
        if request.request_id in self._known and not self._adapters.is_current(request.adapter):
            self.remove(request.request_id)
            self._unnamed[request.request_id] = Unnameable("its LoRA was replaced in place since it came in")
        if request.request_id in self._known and any(one.is_ambiguous for one in request.items):
            self.remove(request.request_id)
            self._unnamed[request.request_id] = Unnameable("an identifier of its items has stood for another")
        chunks = self._known.get(request.request_id)
        if chunks is not None and len(chunks.keys) < request.num_tokens:
            try:
                chunks.keys.extend(request.all_token_ids[len(chunks.keys) : request.num_tokens])
            except Unnameable as error:
                self.remove(request.request_id)
                self._unnamed[request.request_id] = error
                return None
        return chunks

    def are_pending(self, request_id: str) -> bool:
        """Return True while the digest of a request's LoRA adapter is computed: its keys may become known."""
        return isinstance(self._unnamed.get(request_id), NotYetNamed)

    def why_unnamed(self, request_id: str) -> str:
        """Return the reason why a request has no chunk keys, as text for people."""
        return str(self._unnamed.get(request_id, self._suspended or "the cache was reset since it came in"))

    def remove(self, request_id: str) -> None:
        """Forget the chunk keys of a request, and the reason why it has none."""
        self._known.pop(request_id, None)
        self._salt_of.pop(request_id, None)
        self._unnamed.pop(request_id, None)

    def start_anew(self) -> None:
        """Give all content new chunk keys from now on, because the engine's cache was reset. Ends `suspend`.

        KV of running requests is no longer stored or looked up.
        """
        self._known.clear()
        self._salt_of.clear()
        self._unnamed.clear()
        # The number is random, so that other engines with a shared tier do not find chunks from after the
        # reset, nor this engine those from before. Running requests get no keys: their blocks mix KV from
        # before and after.
        self._epoch, self._suspended = f"{secrets.token_hex(16)} ", ""

    def forget_salt(self, salt: str) -> None:
        """Give content under a cache salt new chunk keys from now on, so that its chunks are not found again.

        KV of running requests with the salt is no longer stored or looked up.

        Args:
            salt: cache salt of the requests; empty for requests without a salt.
        """
        self._salt_epochs[salt] = f"{secrets.token_hex(16)} "
        for name in [name for name, one in self._salt_of.items() if one == salt]:
            self.remove(name)

    def chunks_of(self, request: Request) -> PromptChunks:
        """Return the chunks of a prompt that this engine need not have, without remembering it.

        Raises:
            Unnameable: the content cannot be identified for certain.
        """
        return self._chunks_with(self._keys(request))

    def suspend(self, why: str) -> None:
        """Drop the chunk keys of all requests, and compute no keys until `start_anew` is called.

        Args:
            why: reason, as text for people.
        """
        self._known.clear()
        self._salt_of.clear()
        self._unnamed.clear()
        self._suspended = why

    def _chunks_with(self, keys: ChunkKeys) -> PromptChunks:
        return PromptChunks(self._canonical.groups, keys, self._beginnings)

    def _keys(self, request: Request) -> ChunkKeys:
        if self._suspended:
            raise Unnameable(self._suspended)
        tokens = list(request.all_token_ids)
        epoch = self._epoch + self._salt_epochs.get(request.cache_salt or "", "")
        return keys_of(request, tokens, self._canonical.chunk_tokens, self._adapters, epoch)
