"""Counts that are not in the store yet. Pure: counts go in, batches come out.

Equal keys are added up, so the journal grows with the number of different keys in the minutes for which the
store was away, not with the number of jobs. When it is half full, further jobs count by the hour only: a long
absence of the store costs minutes first, and counts last. At most one batch is under way. It stays the same
until it is written: it may be in the store although the answer was lost, and its number is known there then.

    add a 1, add b 1, add a 1 → seal: batch 1 {a: 2, b: 1} → add a 1 → seal: batch 1 again, not written yet
    → written → seal: batch 2 {a: 1}
"""

import secrets

import msgspec

from fairlead.store.records import NO_MINUTE, UsageBatch, UsageCounts, UsageKey

MAX_ROWS = 20_000
"""The most different keys that wait. Further ones are dropped, and counted."""
MAX_BATCH_ROWS = 1000
USERS_AT_MOST = 1000
"""Users of one API key that are counted apart in an hour. A trusted key may name any number."""
OTHER = "other"


class JournalStatistics(msgspec.Struct, frozen=True):
    """Counts since the start.

    waiting: jobs that are not in the store yet.
    written: jobs that are.
    dropped: jobs that never will be, because too many different keys waited, or the store refused them.
    """

    waiting: int = 0
    written: int = 0
    dropped: int = 0


class UsageJournal:
    """The counts of one process.

    writer: names this journal in the store; a new journal needs a new name.
    max_rows: as `MAX_ROWS`.
    """

    def __init__(self, writer: str | None = None, *, max_rows: int = MAX_ROWS) -> None:
        self._writer = writer or secrets.token_hex(16)
        self._max_rows = max_rows
        self._rows: dict[UsageKey, UsageCounts] = {}
        self._sealed: UsageBatch | None = None
        self._number = 0
        self._users: dict[str, set[str]] = {}
        self._hour = 0
        self._added = self._written = self._dropped = 0

    def add(self, key: UsageKey, counts: UsageCounts) -> bool:
        """Add counts; return False if there is no room for them."""
        self._added += counts.requests
        key = self._with_bounded_user(key)
        if key not in self._rows and len(self._rows) >= self._max_rows // 2:
            key = msgspec.structs.replace(key, minute=NO_MINUTE)
        if key in self._rows:
            self._rows[key] += counts
            return True
        if len(self._rows) >= self._max_rows:
            self._dropped += counts.requests
            return False
        self._rows[key] = counts
        return True

    def seal(self) -> UsageBatch | None:
        """Return the batch to write now; None: nothing waits."""
        if self._sealed is None and self._rows:
            self._number += 1
            keys = list(self._rows)[:MAX_BATCH_ROWS]
            rows = tuple((key, self._rows.pop(key)) for key in keys)
            self._sealed = UsageBatch(self._writer, self._number, rows)
        return self._sealed

    def written(self) -> None:
        """Forget the sealed batch, which is in the store."""
        assert self._sealed is not None
        self._written += sum(counts.requests for _, counts in self._sealed.rows)
        self._sealed = None

    def refused(self) -> None:
        """Drop the sealed batch, which the store will never take."""
        assert self._sealed is not None
        self._dropped += sum(counts.requests for _, counts in self._sealed.rows)
        self._sealed = None

    def statistics(self) -> JournalStatistics:
        """Return what was counted so far."""
        waiting = self._added - self._written - self._dropped
        return JournalStatistics(waiting, self._written, self._dropped)

    def _with_bounded_user(self, key: UsageKey) -> UsageKey:
        """Return the key with the user `OTHER` if too many users have been named in this hour."""
        if key.hour != self._hour:
            self._hour = key.hour
            self._users.clear()
        if not key.user:
            return key
        users = self._users.setdefault(key.key, set())
        if key.user in users:
            return key
        if len(users) >= USERS_AT_MOST:
            return msgspec.structs.replace(key, user=OTHER)
        users.add(key.user)
        return key
