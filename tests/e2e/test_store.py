"""Real servers with a store: killed at any time, or with a store that goes away under load."""

import contextlib
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.real_server import RealServer, configured, real_server, until
from fairlead.store.database import Database
from fairlead.store.sqlite import Sqlite
from store.databases import PostgresServer, start_postgres

FRONTS = (1, 2)
ADMIN = "sk-admin"
KEYS, BUDGETS = "/v1/organization/api_keys", "/v1/organization/budgets"
BODY = {"prompt": "What is Fairlead?", "max_tokens": 4, "temperature": 0}


def arguments(folder: Path, store: object, fronts: int, **more: object) -> tuple[str, ...]:
    keys = [
        {"key": ADMIN, "user": "ada", "role": "admin"},
        {"key": "sk-ana", "user": "ana", "team": "research"},
    ]
    settings = {"fronts": fronts, "apiKeys": keys, **more}
    return (*configured(folder, {}, **settings), "--store", str(store))


def ask(server: RealServer, key: str = "sk-ana") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60)


def counted(store: Path) -> dict[str, int]:
    """Return the sums of all usage in a file."""
    with contextlib.closing(sqlite3.connect(store)) as connection:
        row = connection.execute(
            "SELECT COALESCE(SUM(requests), 0), COALESCE(SUM(prompt_tokens), 0), "
            "COALESCE(SUM(generated_tokens), 0) FROM fairlead_usage"
        ).fetchone()
    return dict(zip(("requests", "prompt", "generated"), row, strict=True))


class Changes(threading.Thread):
    """Makes keys, rotates and revokes them, and sets budgets, until the server does not answer any more.

    With fronts, the last answer may be a refusal: the dispatcher has ended before its front.

    `valid`, `revoked`: values of keys for which the server has acknowledged this. `limit`: the budget that it
    has acknowledged last; `asked`: the one that may be in force in its place.
    """

    def __init__(self, server: RealServer, number: int) -> None:
        super().__init__(daemon=True)
        self.valid: list[str] = []
        self.revoked: list[str] = []
        self.limit = self.asked = 0
        self._number = number
        self._http = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60
        )

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                self._change()

    def _change(self) -> None:
        self.asked = self.limit + 1
        budget = {"team": f"ops{self._number}", "tokens_per_day": self.asked}
        self._http.post(BUDGETS, json=budget).raise_for_status()
        self.limit = self.asked
        made = [self._key(KEYS, name="ben") for _ in range(2)]
        self._key(f"{KEYS}/{made[0]['id']}/rotate")
        self.valid.remove(made[1]["value"])
        self._http.delete(f"{KEYS}/{made[1]['id']}").raise_for_status()
        self.revoked.append(made[1]["value"])

    def _key(self, path: str, **body: str) -> dict[str, str]:
        """Return a new key, which is valid as soon as the server has answered."""
        key: dict[str, str] = self._http.post(path, json=body).raise_for_status().json()
        self.valid.append(key["value"])
        return key

    def check(self, store: Path) -> None:
        """Check that the store has all that was acknowledged."""
        self.join(60)
        database = Database(Sqlite(store), usage_days=400)
        keys = database.keys(-1)
        database.close()
        assert keys is not None
        found = {secret.sha256: key for key in keys.keys for secret in key.secrets}
        for value in self.valid:
            assert found[hashlib.sha256(value.encode()).hexdigest()].is_valid(time.time())
        for value in self.revoked:
            assert not found[hashlib.sha256(value.encode()).hexdigest()].is_valid(time.time())
        assert keys.budgets[f"team:ops{self._number}"].tokens_per_day in (self.limit, self.asked)


class Load(threading.Thread):
    """Asks a server until `end` is called. `answers` are the usages, `failures` the errors."""

    def __init__(self, server: RealServer) -> None:
        super().__init__(daemon=True)
        self.answers: list[dict[str, int]] = []
        self.failures: list[object] = []
        self._server = server
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                answer = ask(self._server)
            except httpx.HTTPError as error:
                self.failures.append(error)
                return
            if answer.status_code == 200:
                self.answers.append(answer.json()["usage"])
            else:
                self.failures.append(answer.text)

    def await_answers(self, more: int = 3) -> None:
        """Wait until it has got so many more answers."""
        enough = len(self.answers) + more
        until(lambda: len(self.answers) >= enough or self.failures)

    def end(self) -> None:
        self._ends.set()
        self.join(60)


@contextlib.contextmanager
def loaded(server: RealServer, threads: int = 3) -> Iterator[list[Load]]:
    loads = [Load(server) for _ in range(threads)]
    for load in loads:
        load.start()
    try:
        yield loads
    finally:
        for load in loads:
            load.end()


def sums(loads: list[Load]) -> dict[str, int]:
    usages = [usage for load in loads for usage in load.answers]
    return {
        "requests": len(usages),
        "prompt": sum(usage["prompt_tokens"] for usage in usages),
        "generated": sum(usage["completion_tokens"] for usage in usages),
    }


@pytest.mark.parametrize("fronts", FRONTS)
def test_usage_is_in_the_store_when_the_server_has_stopped(tmp_path, fronts):
    store = tmp_path / "data" / "fairlead.db"
    with real_server(*arguments(tmp_path, store, fronts)) as server:
        with loaded(server) as loads:
            until(lambda: sums(loads)["requests"] >= 20)
        assert [load.failures for load in loads] == [[], [], []]
        assert server.stop() == 0
    assert counted(store) == sums(loads)
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    with contextlib.closing(sqlite3.connect(store)) as connection:
        found = connection.execute("SELECT DISTINCT user_id, team, model, route, outcome FROM fairlead_usage")
        assert found.fetchall() == [("ana", "research", "fairlead-demo", "/v1/completions", "success")]


def kill_all(server: RealServer) -> None:
    """Kill the server's process, and wait until its children have ended with it."""
    children = server.child_pids()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def written(server: RealServer) -> int:
    """Return how many requests are in the store, as the server says."""
    metrics = httpx.get(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60
    ).text
    (found,) = re.findall(r"^fairlead_usage_jobs_written_total (\S+)$", metrics, re.MULTILINE)
    return int(float(found))


def check_kill(folder: Path, fronts: int, number: int, before: dict[str, int]) -> dict[str, int]:
    """Kill a server under load at a time that depends on `number`; return what is counted then.

    Nothing is counted twice: never more than was asked for. Nothing is lost that the server calls written.
    Keys and budgets are changed meanwhile, and each change that was acknowledged is there.
    """
    store = folder / "fairlead.db"
    with real_server(*arguments(folder, store, fronts)) as server:
        changes = Changes(server, number)
        with loaded(server) as loads:
            changes.start()
            until(lambda: changes.revoked and written(server) >= 3)
            time.sleep(number * 0.137 % 2)
            early = written(server)
            assert changes.is_alive(), "a change was refused"
            kill_all(server)
        asked = sum(len(load.answers) + 1 for load in loads)
    changes.check(store)
    now = counted(store)
    assert early <= now["requests"] - before["requests"] <= asked
    per_request = {load["prompt_tokens"] for each in loads for load in each.answers}
    assert now["prompt"] - before["prompt"] <= (now["requests"] - before["requests"]) * max(per_request)
    return now


@pytest.mark.parametrize("fronts", FRONTS)
def test_killed_server_counts_nothing_twice_and_loses_no_acknowledged_change(tmp_path, fronts):
    before = dict.fromkeys(("requests", "prompt", "generated"), 0)
    for number in range(2):
        before = check_kill(tmp_path, fronts, number, before)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fronts", FRONTS)
def test_server_killed_many_times_counts_nothing_twice_and_loses_no_acknowledged_change(tmp_path, fronts):
    before = dict.fromkeys(("requests", "prompt", "generated"), 0)
    for number in range(100):
        before = check_kill(tmp_path, fronts, number, before)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = start_postgres()
    yield server
    server.remove()


def check_outage(folder: Path, postgres: PostgresServer, fronts: int, outage_s: float) -> None:
    """Stop PostgreSQL under load, hanging first and then dead: no request notices, and all are counted.

    A request that waited for it would have no answer before it runs again.
    """
    import psycopg

    with real_server(*arguments(folder, postgres.url, fronts)) as server:
        with loaded(server) as loads:
            until(lambda: sums(loads)["requests"] >= 10)
            postgres.pause()
            time.sleep(outage_s / 2)
            for load in loads:
                load.await_answers()
            postgres.resume()
            postgres.stop()
            time.sleep(outage_s / 2)
            for load in loads:
                load.await_answers()
            postgres.start()
            time.sleep(1)
        assert [load.failures for load in loads] == [[], [], []]
        until(lambda: written(server) == sums(loads)["requests"], within_s=90)
        assert server.stop() == 0
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute(
            "SELECT SUM(requests), SUM(prompt_tokens), SUM(generated_tokens) FROM fairlead_usage"
        ).fetchone()
    assert dict(zip(("requests", "prompt", "generated"), map(int, row), strict=True)) == sums(loads)


@pytest.mark.parametrize("fronts", FRONTS)
def test_no_request_notices_that_postgresql_is_away(tmp_path, postgres, fronts):
    check_outage(tmp_path, postgres, fronts, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("fronts", FRONTS)
def test_no_request_notices_that_postgresql_is_away_for_a_minute(tmp_path, postgres, fronts):
    check_outage(tmp_path, postgres, fronts, 60)


@pytest.mark.parametrize("fault", ["locked", "a folder", "not a database", "read-only"])
def test_server_answers_although_its_store_cannot_be_used(tmp_path, fault):
    store = tmp_path / "fairlead.db"
    holder = None
    match fault:
        case "locked":
            holder = sqlite3.connect(store, isolation_level=None)
            holder.execute("PRAGMA journal_mode = WAL")
            holder.execute("BEGIN IMMEDIATE")
        case "a folder":
            store.mkdir()
        case "not a database":
            store.write_bytes(b"no database" * 1000)
        case "read-only":
            store = Path("/proc/fairlead.db")
    with real_server(*arguments(tmp_path, store, 1)) as server:
        assert ask(server).status_code == 200
        metrics = server.http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"}).text
        assert "fairlead_usage_jobs_waiting 1.0" in metrics
        until(lambda: any("store not read" in line for line in server.log))
        if holder is not None:
            holder.execute("ROLLBACK")
            holder.close()
            until(lambda: counted(store)["requests"] == 1 if _has_tables(store) else False)
        server.stop()
        log = "\n".join(server.log)
    assert ("usage lost" in log) == (fault != "locked")


def _has_tables(store: Path) -> bool:
    with contextlib.closing(sqlite3.connect(store)) as connection:
        return bool(
            connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'fairlead_usage'").fetchall()
        )


# Keys ------------------------------------------------------------------------------------------------


def fairlead(server: RealServer, *words: str, key: str = ADMIN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", *words, "--url", server.url]
    return subprocess.run(
        command,
        env=os.environ | {"FAIRLEAD_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def statuses(server: RealServer, value: str) -> set[int]:
    """Ask for the models over many connections, which reach all fronts."""
    headers = {"Authorization": f"Bearer {value}", "Connection": "close"}
    return {httpx.get(f"{server.url}/v1/models", headers=headers).status_code for _ in range(16)}


@pytest.mark.parametrize("fronts", FRONTS)
def test_acknowledged_changes_of_keys_are_in_force_everywhere_and_outlive_a_kill(tmp_path, fronts):
    where = arguments(tmp_path, tmp_path / "fairlead.db", fronts)
    with real_server(*where) as server:
        made = fairlead(
            server, "keys", "add", "ben", "--team", "ops", "--tokens-per-day", "20", "--expires", "90d"
        )
        value = made.stdout.strip()
        assert statuses(server, value) == {200}, made.stderr
        key_id = made.stderr.split(":")[0]
        rotated = fairlead(server, "keys", "rotate", key_id).stdout.strip()
        assert statuses(server, value) == statuses(server, rotated) == {200}
        gone = fairlead(server, "keys", "add", "gone")
        assert fairlead(server, "keys", "revoke", gone.stderr.split(":")[0]).returncode == 0
        assert statuses(server, gone.stdout.strip()) == {401}
        spent = [ask(server, value).status_code for _ in range(4)]
        assert (spent[0], spent[-1]) == (200, 429)
        time.sleep(3)  # until its usage is written
        kill_all(server)
    with real_server(*where) as server:
        assert statuses(server, value) == statuses(server, rotated) == {200}
        assert statuses(server, gone.stdout.strip()) == {401}
        assert ask(server, rotated).status_code == 429, "what was spent outlives the kill, for both values"
        shown = fairlead(server, "keys", "list", "--json").stdout
        assert [key["name"] for key in json.loads(shown)] == ["ben"]
        used = json.loads(fairlead(server, "usage", "--by", "team", "--days", "2", "--json").stdout)
        assert {row["team"]: row["num_model_requests"] for row in used}["ops"] >= 1
        refused = fairlead(server, "keys", "list", key=value)
        assert (refused.returncode, "role admin" in refused.stderr) == (1, True)


LITELLM = {
    "keys": [
        {
            "token": hashlib.sha256(b"sk-litellm-ana").hexdigest(),
            "key_name": "sk-...-ana",
            "key_alias": "ana",
            "team_id": "research",
            "models": ["all-proxy-models"],
            "max_budget": 5.0,
            "budget_duration": "30d",
            "rpm_limit": 100,
            "expires": "2099-01-01T00:00:00Z",
        },
        {"token": hashlib.sha256(b"sk-litellm-old").hexdigest(), "expires": "2020-01-01T00:00:00Z"},
        {"token": hashlib.sha256(b"sk-litellm-bad").hexdigest(), "blocked": True},
    ]
}


def test_keys_of_litellm_stay_valid(tmp_path):
    export = tmp_path / "keys.json"
    export.write_text(json.dumps(LITELLM))
    with real_server(*arguments(tmp_path, tmp_path / "fairlead.db", 1)) as server:
        first = fairlead(server, "keys", "import", str(export))
        assert first.stdout.splitlines() == ["ana: added", "1 keys added"], first.stderr
        assert fairlead(server, "keys", "import", str(export)).stdout.splitlines()[-1] == "0 keys added"
        assert statuses(server, "sk-litellm-ana") == {200}
        assert statuses(server, "sk-litellm-old") == statuses(server, "sk-litellm-bad") == {401}
        shown = fairlead(server, "keys", "list", "--team", "research").stdout
        assert "sk-...-ana" in shown
        for text in ("[]x", '{"keys": [{"token": "sk-plain"}]}', '{"keys": ["abc"]}'):
            export.write_text(text)
            refused = fairlead(server, "keys", "import", str(export))
            assert (refused.returncode, "keys.json" in refused.stderr) == (1, True)
