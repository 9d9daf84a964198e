from kvferry.tiers.admin import (
    CacheAdmin as CacheAdmin,
    cache_totals as cache_totals,
    namespace_usage as namespace_usage,
    verify_all as verify_all,
)
from kvferry.tiers.eviction import EVICTION_POLICIES as EVICTION_POLICIES, EvictionPolicy as EvictionPolicy
from kvferry.tiers.eviction.fair import FairEviction as FairEviction
from kvferry.tiers.files.admin import DirectoryAdmin as DirectoryAdmin
from kvferry.tiers.files.chunk_file import (
    read_all as read_all,
    whole_pages as whole_pages,
    write_all as write_all,
)
from kvferry.tiers.files.full_disk import (
    OUT_OF_ROOM as OUT_OF_ROOM,
    DiskRoom as DiskRoom,
    shortage as shortage,
)
from kvferry.tiers.files.ledger import read_ledger as read_ledger
from kvferry.tiers.files.opening import (
    DEFAULT_CAPACITY_DIVISOR as DEFAULT_CAPACITY_DIVISOR,
    check_directory as check_directory,
    check_encryption as check_encryption,
    try_directory as try_directory,
)
from kvferry.tiers.files.tier import FileSettings as FileSettings, FileTier as FileTier
from kvferry.tiers.format.chunk import (
    NAMESPACE_BYTES as NAMESPACE_BYTES,
    Chunk as Chunk,
    ChunkGroup as ChunkGroup,
)
from kvferry.tiers.format.decode import chunk_group as chunk_group
from kvferry.tiers.host.arena import Arena as Arena
from kvferry.tiers.host.settings import HostSettings as HostSettings, check_available as check_available
from kvferry.tiers.host.tier import Slot as Slot
from kvferry.tiers.names import (
    FLEET as FLEET,
    HOST as HOST,
    PEER as PEER,
    TIERS as TIERS,
    GetOutcome as GetOutcome,
    PutOutcome as PutOutcome,
    tier_kind as tier_kind,
)
from kvferry.tiers.objects.admin import BucketAdmin as BucketAdmin
from kvferry.tiers.objects.client import BucketClient as BucketClient
from kvferry.tiers.objects.faults import Unavailable as Unavailable
from kvferry.tiers.objects.settings import ObjectSettings as ObjectSettings, is_url as is_url
from kvferry.tiers.objects.tier import ObjectTier as ObjectTier
from kvferry.tiers.paths import (
    default_directory as default_directory,
    find_same_directory as find_same_directory,
)
from kvferry.tiers.registry import TIER_KINDS as TIER_KINDS
from kvferry.tiers.storage_tier import StorageSettings as StorageSettings, StorageTier as StorageTier
from kvferry.tiers.tenants import OTHERS as OTHERS, Tenants as Tenants, TenantUsage as TenantUsage
from kvferry.tiers.write_budget import WriteBudget as WriteBudget
from kvferry.tiers.write_filter import WriteFilter as WriteFilter
