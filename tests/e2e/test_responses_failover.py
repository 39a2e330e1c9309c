"""The model's process is killed while it writes a response of OpenAI's Responses API."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from api.typed_responses import RESPONSES, final_response, without_times
from e2e.own_copy import own_copy
from e2e.real_server import configured, real_server
from e2e.test_failover import CONTEXT, NUMBERS, Stream, wait_until_ready

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


@pytest.fixture
def server(tmp_path: Path):
    """A server for each test, because a child which dies often is restarted with a delay."""
    model = {"path": str(own_copy(tmp_path / "model", max_position_embeddings=CONTEXT))}
    with real_server(*configured(tmp_path, model)) as server:
        yield server


def killed(server, body):
    """Return the stream of a request. Its model is killed when the first event arrives."""
    return Stream(RESPONSES).read(server, body, lambda: os.kill(server.child_pid(), signal.SIGKILL))


@pytest.mark.parametrize("body", [LONG | {"temperature": 0}, CALL], ids=["text", "call"])
def test_response_resumes_where_it_stopped(server, body):
    expected = final_response(Stream(RESPONSES).read(server, body).events)
    stream = killed(server, body)
    resumed = final_response(stream.events)
    assert stream.is_whole
    for response in (expected, resumed):
        del response["usage"]["input_tokens_details"]  # the second prompt may be cached
    assert without_times(resumed) == without_times(expected)
    assert not any(server.wait_until_at_rest().values())


def test_random_response_ends_with_its_failure_and_a_cut(server):
    stream = killed(server, LONG | {"temperature": 1.5, "max_output_tokens": 20_000})
    response = final_response(stream.events)
    assert not stream.is_whole
    assert (response["status"], response["error"]["type"]) == ("failed", "node_failed")
    assert response["output"] != []
    wait_until_ready(server)
    assert not any(server.wait_until_at_rest().values())
