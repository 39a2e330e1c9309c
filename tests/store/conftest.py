from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.store.database import Database
from fairlead.store.opening import engine_of
from store.databases import PostgresServer, start_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = start_postgres()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path: Path) -> str:
    """Return the setting `store` of an empty database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "folder" / "fairlead.db")
    import psycopg

    server = request.getfixturevalue("postgres")
    name = f"t{abs(hash(request.node.nodeid))}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url.removesuffix("postgres") + name


@pytest.fixture
def open_database(url: str) -> Iterator[object]:
    """Return a function that opens another connection to the same database."""
    opened = []

    def open_one(**options: object) -> Database:
        database = Database(engine_of(url), **{"usage_days": 400, **options})
        opened.append(database)
        return database

    yield open_one
    for database in opened:
        database.close()
