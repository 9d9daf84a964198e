"""A storage tier in a SQLite database: a row for each chunk. It evicts nothing."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvferry.common.errors import ChunkError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.chunk import Chunk, ChunkGroup
from kvferry.tiers.format.decode import check_body, check_size, make_header, read_header
from kvferry.tiers.index import KeyTable, ListedKeys, TierKeys
from kvferry.tiers.names import GetOutcome, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.storage_tier import StorageTier

_TABLE = "CREATE TABLE IF NOT EXISTS chunks (namespace, key, file BLOB, PRIMARY KEY (namespace, key))"
_WAIT_SECONDS = 5.0

_log = logging.getLogger(__name__)


class SqliteTier(StorageTier):
    """A storage tier with the chunks of one namespace in a database. Other namespaces may use the same one.

    Args:
        path: path of the database.
        namespace: namespace of the chunks.
        table: hash table of the chunk keys of all tiers of a cache.

    Raises:
        sqlite3.Error: the database cannot be opened.
    """

    def __init__(self, path: str, namespace: Namespace, table: KeyTable) -> None:
        self._path, self._namespace = path, namespace.digest
        self.keys = TierKeys(table)
        self._listed = ListedKeys(self.keys)
        self._counter = OutcomeCounter()
        with self._database() as database:
            database.execute(_TABLE)
        self._list()

    @property
    def stats(self) -> TierStats:
        return self._counter.stats()

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        del cold
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, body)
        why = ""
        try:
            done = self._put(chunk, body)
            self._listed.add(key)
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            done, why = PutOutcome.NO_SPACE if full else PutOutcome.IO_ERROR, str(error)
        if self._counter.count_put(done, chunk.file_bytes) and why:
            _log.warning("sqlite tier %s: a chunk is not stored: %s; check the disk", self._path, why)
        return done

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, into)
        try:
            done = self._get(chunk, into)
        except sqlite3.Error:
            done = GetOutcome.IO_ERROR
        if done is not GetOutcome.HIT:
            self._listed.discard(key)
        self._counter.count_get(done)
        return done

    def refresh(self) -> int:
        changes = self._listed.changes
        try:
            self._list()
        except sqlite3.Error as error:
            _log.debug("sqlite tier %s: cannot be listed: %s", self._path, error)
        return int(self._listed.changes > changes)

    def close(self) -> None:
        """Do nothing, because no connection stays open between calls."""

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Return a context manager for a transaction. Threads share no connection."""
        with closing(sqlite3.connect(self._path, timeout=_WAIT_SECONDS)) as database, database:
            yield database

    def _list(self) -> None:
        query = "SELECT key FROM chunks WHERE namespace = ?"
        with self._database() as database, self._listed.listing():
            self._listed.add_page(key for (key,) in database.execute(query, (self._namespace,)))

    def _put(self, chunk: Chunk, body: memoryview) -> PutOutcome:
        row = (chunk.namespace, chunk.key, make_header(chunk, body) + body)
        with self._database() as database:
            inserted = database.execute("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)", row).rowcount
        return PutOutcome.STORED if inserted else PutOutcome.PRESENT

    def _get(self, chunk: Chunk, into: memoryview) -> GetOutcome:
        with self._database() as database:
            where = "WHERE namespace = ? AND key = ?"
            name = (chunk.namespace, chunk.key)
            row = database.execute(f"SELECT file FROM chunks {where}", name).fetchone()  # noqa: S608 - constant
            if row is None:
                return GetOutcome.ABSENT
            file = memoryview(row[0])
            try:
                header = read_header(lambda at, size: file[at : at + size], len(file))
                if (header.chunk.namespace, header.chunk.key) != name:
                    raise ChunkError("it is another chunk")
                if header.chunk != chunk:
                    return GetOutcome.OTHER_SHAPE
                into[:] = file[header.chunk.offsets[0] :]
                check_body(header, into)
            except ChunkError as error:
                # It must go: a row that stays would keep the chunk from being stored anew.
                database.execute(f"DELETE FROM chunks {where}", name)  # noqa: S608 - constant
                _log.warning("sqlite tier %s: a chunk is corrupt and was removed: %s", self._path, error)
                return GetOutcome.CORRUPT
        return GetOutcome.HIT
