"""The store's tables and statements, the same for SQLite and PostgreSQL. For one thread at a time.

A batch of usage and what it spends are written in one transaction with its number, so a batch whose answer
was lost can be sent again: its number is known then, and nothing is added. A change of a key is committed
when `change_key` returns. After any failure the connection is closed, and the next call opens another one.

All methods raise `StoreUnavailable`. `write` raises `InvalidRequest` for a batch that no table can hold, and
so do `change_key` and `change_budget`, also `NotFound`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from msgspec.structs import astuple

from fairlead.base.config import Budget
from fairlead.base.errors import FairleadError, InvalidRequest, NotFound, StoreUnavailable, quoted
from fairlead.store.records import (
    HOUR_S,
    MINUTE_S,
    NO_MINUTE,
    AddKey,
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
    changed,
)

SCHEMA = 2
MAX_KEYS = 10_000
MAX_BUDGETS = 10_000
MAX_RESULTS = 100_000
"""The most rows that a query may return."""
MAX_COUNT = 2**53
"""The highest count of a batch. Sums stay far below what a table can hold."""
VALUES_AT_MOST = 1000
"""The most values in a statement."""
DAY_S = 86_400
MINUTES_DAYS = 2
"""How many days usage is kept by the minute."""
SPENT_DAYS = 62
"""How long sums for budgets are kept: longer than a month."""
WRITER_DAYS = 30
"""How long the last number of a writer is kept. A batch is sent again within this time, or never."""

_NAMES = ("key_id", "user_id", "team", "model", "route", "outcome", "batch")
COLUMNS = dict(zip(("key", "user", "team", "model", "route", "outcome", "batch"), _NAMES, strict=True))
_COUNTS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "seat_ms",
    "wait_ms",
    "cost_nano",
    "budget_tokens",
)
_HOURS, _MINUTES = ("fairlead_usage", "hour"), ("fairlead_minutes", "minute")
"""The tables of usage, and the columns of their times."""


def _usage_table(table: str, time_column: str) -> str:
    return f"""CREATE TABLE IF NOT EXISTS {table} ({time_column} BIGINT NOT NULL,
        {", ".join(f"{name} {'BIGINT' if name == 'batch' else 'TEXT'} NOT NULL" for name in _NAMES)},
        {", ".join(f"{name} BIGINT NOT NULL" for name in _COUNTS)},
        PRIMARY KEY ({time_column}, {", ".join(_NAMES)}))"""


# Indexes are parts of tables: PostgreSQL locks a table for a statement of its own, even if the index exists,
# and a process that starts would then wait for those that write, and they for it.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS fairlead_meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    _usage_table(*_HOURS),
    _usage_table(*_MINUTES),
    """CREATE TABLE IF NOT EXISTS fairlead_spent (period TEXT NOT NULL, subject TEXT NOT NULL,
        tokens BIGINT NOT NULL, cost_nano BIGINT NOT NULL, PRIMARY KEY (period, subject))""",
    """CREATE TABLE IF NOT EXISTS fairlead_writers
        (writer TEXT PRIMARY KEY, number BIGINT NOT NULL, seen BIGINT NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS fairlead_keys (id TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS fairlead_budgets (subject TEXT PRIMARY KEY, document TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS fairlead_responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL,
        tenant TEXT NOT NULL, request_id TEXT NOT NULL, previous TEXT NOT NULL, input BYTEA NOT NULL,
        document BYTEA NOT NULL, is_background SMALLINT NOT NULL, keeps_events SMALLINT NOT NULL,
        has_ended SMALLINT NOT NULL, expires BIGINT NOT NULL, size BIGINT NOT NULL,
        UNIQUE (tenant, has_ended, expires, id), UNIQUE (has_ended, expires, id))""",
    """CREATE TABLE IF NOT EXISTS fairlead_response_events (id TEXT NOT NULL, position BIGINT NOT NULL,
        events BYTEA NOT NULL, PRIMARY KEY (id, position))""",
    """CREATE TABLE IF NOT EXISTS fairlead_response_sizes
        (tenant TEXT PRIMARY KEY, size BIGINT NOT NULL)""",
    f"""INSERT INTO fairlead_meta VALUES ('schema', {SCHEMA}), ('keys', 0), ('responses', 0)
        ON CONFLICT DO NOTHING""",
)
# By the schema of a store: what makes it one of the next schema.
_UPGRADES = {
    1: (  # its usage had no batches, and all tokens counted for budgets
        "ALTER TABLE fairlead_usage RENAME TO fairlead_usage_1",
        _usage_table(*_HOURS),
        f"""INSERT INTO fairlead_usage SELECT hour, {", ".join(_NAMES[:-1])}, 0, {", ".join(_COUNTS[:-1])},
            prompt_tokens + generated_tokens FROM fairlead_usage_1""",
        "DROP TABLE fairlead_usage_1",
        "UPDATE fairlead_meta SET value = 2 WHERE name = 'schema'",
    )
}


def _add_usage(table: str, time_column: str) -> str:
    return (
        f"INSERT INTO {table} VALUES ({', '.join('?' * (1 + len(_NAMES) + len(_COUNTS)))}) "
        f"ON CONFLICT ({time_column}, {', '.join(_NAMES)}) DO UPDATE SET "
        + ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in _COUNTS)
    )


_ADD_SPENT = (
    "INSERT INTO fairlead_spent VALUES (?, ?, ?, ?) ON CONFLICT (period, subject) DO UPDATE SET "
    "tokens = fairlead_spent.tokens + excluded.tokens, "
    "cost_nano = fairlead_spent.cost_nano + excluded.cost_nano"
)
_NEXT_NUMBER = (
    "INSERT INTO fairlead_writers VALUES (?, ?, ?) ON CONFLICT (writer) DO UPDATE SET "
    "number = excluded.number, seen = excluded.seen WHERE fairlead_writers.number < excluded.number"
)


class SqlEngine(Protocol):
    """What differs between SQLite and PostgreSQL.

    begin: starts a transaction that may write.
    errors: the classes of its failures.
    data_errors: those of values that no column can hold; these come first.
    """

    begin: str
    errors: tuple[type[Exception], ...]
    data_errors: tuple[type[Exception], ...]

    def connect(self) -> Any:
        """Return a connection without transactions of its own, whose statements have a time limit."""

    def statement(self, text: str) -> str:
        """Return a statement with the parameter marks of its driver, instead of `?`."""
        ...

    def prepare(self, cursor: Any) -> None:
        """Make other processes wait until the tables are made, where they could be made twice."""


class Database:
    """One connection to the tables, opened when it is needed.

    engine: the database.
    usage_days: how long usage is kept.
    now: returns the seconds since 1970.
    """

    def __init__(self, engine: SqlEngine, *, usage_days: int, now: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._usage_days = usage_days
        self._now = now
        self._refused: tuple[type[Exception], ...] = (UnicodeError, *engine.data_errors)
        self._connection: Any = None
        self._pruned_hour = 0

    def write(self, batch: UsageBatch) -> None:
        """Add a batch of usage, unless it was added before."""
        now = int(self._now())
        if not all(0 <= count <= MAX_COUNT for _, counts in batch.rows for count in astuple(counts)):
            raise InvalidRequest("a count of this batch is out of range")
        with self.transaction() as cursor:
            self._run(cursor, _NEXT_NUMBER, (batch.writer, batch.number, now))
            if cursor.rowcount != 1:
                return
            # In one order, so that two writers cannot wait for each other.
            rows = sorted(batch.rows, key=lambda row: row[0])
            minutes = [row for row in rows if row[0].minute != NO_MINUTE]
            self._run_all(cursor, _add_usage(*_HOURS), [_usage_row(key.hour, key, of) for key, of in rows])
            self._run_all(cursor, _add_usage(*_MINUTES), [_usage_row(key.at, key, of) for key, of in minutes])
            self._run_all(cursor, _ADD_SPENT, sorted(_spent_of(batch.rows)))
            if now // HOUR_S != self._pruned_hour:
                self._prune(cursor, now)
        self._pruned_hour = now // HOUR_S

    def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of a query, in the order of their buckets."""
        text, values = _select(query)
        with self.transaction(writes=False) as cursor:
            self._run(cursor, text, values)
            found = cursor.fetchmany(MAX_RESULTS + 1)
        if len(found) > MAX_RESULTS:
            raise InvalidRequest(f"more than {MAX_RESULTS} results; ask for less time or fewer groups")
        names = query.group_by
        return [
            (
                _usage_key(int(row[0]), dict(zip(names, row[1:], strict=False))),
                UsageCounts(*map(int, row[1 + len(names) :])),
            )
            for row in found
        ]

    def spent(self, periods: Sequence[str], subjects: Sequence[str]) -> list[Spent]:
        """Return what these subjects have spent in these periods."""
        found: list[Spent] = []
        with self.transaction(writes=False) as cursor:
            for first in range(0, len(subjects), VALUES_AT_MOST):
                some = subjects[first : first + VALUES_AT_MOST]
                text = (
                    "SELECT period, subject, tokens, cost_nano FROM fairlead_spent "
                    f"WHERE period IN ({_marks(periods)}) AND subject IN ({_marks(some)})"
                )
                self._run(cursor, text, (*periods, *some))
                found += [Spent(*row) for row in cursor.fetchall()]
        return found

    def keys(self, known: int = -1) -> KeySet | None:
        """Return all keys and budgets; None if their revision is still `known`."""
        with self.transaction(writes=False) as cursor:
            revision = self._revision(cursor)
            if revision == known:
                return None
            self._run(cursor, "SELECT document FROM fairlead_keys ORDER BY id", ())
            keys = tuple(_decoder.decode(document) for (document,) in cursor.fetchall())
            self._run(cursor, "SELECT subject, document FROM fairlead_budgets ORDER BY subject", ())
            budgets = {subject: _budget_decoder.decode(document) for subject, document in cursor.fetchall()}
        return KeySet(revision, keys, budgets)

    def change_key(self, change: KeyChange) -> tuple[StoredKey, int]:
        """Apply a change; return the key, and the revision of all keys that has it."""
        with self.transaction() as cursor:
            self._begin_change(cursor)
            if isinstance(change, AddKey):
                key = change.key
                self._run(cursor, "SELECT COUNT(*) FROM fairlead_keys", ())
                if cursor.fetchone()[0] >= MAX_KEYS:
                    raise InvalidRequest(f"the store has {MAX_KEYS} keys, which is the most")
                self._run(cursor, "INSERT INTO fairlead_keys VALUES (?, ?) ON CONFLICT DO NOTHING", _row(key))
                if cursor.rowcount != 1:
                    raise InvalidRequest("this key is in the store already", param="value")
            else:
                self._run(cursor, "SELECT document FROM fairlead_keys WHERE id = ?", (change.id,))
                found = cursor.fetchone()
                before = _decoder.decode(found[0]) if found is not None else None
                if before is None or not before.is_valid(self._now()):
                    raise NotFound(f"there is no valid key {quoted(change.id)} in the store")
                key = changed(before, change)
                self._run(cursor, "UPDATE fairlead_keys SET document = ? WHERE id = ?", _row(key)[::-1])
            return key, self._revision(cursor)

    def change_budget(self, change: SetBudget) -> int:
        """Apply a change of a budget; return the revision that has it."""
        with self.transaction() as cursor:
            self._begin_change(cursor)
            self._run(cursor, "DELETE FROM fairlead_budgets WHERE subject = ?", (change.subject,))
            if change.budget is None and cursor.rowcount != 1:
                raise NotFound(f"there is no budget of {quoted(change.subject)} in the store")
            if change.budget is not None:
                self._run(cursor, "SELECT COUNT(*) FROM fairlead_budgets", ())
                if cursor.fetchone()[0] >= MAX_BUDGETS:
                    raise InvalidRequest(f"the store has {MAX_BUDGETS} budgets, which is the most")
                document = msgspec.json.encode(change.budget).decode()
                self._run(cursor, "INSERT INTO fairlead_budgets VALUES (?, ?)", (change.subject, document))
            return self._revision(cursor)

    def statement(self, text: str) -> str:
        """Return a statement with the parameter marks of the driver, instead of `?`."""
        return self._engine.statement(text)

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self._engine.errors):  # it is of no use anyway
                connection.close()

    # Statements --------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Any]:
        """Run the block in a transaction, which is undone if the block raises."""
        try:
            if self._connection is None:
                self._connection = self._open()
            with closing(self._connection.cursor()) as cursor:
                cursor.execute(self._engine.begin if writes else "BEGIN")
                try:
                    yield cursor
                except FairleadError:
                    cursor.execute("ROLLBACK")
                    raise
                cursor.execute("COMMIT")
        except FairleadError:
            raise
        except self._refused as error:
            self.close()
            raise InvalidRequest(f"the store cannot hold this: {error}") from error
        except self._engine.errors as error:
            self.close()
            reason = str(error).strip() or type(error).__name__
            raise StoreUnavailable(reason=reason) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> Any:
        """Return a connection to a database that has the tables."""
        connection = self._engine.connect()
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute(self._engine.begin)
                self._engine.prepare(cursor)
                for table in _TABLES:
                    cursor.execute(table)
                cursor.execute("SELECT value FROM fairlead_meta WHERE name = 'schema'")
                (schema,) = cursor.fetchone()
                for earlier in range(int(schema), SCHEMA):
                    for statement in _UPGRADES[earlier]:
                        cursor.execute(statement)
                cursor.execute("COMMIT")
            if schema > SCHEMA:
                raise StoreUnavailable(reason="it was made by a later version of Fairlead")
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(self, cursor: Any, text: str, values: Sequence[Any]) -> None:
        cursor.execute(self._engine.statement(text), values)

    def _run_all(self, cursor: Any, text: str, rows: Sequence[Sequence[Any]]) -> None:
        cursor.executemany(self._engine.statement(text), rows)

    def _begin_change(self, cursor: Any) -> None:
        """Count a change of keys or budgets. This row's lock makes changes follow each other, everywhere."""
        self._run(cursor, "UPDATE fairlead_meta SET value = value + 1 WHERE name = 'keys'", ())

    def _revision(self, cursor: Any) -> int:
        cursor.execute("SELECT value FROM fairlead_meta WHERE name = 'keys'")
        return int(cursor.fetchone()[0])

    def _prune(self, cursor: Any, now: int) -> None:
        """Remove what is older than it is kept."""
        self._run(cursor, "DELETE FROM fairlead_usage WHERE hour < ?", (now - self._usage_days * DAY_S,))
        self._run(cursor, "DELETE FROM fairlead_minutes WHERE minute < ?", (now - MINUTES_DAYS * DAY_S,))
        first = periods_at(now - SPENT_DAYS * DAY_S)[0]
        self._run(cursor, "DELETE FROM fairlead_spent WHERE period < ?", (first[:7],))
        self._run(cursor, "DELETE FROM fairlead_writers WHERE seen < ?", (now - WRITER_DAYS * DAY_S,))


def periods_at(at: float) -> tuple[str, str]:
    """Return the day and the month of a time, in UTC: 2026-11-28, 2026-11."""
    day = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return day, day[:7]


def _spent_of(rows: Sequence[UsageRow]) -> list[tuple[str, str, int, int]]:
    """Return what usage adds to the sums for budgets: period, subject, tokens, cost."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for key, counts in rows:
        if not (key.key and (counts.budget_tokens or counts.cost_nano)):
            continue
        subjects = [f"key:{key.key}"]
        subjects += [f"user:{key.user}"] * bool(key.user) + [f"team:{key.team}"] * bool(key.team)
        for at in ((period, subject) for period in periods_at(key.hour) for subject in subjects):
            tokens, cost = found.get(at, (0, 0))
            found[at] = (tokens + counts.budget_tokens, cost + counts.cost_nano)
    return [(*at, *amounts) for at, amounts in found.items()]


def _select(query: UsageQuery) -> tuple[str, list[Any]]:
    """Return the statement of a query, and its values. Names of columns are ours, not the client's."""
    columns = [COLUMNS[name] for name in query.group_by]
    table, at = _MINUTES if query.width_s % HOUR_S else _HOURS
    assert query.width_s % MINUTE_S == 0
    bucket = f"({at} - {int(query.start)}) / {int(query.width_s)} * {int(query.width_s)} + {int(query.start)}"
    conditions = [f"{at} >= ?", f"{at} < ?"]
    values: list[Any] = [query.start, query.end]
    for name, allowed in query.filters.items():
        conditions.append(f"{COLUMNS[name]} IN ({_marks(allowed)})" if allowed else "1 = 0")
        values += allowed
    if query.own is not None:
        key, user = query.own
        owned = ["key_id = ?"]
        values.append(key)
        if user:
            owned += ["user_id = ?", "SUBSTR(user_id, 1, ?) = ?"]  # also users that a trusted key names
            values += [user, len(user) + 1, f"{user}/"]
        conditions.append(f"({' OR '.join(owned)})")
    totals = ", ".join(f"SUM({name})" for name in _COUNTS)
    groups = ", ".join(str(number) for number in range(1, 2 + len(columns)))
    text = (
        f"SELECT {', '.join([bucket, *columns])}, {totals} FROM {table} "  # our own names
        f"WHERE {' AND '.join(conditions)} GROUP BY {groups} ORDER BY {groups}"
    )
    return text, values


def _usage_row(at: int, key: UsageKey, counts: UsageCounts) -> tuple[str | int, ...]:
    names = (key.key, key.user, key.team, key.model, key.route, key.outcome, int(key.batch))
    return (at, *names, *astuple(counts))


def _usage_key(at: int, names: dict[str, Any]) -> UsageKey:
    """Return the key of a row of sums, whose bucket begins at `at`."""
    if "batch" in names:
        names["batch"] = bool(names["batch"])
    return UsageKey(
        at // HOUR_S * HOUR_S, minute=at % HOUR_S // MINUTE_S if at % HOUR_S else NO_MINUTE, **names
    )


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _row(key: StoredKey) -> tuple[str, str]:
    return key.id, msgspec.json.encode(key).decode()


_decoder = msgspec.json.Decoder(StoredKey)
_budget_decoder = msgspec.json.Decoder(Budget)
