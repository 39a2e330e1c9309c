"""Scenarios that depend on no single setting: where jobs are placed, and what a reload does not change."""

import json
import signal
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import trio

from settings.cache_settings import BLOCK
from settings.cases import FRONTS
from settings.documents import Document, file_with
from settings.limit_settings import FORM, form
from settings.prompts import random_text
from settings.queue_settings import LONG_TOKENS, RELAY_NODE, of_keys, order
from settings.relay_settings import URL
from settings.served import SECOND, Pending, Scenario, Served
from simulation.parent import model_folder

TWO = {
    "models": {"m": None},
    "nodes": [
        {"id": "one", "url": URL, "models": ["far"], "seats": 4},
        {"id": "two", "url": f"http://{SECOND[0]}:{SECOND[1]}", "models": ["far"], "seats": 4},
    ],
    "healthCheck": {"interval": 1},
}
LONG_S = 60


class Behaviour(NamedTuple):
    """A configuration, and a scenario that must hold with it, on servers with these numbers of fronts."""

    document: Document
    scenario: Scenario
    fronts: tuple[int, ...] = FRONTS


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(document: Document, *, fronts: tuple[int, ...] = FRONTS) -> Callable[[Scenario], Scenario]:
    """Register a scenario under its name."""

    def register(scenario: Scenario) -> Scenario:
        BEHAVIOURS[scenario.__name__] = Behaviour(document, scenario, fronts)
        return scenario

    return register


@behaviour(
    {
        "apiKeys": [{"key": "A", "team": "red"}, {"key": "B", "team": "red"}, {"key": "C"}, {"key": "D"}],
        "teams": {"red": {}},
    },
)
async def keys_of_a_team_share_its_turns(server: Served) -> None:
    served = await order(server, *of_keys("AABBCC"), holder_key="D")
    assert served.index("C") == 1, served
    assert served[3] == "C", served


def running(server: Served) -> tuple[int, int]:
    """Return how many jobs run on each of the two nodes."""
    return server.upstream.running, server.second.running


async def wait_until_both_up(server: Served, *, delay_s: float = LONG_S) -> None:
    await trio.sleep(3)
    assert [node["state"] for node in await server.get_json("/nodes")] == ["up", "up"]
    server.upstream.delay_s = server.second.delay_s = delay_s


async def start_jobs(server: Served, count: int, *, prompt: str = "a") -> list[Pending]:
    """Start this many jobs, one after the other."""
    started = []
    for _ in range(count):
        started.append(server.complete(prompt, model="far"))
        await trio.sleep(0.05)
    return started


async def set_reported_loads(server: Served, one: int, two: int) -> None:
    """Restart both nodes as Fairlead servers, which report this many running jobs and four seats."""
    nodes = (server.upstream, server.second)
    for node in nodes:
        node.is_healthy = False
    await trio.sleep(5)
    for node, taken in zip(nodes, (one, two), strict=True):
        node.is_healthy = True
        node.reports = [{"model": "far", "seats": 4, "sequences": taken}]
    await wait_until_both_up(server)


@behaviour(TWO)
async def idle_node_is_preferred_whatever_it_reports(server: Served) -> None:
    await set_reported_loads(server, 4, 0)
    await start_jobs(server, 2)
    assert running(server) == (1, 1)


@behaviour(TWO)
async def reported_load_counts(server: Served) -> None:
    await set_reported_loads(server, 2, 0)
    for busy in (1, 2, 3):  # while both have equally many busy seats, the load decides every time
        await start_jobs(server, 3 if busy == 1 else 2)
        assert running(server) == (busy, busy + 1)


@behaviour(TWO)
async def busy_seats_count_more_than_a_reported_load(server: Served) -> None:
    await set_reported_loads(server, 2, 0)
    await start_jobs(server, 3)
    assert running(server) == (1, 2)
    # 0.3·2/4 + 0.7·1/4 is less than 0.3·0/4 + 0.7·2/4; with the weights exchanged it is more.
    await start_jobs(server, 1)
    assert running(server) == (2, 2)


@behaviour(TWO)
async def job_goes_to_the_node_that_has_its_prefix_cached(server: Served) -> None:
    await wait_until_both_up(server)
    await start_jobs(server, 2)
    assert running(server) == (1, 1)
    server.upstream.delay_s = server.second.delay_s = 0.5
    beginning = random_text(300)
    for _ in range(6):  # both are equally busy: only the remembered prefix differs
        await (await start_jobs(server, 1, prompt=beginning))[0].done()
    counts = (len(server.upstream.posted), len(server.second.posted))
    assert sorted(counts) == [1, 7]


@behaviour(TWO)
async def failed_job_is_retried_on_the_other_node(server: Served) -> None:
    await wait_until_both_up(server, delay_s=0.5)
    server.upstream.fails = True
    answers = [await job.done() for job in await start_jobs(server, 8)]
    assert [answer.status for answer in answers] == [200] * 8


@behaviour(TWO)
async def drained_node_gets_no_more_jobs_and_stays_drained_after_a_reload(server: Served) -> None:
    await wait_until_both_up(server)
    assert (await server.fetch("/nodes/one/drain", {})).status < 300
    reloaded = {**TWO, "healthCheck": {"interval": 2}}
    assert await server.reload(file_with(reloaded)) == []
    await start_jobs(server, 3)
    assert running(server) == (0, 3)


@behaviour(
    {"models": {"m": None}, "nodes": [RELAY_NODE | {"id": "configured"}], "healthCheck": {"interval": 60}}
)
async def added_node_is_probed_at_the_reloaded_interval(server: Served) -> None:
    added = {"id": "added", "url": f"http://{SECOND[0]}:{SECOND[1]}", "models": ["near"]}
    assert (await server.fetch("/nodes", added)).status < 300
    document = {
        "models": {"m": None},
        "nodes": [RELAY_NODE | {"id": "configured"}],
        "healthCheck": {"interval": 1},
    }
    assert await server.reload(file_with(document)) == []
    seen = len(server.second.times)
    await trio.sleep(10)
    assert len(server.second.times) - seen >= 8


@behaviour({"models": {"m": None, "far": {"cmd": "model-server ${PORT}"}}})
async def running_command_is_probed_at_the_reloaded_interval(server: Served) -> None:
    assert (await server.complete(model="far").done()).status == 200
    document = {
        "models": {"m": None, "far": {"cmd": "model-server ${PORT}"}},
        "healthCheck": {"interval": 1, "failures": 2, "timeout": 1},
    }
    (process,) = server.processes_of("model-server")
    assert await server.reload(file_with(document)) == []
    assert server.processes_of("model-server") == [process]
    server.upstream.responds = False
    await trio.sleep(8)
    assert process not in server.processes_of("model-server")


def commands(*names: str) -> Document:
    models = {name: {"cmd": f"model-server ${{PORT}} {name}"} for name in names}
    return {"models": {"m": None} | models, "startPort": 9080, "routing": {"router": {"use": "keep"}}}


@behaviour(commands("m1", "m2"))
async def command_keeps_its_port_over_reloads(server: Served) -> None:
    for name in ("m1", "m2"):
        assert (await server.complete(model=name).done()).status == 200
    before = server.processes_of("model-server")
    assert [process.args[1:] for process in before] == [["9080", "m1"], ["9081", "m2"]]
    assert await server.reload(file_with(commands("a0", "m1", "m2"))) == []
    assert server.processes_of("model-server") == before
    for name in ("m1", "m2", "a0"):
        assert (await server.complete(model=name).done()).status == 200
    assert [process.args[1:] for process in server.processes_of("model-server")[2:]] == [["9082", "a0"]]
    # The port of a removed model is free for another.
    assert await server.reload(file_with(commands("a0", "b0", "m2"))) == []
    assert (await server.complete(model="b0").done()).status == 200
    found = {process.args[2]: process.args[1] for process in server.processes_of("model-server")}
    assert found == {"m2": "9081", "a0": "9082", "b0": "9080"}


@behaviour({})
async def unchanged_model_keeps_its_process(server: Served) -> None:
    job = server.complete(tokens=100)
    assert await server.reload(file_with({"models": {"k": {"path": "DEMO"}}})) == []
    assert (await job.done()).status == 200
    await trio.sleep(3)
    assert len(server.engine.specs) == 1
    assert (await server.complete(model="k").done()).status == 200


@behaviour(
    {
        "models": {"m": None} | {name: {"cmd": "model-server ${PORT}", "unloadTimeout": 4} for name in "abc"},
        "groups": {"pair": {"members": ["a", "b"], "swap": False}, "other": {"members": ["c"]}},
    }
)
async def evicted_models_stop_at_the_same_time(server: Served) -> None:
    server.upstream.ignores_term = True  # each is killed after its four seconds
    for model in "ab":
        assert (await server.complete(model=model).done()).status == 200
    pair = server.processes_of("model-server")
    assert len(pair) == 2
    job = server.complete(model="c")
    await trio.sleep(3.5)
    assert server.processes_of("model-server") == pair, "the next one starts when they are gone"
    await trio.sleep(1)
    assert not set(pair) & set(server.processes_of("model-server"))
    assert (await job.done()).status == 200


async def first_queued_job_waits_for_the_running_job(server: Served) -> None:
    """Check that the estimate for a busy model is the rest of its job, although another model is idle."""
    for model in "mk":
        assert (await server.complete(model=model, tokens=LONG_TOKENS).done()).status == 200
    server.complete(tokens=LONG_TOKENS)  # takes the only seat for six seconds
    await trio.sleep(1)
    estimate = await server.get_json("/queue/estimate?model=m")
    assert 4 <= estimate["estimated_wait_s"] <= 7, estimate
    assert (await server.get_json("/queue/estimate?model=k"))["estimated_wait_s"] == 0


@behaviour({"models": {"k": {"path": "DEMO"}}})
async def estimate_of_the_first_queued_job_is_the_rest_of_the_running_job(server: Served) -> None:
    await first_queued_job_waits_for_the_running_job(server)


@behaviour({"models": {"k": {"path": "DEMO"}}, "queue": {"estimate": "mean"}})
async def mean_estimate_of_the_first_queued_job_is_the_rest_of_the_running_job(server: Served) -> None:
    await first_queued_job_waits_for_the_running_job(server)


@behaviour({})
async def stopped_server_refuses_waiting_jobs_and_finishes_those_that_run(server: Served) -> None:
    running = server.complete(tokens=50)
    await trio.sleep(0.3)
    waiting = server.complete()
    await trio.sleep(0.3)
    server.system.signals.send(signal.SIGTERM)
    await trio.sleep(0.5)
    assert waiting.is_over
    assert (await waiting.done()).error == "draining", waiting
    assert (await running.done()).status == 200


def with_model(**settings: Any) -> Document:
    return {"models": {"m": settings}}


@behaviour(with_model(preload=True))
async def removed_model_finishes_its_jobs_and_is_unloaded(server: Served) -> None:
    job = server.complete(tokens=100)
    await trio.sleep(0.5)
    assert await server.reload(file_with({"models": {"m": None, "k": {"path": "DEMO"}}})) == []
    assert (await server.complete().done()).status == 404
    assert (await job.done()).status == 200
    await trio.sleep(1)
    assert "m" not in await server.states()


# Tenants share no cached prefixes -----------------------------------------------------------------------

_SAID = "turn seat queue node line " * 20
_BEGINNINGS = ("seat " * 40, "seat " * 40 + "line " * 40, "turn " * 60)
_CHAT = {"messages": [{"role": "user", "content": _SAID}], "max_tokens": 2}
# Every route by which a prompt reaches the cache, and where its answer says how much of it was there.
_PROMPTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", _CHAT, "usage.prompt_tokens_details.cached_tokens"),
    "several answers": (
        "/v1/chat/completions",
        _CHAT | {"n": 2},
        "usage.prompt_tokens_details.cached_tokens",
    ),
    "stream": ("/v1/chat/completions", _CHAT | {"stream": True}, ""),
    "text": (
        "/v1/completions",
        {"prompt": _SAID, "max_tokens": 2},
        "usage.prompt_tokens_details.cached_tokens",
    ),
    "tokens": ("/v1/completions", {"prompt": [[7] * 64, [8] * 64], "max_tokens": 2}, ""),
    "response": (
        "/v1/responses",
        {"input": _SAID, "max_output_tokens": 2},
        "usage.input_tokens_details.cached_tokens",
    ),
    "message": ("/v1/messages", _CHAT, "usage.cache_read_input_tokens"),
    "Ollama's chat": ("/api/chat", {"messages": _CHAT["messages"], "options": {"num_predict": 2}}, ""),
    "Ollama's text": ("/api/generate", {"prompt": _SAID, "options": {"num_predict": 2}}, ""),
}


async def found_in_answer(server: Served, name: str, key: str, user: str = "", beginning: str = "") -> int:
    """Send a prompt; return how many of its tokens were in the cache, by its answer, or 0."""
    path, body, field = _PROMPTS[name]
    if beginning:
        body = json.loads(json.dumps(body).replace(_SAID, beginning + _SAID))
    headers = {"X-OpenWebUI-User-Id": user} if user else {}
    answer = await server.fetch(path, {"model": "m", **body}, key=key, headers=headers)
    assert answer.status == 200, answer
    found = answer.document if field else 0
    for member in field.split(".") if field else ():
        found = found[member]
    return int(found)


async def cached(server: Served, name: str, key: str, *, user: str = "") -> int:
    """Send a prompt; return how many of its tokens the engine has found, as its answer must say."""
    before = server.engine.statistics.prefix_hits
    found = await found_in_answer(server, name, key, user)
    hits = server.engine.statistics.prefix_hits - before
    assert not _PROMPTS[name][2] or (found > 0) == (hits > 0), (name, found, hits)
    return hits


@behaviour({"apiKeys": [{"key": "a"}, {"key": "b"}]})
async def no_route_tells_a_tenant_of_another_ones_prompt(server: Served) -> None:
    for name in _PROMPTS:
        own = await cached(server, name, "a")  # of its other requests, or the first one of a pair
        assert await cached(server, name, "b") == own, name
        assert await cached(server, name, "a") >= BLOCK, name


@behaviour({"apiKeys": [{"key": "portal", "trusted": True}]})
async def users_of_a_trusted_key_are_isolated(server: Served) -> None:
    for user in ("ana", "bob"):
        assert await cached(server, "text", "portal", user=user) == 0
    assert await cached(server, "text", "portal", user="ana") >= BLOCK


@behaviour({"apiKeys": [{"key": key, "trusted": True} for key in "ab"], "models": {"m": {"slots": 4}}})
async def what_a_tenant_finds_is_what_it_would_find_alone(server: Served) -> None:
    """Tenants send prompts that begin alike, at the same time; then unused ones send the same, one by one."""
    random = Random(1)
    routes = [name for name, (_, _, field) in _PROMPTS.items() if field]
    sent = {
        (key, user): [(random.choice(routes), random.choice(_BEGINNINGS)) for _ in range(6)]
        for key in "ab"
        for user in ("ana", "bob")
    }
    found: dict[tuple[str, str], list[int]] = {sender: [] for sender in sent}

    async def send(sender: tuple[str, str], key: str, user: str) -> None:
        for name, beginning in sent[sender]:
            await trio.sleep(random.random())
            found[sender].append(await found_in_answer(server, name, key, user, beginning))

    async with trio.open_nursery() as nursery:
        for key, user in sent:
            nursery.start_soon(send, (key, user), key, user)
    together = dict(found)
    found = {sender: [] for sender in sent}
    for key, user in sent:
        await send((key, user), key, f"new {user}")
    assert together == found
    assert any(map(any, found.values()))


@behaviour({"apiKeys": [{"key": "a"}]})
async def second_key_isolates_the_tenants_at_once(server: Served) -> None:
    assert [await cached(server, "text", "a") >= BLOCK for _ in range(2)] == [False, True]
    process = server.processes_of("fairlead.engine.worker.main")
    await server.reload(file_with({"apiKeys": [{"key": "a"}, {"key": "b"}]}))
    assert await cached(server, "text", "b") == 0
    assert server.processes_of("fairlead.engine.worker.main") == process, "the model was not loaded again"


@behaviour({"host": "127.0.0.1"})
async def one_persons_server_shares_all_prefixes(server: Served) -> None:
    await server.complete(_SAID, user="ana").done()
    await server.complete(_SAID, user="bob").done()
    assert server.engine.statistics.prefix_hits >= BLOCK


_ODD = {"path": "DEMO", "maxModelLen": 10**7, "aliases": ["strange"]}


@behaviour({"models": {"odd": _ODD}})
async def faulty_model_does_not_stop_the_others_and_is_named_alone(server: Served) -> None:
    assert (await server.complete().done()).status == 200
    for name in ("odd", "strange"):
        refused = await server.complete(model=name).done()
        error = refused.document["error"]
        assert (refused.status, error["code"]) == (502, "load_failed"), refused
        assert error["message"].startswith("the model odd cannot be loaded: maxModelLen "), refused
        assert "config.json gives" in error["message"], refused
    assert (await server.fetch("/models/load", {"model": "odd"})).status == 502
    cards = {card["id"]: card for card in (await server.get_json("/v1/models"))["data"]}
    assert (list(cards), "problem" in cards["m"]) == (["m", "odd"], False)
    statuses = {node["models"][0]: node for node in await server.get_json("/nodes")}
    for shown in (cards["odd"], statuses["odd"]):
        assert shown["problem"] == error["message"]
    assert statuses["m"]["problem"] is None
    assert (await server.fetch("/ready")).status == 200


@behaviour({"models": {"odd": _ODD}})
async def faulty_model_is_served_once_it_is_repaired(server: Served) -> None:
    process = server.processes_of("fairlead.engine.worker.main")
    repaired = {"path": "DEMO", "aliases": ["strange"]}
    assert await server.reload(file_with({"models": {"odd": repaired}})) == []
    assert (await server.complete(model="odd").done()).status == 200
    assert "problem" not in (await server.get_json("/v1/models/odd"))
    assert process[0] in server.processes_of("fairlead.engine.worker.main"), (
        "the other model was not loaded again"
    )


def _without_vocabulary() -> str:
    """Return a folder whose fault only a front sees, as the dispatcher reads no vocabularies."""
    folder = model_folder("without vocabulary")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@behaviour({"models": {"odd": {"path": _without_vocabulary()}}})
async def fault_of_a_vocabulary_is_shown_by_every_process(server: Served) -> None:
    refused = await server.complete(model="odd").done()
    message = refused.document["error"]["message"]
    assert (refused.status, message.split("/")[0]) == (502, "the model odd cannot be loaded: "), refused
    assert "tokenizer.json is broken" in message
    for path in ("/v1/models/odd", "/running", "/nodes"):
        found = await server.get_json(path)
        shown = found if isinstance(found, dict) else {}
        if path == "/nodes":
            (shown,) = (node for node in found if node["models"] == ["odd"])
        if shown:
            assert shown["problem"] == message, path


@behaviour({"nodes": [RELAY_NODE]})
async def turns_of_tenants_hold_across_kinds_of_routes(server: Served) -> None:
    """Five requests of ana, then two of ben, for one seat: A B A B A A A."""
    server.upstream.delay_s = 1
    await server.until(lambda: server.upstream.times)
    requests = ("/v1/audio/transcriptions", "/v1/images/generations", "/v1/chat/completions")
    jobs = []
    for number, name in enumerate(["A1", "A2", "A3", "A4", "A5", "B1", "B2"]):
        headers = {"X-Request-Id": name, "X-OpenWebUI-User-Id": name[0]}
        path = requests[number % len(requests)]
        if path.startswith("/v1/audio"):
            jobs.append(server.start(path, form(), headers=headers | FORM))
        else:
            jobs.append(server.start(path, {"model": "far", "messages": [], "prompt": "x"}, headers=headers))
        await trio.sleep(0.1)
    assert [(await job.done()).status for job in jobs] == [200] * 7
    order = [request.headers["x-request-id"] for request in server.upstream.posted]
    assert order == ["A1", "B1", "A2", "B2", "A3", "A4", "A5"]
