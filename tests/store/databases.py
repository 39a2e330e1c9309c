"""Databases for tests: SQLite in a folder, and a PostgreSQL server of the test's own if one is installed."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

# Statements that add a trigger, which fails as a value does that the database cannot hold.
REFUSE_LARGE = {
    "sqlite": """CREATE TRIGGER refuse BEFORE INSERT ON fairlead_responses WHEN NEW.request_id = 'large'
        BEGIN SELECT zeroblob(2000000000); END""",
    "postgres": """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.request_id = 'large' THEN RAISE EXCEPTION 'too large' USING ERRCODE = '22001'; END IF;
        RETURN NEW; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON fairlead_responses FOR EACH ROW EXECUTE FUNCTION refuse()""",
}
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
START_S = 30


class PostgresServer:
    """A PostgreSQL server on a free port, in a folder of its own; `stop` and `start` as often as wanted."""

    def __init__(self) -> None:
        self._bin = BINARIES[-1]
        # Not below pytest's folder, which only its user can enter: PostgreSQL refuses to run as root.
        self.folder = Path(tempfile.mkdtemp(prefix="fairlead-postgres-"))
        self.user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            shutil.chown(self.folder, self.user)
        self._options = {"user": self.user} if os.geteuid() == 0 else {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "-D", self.folder / "data", "-U", "fairlead", "-A", "trust", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://fairlead@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(self._bin / "postgres", "-D", self.folder / "data", "-p", str(self.port)),
                *("-c", "listen_addresses=127.0.0.1", "-k", self.folder, "-c", "shared_buffers=16MB"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **self._options,
        )
        deadline = time.monotonic() + START_S
        while self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port), check=False).returncode:
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay open, and nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            os.kill(pid, number)

    def _run(
        self, program: str, *arguments: object, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        words = [self._bin / program, *map(str, arguments)]
        return subprocess.run(
            words, check=check, capture_output=True, cwd=self.folder, timeout=START_S, **self._options
        )


def start_postgres() -> PostgresServer:
    """Return a running server; skip the test if PostgreSQL or its driver is not installed."""
    pytest.importorskip("psycopg")
    if not BINARIES:
        pytest.skip("PostgreSQL is not installed")
    server = PostgresServer()
    server.start()
    return server


def refuse_large(store: object, kind: str) -> None:
    """Add a trigger that refuses responses whose request has the id `large`."""
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(str(store), isolation_level=None)) as connection:
            connection.execute(REFUSE_LARGE[kind])
    else:
        import psycopg

        with psycopg.connect(str(store), autocommit=True) as connection:
            connection.execute(REFUSE_LARGE[kind])
