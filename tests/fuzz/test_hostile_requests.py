"""Mutated requests to all routes of a real server, beside a canary client.

    pytest tests/fuzz/test_hostile_requests.py --fuzz-requests 100000 --fuzz-connections 10000

A fault is printed with its seed and its bytes; `python bench/hostile.py --replay` sends it again. `KEPT` has
requests that caused faults before. Their seeds would give other requests after a change of the routes.
"""

import re
from urllib.parse import unquote_to_bytes

import pytest
import structlog
import trio

from e2e.real_server import configured, real_server
from fairlead.base.config import Limits, demonstration_model
from fairlead.server.listener import protocol
from fairlead.server.routes import errors
from fairlead.server.routes.paths import RouteMatcher
from fairlead.server.routes.routes import Application
from fuzz.test_faults import ServerOverFakeNodes
from hostile_client.attack import Attack
from hostile_client.target import Canary, grammar_of, send
from hostile_client.wire import fault_of
from server.routes.raw_http import get, post

MODEL = "fairlead-demo"
SPARE = "spare"
AT_ONCE = 8
# Short, because some requests announce longer bodies than they send, which would delay the attack.
SETTINGS = {"limits": {"bodyTimeout": "2s"}, "requestTimeout": "60s"}
OUR_BUGS = re.compile(r"Traceback|\[(?:error|critical)|unexpected error|request failed")

KEPT = {
    "a path that Quart normalizes": ("POST", post(b"{}", "//v1/completions")),
    "a method in lower case": ("GET", get().replace(b"GET", b"head")),
    "a host that DNS could not have": ("GET", get("/queue").replace(b"test", b"x" * 300)),
}


@pytest.fixture
def attacked(tmp_path):
    """A server with the demonstration model and a spare model to load and unload."""
    model = {"path": str(demonstration_model()), "watchdog": "1h"}
    models = {MODEL: model | {"preload": True}, SPARE: model}
    arguments = configured(tmp_path, {}, queue={"timeout": "60s"}, models=models, **SETTINGS)
    with real_server(*arguments) as server:
        yield server


@pytest.mark.timeout(24 * 3600)
def test_mutated_requests_to_all_routes_cause_no_fault_and_do_not_affect_the_canary(attacked, pytestconfig):
    seed = pytestconfig.getoption("--fuzz-seed")
    requests = range(seed, seed + pytestconfig.getoption("--fuzz-requests"))
    connections = range(seed, seed + pytestconfig.getoption("--fuzz-connections"))
    canary = Canary(attacked.address, MODEL)

    async def attack():
        kept = {
            name: fault_of(await send(attacked.address, *request), request[0])
            for name, request in KEPT.items()
        }
        grammar = await grammar_of(attacked.address, models=(MODEL,), spare=SPARE)
        attack = Attack(attacked.address, grammar, at_once=AT_ONCE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(canary.check_canary)
            await attack.run(requests=requests, connections=connections)
            nursery.cancel_scope.cancel()
        return kept, attack.findings

    kept, findings = trio.run(attack)
    counts = attacked.wait_until_at_rest()
    code = attacked.stop()
    ours = [line for line in attacked.log if OUR_BUGS.search(line)]
    assert kept == dict.fromkeys(KEPT)
    assert not findings.faults, "\n".join(map(str, findings.faults))
    assert ours == []
    assert (len(canary.texts), canary.faults) == (1, [])
    assert sum(findings.answers.values()) == len(requests)
    assert findings.connections == len(connections)
    assert set(counts.values()) == {0}
    assert code == 0


# Mutants that the attack must find ------------------------------------------------------------------


def fail_at_unusual_paths(monkeypatch):
    real = RouteMatcher.is_spelled

    def decoding(self, raw_path, path):
        unquote_to_bytes(raw_path).decode()
        return real(self, raw_path, path)

    monkeypatch.setattr(RouteMatcher, "is_spelled", decoding)


def let_quart_read_host(monkeypatch):
    real = Application.create_url_adapter

    def reading(self, request):
        super(Application, self).create_url_adapter(request)
        return real(self, request)

    monkeypatch.setattr(Application, "create_url_adapter", reading)


def refuse_with_an_empty_body(monkeypatch):
    monkeypatch.setattr(protocol, "refusal", lambda *_: b"")


def refuse_in_plain_text(monkeypatch):
    real = errors.json_response
    plain = {"Content-Type": "text/plain"}
    monkeypatch.setattr(errors, "json_response", lambda *given: real(*given)._replace(headers=plain))


async def attack_in_process(seeds: range, max_faults: int = 20) -> list[str]:
    """Attack the application over fake nodes; return the faults."""
    server = ServerOverFakeNodes(Limits(body_timeout_s=0.2))
    async with server.open():
        grammar = await grammar_of(server.address, models=(MODEL,), spare="x")
        attack = Attack(server.address, grammar, max_faults=max_faults)
        await attack.run(requests=seeds, connections=seeds[::10])
    return list(map(str, attack.findings.faults))


@pytest.mark.parametrize(
    "mutant", [fail_at_unusual_paths, let_quart_read_host, refuse_with_an_empty_body, refuse_in_plain_text]
)
async def test_attack_finds_a_mutant(mutant, monkeypatch):
    mutant(monkeypatch)
    with structlog.testing.capture_logs():
        assert await attack_in_process(range(5000), max_faults=1) != []


async def test_attack_finds_no_fault_in_a_correct_server():
    assert await attack_in_process(range(300)) == []


async def test_seed_always_makes_the_same_request():
    server = ServerOverFakeNodes()
    async with server.open():
        first, second = [await grammar_of(server.address, models=(MODEL,), spare="x") for _ in range(2)]
    for seed in (3, 1, 2, 3):
        assert first.request(seed) == second.request(seed)
        assert first.conversation(seed) == second.conversation(seed)
    routes_requested = {(route.method, route.path) for route in first.routes}
    assert {
        ("POST", "/v1/completions"),
        ("GET", "/events"),
        ("GET", "/dashboard/main.js"),
    } <= routes_requested
