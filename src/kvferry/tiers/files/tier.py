"""The file tier: chunks in a directory, on a disk of this machine or on a mount that machines share.

A fetch takes no lock: a chunk is written under a temporary name and then renamed, so it exists completely or
not at all. A fetch is a hit only if all checksums match. A store reserves its space before it writes, under
the lock of the directory's ledger. If the disk, a file or another process fails, calls return an outcome and
raise no exception. Failures are counted, and the first of each kind is logged.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import ClassVar

from kvferry.common.errors import ChunkError, ConfigError, OtherKey, Unnameable
from kvferry.common.units import check_capacity, parse_size
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import (
    NotRegular,
    check_folders,
    explain_refusal,
    is_regular,
    make_folder,
    mark_files_used,
    open_regular,
    read_chunk,
    read_encrypted,
    read_regular,
    sync_folder,
    write_chunk,
    write_encrypted,
)
from kvferry.tiers.files.directory_index import DirectoryIndex
from kvferry.tiers.files.full_disk import OUT_OF_ROOM, shortage
from kvferry.tiers.files.ledger import (
    Ledger,
    LockTimeout,
    read_ledger,
    read_used_by_tenant,
    read_write_budget,
)
from kvferry.tiers.files.opening import (
    check_directory,
    check_writable,
    open_directory,
    unusable_directory,
)
from kvferry.tiers.files.page_cache import CachedFiles
from kvferry.tiers.files.space import (
    MAX_LISTED,
    DirectoryFull,
    DirectorySpace,
    OverBudget,
    quarantine_file,
)
from kvferry.tiers.format.chunk import Chunk, ChunkGroup
from kvferry.tiers.format.decode import check_size
from kvferry.tiers.format.encryption import EncryptionKeys
from kvferry.tiers.index import KeyTable, ListedKeys, TierKeys
from kvferry.tiers.key_file import read_key_file
from kvferry.tiers.names import GetOutcome, Medium, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.paths import (
    chunk_name,
    default_directory,
    find_same_directory,
    key_of,
    note_name,
    tenant_of_path,
)
from kvferry.tiers.storage_tier import Location, StorageSettings, StorageTier, StoreUsage
from kvferry.tiers.tenants import Tenants

_log = logging.getLogger(__name__)

_NO_SPACE = (*OUT_OF_ROOM, errno.EFBIG)
# A network mount reports ESTALE for a file that was removed while it was open.
_EVICTED = (errno.ENOENT, errno.ESTALE)

_MAX_NOTE_BYTES = 1 << 20

# The ledger counts 64 bits.
MAX_PER_DAY = 1 << 60

# Number of times that a chunk's folder is created. Evictions remove folders while they are empty.
_MOST_FOLDERS = 8

_ADVICE = {
    PutOutcome.TOO_LARGE: "raise the capacity or store smaller chunks",
    PutOutcome.FULL: "raise the capacity",
    PutOutcome.OVER_BUDGET: "raise write_per_day, or set min_uses so that it goes to what is used again",
    PutOutcome.NO_SPACE: "lower the capacity or free space",
    PutOutcome.BUSY: "find the process that holds it, or check whether the mount hangs",
    PutOutcome.IO_ERROR: "check the disk or mount",
    GetOutcome.CORRUPT: "check the disk; the file was moved to quarantine and the chunk is computed again",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the group is not: report this to kvferry's authors",
    GetOutcome.OTHER_KEY: "give all engines of the directory the same keys; the chunk is computed again",
    GetOutcome.IO_ERROR: "check the disk or mount",
}


class FileTier(StorageTier):
    """A storage tier with the chunks of one namespace in a directory, which others may use too.

    Args:
        path, capacity, durable, page_cache, write_per_day: as in `FileSettings`, sizes in bytes. The
            directory must exist.
        namespace: namespace of the chunks. Its note is written if it is missing.
        encryption: keys of an encrypted directory; None for one that is not encrypted.
        clock: seconds since 1970, for times of use.
        lock_seconds: maximum time for which `put` waits for the lock of the ledger. Then it stores nothing.
        table: hash table that the tiers of a cache share; None for a separate one.
        write, read: in place of `write_chunk` and `read_chunk`.
        max_listed: maximum number of files that a walk of the directory lists for eviction.

    Raises:
        ConfigError: the directory is missing or cannot be written, its layout has another version, it is
            encrypted and `encryption` is None or the other way round, or the capacity is larger than the disk
            allows.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: Namespace,
        *,
        capacity: int | None = None,
        durable: bool = False,
        page_cache: int | None = None,
        write_per_day: int | None = None,
        encryption: EncryptionKeys | None = None,
        clock: Callable[[], float] = time.time,
        lock_seconds: float = 2.0,
        table: KeyTable | None = None,
        write: Callable[[int, Chunk, memoryview], None] = write_chunk,
        read: Callable[[int, Chunk, memoryview], bool] = read_chunk,
        max_listed: int = MAX_LISTED,
    ) -> None:
        self._encrypted = encryption is not None
        if encryption is not None:
            write, read = partial(write_encrypted, keys=encryption), partial(read_encrypted, keys=encryption)
        self._write_chunk, self._read_chunk = write, read
        # Files of which this process has no key, by the key of the chunk. The next `put` replaces them.
        self._unreadable: dict[bytes, os.stat_result] = {}
        self._root = os.path.abspath(path)
        self._namespace = namespace.digest
        self._durable = durable
        self._clock = clock
        self._counter = OutcomeCounter()
        self._tenants: Tenants | None = None
        self._evicted = Counter[str]()  # number of evicted files, by the tenant's label
        check_directory(self._root, self._encrypted)
        self.keys = TierKeys(table)
        self._listed = ListedKeys(self.keys)
        self._index = DirectoryIndex(self._root, self._namespace, self._listed, clock)
        self._ledger = Ledger(self._root, lock_seconds)
        self._space = DirectorySpace(
            self._root, self._ledger, self._counter, self._on_evicted, clock, max_listed
        )
        open_directory(
            self._root,
            self._ledger,
            self._space,
            namespace,
            capacity,
            write_per_day,
            encrypted=self._encrypted,
        )
        self._cached = CachedFiles(self._root, page_cache)
        self._index.refresh()
        self._usage = UsageReader(self._root, namespace, clock)

    def use_tenants(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._space.use_tenants(tenants)

    @property
    def stats(self) -> TierStats:
        return self._counter.stats()

    def __len__(self) -> int:
        return len(self._listed)

    def mark_used(self, keys: Sequence[bytes]) -> None:
        known = compress(keys, self.contains(keys))
        mark_files_used(self._root, map(self._path_of, known), self._clock)

    def usage(self) -> StoreUsage:
        found = self._usage.read(empty=not len(self._listed))
        if self._tenants is None:
            return found
        used = read_used_by_tenant(self._root)
        return replace(found, tenants=self._tenants.usage(used, self._evicted))

    def refresh(self) -> int:
        changed = self._index.refresh()
        self._cached.refresh()
        return changed

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        chunk = Chunk(self._namespace, key, (group,), self._encrypted)
        check_size(chunk, body)
        detail = ""
        try:
            done = self._put(chunk, body, cold=cold)
        except LockTimeout as error:
            done, detail = PutOutcome.BUSY, str(error)
        except OverBudget as error:
            done, detail = PutOutcome.OVER_BUDGET, str(error)
        except DirectoryFull as error:
            done, detail = PutOutcome.TOO_LARGE if error.too_large else PutOutcome.FULL, str(error)
        except OSError as error:
            done = PutOutcome.NO_SPACE if error.errno in _NO_SPACE else PutOutcome.IO_ERROR
            detail = str(error)
            if error.errno in OUT_OF_ROOM:
                detail += f"; {shortage(self._root, error, chunk.file_bytes)[0]}"
        if not done.dropped:
            self._listed.add(key)
        if self._counter.count_put(done, chunk.file_bytes) and done.dropped:
            self._warn(f"a chunk of {chunk.file_bytes} bytes is not stored", done, detail)
        return done

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        chunk = Chunk(self._namespace, key, (group,), self._encrypted)
        check_size(chunk, into)
        try:
            done, detail = self._get(chunk, into)
        except OSError as error:
            done, detail = GetOutcome.ABSENT if error.errno in _EVICTED else GetOutcome.IO_ERROR, str(error)
        # Another process evicted or spoiled it: no lookup should find it again.
        if done is not GetOutcome.HIT:
            self._listed.discard(key)
        if self._counter.count_get(done) and done in _ADVICE:
            self._warn(f"chunk {key.hex()} is not used", done, detail)
        return done

    def close(self) -> None:
        """Do nothing, because no file stays open between calls."""

    def _put(self, chunk: Chunk, body: memoryview, *, cold: bool) -> PutOutcome:
        final = self._path_of(chunk.key)
        # A missing folder is created later. A link in its place is refused before anything is written.
        with suppress(FileNotFoundError):
            check_folders(self._root, final)
        if is_regular(final):
            found = self._unreadable.pop(chunk.key, None)
            # A file that stays unreadable would keep the chunk from this engine until it is evicted.
            if found is None or not self._space.remove(found, final):
                return PutOutcome.PRESENT
        self._space.spare_files()
        tries = 0
        while True:
            try:
                with self._cached.using_disk():
                    return self._create(chunk, final, body, cold=cold)
            except OSError as error:
                tries += 1
                if not self._space.make_way(error, tries, final, chunk.file_bytes):
                    raise

    def _create(self, chunk: Chunk, final: str, body: memoryview, *, cold: bool) -> PutOutcome:
        """Write a chunk to a file, of which nothing is left after an error."""
        fd, temporary = self._reserve(final, chunk.file_bytes)
        try:
            self._write_chunk(fd, chunk, body)
            now = int(self._clock() * 1e9)
            os.utime(fd, ns=(now, now))
            # Before the rename: a name that survives a crash must not lead to a file without content.
            if self._durable:
                os.fdatasync(fd)
            first = self._space.commit(temporary, final, chunk.file_bytes, fd if cold else None)
        except BaseException:
            self._space.abandon(temporary, chunk.file_bytes)
            raise
        finally:
            os.close(fd)
        if self._durable:
            sync_folder(os.path.dirname(final))
        if first:
            self._cached.add(final, chunk.file_bytes)
        return PutOutcome.STORED if first else PutOutcome.PRESENT

    def _reserve(self, final: str, size: int) -> tuple[int, str]:
        """Reserve space for a file, and create its folder if it is missing."""
        folder = os.path.dirname(final)
        for _ in range(_MOST_FOLDERS):
            with suppress(FileNotFoundError):
                return self._space.reserve(final, size)
            with suppress(FileNotFoundError):
                make_folder(self._root, folder)
                if self._durable:
                    sync_folder(os.path.dirname(folder))
        return self._space.reserve(final, size)

    def _get(self, chunk: Chunk, into: memoryview) -> tuple[GetOutcome, str]:
        """Fetch a chunk from its file. Move a bad file to quarantine, and return what is wrong with it."""
        path = self._path_of(chunk.key)
        check_folders(self._root, path)
        try:
            fd = open_regular(path, os.O_RDONLY)
        except NotRegular as error:
            # Something planted, such as a link, keeps the name from real chunks.
            self._quarantine(os.lstat(path), path)
            return GetOutcome.CORRUPT, str(error)
        try:
            with self._cached.using_disk():
                good, status = self._read_chunk(fd, chunk, into), os.fstat(fd)
            if not good or status.st_size != chunk.file_bytes:
                explain_refusal(fd, chunk, into)
                return GetOutcome.OTHER_SHAPE, ""
        except OtherKey as error:
            self._unreadable[chunk.key] = os.fstat(fd)
            return GetOutcome.OTHER_KEY, f"{path}: {error}"
        except ChunkError as error:
            self._quarantine(os.fstat(fd), path)
            return GetOutcome.CORRUPT, f"{path}: {error}"
        finally:
            os.close(fd)
        return GetOutcome.HIT, ""

    def _quarantine(self, found: os.stat_result, path: str) -> None:
        self._counter.add(quarantined=quarantine_file(self._root, self._ledger, found, path))

    def _path_of(self, key: bytes) -> str:
        return f"{self._root}/{chunk_name(self._namespace, key)}"

    def _on_evicted(self, path: str) -> None:
        if self._tenants is not None and (tenant := tenant_of_path(path)) is not None:
            self._evicted[self._tenants.of(tenant).name] += 1
        key = key_of(os.path.basename(path))
        # A file in another folder may have the key of a chunk that is still here.
        if key is not None and path == self._path_of(key):
            self._listed.discard(key)

    def _warn(self, what: str, why: PutOutcome | GetOutcome, detail: str) -> None:
        said = f" ({detail})" if detail else ""
        _log.warning("file tier %s: %s: %s%s; %s", self._root, what, why, said, _ADVICE[why])


class UsageReader:
    """Reads the capacity and the bytes in use of a directory. Not thread-safe; every call blocks.

    `clock` is in seconds since 1970.
    """

    def __init__(self, root: str, namespace: Namespace, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._root, self._ours, self._name = root, namespace.digest.hex(), namespace.name
        self._names: dict[str, str] = {}
        self._last = StoreUsage()

    def read(self, *, empty: bool) -> StoreUsage:
        """Return the usage of the directory. A value that cannot be read keeps its last known value.

        If `empty`, it names another namespace of a model with the same name, if there is one. Its engines
        probably differ in a setting, which is why this one finds no chunks.
        """
        capacity, used = read_ledger(self._root) or (self._last.capacity, self._last.used)
        budget = read_write_budget(self._root)
        self._last = StoreUsage(
            used,
            capacity,
            self._same_name_namespace() if empty else "",
            write_budget_left=None if budget is None else budget.left(self._clock()),
        )
        return self._last

    def _same_name_namespace(self) -> str:
        try:
            folders = sorted(os.listdir(self._root))
        except OSError:
            return self._last.same_name_namespace
        for folder in folders:
            if len(folder) != len(self._ours) or folder == self._ours:
                continue
            # Notes never change, so each is read once.
            name = self._names[folder] = self._names.get(folder) or self._model_name(folder)
            if name and name == self._name:
                return folder
        return ""

    def _model_name(self, digest: str) -> str:
        try:
            note = f"{self._root}/{note_name(bytes.fromhex(digest))}"
            check_folders(self._root, note)
            return Namespace.read(read_regular(note, _MAX_NOTE_BYTES).decode("ascii")).name
        except (OSError, ValueError, Unnameable):
            return ""


class FileSettings(StorageSettings, frozen=True):
    """Settings of a file tier, which keeps chunks in a directory that several engines may share.

    Attributes:
        path: path of the directory, which must exist; None for the default directory, which is created in the
            user's cache directory.
        capacity: maximum size of all kvferry files in the directory: a number of bytes, or a text such as
            ``50GiB``. If None, the current capacity of the directory is kept, and a new directory gets a
            tenth of the free space.
        durable: whether to flush every chunk to the disk before it counts as stored.
        page_cache: maximum size of the newest files of this engine that are in the page cache, from which
            engines of this machine read them as fast as memory: a number of bytes, or a text such as
            ``50GiB``. A file is brought there within seconds after it was stored, while this engine does not
            use the disk. If None, a tenth of the available memory. On a network mount, none are.
        write_per_day: maximum number of bytes that all engines together write to the directory in 24 hours,
            so that its disk lasts: a number of bytes, or a text such as ``2TiB``. An hour's share may be
            written at once. If None, the current limit of the directory is kept, and a new directory has
            none; 0 for no limit.
        key_file: path of a file with the keys that encrypt the chunks of the directory, one per line, the
            newest first. If None, chunks are not encrypted.
    """

    kind: ClassVar[str] = "file"
    medium: ClassVar[Medium] = Medium.DISK

    path: str | None = None
    capacity: int | str | None = None
    durable: bool = False
    page_cache: int | str | None = None
    write_per_day: int | str | None = None
    key_file: str | None = None

    def check(self, where: str) -> None:
        check_capacity(where, self.capacity)
        if self.page_cache is not None:
            parse_size(self.page_cache)
        if self.write_per_day is not None and parse_size(self.write_per_day) > MAX_PER_DAY:
            raise ConfigError(
                f"{where}: write_per_day is {self.write_per_day!r}, more than any disk writes; lower it, or "
                "set it to 0 for no limit"
            )
        if self.path is None:
            return
        try:
            # Such a path fails with ValueError later, not with OSError.
            usable = self.path and b"\0" not in os.fsencode(self.path)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise ConfigError(
                f"{where}: path is {self.path!r}; name a directory, or leave it out for the default one"
            )

    def check_storage(self) -> None:
        encrypted = self.read_keys() is not None
        if self.path is not None:
            check_writable(self.path, encrypted)
            return
        path = Path(default_directory())
        # `Path.exists` raises an error for a directory that this user may not enter, `lexists` returns False.
        found = next(one for one in (path, *path.parents) if os.path.lexists(one))
        check_writable(str(found), encrypted)

    def read_keys(self) -> EncryptionKeys | None:
        """Return the keys in `key_file`, None without the setting, or raise ConfigError."""
        return None if self.key_file is None else read_key_file(self.key_file)

    @property
    def location(self) -> Location:
        if self.path is None:
            return Location("the default directory", ())
        path = os.path.abspath(self.path)
        return Location(path, (path,))

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> FileTier:
        path = self.path or make_default_directory()
        directories = [one.path or default_directory() for one in earlier if isinstance(one, FileSettings)]
        if twin := find_same_directory(path, directories):
            raise ConfigError(
                f"file tier: {path} and {twin}, which is a tier already, are one directory; name another, or "
                "leave out one of the two"
            )
        capacity = None if self.capacity is None else parse_size(self.capacity)
        page_cache = None if self.page_cache is None else parse_size(self.page_cache)
        return FileTier(
            path,
            namespace,
            capacity=capacity,
            durable=self.durable,
            page_cache=page_cache,
            write_per_day=None if self.write_per_day is None else parse_size(self.write_per_day),
            encryption=self.read_keys(),
            table=table,
        )


def make_default_directory() -> str:
    """Create the default directory if it is missing, for this user only, and return its path."""
    path = default_directory()
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_directory(path, error) from error
    return path
