from kvferry.cache.tier_queue import Done as Done, ReadEnded as ReadEnded, TierQueue as TierQueue
from kvferry.cache.weights import cached_digests as cached_digests
