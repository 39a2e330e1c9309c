"""One suite for SQLite and PostgreSQL: kept responses, who finds them, and their bounds."""

import threading

import pytest
from msgspec.structs import replace

from fairlead.base.errors import InvalidRequest
from fairlead.store import kept
from fairlead.store.kept import ROW_BYTES, KeptChange, KeptRow, KeptTables

NOW = 1_800_000_000
ANA = KeptRow(
    "resp_1",
    "key-ana",
    "ana",
    request_id="r1",
    input=b'"hello"',
    document=b'{"id":"resp_1"}',
    has_ended=True,
    expires=NOW + 60,
)
MEGA = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = float(NOW)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_tables(open_database, clock):
    """Return a function that opens another connection, as another process does."""

    def open_one(max_bytes: int = MEGA) -> KeptTables:
        return KeptTables(open_database(), max_bytes=max_bytes, keep_s=60, now=clock)

    return open_one


def new(row: KeptRow, *events: bytes) -> KeptChange:
    return KeptChange(row, is_new=True, events=events)


def size_of(tables: KeptTables) -> int:
    """Return the size that the store has counted, after comparing it with the rows."""
    with tables._database.transaction() as cursor:
        cursor.execute("SELECT COALESCE(SUM(size), 0) FROM fairlead_responses")
        (rows,) = cursor.fetchone()
        cursor.execute("SELECT COALESCE(SUM(size), 0) FROM fairlead_response_sizes")
        (tenants,) = cursor.fetchone()
        cursor.execute("SELECT value FROM fairlead_meta WHERE name = 'responses'")
        (total,) = cursor.fetchone()
    assert rows == tenants == total
    return int(total)


def test_response_is_found_by_its_owner_at_every_connection(open_tables):
    assert open_tables().write([new(ANA)]) == []
    other = open_tables()
    found = other.find("resp_1", "key-ana")
    assert found == replace(ANA, tenant=found.tenant)
    assert other.find("resp_1", "key-ben") is None
    assert other.find("resp_2", "key-ana") is None


@pytest.mark.parametrize("name", ["nul \0", "surrogate \ud800", "'; DROP TABLE fairlead_responses; --", ""])
def test_any_name_may_own_a_response(open_tables, name):
    row = replace(ANA, owner=name, tenant=name)
    open_tables().write([new(row)])
    assert open_tables().find("resp_1", name).document == ANA.document


@pytest.mark.parametrize("name", ["nul \0", "surrogate \ud800", "\u20ac", ""])
def test_name_that_is_no_id_is_not_found(open_tables, name):
    tables = open_tables()
    assert tables.find(name, "key-ana") is None
    assert tables.chain(name, "key-ana", MEGA, 60) == []
    assert tables.change(name, "key-ana", lambda document: document, 60) is None


def test_any_text_may_be_kept(open_tables):
    row = replace(ANA, input='"\0 \U0001f600"'.encode(), document=b'{"text": "\\u0000 \\ud800 \xff\0"}')
    open_tables().write([new(row, b"event \0 \xff")])
    other = open_tables()
    found = other.find("resp_1", "key-ana")
    assert (found.input, found.document) == (row.input, row.document)
    assert other.events("resp_1", 0) == [b"event \0 \xff"]


@pytest.mark.parametrize("large", ["input", "document", "events"])
def test_response_that_is_too_large_for_a_statement_is_refused_before_it(open_tables, monkeypatch, large):
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    tables = open_tables()
    tables.write([new(replace(ANA, id="resp_0"))])
    events = (b"x" * 101,) if large == "events" else ()
    row = ANA if events else replace(ANA, **{large: b"x" * 101})
    with pytest.raises(InvalidRequest, match="at most 100 of one"):
        tables.write([new(row, *events), new(replace(ANA, id="resp_2"))])
    assert [tables.find(f"resp_{number}", "key-ana") is not None for number in range(3)] == [
        True,
        False,
        False,
    ]
    with pytest.raises(InvalidRequest, match="at most 100 of one"):
        tables.change("resp_0", "key-ana", lambda document: document * 50, 60)
    assert tables.find("resp_0", "key-ana").document == ANA.document


def test_response_without_an_object_is_not_found(open_tables):
    tables = open_tables()
    tables.write([new(replace(ANA, document=b"", has_ended=False))])
    assert tables.find("resp_1", "key-ana") is None
    assert tables.chain("resp_1", "key-ana", MEGA, 60) == []


def test_change_of_a_removed_response_is_reported_and_does_not_bring_it_back(open_tables):
    tables, other = open_tables(), open_tables()
    running = replace(ANA, has_ended=False)
    tables.write([new(running)])
    assert other.remove("resp_1", "key-ben") is False
    assert other.remove("resp_1", "key-ana") is True
    assert tables.write([KeptChange(ANA, is_new=False)]) == ["resp_1"]
    assert tables.find("resp_1", "key-ana") is None
    assert size_of(tables) == 0


def test_events_are_read_from_any_index_on(open_tables):
    tables = open_tables()
    running = replace(ANA, has_ended=False, keeps_events=True)
    tables.write([new(running, b"0", b"1")])
    tables.write([KeptChange(running, is_new=False, first=2, events=(b"2",))])
    # Sent again with one more, because the answer was lost.
    tables.write([KeptChange(ANA, is_new=False, first=2, events=(b"2", b"3"))])
    events = [b"0", b"1", b"2", b"3"]
    for first in range(6):
        assert tables.events("resp_1", first) == events[first:], first
    assert tables.events("resp_2", 0) == []


def test_size_is_that_of_the_rows_after_any_change(open_tables):
    tables = open_tables()
    running = replace(ANA, has_ended=False, keeps_events=True)
    tables.write([new(running, b"0" * 100), new(replace(ANA, id="resp_2", tenant="ben"))])
    assert size_of(tables) > 2 * ROW_BYTES + 100
    tables.write([KeptChange(replace(running, document=b"x" * 5000), is_new=False)])
    before = size_of(tables)
    tables.write([KeptChange(replace(running, document=b"x" * 6000), is_new=False)])
    assert size_of(tables) == before + 1000
    tables.write([new(ANA)])  # a row that is there already
    tables.remove("resp_1", "key-ana")
    tables.remove("resp_2", "key-ana")
    assert size_of(tables) == 0
    assert tables.events("resp_1", 0) == []


def test_tenant_with_the_most_bytes_loses_its_oldest_ended_response(open_tables):
    tables = open_tables(10 * ROW_BYTES)
    large = b"x" * ROW_BYTES
    tables.write([new(replace(ANA, id="little", tenant="ben", expires=NOW + 1))])
    tables.write([new(replace(ANA, id="running", has_ended=False, document=large, expires=NOW + 1))])
    for number in range(6):
        tables.write([new(replace(ANA, id=f"large{number}", document=large, expires=NOW + 10 + number))])
    assert size_of(tables) <= 10 * ROW_BYTES
    assert tables.find("little", "key-ana") is not None
    assert tables.find("running", "key-ana") is not None
    kept = [number for number in range(6) if tables.find(f"large{number}", "key-ana")]
    assert kept == list(range(6 - len(kept), 6))
    assert 0 < len(kept) < 6


def test_response_that_exceeds_the_bound_alone_is_not_kept(open_tables):
    tables = open_tables(2 * ROW_BYTES)
    tables.write([new(replace(ANA, document=b"x" * 3 * ROW_BYTES))])
    assert tables.find("resp_1", "key-ana") is None
    assert size_of(tables) == 0


def test_expired_responses_are_not_found_and_removed_later(open_tables, clock):
    tables = open_tables()
    running = replace(ANA, id="running", has_ended=False, expires=NOW + 10)
    tables.write([new(ANA), new(running)])
    clock.now += 61
    assert tables.find("resp_1", "key-ana") is None
    assert tables.find("running", "key-ana") is not None  # its process may have gone: the reader says so
    tables.write([])
    assert size_of(tables) == ROW_BYTES + len(ANA.input) + len(ANA.document)
    clock.now += 61
    tables.write([])
    assert size_of(tables) == 0


def test_chain_is_the_latest_first_and_renews_all(open_tables, clock):
    tables = open_tables()
    rows = [replace(ANA, id=f"resp_{n}", previous=f"resp_{n - 1}" if n else "") for n in range(4)]
    tables.write([new(row) for row in rows])
    clock.now += 50
    found = tables.chain("resp_3", "key-ana", MEGA, 60)
    assert [row.id for row in found] == ["resp_3", "resp_2", "resp_1", "resp_0"]
    clock.now += 50
    assert tables.find("resp_0", "key-ana") is not None
    tables.remove("resp_1", "key-ana")
    assert [row.id for row in tables.chain("resp_3", "key-ana", MEGA, 60)] == ["resp_3", "resp_2"]
    assert tables.chain("resp_3", "key-ben", MEGA, 60) == []
    assert len(tables.chain("resp_3", "key-ana", 1, 60)) == 1


def test_processes_that_write_at_the_same_time_count_right(open_tables):
    failures = []

    def write(tables: KeptTables, writer: int) -> None:
        try:
            for number in range(20):
                row = replace(ANA, id=f"resp_{writer}_{number}", tenant=f"t{number % 3}")
                tables.write([new(row)])
                tables.chain(row.id, "key-ana", MEGA, 60)
                if number % 2:
                    tables.remove(row.id, "key-ana")
        except Exception as error:  # noqa: BLE001
            failures.append(getattr(error, "reason", error))

    opened = [open_tables(30 * ROW_BYTES) for _ in range(3)]
    threads = [threading.Thread(target=write, args=(tables, n)) for n, tables in enumerate(opened)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert 0 < size_of(opened[0]) <= 30 * ROW_BYTES
