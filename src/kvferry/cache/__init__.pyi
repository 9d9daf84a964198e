from kvferry.cache.tier_queue import Ended as Ended, TierQueue as TierQueue
from kvferry.cache.weights import cached_digests as cached_digests
