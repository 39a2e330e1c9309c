"""One suite for SQLite and PostgreSQL: usage is added once, and changes of keys are kept."""

import subprocess
import sys
import threading

import pytest
from msgspec.structs import replace

from fairlead.base.config import Budget
from fairlead.base.errors import InvalidRequest, NotFound, StoreUnavailable
from fairlead.store.database import MINUTES_DAYS, SCHEMA, WRITER_DAYS, periods_at
from fairlead.store.records import (
    AddKey,
    RevokeKey,
    RotateKey,
    Secret,
    SetBudget,
    StoredKey,
    UsageBatch,
    UsageCounts,
    UsageKey,
    UsageQuery,
)
from fairlead.store.sqlite import Sqlite

HOUR = 1_795_870_800  # 2026-11-28, 13:00 UTC
ANA = UsageKey(HOUR, "key-1", "ana", "research", "small", "/v1/chat/completions", "success")
COUNTS = UsageCounts(1, 10, 4, 5, 1500, 20, 700, 15)
SUBJECTS = ["key:key-1", "user:ana", "team:research"]
ALL = UsageQuery(start=HOUR - 86_400 * 40, end=HOUR + 86_400)


def batch(number: int, *rows: tuple[UsageKey, UsageCounts], writer: str = "w") -> UsageBatch:
    return UsageBatch(writer, number, rows or ((ANA, COUNTS),))


def stored(number: int = 1, **settings: object) -> StoredKey:
    secret = Secret(f"{number:064x}", "fl-…")
    return StoredKey(
        **{"id": f"key-{number:016x}", "name": "n", "secrets": (secret,), "created_at": 1.0, **settings}
    )


def total(database) -> UsageCounts:
    return sum((counts for _, counts in database.usage(ALL)), UsageCounts())


def test_batches_are_added_up_and_each_is_added_once(open_database):
    database, other = open_database(), open_database()
    database.write(batch(1))
    database.write(batch(1))
    other.write(batch(1))
    database.write(batch(2))
    other.write(batch(1))
    database.write(batch(1, writer="another"))
    assert total(other) == COUNTS + COUNTS + COUNTS


def test_batch_that_fails_in_the_middle_leaves_nothing(open_database):
    database = open_database()
    with pytest.raises(InvalidRequest):
        database.write(batch(1, (ANA, COUNTS), (replace(ANA, user="\ud800"), COUNTS)))
    assert total(database) == UsageCounts()
    database.write(batch(1))  # the number was not used up
    assert total(database) == COUNTS


@pytest.mark.parametrize("counts", [UsageCounts(-1), UsageCounts(1, 2**60)])
def test_impossible_counts_are_refused(open_database, counts):
    with pytest.raises(InvalidRequest, match="out of range"):
        open_database().write(batch(1, (ANA, counts)))


def test_usage_is_summed_up_by_bucket_and_group(open_database):
    database = open_database()
    ben = replace(ANA, user="ben", team="ops", hour=HOUR + 3600)
    yesterday = replace(ANA, hour=HOUR - 86_400)
    database.write(batch(1, (ANA, COUNTS), (ben, COUNTS), (yesterday, COUNTS)))
    day = HOUR // 86_400 * 86_400
    query = UsageQuery(start=day - 86_400, end=day + 86_400, width_s=86_400, group_by=("team",))
    assert database.usage(query) == [
        (UsageKey(day - 86_400, team="research"), COUNTS),
        (UsageKey(day, team="ops"), COUNTS),
        (UsageKey(day, team="research"), COUNTS),
    ]
    assert database.usage(replace(query, group_by=())) == [
        (UsageKey(day - 86_400), COUNTS),
        (UsageKey(day), COUNTS + COUNTS),
    ]
    only = replace(query, group_by=("user",), filters={"team": ("ops", "none")})
    assert database.usage(only) == [(UsageKey(day, user="ben"), COUNTS)]
    assert database.usage(replace(query, filters={"team": ()})) == []


def test_own_usage_is_that_of_the_key_and_of_its_users(open_database):
    database = open_database()
    users = ["portal", "portal/ana", "portal2", "port", "po_tal/ana", "%"]
    rows = [(replace(ANA, key=f"key-{user}", user=user), COUNTS) for user in users]
    database.write(batch(1, *rows))
    own = replace(ALL, group_by=("user",), own=("key-port", "portal"))
    assert {key.user for key, _ in database.usage(own)} == {"portal", "portal/ana", "port"}
    assert database.usage(replace(own, own=("", ""))) == []


def test_text_of_clients_is_never_a_part_of_a_statement(open_database):
    database = open_database()
    evil = replace(ANA, user="'; DROP TABLE fairlead_usage; --", model="%s?$1", team='"')
    database.write(batch(1, (evil, COUNTS)))
    query = replace(ALL, group_by=("user", "model"), filters={"user": (evil.user,)})
    (found,) = database.usage(query)
    assert (found[0].user, found[0].model) == (evil.user, evil.model)


def test_spending_is_kept_for_key_user_and_team_by_day_and_month(open_database):
    database = open_database()
    jobs = [
        (ANA, COUNTS),
        (replace(ANA, hour=HOUR + 86_400, user=""), COUNTS),
        (replace(ANA, key=""), COUNTS),
    ]
    database.write(batch(1, *jobs))
    day, month = periods_at(HOUR)
    assert (day, month) == ("2026-11-28", "2026-11")
    found = {(each.period, each.subject): each.tokens for each in database.spent((day, month), SUBJECTS)}
    assert found == {
        (day, "key:key-1"): 15,
        (day, "user:ana"): 15,
        (day, "team:research"): 15,
        (month, "key:key-1"): 30,
        (month, "user:ana"): 15,
        (month, "team:research"): 30,
    }
    assert all(each.cost_nano == each.tokens // 15 * 700 for each in database.spent((day, month), SUBJECTS))


def test_old_usage_is_removed_and_a_long_silent_writer_forgotten(open_database):
    now = HOUR
    database = open_database(usage_days=7, now=lambda: now)
    database.write(batch(1, (replace(ANA, hour=HOUR - 8 * 86_400), COUNTS), (ANA, COUNTS)))
    assert total(database) == COUNTS
    now = HOUR + (WRITER_DAYS + 1) * 86_400
    database.write(batch(1, (replace(ANA, hour=now), COUNTS), writer="later"))
    assert [key.hour for key, _ in database.usage(replace(ALL, end=now + 1))] == [now]


def test_keys_are_added_rotated_and_revoked(open_database):
    database, other = open_database(now=lambda: 100.0), open_database(now=lambda: 100.0)
    assert database.keys(-1).keys == ()
    added, revision = database.change_key(AddKey(stored(team="research")))
    assert other.keys(-1).keys == (added,)
    assert other.keys(revision) is None
    second = Secret("b" * 64, "fl-b")
    rotated, later = other.change_key(RotateKey(added.id, second, 900.0))
    assert later > revision
    assert [secret.expires_at for secret in rotated.secrets] == [900.0, None]
    third, _ = database.change_key(RotateKey(added.id, Secret("c" * 64, "fl-c"), 800.0))
    assert [secret.expires_at for secret in third.secrets] == [800.0, 800.0, None]
    database.change_key(RevokeKey(added.id, 100.0))
    (revoked,) = other.keys(-1).keys
    assert not revoked.is_valid(100.0)
    for change in (RevokeKey(added.id, 101.0), RotateKey(added.id, second, 1.0), RevokeKey("key-0", 1.0)):
        with pytest.raises(NotFound):
            database.change_key(change)
    with pytest.raises(InvalidRequest):
        database.change_key(AddKey(stored()))


def test_budgets_are_set_replaced_and_removed(open_database):
    database, other = open_database(), open_database()
    first = database.change_budget(SetBudget("team:research", Budget(tokens_per_day=5)))
    assert other.keys(-1).budgets == {"team:research": Budget(tokens_per_day=5)}
    assert other.keys(first) is None
    second = other.change_budget(SetBudget("team:research", Budget(cost_per_month=0.1)))
    other.change_budget(SetBudget("user:portal/ana", Budget(tokens_per_month=7)))
    assert second > first
    found = database.keys(first)
    assert found.budgets == {
        "team:research": Budget(cost_per_month=0.1),
        "user:portal/ana": Budget(tokens_per_month=7),
    }
    other.change_budget(SetBudget("team:research", None))
    assert list(database.keys(found.revision).budgets) == ["user:portal/ana"]
    with pytest.raises(NotFound):
        database.change_budget(SetBudget("team:research", None))


def test_minutes_are_counted_beside_hours_and_kept_for_two_days(open_database):
    now = HOUR
    database = open_database(usage_days=7, now=lambda: now)
    rows = [(replace(ANA, minute=minute), COUNTS) for minute in (0, 1, 59)]
    database.write(batch(1, *rows, (ANA, COUNTS)))  # the last one by the hour only
    minutes = UsageQuery(start=HOUR, end=HOUR + 3600, width_s=60)
    assert [(key.at, counts) for key, counts in database.usage(minutes)] == [
        (HOUR, COUNTS),
        (HOUR + 60, COUNTS),
        (HOUR + 59 * 60, COUNTS),
    ]
    assert total(database).requests == 4
    now = HOUR + MINUTES_DAYS * 86_400 + 3600
    database.write(batch(2, (replace(ANA, hour=now, minute=3), COUNTS)))
    assert database.usage(minutes) == []
    assert total(database).requests == 4, "hours are kept longer"


def test_batches_are_counted_apart(open_database):
    database = open_database()
    line = replace(ANA, batch=True)
    database.write(batch(1, (ANA, COUNTS), (line, COUNTS), (line, COUNTS)))
    groups = replace(ALL, group_by=("batch",))
    assert [(key.batch, counts.requests) for key, counts in database.usage(groups)] == [(False, 1), (True, 2)]
    assert [key.batch for key, _ in database.usage(replace(groups, filters={"batch": (1,)}))] == [True]
    assert database.spent(periods_at(HOUR), ["user:ana"])[0].tokens == 45


def test_tokens_that_do_not_count_for_budgets_are_not_spent(open_database):
    database = open_database()
    database.write(batch(1, (ANA, replace(COUNTS, budget_tokens=7, cost_nano=0))))
    assert [each.tokens for each in database.spent(periods_at(HOUR), ["user:ana"])] == [7, 7]


def test_store_of_the_first_schema_keeps_its_usage(open_database):
    database = open_database()
    database.write(batch(1))
    with database.transaction() as cursor:
        for statement in (
            "ALTER TABLE fairlead_usage DROP COLUMN budget_tokens",
            (
                "CREATE TABLE old AS SELECT hour, key_id, user_id, team, model, route, outcome, requests, "
                "prompt_tokens, cached_tokens, generated_tokens, seat_ms, wait_ms, cost_nano "
                "FROM fairlead_usage"
            ),
            "DROP TABLE fairlead_usage",
            "ALTER TABLE old RENAME TO fairlead_usage",
            "DROP TABLE fairlead_minutes",
            "DROP TABLE fairlead_budgets",
            "UPDATE fairlead_meta SET value = 1 WHERE name = 'schema'",
        ):
            cursor.execute(statement)
    later = open_database()
    assert total(later) == COUNTS
    later.write(batch(2))
    assert total(later) == COUNTS + COUNTS
    assert total(open_database()).requests == 2


def test_concurrent_changes_and_batches_of_several_writers_are_all_kept(open_database):
    databases = [open_database(now=lambda: 100.0) for _ in range(4)]
    databases[0].change_key(AddKey(stored()))
    failures = []

    def work(number: int) -> None:
        try:
            for turn in range(1, 6):
                databases[number].write(batch(turn, writer=f"w{number}"))
                secret = Secret(f"{number}{turn}".zfill(64), "fl")
                databases[number].change_key(RotateKey(stored().id, secret, 200.0 + turn))
        except StoreUnavailable as error:
            failures.append(error.reason)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert total(databases[0]).requests == 20
    (key,) = databases[0].keys(-1).keys
    assert len(key.secrets) == 21


def test_store_of_a_later_version_is_refused(open_database):
    database = open_database()
    database.keys(-1)
    with database.transaction() as cursor:
        cursor.execute(f"UPDATE fairlead_meta SET value = {SCHEMA + 1} WHERE name = 'schema'")
    with pytest.raises(StoreUnavailable) as caught:
        open_database().keys(-1)
    assert "later version" in caught.value.reason


def test_another_connection_of_a_process_leaves_the_locks_of_the_first_to_it(tmp_path):
    """Without them another process takes itself for the last one, and removes what is not in the file yet."""
    path = tmp_path / "fairlead.db"
    first = Sqlite(path).connect()
    first.execute("CREATE TABLE numbers (number)")
    second = Sqlite(path).connect()
    read = f"import sqlite3; c = sqlite3.connect({str(path)!r}); "
    read += "print(c.execute('SELECT COUNT(*) FROM numbers').fetchone()[0]); c.close()"
    for number in range(3):
        first.execute("INSERT INTO numbers VALUES (?)", (number,))
        shown = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
        assert int(shown.stdout) == number + 1
    first.close()
    second.close()
