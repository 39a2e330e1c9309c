"""The store as tasks use it: its database on threads, with a limit of time for each call.

A call that the database does not answer in time fails, and its thread stays behind until the driver's own
limits end it. Until then all further calls fail in the same way. So a store that hangs costs its callers
some seconds, and one thread.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import structlog
import trio

from fairlead.base.backoff import Backoff
from fairlead.base.errors import FairleadError, InvalidRequest, StoreUnavailable
from fairlead.store.database import Database, periods_at
from fairlead.store.journal import UsageJournal
from fairlead.store.records import (
    KeyChange,
    KeySet,
    SetBudget,
    Spent,
    StoredKey,
    UsageBatch,
    UsageCounts,
    UsageKey,
    UsageQuery,
    UsageRow,
)

CALL_S = 12.0
"""How long a caller waits; longer than the databases' own limits."""
READERS_AT_MOST = 16
"""Queries that wait for their turn; further ones are refused."""
FLUSH_S = 1.0
"""How long counts are collected before they are written."""
REFRESH_S = 5.0
"""How often changes that another server has made are looked for."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
FINISH_S = 3.0
"""How long a server that stops waits until its last counts are written."""

Result = TypeVar("Result")

logger = structlog.get_logger("fairlead.store")


class StoreAccess(Protocol):
    """What routes do with the store, which another process may have."""

    @property
    def keys(self) -> KeySet | None:
        """All stored keys and budgets; None until they have been read once."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of a query. Raises `StoreUnavailable` and `InvalidRequest`."""
        ...

    async def change_key(self, change: KeyChange) -> StoredKey:
        """Return the changed key when the change is in the store, and in force in all processes.

        Raises as `Database.change_key`.
        """
        ...

    async def change_budget(self, change: SetBudget) -> None:
        """Return when the change is in the store, and in force in all processes.

        Raises as `Database.change_budget`.
        """
        ...


class Store:
    """A database.

    writing: is used by one thread at a time, for everything that must be quick.
    reading: the same for queries, which may take long; another connection.
    """

    def __init__(self, writing: Database, reading: Database) -> None:
        self._writing = writing
        self._reading = reading
        self._writers, self._readers = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
        self.failures = 0

    async def write(self, batch: UsageBatch) -> None:
        """Add a batch of usage, once. Raises `StoreUnavailable` and `InvalidRequest`."""
        await self._call(self._writers, self._writing.write, batch)

    async def change_key(self, change: KeyChange) -> StoredKey:
        """Apply a change. Raises as `Database.change_key`."""
        key, _revision = await self._call(self._writers, self._writing.change_key, change)
        return key

    async def change_budget(self, change: SetBudget) -> None:
        """Apply a change. Raises as `Database.change_budget`."""
        await self._call(self._writers, self._writing.change_budget, change)

    async def keys(self, known: int) -> KeySet | None:
        """Return all keys and budgets; None if their revision is still `known`. Raises `StoreUnavailable`."""
        return await self._call(self._writers, self._writing.keys, known)

    async def spent(self, periods: Sequence[str], subjects: Sequence[str]) -> list[Spent]:
        """Return what these subjects have spent in these periods. Raises `StoreUnavailable`."""
        return await self._call(self._writers, self._writing.spent, periods, subjects)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of a query. Raises `StoreUnavailable` and `InvalidRequest`."""
        if self._readers.statistics().tasks_waiting >= READERS_AT_MOST:
            raise StoreUnavailable("too many queries wait for the store")
        return await self._call(self._readers, self._reading.usage, query)

    async def _call(
        self, limiter: trio.CapacityLimiter, function: Callable[..., Result], *arguments: object
    ) -> Result:
        try:
            return await call_in_thread(limiter, function, *arguments)
        except StoreUnavailable:
            self.failures += 1
            raise


async def call_in_thread(
    limiter: trio.CapacityLimiter, function: Callable[..., Result], *arguments: object
) -> Result:
    """Call a function of a database in a thread. Raises `StoreUnavailable` after `CALL_S`, too."""
    with trio.move_on_after(CALL_S):
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=limiter)
    raise StoreUnavailable(reason=f"it did not answer within {CALL_S:g} s")


class StoreKeeper:
    """The store of this process: keeps its keys and sums for budgets up to date. Implements `StoreAccess`.

    store: the store.
    now: returns the seconds since 1970.

    The functions of `on_keys` are called with all keys and budgets when some have changed. `on_spent` is
    called with what `subjects` have spent in this day and month, at the start and regularly.
    """

    def __init__(self, store: Store, *, now: Callable[[], float] = time.time) -> None:
        self.on_keys: list[Callable[[KeySet], None]] = []
        self.on_spent: Callable[[list[Spent]], None] = lambda _spent: None
        self.subjects: Callable[[], list[str]] = list
        self._store = store
        self._now = now
        self._keys: KeySet | None = None
        self.has_spent = trio.Event()

    @property
    def keys(self) -> KeySet | None:
        """All stored keys and budgets; None until they have been read once."""
        return self._keys

    async def run(self) -> None:
        """Read what has changed, until cancelled. Failures are logged once, until it succeeds again."""
        pauses, is_failing = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), False
        while True:
            try:
                await self._refresh()
            except FairleadError as error:
                if not is_failing:
                    logger.warning("store not read", reason=_reason(error))
                is_failing = True
                await trio.sleep(pauses.take())
                continue
            if is_failing:
                logger.info("store read again")
            is_failing = False
            pauses.reset()
            await trio.sleep(REFRESH_S)

    async def write(self, batch: UsageBatch) -> None:
        """Add a batch of usage, once. Raises `StoreUnavailable` and `InvalidRequest`."""
        # First what was spent before, so that it is not counted twice: see `Budgets.restore`.
        if not self.has_spent.is_set():
            raise StoreUnavailable(reason="it was not read yet")
        await self._store.write(batch)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of a query. Raises `StoreUnavailable` and `InvalidRequest`."""
        return await self._store.usage(query)

    async def change_key(self, change: KeyChange) -> StoredKey:
        """Apply a change in the store, and then here. Raises as `Database.change_key`."""
        key = await self._store.change_key(change)
        try:
            await self._refresh_keys()
        except StoreUnavailable:  # it is in the store all the same
            known = self._keys or KeySet(-1)
            self._apply(known.with_key(key, known.revision))
        return key

    async def change_budget(self, change: SetBudget) -> None:
        """Apply a change in the store, and then here. Raises as `Database.change_budget`."""
        await self._store.change_budget(change)
        try:
            # First what was spent before there was a budget, so that the budget holds from its first job on.
            self.on_spent(await self._store.spent(periods_at(self._now()), [change.subject]))
            await self._refresh_keys()
        except StoreUnavailable:  # it is in the store all the same
            known = self._keys or KeySet(-1)
            self._apply(known.with_budget(change, known.revision))

    async def _refresh(self) -> None:
        await self._refresh_keys()
        self.on_spent(await self._store.spent(periods_at(self._now()), self.subjects()))
        self.has_spent.set()

    async def _refresh_keys(self) -> None:
        known = -1 if self._keys is None else self._keys.revision
        found = await self._store.keys(known)
        # A change and the regular reading may overtake each other.
        if found is not None and (self._keys is None or found.revision > self._keys.revision):
            self._apply(found)

    def _apply(self, keys: KeySet) -> None:
        self._keys = keys
        for use in self.on_keys:
            use(keys)


class UsageWriter:
    """Collects the usage of this process, and writes it soon after. `add` never waits, and never fails.

    The argument `write` of the methods writes a batch, as `Store.write` does.
    """

    def __init__(self, journal: UsageJournal) -> None:
        self.journal = journal
        self._added = trio.Event()
        self._is_full = False

    def add(self, key: UsageKey, counts: UsageCounts) -> None:
        """Add the counts of a finished job."""
        has_room = self.journal.add(key, counts)
        if not has_room and not self._is_full:
            logger.error("usage is not counted: the store was away for too long")
        self._is_full = not has_room
        self._added.set()

    async def run(self, write: Callable[[UsageBatch], Awaitable[object]]) -> None:
        """Write until cancelled."""
        pauses, is_failing = Backoff(FLUSH_S, LONGEST_PAUSE_S), False
        while True:
            await self._added.wait()
            await trio.sleep(pauses.pause_s)
            try:
                await self._flush(write)
            except FairleadError as error:
                if not is_failing:
                    waiting = self.journal.statistics().waiting
                    logger.warning("usage not written yet", reason=_reason(error), requests=waiting)
                is_failing = True
                pauses.grow()
                continue
            if is_failing:
                logger.info("usage written again")
            is_failing = False
            pauses.reset()

    async def finish(self, write: Callable[[UsageBatch], Awaitable[object]]) -> None:
        """Write what is left, for `FINISH_S` at most; log what is lost."""
        with trio.move_on_after(FINISH_S, shield=True):
            try:
                await self._flush(write)
            except FairleadError as error:
                logger.warning("usage not written", reason=_reason(error))
        if waiting := self.journal.statistics().waiting:
            logger.error("usage lost: the store was away", requests=waiting)

    async def _flush(self, write: Callable[[UsageBatch], Awaitable[object]]) -> None:
        self._added = trio.Event()
        try:
            while (batch := self.journal.seal()) is not None:
                try:
                    await write(batch)
                except InvalidRequest as error:
                    logger.error("usage refused by the store", reason=_reason(error))  # noqa: TRY400
                    self.journal.refused()
                else:
                    self.journal.written()
        except BaseException:
            self._added.set()
            raise


def _reason(error: FairleadError) -> str:
    """Return the reason for the log."""
    return error.reason if isinstance(error, StoreUnavailable) else error.message
