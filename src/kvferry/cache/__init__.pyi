from kvferry.cache.tier_queue import TierQueue as TierQueue
from kvferry.cache.weights import cached_digests as cached_digests
