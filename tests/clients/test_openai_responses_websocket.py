"""OpenAI's package with the WebSocket mode of responses: `client.responses.connect()`."""

import json
from collections.abc import Iterator
from itertools import groupby

import httpx
import pytest

from clients.conftest import MODEL
from e2e.real_server import RealServer, configured, real_server, until

openai = pytest.importorskip("openai")
websockets = pytest.importorskip("websockets")
# OpenAI's package opens it without a block.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

ASK = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0}
KEYS = [{"key": "sk-ana", "user": "ana"}, {"key": "sk-ben", "user": "ben", "models": ["other"]}]
BODY_BYTES = 200_000


@pytest.fixture(scope="module", params=[1, 2])
def server(request, tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("websocket")
    settings = {"fronts": request.param, "apiKeys": KEYS, "responses": {"inStore": True}}
    settings["limits"] = {"bodyBytes": BODY_BYTES}
    with real_server(*configured(folder, {}, **settings), "--store", str(folder / "store.db")) as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> Iterator["openai.OpenAI"]:
    with connect(server) as client:
        yield client


def connect(server: RealServer, key: str = "sk-ana") -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def answer(connection) -> list:
    """Return the events of one response, or one error."""
    events = []
    while not events or events[-1].type not in {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    }:
        events.append(connection.recv())
    return events


def test_events_are_those_of_a_stream(client):
    streamed = list(client.responses.create(**ASK, stream=True))
    with client.responses.connect() as connection:
        connection.response.create(**ASK)
        events = answer(connection)
    kinds, expected = ([kind for kind, _ in groupby(e.type for e in some)] for some in (events, streamed))
    assert kinds == expected  # how many deltas the text comes in depends on time
    assert events[-1].response.output_text == streamed[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_one_connection_has_many_turns_which_continue_each_other(client):
    previous, tokens = None, 0
    with client.responses.connect() as connection:
        for _ in range(5):
            connection.response.create(**ASK, previous_response_id=previous, max_output_tokens=4)
            response = answer(connection)[-1].response
            assert response.previous_response_id == previous
            assert response.usage.input_tokens > tokens
            previous, tokens = response.id, response.usage.input_tokens
    assert client.responses.retrieve(previous).id == previous


def test_messages_that_are_sent_ahead_are_answered_in_turn(client):
    with client.responses.connect() as connection:
        for number in range(8):
            connection.response.create(**ASK, max_output_tokens=2, metadata={"number": str(number)})
        found = [answer(connection)[-1].response.metadata["number"] for _ in range(8)]
    assert found == [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("wrong", "status", "code", "param"),
    [
        ({"temperature": 9}, 400, None, "temperature"),
        ({"model": "unknown"}, 404, "model_not_found", "model"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_not_found", "previous_response_id"),
        ({"type": "session.update"}, 400, None, "type"),
        ({"generate": False}, 400, None, "generate"),
    ],
)
def test_error_is_a_message_and_the_connection_goes_on(client, wrong, status, code, param):
    with client.responses.connect() as connection:
        connection.send_raw(json.dumps({"type": "response.create", **ASK, **wrong}))
        (error,) = answer(connection)
        assert (error.type, error.status, error.param) == ("error", status, param)
        if code is not None:
            assert error.code == code
        assert error.message
        connection.response.create(**ASK)
        assert answer(connection)[-1].type == "response.completed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"type": 5}', "\u0000", "[" * 5000])
def test_message_that_is_no_request_is_refused(client, text):
    with client.responses.connect() as connection:
        connection.send_raw(text or " ")
        (error,) = answer(connection)
        assert error.status == 400


def test_message_larger_than_a_body_is_refused(client):
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input="x" * (BODY_BYTES + 1))
        (error,) = answer(connection)
        assert error.status == 413


@pytest.mark.parametrize("key", ["sk-wrong", "sk-ben"])
def test_key_counts_as_in_other_requests(server, key):
    with connect(server, key) as other, other.responses.connect() as connection:
        connection.response.create(**ASK)
        (error,) = answer(connection)
        assert error.status == (401 if key == "sk-wrong" else 403)


def test_leaving_ends_the_response_and_frees_its_seat(client, server):
    with client.responses.connect() as connection:
        connection.send_raw(
            json.dumps({"type": "response.create", "model": MODEL, "input": "hello", "ignore_eos": True})
        )
        while connection.recv().type != "response.output_text.delta":
            pass
    headers = {"Authorization": "Bearer sk-ana"}
    until(lambda: httpx.get(f"{server.url}/queue", headers=headers).json()["running"] == 0)


def test_many_connections_at_once_get_whole_answers(client):
    expected = client.responses.create(**ASK).output_text
    connections = [client.responses.connect().enter() for _ in range(12)]
    for connection in connections:
        connection.response.create(**ASK)
    for connection in connections:
        assert answer(connection)[-1].response.output_text == expected
        connection.close()


def test_other_paths_and_invalid_handshakes_are_refused(server):
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Authorization": "Bearer sk-ana",
    }
    assert httpx.get(f"{server.url}/v1/chat/completions", headers=upgrade).status_code == 400
    for wrong in (
        {"Sec-WebSocket-Version": "8"},
        {"Sec-WebSocket-Key": "short"},
        {"Connection": "keep-alive"},
    ):
        assert httpx.get(f"{server.url}/v1/responses", headers=upgrade | wrong).status_code == 400
    assert httpx.post(f"{server.url}/v1/responses", headers=upgrade, json=ASK).status_code == 400


def test_stopping_server_ends_idle_connections_and_finishes_others(tmp_path):
    with real_server(*configured(tmp_path, {})) as server, connect(server) as client:
        idle, busy = (client.responses.connect().enter() for _ in range(2))
        busy.response.create(**ASK)
        busy.recv()
        server.process.terminate()
        assert answer(busy)[-1].type == "response.completed"
        for connection in (idle, busy):
            with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                connection.recv()
            assert closed.value.rcvd.code == 1001
        assert server.process.wait(30) == 0
