"""The model's process is killed while it writes a response of OpenAI's Responses API."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.own_copy import own_copy
from e2e.real_server import configured, real_server
from e2e.test_failover import CONTEXT, NUMBERS, Stream, struck_midway, wait_until_ready
from server.routes.typed_responses import RESPONSES, final_response, without_times

LONG = {"model": "fairlead-demo", "input": "Count", "max_output_tokens": 450, "ignore_eos": True}
FUNCTION = {"type": "function", "name": "add", "parameters": NUMBERS, "strict": True}
CALL: dict[str, Any] = {
    "model": "fairlead-demo",
    "input": "Count from 1 to 150.",
    "tools": [FUNCTION],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 20_000,
    "temperature": 1,
    "seed": 7,
}


GREEDY = {"text": LONG | {"temperature": 0}, "call": CALL}
RANDOM = LONG | {"temperature": 1.5, "max_output_tokens": 20_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = {"path": str(own_copy(folder / "model", max_position_embeddings=CONTEXT))}
    with real_server(*configured(folder, model)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """The streams of responses that nothing disturbs."""
    with ThreadPoolExecutor(len(GREEDY)) as pool:
        runs = {name: pool.submit(Stream(RESPONSES).read, server, body) for name, body in GREEDY.items()}
    return {name: run.result() for name, run in runs.items()}


@pytest.fixture(scope="module")
def killed(server, expected):
    """Return the streams of all responses. The model is killed after the first events of each."""

    def client(body):
        return lambda begin: Stream(RESPONSES, begun_at=10).read(server, body, begin)

    clients = {name: client(body) for name, body in (GREEDY | {"random": RANDOM}).items()}
    streams = struck_midway(server, signal.SIGKILL, clients, sequences=len(clients))
    wait_until_ready(server)
    return streams


@pytest.mark.parametrize("name", GREEDY)
def test_response_resumes_where_it_stopped(server, expected, killed, name):
    assert killed[name].is_whole
    whole, resumed = (final_response(streams[name].events) for streams in (expected, killed))
    for response in (whole, resumed):
        del response["usage"]["input_tokens_details"]  # the second prompt may be cached
    assert without_times(resumed) == without_times(whole)
    assert not any(server.wait_until_at_rest().values())


def test_random_response_ends_with_its_failure_and_a_cut(server, killed):
    response = final_response(killed["random"].events)
    assert not killed["random"].is_whole
    assert (response["status"], response["error"]["type"]) == ("failed", "node_failed")
    assert response["output"] != []
    assert not any(server.wait_until_at_rest().values())
