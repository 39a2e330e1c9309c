"""A store in memory, for tests of what uses one."""

import time
from collections.abc import Callable

from fairlead.base.errors import NotFound, StoreUnavailable
from fairlead.store.database import COLUMNS
from fairlead.store.records import (
    HOUR_S,
    MINUTE_S,
    NO_MINUTE,
    AddKey,
    KeyChange,
    KeySet,
    SetBudget,
    StoredKey,
    UsageKey,
    UsageQuery,
    UsageRow,
    changed,
    sums,
)
from fairlead.store.store import StoreAccess


class FakeStore(StoreAccess):
    """Has keys and rows of usage. `is_away`: every call fails. `on_keys` is called after each change."""

    def __init__(self, rows: list[UsageRow] | None = None) -> None:
        self.rows = rows or []
        self.is_away = False
        self.on_keys: Callable[[KeySet], None] = lambda _keys: None
        self._keys: KeySet = KeySet()

    @property
    def keys(self) -> KeySet | None:
        return None if self.is_away else self._keys

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        self._check()
        found = []
        for key, counts in self.rows:
            is_own = query.own is None or (
                key.key == query.own[0] or (query.own[1] and f"{key.user}/".startswith(f"{query.own[1]}/"))
            )
            is_kept = all(getattr(key, name) in values for name, values in query.filters.items())
            by_minute = query.width_s % HOUR_S != 0
            is_kept &= not by_minute or key.minute != NO_MINUTE
            time_of = key.at if by_minute else key.hour
            if is_own and is_kept and query.start <= time_of < query.end:
                at = (time_of - query.start) // query.width_s * query.width_s + query.start
                names = {name: getattr(key, name) for name in query.group_by if name in COLUMNS}
                if by_minute:
                    names["minute"] = at % HOUR_S // MINUTE_S
                found.append((UsageKey(at // HOUR_S * HOUR_S, **names), counts))
        return sorted(sums(found).items())

    async def change_key(self, change: KeyChange) -> StoredKey:
        self._check()
        if isinstance(change, AddKey):
            key = change.key
        else:
            known = next((key for key in self._keys.keys if key.id == change.id), None)
            if known is None or not known.is_valid(time.time()):
                raise NotFound("no key")
            key = changed(known, change)
        self._keys = self._keys.with_key(key, self._keys.revision + 1)
        self.on_keys(self._keys)
        return key

    async def change_budget(self, change: SetBudget) -> None:
        self._check()
        if change.budget is None and change.subject not in self._keys.budgets:
            raise NotFound("no budget")
        self._keys = self._keys.with_budget(change, self._keys.revision + 1)
        self.on_keys(self._keys)

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable
