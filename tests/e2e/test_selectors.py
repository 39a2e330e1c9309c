"""llama-swap's own example configuration on a real server, with stubs as commands.

Some of the models that the example names but does not define are added. Its peers are unreachable.
"""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from router.fleet.running_fleet import STUB, free_port
from server.configfile.test_llama_swap_example import ENVIRONMENT, FILE

KEY = {"Authorization": "Bearer sk-hunter2"}
COMMAND = " ".join((*STUB, "${PORT}"))
# A command that llama-swap would refuse, because nothing in it states the port.
UNSTARTED_LOAD = f'sh -c "exec {" ".join(STUB)} $PORT"'
CHAT = "/v1/chat/completions"


def example(port: int) -> dict[str, Any]:
    """Return the example with stubs as commands and without addresses outside this machine."""
    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    document["startPort"] = port
    document["queue"] = {"timeout": "1h", "starvationBound": "1h"}
    models = document["models"]
    models["gpt-oss-120b"] |= {
        "ttl": 0,  # no model is unloaded because the test is slow
        "cmd": COMMAND,
        "proxy": "http://127.0.0.1:${PORT}",
        "checkEndpoint": "/health",
    }
    # One seat each, so that an endless answer blocks the others.
    models["docker-llama"] |= {"cmd": COMMAND, "cmdStop": "kill ${PID}", "concurrencyLimit": 1}
    models["unlisted-model"] |= {"cmd": UNSTARTED_LOAD, "aliases": ["qwen-unlisted"], "concurrencyLimit": 1}
    models |= {name: {"cmd": COMMAND} for name in ("modelA", "modelB", "forever-modelA", "A", "B")}
    for peer in document["peers"].values():
        peer["proxy"] = "http://127.0.0.1:9"
    return document


class SelectorServer:
    """The server, and concurrent clients."""

    def __init__(self, server: RealServer, file: Path) -> None:
        self.server = server
        self.file = file
        self._pool = ThreadPoolExecutor(16)
        server.http.headers.update(KEY)

    def submit_chat(self, model: str, *, endless: bool = False) -> "Future[httpx.Response]":
        """Send a request. An endless answer runs until it is cancelled; use one at a time."""
        body = {"model": model, "messages": [], "stub": {"words": 2, "delay_s": 600.0 * endless}}
        headers = KEY | ({"X-Request-Id": "endless"} if endless else {})
        url = f"{self.server.url}{CHAT}"
        return self._pool.submit(httpx.post, url, json=body, headers=headers, timeout=2 * TIMEOUT_S)

    def cancel(self) -> None:
        """End the endless answer."""
        assert self.server.http.post("/v1/requests/endless/cancel").status_code == 200

    def jobs(self) -> dict[str, str]:
        """Return the state of each model that is loaded or loading."""
        return {each["model"]: each["state"] for each in self.server.http.get("/running").json()}

    def loaded_after(self, model: str) -> str:
        """Let a model answer; return the names of the models loaded then."""
        answer = self.submit_chat(model).result()
        assert answer.status_code == 200, answer.text
        until(lambda: set(self.jobs().values()) == {"ready"})
        return " ".join(sorted(self.jobs()))

    def loaded(self) -> list[str]:
        """Return the model of each load so far."""
        lines = [json.loads(line) for line in self.server.log if '"command ready"' in line]
        return [line["model"] for line in lines]

    def queue(self) -> tuple[int, int]:
        totals = self.server.queue()
        return totals["running"], totals["waiting"]

    def write(self, document: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(document))  # JSON is valid YAML


@pytest.fixture(scope="module")
def selectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SelectorServer]:
    document = example(free_port(20))
    file = tmp_path_factory.mktemp("example") / "config.yaml"
    file.write_text(json.dumps(document))
    with real_server("--config", str(file), "--log-json", environment=ENVIRONMENT) as server:
        opened = SelectorServer(server, file)
        yield opened
        opened._pool.shutdown()


def test_file_is_read_with_a_note_and_its_models_are_listed(selectors: SelectorServer):
    (line,) = [line for line in selectors.server.log if "unlisted-model.cmd" in line]
    assert "its port is in the environment variable PORT" in line
    cards = selectors.server.http.get("/v1/models").json()["data"]
    listed = {card["id"]: card for card in cards}
    assert {"coding-model", "llm-plan", "llama", "gpt-oss-120b"} <= listed.keys()
    assert "unlisted-model" not in listed
    assert (
        listed["coding-model"]["name"],
        listed["coding-model"]["meta"]["llamaswap"]["purpose"],
    ) == ("Coding Model", "coding")


def test_groups_evict_and_selectors_find_what_is_loaded(selectors: SelectorServer):
    assert [
        (model, selectors.loaded_after(model))
        for model in (
            "coding-model",
            "forever-modelA",
            "unlisted-model",
            "coding-model",
            "docker-llama",
            "llm-plan",
            "coding-model",
        )
    ] == [
        ("coding-model", "gpt-oss-120b"),  # nothing is loaded: the first target
        ("forever-modelA", "forever-modelA gpt-oss-120b"),  # persistent, and evicts no other
        ("unlisted-model", "forever-modelA unlisted-model"),  # one at a time of the models without a group
        ("coding-model", "forever-modelA unlisted-model"),  # warm: a target is loaded already
        ("docker-llama", "docker-llama forever-modelA unlisted-model"),  # not exclusive
        ("llm-plan", "forever-modelA gpt-oss-120b"),  # a pin is its first target, loaded or not
        ("coding-model", "forever-modelA gpt-oss-120b"),
    ]


def test_jobs_spill_over_and_a_reload_changes_the_target_of_the_next_one(selectors: SelectorServer):
    selectors.submit_chat("llama", endless=True)
    until(lambda: selectors.queue() == (1, 0))
    first = [selectors.submit_chat("llama") for _ in range(3)]
    until(lambda: selectors.queue() == (1, 3))
    assert "modelA" not in selectors.jobs()  # up to four jobs, running or waiting, stay with one model
    assert selectors.submit_chat("llama").result().status_code == 200
    assert (selectors.jobs()["modelA"], selectors.jobs().get("modelB")) == ("ready", None)

    document = json.loads(selectors.file.read_text())
    document["selectors"]["llama"] = {"strategy": "pin", "targets": ["modelB"]}
    selectors.write(document)
    selectors.server.process.send_signal(signal.SIGHUP)
    until(lambda: any("configuration reloaded" in line for line in selectors.server.log))
    assert selectors.submit_chat("llama").result().status_code == 200
    assert selectors.jobs()["modelB"] == "ready"
    assert selectors.queue() == (1, 3)
    selectors.cancel()
    assert [answer.result().status_code for answer in first] == [200] * 3

    del document["selectors"]["llama"]
    selectors.write(document)
    selectors.server.process.send_signal(signal.SIGHUP)
    until(lambda: selectors.submit_chat("llama").result().status_code == 404)
    until(lambda: selectors.queue() == (0, 0))


def test_of_models_that_are_waited_for_the_one_with_the_highest_priority_is_loaded_first(
    selectors: SelectorServer,
):
    selectors.loaded_after("unlisted-model")
    selectors.submit_chat("unlisted-model", endless=True)
    until(lambda: selectors.queue() == (1, 0))
    waiting = []
    for number, model in enumerate(("gpt-oss-120b", "B", "A"), start=1):
        waiting.append(selectors.submit_chat(model))
        until(lambda number=number: selectors.queue() == (1, number))
    selectors.cancel()
    assert [answer.result().status_code for answer in waiting] == [200] * 3
    until(lambda: {"A", "B", "gpt-oss-120b"} == set(selectors.loaded()[-3:]))
    assert selectors.loaded()[-3:] == ["A", "B", "gpt-oss-120b"]
