from kvferry.cache.chunk_cache import Fetch as Fetch, PromptChunk as PromptChunk
from kvferry.cache.prefetching import Prefetch as Prefetch, Prefetches as Prefetches
from kvferry.cache.retained import RetainedChunks as RetainedChunks
from kvferry.cache.sessions import Sessions as Sessions, end_session as end_session
from kvferry.cache.tier_queue import TierQueue as TierQueue
from kvferry.cache.weights import cached_digests as cached_digests
