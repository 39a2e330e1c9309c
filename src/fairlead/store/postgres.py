"""PostgreSQL as the store, for servers on several machines. Needs the extra `postgres` (psycopg)."""

from typing import Any

from fairlead.base.config import ConfigError

CONNECT_S = 5
STATEMENT_MS = 10_000
_SILENCE_MS = 10_000  # after which a connection counts as broken although nothing has closed it
_ADVISORY_LOCK = 0x0FA1_41EA  # any number that other programs in the database do not use


class Postgres:
    """A database at a URL, `postgresql://USER:PASSWORD@HOST/NAME`. Raises `ConfigError` without psycopg."""

    begin = "BEGIN"

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise ConfigError(f"store: PostgreSQL needs fairlead[postgres]: {error}") from error
        self._psycopg = psycopg
        self._url = url
        self.errors: tuple[type[Exception], ...] = (psycopg.Error, OSError)
        self.data_errors: tuple[type[Exception], ...] = (psycopg.DataError,)

    def connect(self) -> Any:
        """Return a connection on which nothing takes longer than `STATEMENT_MS`."""
        return self._psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            options=f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}",
            keepalives_idle=CONNECT_S,
            keepalives_interval=CONNECT_S,
            keepalives_count=1,
            tcp_user_timeout=_SILENCE_MS,
            application_name="fairlead",
        )

    def statement(self, text: str) -> str:
        """Return the statement with psycopg's marks."""
        return text.replace("?", "%s")

    def prepare(self, cursor: Any) -> None:
        """Wait for other processes that make the tables: two could not make one at a time."""
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
