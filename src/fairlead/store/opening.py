"""The store of a configuration."""

from pathlib import Path

from fairlead.base.config import POSTGRES_PREFIXES, Config
from fairlead.store.database import Database, SqlEngine
from fairlead.store.kept import LONGEST_S, KeptResponsesStore, KeptTables
from fairlead.store.postgres import Postgres
from fairlead.store.sqlite import Sqlite
from fairlead.store.store import Store


def store_of(config: Config) -> Store | None:
    """Return the store that is configured; None: there is none. Nothing is opened yet.

    Raises `ConfigError` for PostgreSQL without its driver.
    """
    if config.store is None or not config.has_store:
        return None
    engine = engine_of(config.store)
    writing, reading = (Database(engine, usage_days=config.usage_days) for _ in range(2))
    return Store(writing, reading)


def kept_of(config: Config) -> KeptResponsesStore | None:
    """Return the store of kept responses; None: they are in memory. Raises as `store_of`."""
    settings = config.responses
    if config.store is None or not (config.has_store and settings.store and settings.in_store):
        return None
    engine = engine_of(config.store)
    writing, reading = (
        KeptTables(
            Database(engine, usage_days=config.usage_days),
            max_bytes=settings.store_bytes,
            keep_s=int(min(settings.ttl_s, LONGEST_S)),
        )
        for _ in range(2)
    )
    return KeptResponsesStore(writing, reading)


def engine_of(store: str) -> SqlEngine:
    """Return the database of the setting `store`. Raises `ConfigError` as `Postgres` does."""
    if store.startswith(POSTGRES_PREFIXES):
        return Postgres(store)
    return Sqlite(Path(store).expanduser())
