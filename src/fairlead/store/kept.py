"""Kept responses in the store: each front reads and writes them on a thread of its own.

Responses are no matter of the dispatcher: they are large, and nothing that it decides depends on them. So
every process that serves HTTP has its own connection.

The bound is that of responses in memory: when all together exceed it, the tenant with the most bytes loses
its oldest ones, those in progress last. One row of `fairlead_meta` has the size of all. A transaction that
changes it holds its lock, so writers of all processes follow each other.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import trio

from fairlead.base.errors import InvalidRequest, StoreUnavailable
from fairlead.store.database import Database
from fairlead.store.store import call_in_thread

ROW_BYTES = 2048
"""What a response counts besides its texts, as in memory."""
EVENTS_BYTES = 64
MOST_BYTES = 128 * 1024 * 1024
"""The most bytes of a response, and of the events in one change of it.

More would take longer to write than a statement may take, and would be tried again for ever. A row of SQLite
has at most 10^9 bytes, and PostgreSQL reads at most 512 MiB of one.
"""
LONGEST_S = 2**40
"""The longest time for which a response is kept. Later times would not fit the column."""
CALLS_AT_MOST = 64
"""Reads that wait for their turn in one process; further ones are refused."""
PRUNE_S = 60
"""How often a writer removes what has expired."""

Result = TypeVar("Result")

_COLUMNS = """id, owner, tenant, request_id, previous, input, document,
    is_background, keeps_events, has_ended, expires"""
_FIND = f"SELECT {_COLUMNS} FROM fairlead_responses WHERE id = ? AND owner = ? AND document <> ? "
_INSERT = (
    f"INSERT INTO fairlead_responses ({_COLUMNS}, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0) "
    "ON CONFLICT (id) DO NOTHING"
)
_UPDATE = (
    "UPDATE fairlead_responses SET document = ?, has_ended = ?, expires = ?, size = ? "
    "WHERE id = ? AND owner = ?"
)


class KeptRow(msgspec.Struct, frozen=True):
    """One response as it is in the store.

    id: its id.
    owner: who may read it. The store has a digest of it.
    tenant: whose share it takes, also as a digest.
    request_id: its job's id for clients, by which any front can cancel it.
    previous: the id of the response that it continues; "": none.
    input: its input in JSON.
    document: the response object in JSON.
    is_background: it does not end with its request.
    keeps_events: its events can be read again.
    has_ended: nothing more will change.
    expires: when it is removed, in seconds since 1970. Of one in progress: until when its process is known to
        live.
    """

    id: str
    owner: str
    tenant: str
    request_id: str = ""
    previous: str = ""
    input: bytes = b""
    document: bytes = b""
    is_background: bool = False
    keeps_events: bool = False
    has_ended: bool = False
    expires: int = 0


class KeptChange(msgspec.Struct, frozen=True):
    """A response to write, with the events that it has got since the last time.

    row: the response as it is now.
    is_new: it is not in the store yet. One that is not new and not in the store was removed meanwhile.
    first: the index of the first of `events`.
    events: whole events.
    """

    row: KeptRow
    is_new: bool
    first: int = 0
    events: tuple[bytes, ...] = ()


class KeptTables:
    """The statements. For one thread at a time.

    database: the connection.
    max_bytes: the most bytes of all responses.
    keep_s: how many seconds a response in progress stays after its process was last known to live.
    now: returns the seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        *,
        max_bytes: int,
        keep_s: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._now = now
        self._pruned_at = 0.0

    def write(self, changes: Sequence[KeptChange]) -> list[str]:
        """Write responses; return the ids of those that are not in the store, because they were removed.

        Raises `InvalidRequest` for one that no table can hold. Then none is written.
        """
        for change in changes:
            _check_size(change)
        with self._database.transaction() as cursor:
            self._lock(cursor)
            gone = [change.row.id for change in changes if not self._write(cursor, change)]
            self._evict(cursor)
            if self._now() >= self._pruned_at + PRUNE_S:
                self._remove_where(cursor, "expires < ? AND has_ended = 1", int(self._now()))
                self._remove_where(cursor, "expires < ? AND has_ended = 0", int(self._now()) - self._keep_s)
                self._pruned_at = self._now()
        return gone

    def chain(self, response_id: str, owner: str, max_bytes: int, keep_s: int) -> list[KeptRow]:
        """Return a response after those that it continues, the latest first; stop where one is missing.

        Stops after more than `max_bytes`, too. All that have ended are kept for `keep_s` from now on.
        """
        found: list[KeptRow] = []
        previous, size = response_id, 0
        with self._database.transaction() as cursor:
            self._lock(cursor)
            while previous and size <= max_bytes:
                row = self._find(cursor, previous, owner)
                if row is None:
                    break
                found.append(row)
                size += len(row.input) + len(row.document)
                previous = row.previous
            for row in found:
                if row.has_ended:
                    text = "UPDATE fairlead_responses SET expires = ? WHERE id = ?"
                    self._run(cursor, text, int(self._now()) + keep_s, row.id)
        return found

    def change(
        self, response_id: str, owner: str, change: Callable[[bytes], bytes], keep_s: int
    ) -> bytes | None:
        """Change a document by a function, and keep it for `keep_s`; return it, or None if there is none.

        No other process changes it meanwhile. Raises what the function raises, and changes nothing then.
        """
        with self._database.transaction() as cursor:
            self._lock(cursor)
            row = self._find(cursor, response_id, owner)
            if row is None:
                return None
            document = change(row.document)
            expires = int(self._now()) + keep_s
            row = msgspec.structs.replace(row, document=document, expires=expires)
            change_of_row = KeptChange(row, is_new=False)
            _check_size(change_of_row)
            self._write(cursor, change_of_row)
            self._evict(cursor)
        return document

    def find(self, response_id: str, owner: str) -> KeptRow | None:
        """Return a response; None if there is none of this owner."""
        with self._database.transaction(writes=False) as cursor:
            return self._find(cursor, response_id, owner)

    def events(self, response_id: str, first: int) -> list[bytes]:
        """Return the events of a response from an index on."""
        with self._database.transaction(writes=False) as cursor:
            text = (
                "SELECT position, events FROM fairlead_response_events WHERE id = ? AND position >= COALESCE("
                "(SELECT MAX(position) FROM fairlead_response_events WHERE id = ? AND position <= ?), 0) "
                "ORDER BY position"
            )
            self._run(cursor, text, response_id, response_id, first)
            pieces = cursor.fetchall()
        found: list[bytes] = []
        for position, packed in pieces:
            events = _unpack(bytes(packed))
            found += events[max(0, first - position) :]
        return found

    def remove(self, response_id: str, owner: str) -> bool:
        """Remove a response; return whether there was one."""
        with self._database.transaction() as cursor:
            self._lock(cursor)
            return self._remove_where(cursor, "id = ? AND owner = ?", response_id, _digest(owner)) > 0

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._database.close()

    # Helpers -----------------------------------------------------------------------------------------

    def _run(self, cursor: Any, text: str, *values: Any) -> None:
        cursor.execute(self._database.statement(text), values)

    def _lock(self, cursor: Any) -> None:
        """Wait for other processes that change responses, until the end of the transaction."""
        self._run(cursor, "UPDATE fairlead_meta SET value = value WHERE name = 'responses'")

    def _find(self, cursor: Any, response_id: str, owner: str) -> KeptRow | None:
        if not (response_id.isascii() and response_id.isprintable()):
            return None  # no id of ours, and PostgreSQL refuses some characters
        self._run(cursor, _FIND, response_id, _digest(owner), b"")
        found = cursor.fetchone()
        if found is None:
            return None
        (_, _, tenant, request_id, previous, given, document, is_background, keeps, ended, expires) = found
        if ended and expires < self._now():
            return None
        return KeptRow(
            response_id,
            owner,
            tenant,
            request_id,
            previous,
            bytes(given),
            bytes(document),
            bool(is_background),
            bool(keeps),
            bool(ended),
            int(expires),
        )

    def _write(self, cursor: Any, change: KeptChange) -> bool:
        row = change.row
        owner, tenant = _digest(row.owner), _digest(row.tenant)
        if change.is_new:
            flags = (int(row.is_background), int(row.keeps_events), int(row.has_ended))
            texts = (row.request_id, row.previous, row.input, row.document)
            self._run(cursor, _INSERT, row.id, owner, tenant, *texts, *flags, row.expires)
        text = "SELECT size, tenant FROM fairlead_responses WHERE id = ? AND owner = ?"
        self._run(cursor, text, row.id, owner)
        found = cursor.fetchone()
        if found is None:
            return False
        if change.events:
            # A piece that is sent again, because the answer was lost, may have got longer meanwhile.
            text = (
                "INSERT INTO fairlead_response_events VALUES (?, ?, ?) "
                "ON CONFLICT (id, position) DO UPDATE SET events = excluded.events"
            )
            self._run(cursor, text, row.id, change.first, _pack(change.events))
        size = ROW_BYTES + len(row.input) + len(row.document)
        if row.keeps_events:
            text = (
                "SELECT COALESCE(SUM(LENGTH(events)), 0), COUNT(*) FROM fairlead_response_events WHERE id = ?"
            )
            self._run(cursor, text, row.id)
            events_bytes, pieces = cursor.fetchone()
            size += int(events_bytes) + EVENTS_BYTES * int(pieces)
        self._run(cursor, _UPDATE, row.document, int(row.has_ended), row.expires, size, row.id, owner)
        self._add_size(cursor, found[1], size - int(found[0]))
        return True

    def _add_size(self, cursor: Any, tenant: str, change: int) -> None:
        text = "UPDATE fairlead_meta SET value = value + ? WHERE name = 'responses'"
        self._run(cursor, text, change)
        text = (
            "INSERT INTO fairlead_response_sizes VALUES (?, ?) ON CONFLICT (tenant) DO UPDATE SET "
            "size = fairlead_response_sizes.size + excluded.size"
        )
        self._run(cursor, text, tenant, change)

    def _evict(self, cursor: Any) -> None:
        """Remove what exceeds the bound."""
        while True:
            self._run(cursor, "SELECT value FROM fairlead_meta WHERE name = 'responses'")
            if int(cursor.fetchone()[0]) <= self._max_bytes:
                return
            self._run(cursor, "SELECT tenant FROM fairlead_response_sizes ORDER BY size DESC, tenant LIMIT 1")
            (tenant,) = cursor.fetchone()
            for has_ended in (1, 0):
                text = (
                    "SELECT id FROM fairlead_responses WHERE tenant = ? AND has_ended = ? "
                    "ORDER BY expires, id LIMIT 1"
                )
                self._run(cursor, text, tenant, has_ended)
                if oldest := cursor.fetchone():
                    break
            assert oldest is not None
            self._remove_where(cursor, "id = ?", *oldest)

    def _remove_where(self, cursor: Any, condition: str, *values: Any) -> int:
        """Remove responses by a condition of ours; return their number."""
        text = f"DELETE FROM fairlead_responses WHERE {condition} RETURNING id, tenant, size"
        self._run(cursor, text, *values)
        removed = cursor.fetchall()
        for response_id, tenant, size in sorted(removed):
            self._run(cursor, "DELETE FROM fairlead_response_events WHERE id = ?", response_id)
            self._add_size(cursor, tenant, -int(size))
        self._run(cursor, "DELETE FROM fairlead_response_sizes WHERE size <= 0")
        return len(removed)


class KeptResponsesStore:
    """The tables as tasks use them: on a thread each for reading and writing, within a limit of time.

    All methods raise `StoreUnavailable`, those that write also what `KeptTables` raises.
    """

    def __init__(self, writing: KeptTables, reading: KeptTables) -> None:
        self._writing, self._reading = writing, reading
        self._writers, self._readers = trio.CapacityLimiter(1), trio.CapacityLimiter(1)

    async def write(self, changes: Sequence[KeptChange]) -> list[str]:
        """See `KeptTables.write`."""
        return await call_in_thread(self._writers, self._writing.write, changes)

    async def remove(self, response_id: str, owner: str) -> bool:
        """See `KeptTables.remove`."""
        return await call_in_thread(self._writers, self._writing.remove, response_id, owner)

    async def change(
        self, response_id: str, owner: str, change: Callable[[bytes], bytes], keep_s: int
    ) -> bytes | None:
        """See `KeptTables.change`. The function is called in a thread."""
        return await call_in_thread(self._writers, self._writing.change, response_id, owner, change, keep_s)

    async def find(self, response_id: str, owner: str) -> KeptRow | None:
        """See `KeptTables.find`."""
        return await self._read(self._reading.find, response_id, owner)

    async def chain(self, response_id: str, owner: str, max_bytes: int, keep_s: int) -> list[KeptRow]:
        """See `KeptTables.chain`."""
        return await self._read(self._reading.chain, response_id, owner, max_bytes, keep_s)

    async def events(self, response_id: str, first: int) -> list[bytes]:
        """See `KeptTables.events`."""
        return await self._read(self._reading.events, response_id, first)

    async def _read(self, function: Callable[..., Result], *arguments: object) -> Result:
        if self._readers.statistics().tasks_waiting >= CALLS_AT_MOST:
            raise StoreUnavailable("too many requests wait for the store")
        return await call_in_thread(self._readers, function, *arguments)


def _digest(name: str) -> str:
    """Return what the store has instead of a name, which may have characters that no column can hold."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _check_size(change: KeptChange) -> None:
    row = change.row
    size = max(len(row.input) + len(row.document), sum(map(len, change.events)))
    if size > MOST_BYTES:
        raise InvalidRequest(f"it has {size} bytes, and the store keeps at most {MOST_BYTES} of one")


def _pack(events: Sequence[bytes]) -> bytes:
    return msgspec.msgpack.encode(events)


_unpack = msgspec.msgpack.Decoder(list[bytes]).decode
