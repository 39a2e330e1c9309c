"""Rules that hold with each program, as a node of Fairlead and in front of it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, until
from peers.backend import ARGUMENTS, TEXT, TOOL, WORDS
from peers.programs import BODY_BYTES, ENGINES, PROXIES, READ_TIMEOUT_S, ROUTERS, SHAPES, SLOTS, TOO_LARGE
from peers.rigs import PROBE_S, Rig, as_node, fairlead, in_front, marks, peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NODES = (*ROUTERS, *ENGINES, *SHAPES)
SLOW = ("vllm", "litellm")  # to start
UNAWARE = ("litellm", "llama.cpp")  # these finish an answer without `stream` whose client has left
FAILURES = (429, 502, 503, 504)


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    place, name = request.param
    start = {"node": as_node, "fronts": partial(as_node, fronts=2), "front": in_front}[place]
    with start(name, tmp_path_factory.mktemp(f"{place}-{name}")) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave each peer quick, and with nothing to do."""
    yield
    if "rig" in request.fixturenames:
        rig = request.getfixturevalue("rig")
        if rig.backend is not None:
            rig.backend.reset()
        until(lambda: rig.server.queue()["running"] == rig.server.queue()["waiting"] == 0)


def every(nodes=(), fronts=(), *, several_fronts=False):
    """Parametrize a test by peers that are nodes and peers in front.

    `several_fronts`: with the nodes also of a Fairlead of two fronts.
    """
    again = [name for name in nodes if name not in SLOW] if several_fronts else ()
    places = [("node", nodes), ("fronts", again), ("front", fronts)]
    parameters = [
        pytest.param((place, name), marks=marks(name, place), id=f"{place}-{name}")
        for place, names in places
        for name in names
    ]
    return pytest.mark.parametrize("rig", parameters, indirect=True)


@every(NODES, ROUTERS)
def test_chat_is_answered(rig):
    text = rig.dialect.chat(rig.url, rig.key)
    assert text == TEXT if rig.backend else text


@every(NODES, ROUTERS, several_fronts=True)
def test_stream_is_whole(rig):
    text = rig.dialect.stream(rig.url, rig.key)
    assert text == TEXT if rig.backend else text


# With `tool_choice: required`, too, the server of `xllamacpp` lets a model of random weights write text only.
# vLLM 0.32 leaves out a call that its answer has not completed, and the small model completes none.
@every([name for name in NODES if name not in ("llama.cpp", "vllm")], ROUTERS)
def test_tool_is_called(rig):
    assert rig.dialect.call(rig.url, rig.key) == (TOOL, ARGUMENTS)


@every((*ROUTERS, *SHAPES))
def test_probes_generate_nothing(rig):
    before = rig.backend.generations
    time.sleep(10 * PROBE_S)
    assert rig.node()["state"] == "up"
    assert rig.backend.generations == before


# Clients that leave --------------------------------------------------------------------------------------


def begin(lines: Iterator[str]) -> Iterator[str]:
    """Read until the answer has begun; comments may come before. Return the further lines."""
    for line in lines:
        if line and not line.startswith((":", "event: ping")):
            break
    return lines


def is_at_rest(rig: Rig) -> bool:
    return rig.running() == 0 and rig.server.queue()["running"] == 0


@every(NODES, ROUTERS, several_fronts=True)
def test_leaving_in_the_middle_ends_the_work_of_the_peer(rig):
    rig.slow_down(pause_s=0.5)
    with rig.asking(rig.long_body()) as lines:
        begin(lines)
        until(lambda: rig.running() == 1, within_s=2)
    until(lambda: is_at_rest(rig), within_s=3)
    rig.slow_down()
    assert rig.ask().status_code == 200


@every(NODES, PROXIES)
def test_leaving_before_the_first_byte_frees_the_seat(rig):
    rig.slow_down(first_s=1.8 if rig.name in PROXIES else 6)
    is_unaware = rig.name in UNAWARE  # it generates the whole answer, and has a slot less until then
    body = rig.dialect.body(stream=False, tokens=1000) if is_unaware else rig.long_body(stream=False)
    with pytest.raises(httpx.ReadTimeout), rig.asking(body, timeout=0.7):
        pass
    until(lambda: rig.server.queue()["running"] == 0, within_s=1)
    until(lambda: is_at_rest(rig), within_s=TIMEOUT_S if is_unaware else 1)
    rig.slow_down()
    assert rig.ask().status_code == 200


@every(NODES, several_fronts=True)
def test_client_that_leaves_the_queue_never_reaches_the_peer(rig):
    rig.slow_down(pause_s=0.5)
    with ExitStack() as stack:
        running = [begin(stack.enter_context(rig.asking(rig.long_body()))) for _ in range(SLOTS)]
        assert rig.server.queue()["running"] == len(running) == SLOTS
        begun = rig.backend and rig.backend.generations
        with pytest.raises(httpx.ReadTimeout), rig.asking(rig.dialect.body(stream=False), timeout=0.5):
            pass
        until(lambda: rig.server.queue()["waiting"] == 0, within_s=2)
    until(lambda: is_at_rest(rig))  # on a busy machine LiteLLM takes seconds to notice clients that have left
    assert begun == (rig.backend and rig.backend.generations)
    rig.slow_down()
    assert rig.ask().status_code == 200


# Peers that fail -------------------------------------------------------------------------------------------


@every((*ROUTERS, *SHAPES), several_fronts=True)
@pytest.mark.parametrize("status", [503, 429])
def test_job_waits_for_a_full_peer(rig, status):
    rig.backend.refusals, rig.backend.refusal = 2, status
    began = time.monotonic()
    answer = rig.ask()
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began > 1, "the peer asked to be left alone for a second"
    assert rig.node()["state"] == "up"


@every(ENGINES)
def test_job_waits_for_an_engine_that_others_use(rig):
    direct = Rig(rig.name, rig.server, rig.program.url, rig.program.key, rig.dialect, None, rig.program)
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        running = [begin(stack.enter_context(direct.asking(direct.long_body()))) for _ in range(SLOTS)]
        third = threads.submit(direct.ask)  # waits in the queue of the peer, which then is full
        time.sleep(0.5)
        asked = threads.submit(rig.ask)
        time.sleep(0.5)
        assert running
        stack.close()
        assert asked.result(TIMEOUT_S).status_code == 200
        assert third.result(TIMEOUT_S).status_code == 200


@every(PROXIES, several_fronts=True)
def test_too_large_body_is_answered_by_the_peer(rig):
    begun = rig.backend.generations
    answer = rig.ask(rig.dialect.body(stream=False, content="x" * (2 * BODY_BYTES)))
    assert answer.status_code == TOO_LARGE[rig.name], answer.text
    assert rig.backend.generations == begun
    assert rig.node()["state"] == "up"
    assert rig.ask().status_code == 200


@every(PROXIES, several_fronts=True)
def test_timeout_of_a_proxy_ends_only_the_slow_request(rig):
    rig.slow_down(pause_s=0.7)
    with rig.asking(rig.long_body()) as lines:
        assert any(WORDS[0] in line for line in lines)
        rig.slow_down(first_s=READ_TIMEOUT_S + 1)
        for _ in range(2):
            answer = rig.ask()
            assert answer.status_code in (502, 504), answer.text
            assert rig.node()["state"] == "up"
        rig.slow_down()
        assert rig.ask().status_code == 200
        assert "data: [DONE]" in list(lines)


@every(NODES, several_fronts=True)
def test_peer_may_restart_under_load(rig):
    rig.slow_down(pause_s=0.02)
    is_over = threading.Event()

    def load() -> set[object]:
        found: set[object] = set()
        while not is_over.is_set():
            try:
                found.add(rig.ask(rig.dialect.body(stream=bool(len(found) % 2))).status_code)
            except httpx.RemoteProtocolError:
                found.add("cut")  # a stream of which the client has a part
        return found

    with ThreadPoolExecutor() as threads:
        loads = [threads.submit(load) for _ in range(2 * SLOTS)]
        time.sleep(1)
        try:
            for _ in rig.restart():
                time.sleep(0.5)
            until(lambda: rig.node()["state"] == "up")
            time.sleep(1)
        finally:
            is_over.set()
        statuses = set().union(*(each.result(TIMEOUT_S) for each in loads))
    assert 200 in statuses
    assert statuses <= {200, "cut", *FAILURES}
    assert rig.ask().status_code == 200
    until(lambda: is_at_rest(rig), within_s=5)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, "node")) for name in NODES])
def test_wrong_key_is_the_problem_of_the_node(name, tmp_path: Path):
    with peer(name, tmp_path) as (program, backend, settings):
        settings["nodes"][0]["apiKey"] = "sk-wrong"
        with fairlead(tmp_path, settings) as server:
            rig = Rig(name, server, server.url, "unused", None, backend, program)
            status = "400" if name == "litellm" else "401"  # without a database it knows one key only
            until(lambda: status in (rig.node()["problem"] or ""), within_s=10)
            assert "sk-wrong" not in "".join(server.log) + str(rig.node())
            until(lambda: any(status in line for line in server.log), within_s=5)


# Programs in front -----------------------------------------------------------------------------------------


@every(fronts=PROXIES)
@pytest.mark.parametrize("slow", [{"first_s": 2 * READ_TIMEOUT_S + 1}, {"pause_s": READ_TIMEOUT_S + 0.5}])
def test_keep_alive_outlasts_the_timeout_of_a_proxy(rig, slow):
    rig.slow_down(**slow)
    with rig.asking(rig.dialect.body()) as answer:
        lines = [line for line in answer if line]
    assert lines[-1] == "data: [DONE]"
    assert any(line.startswith(":") for line in lines)
    said = [word for word in WORDS if any(f'"{word}"' in line for line in lines)]
    assert said == list(WORDS)
