"""Requests, people and times of a real server, in one process and with several fronts."""

import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from e2e.real_server import configured, real_server, until
from e2e.slow_motion import stopped

LONG = {"prompt": "Count from 1 to 90.", "max_tokens": 900, "ignore_eos": True}
TEAMS = {"ana": "red", "ben": "blue", "carl": "green"}
KEYS = [
    *({"key": f"sk-{name}", "user": name, "team": team} for name, team in TEAMS.items()),
    {"key": "sk-olga", "user": "olga", "role": "operator"},
]


def get(server, user, path, **query):
    headers = {"Authorization": f"Bearer sk-{user}"}
    answer = httpx.get(f"{server.url}{path}", params=query, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Asking(threading.Thread):
    """A request in a thread, of which `status` is known when it has ended."""

    def __init__(self, server, user):
        super().__init__(daemon=True)
        self.status = 0
        self._server, self._user = server, user
        self.start()

    def run(self):
        headers = {"Authorization": f"Bearer sk-{self._user}", "X-Request-Id": f"by-{self._user}"}
        url = f"{self._server.url}/v1/completions"
        self.status = httpx.post(url, json=LONG, headers=headers, timeout=120).status_code


def engine_of(server):
    """Return the id of the process of the only model."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server.process.pid and b"fairlead.engine.worker.main" in command:
                return int(folder.name)
    raise AssertionError("the model has no process")


@pytest.mark.parametrize("fronts", [1, 2])
def test_everybody_sees_their_own_and_an_operator_all_and_may_cancel(tmp_path, fronts):
    teams = {team: {} for team in TEAMS.values()}
    arguments = configured(tmp_path, {"slots": 1}, fronts=fronts, apiKeys=KEYS, teams=teams, store="none")
    with real_server(*arguments) as server:
        stopping = ExitStack()
        stopping.enter_context(stopped(engine_of(server)))
        first = Asking(server, "ana")
        until(lambda: get(server, "olga", "/v1/requests", state="running")["running"])
        others = [Asking(server, "ben"), Asking(server, "carl")]
        until(lambda: get(server, "olga", "/v1/requests", state="waiting")["waiting"] == 2)
        for _ in range(6):  # at each front
            for user, team in TEAMS.items():
                rows = get(server, user, "/v1/requests")["data"]
                assert [(row["tenant"], row["team"]) for row in rows] == [(user, team)]
                assert [row["tenant"] for row in get(server, user, "/tenants")["data"]] == [user]
                found = get(server, user, "/v1/requests", tenant="carl" if user == "ana" else "ana")
                assert found == {"data": [], "waiting": 0, "running": 0}
            rows = {row["id"]: row for row in get(server, "olga", "/v1/requests")["data"]}
            assert {row["tenant"] for row in rows.values()} == set(TEAMS)
            assert {rows["by-ben"]["position"], rows["by-carl"]["position"]} == {1, 2}
            assert rows["by-ben"]["may_cancel"]
        people = {row["tenant"]: row for row in get(server, "olga", "/tenants")["data"]}
        assert {name: (row["waiting"], row["running"]) for name, row in people.items()} == {
            "ana": (0, 1),
            "ben": (1, 0),
            "carl": (1, 0),
        }
        assert people["ana"]["minute"] == {"part": 1.0, "fair": 0.3333}
        assert people["ben"]["oldest_wait_s"] > 0
        assert get(server, "ana", "/queue")["oldest_wait_s"] > 0

        refused = {"Authorization": "Bearer sk-ben"}
        assert httpx.post(f"{server.url}/v1/requests/by-ana/cancel", headers=refused).status_code == 404
        for name in ("ana", "ben", "carl"):
            operator = {"Authorization": "Bearer sk-olga"}
            url = f"{server.url}/v1/requests/by-{name}/cancel"
            assert httpx.post(url, headers=operator).status_code == 200
        stopping.close()
        began = time.monotonic()
        until(lambda: len(get(server, "olga", "/v1/requests", state="ended")["data"]) == 3)
        assert time.monotonic() - began < 5
        ended = get(server, "olga", "/v1/requests", state="ended")["data"]
        assert {row["outcome"] for row in ended} == {"cancelled"}
        assert [row["tenant"] for row in get(server, "ana", "/v1/requests")["data"]] == ["ana"]
        assert {name: sum(counts) for name, counts in get(server, "ben", "/timings")["outcomes"].items()} == {
            "cancelled": 1
        }
        assert sum(get(server, "olga", "/timings")["outcomes"]["cancelled"]) == 3
        for asking in (first, *others):
            asking.join(30)
            assert asking.status >= 400
