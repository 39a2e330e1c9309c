"""What a streamed chat reports while its model is loading, if `sendLoadingState` is configured."""

import json

import pytest
import trio

from fairlead.base.errors import LoadFailed, QueueFull
from fairlead.router.fleet.status import LoadStatus, ModelStatus, NodeStatus
from fake_fleet import FakeFleet
from server.routes import remote_responses
from server.routes.conftest import Client

CHAT = "/v1/chat/completions"
STATUS = {"model": "small", "kind": "engine", "node": "engine:small"}


class LoadingFleet(FakeFleet):
    """Loads its model during the first `load_s` of the test; half of that time is for the weights."""

    load_s = 3.5

    def models(self) -> list[ModelStatus]:
        done = trio.current_time() / self.load_s
        if done >= 1:
            return [ModelStatus(state="ready", **STATUS)]
        stage = "weights" if done < 0.5 else "graphs"
        return [ModelStatus(state="loading", load=LoadStatus(progress=done, stage=stage), **STATUS)]


@pytest.fixture
def client(client_with) -> Client:
    fleet = LoadingFleet(loading_state_of=["small"])
    client = client_with(fleet=fleet)
    client.fleet = fleet
    client.gateway.wait_s = 4.0
    return client


def reasoning(reply) -> str:
    documents = [json.loads(event) for event in reply.events if event.startswith(b"{")]
    choices = [choice for document in documents for choice in document.get("choices", ())]
    return "".join(choice["delta"].get("reasoning_content", "") for choice in choices)


def content(reply) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in reply.chunks)


async def test_chat_reports_the_load_of_its_model_before_the_answer(client, chat, autojump_clock):
    reply = await client.post(CHAT, chat(stream=True))
    assert reply.status == 200
    assert reasoning(reply) == (
        "Loading the model small\n"
        "weights, 7%, position 4 in the queue"
        "\nweights, 36%, position 3 in the queue"
        "\ngraphs, 64%, position 2 in the queue"
        "\ngraphs, 93%"
        "\nLoaded after 4.0 s\n\n"
    )
    assert content(reply) == "Hello world"
    assert len({chunk["id"] for chunk in reply.chunks}) == 1
    assert {chunk["object"] for chunk in reply.chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"].get("role") for chunk in reply.chunks].count("assistant") == 1


@pytest.mark.parametrize(("progress", "stage_text"), [(None, "waiting"), (0.3, "waiting, 30%")])
async def test_known_progress_of_a_command_is_reported_followed_by_dots_while_unchanged(
    client_with, chat, autojump_clock, progress, stage_text
):
    status = ModelStatus(
        model="small",
        kind="command",
        node="n",
        state="loading",
        load=LoadStatus(progress=progress, stage="waiting"),
    )
    client = client_with(fleet=FakeFleet(statuses=[status], loading_state_of=["small"]))
    client.gateway.prefill_s = 4.0
    reply = await client.post(CHAT, chat(stream=True))
    assert reasoning(reply) == f"Loading the model small\n{stage_text}...\nLoaded after 4.0 s\n\n"


async def test_answer_that_is_slow_after_the_load_is_kept_alive_by_comments(client, chat, autojump_clock):
    client.gateway.prefill_s = 3.0
    reply = await client.post(CHAT, chat(stream=True))
    assert reasoning(reply).count("Loaded after") == 1
    assert set(reply.comments) == {": running"}
    assert content(reply) == "Hello world"


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"stream": False}), ("/v1/completions", {"stream": True, "prompt": "hello", "messages": None})],
)
async def test_other_requests_wait_without_a_report(client, chat, autojump_clock, path, fields):
    body = {name: value for name, value in chat(**fields).items() if value is not None}
    reply = await client.post(path, body)
    assert reply.status == 200
    assert b"Loaded after" not in reply.body
    assert b'"reasoning_content":"' not in reply.body


async def test_chat_for_a_model_that_is_loaded_has_no_report(client, chat, autojump_clock):
    client.gateway.wait_s = 1.0
    up = NodeStatus(id="engine:small", kind="engine", models=("small",), seats=1, busy=1, state="up")
    client.fleet.node_statuses = [up]
    reply = await client.post(CHAT, chat(stream=True))
    assert reasoning(reply) == ""


async def test_chat_has_no_report_unless_it_is_configured(client, chat, autojump_clock):
    client.fleet.loading_state_of = ()
    reply = await client.post(CHAT, chat(stream=True))
    assert reasoning(reply) == ""
    assert content(reply) == "Hello world"


async def test_model_that_is_loaded_at_once_is_not_reported(client, chat, autojump_clock):
    client.gateway.wait_s = 0.2
    assert reasoning(await client.post(CHAT, chat(stream=True))) == ""


async def test_immediate_refusal_keeps_its_status(client, chat, autojump_clock):
    client.gateway.wait_s = 0.0
    client.gateway.refusal = QueueFull("the queue is full")
    assert (await client.post(CHAT, chat(stream=True))).status == 429


async def test_load_that_fails_is_an_error_event_after_the_report(client, chat, autojump_clock):
    client.gateway.refusal = LoadFailed("no such weights")
    reply = await client.post(CHAT, chat(stream=True))
    assert reply.status == 200
    assert "Loaded" not in reasoning(reply)
    assert b"no such weights" in reply.events[-1]
    assert not reply.is_complete


async def test_relayed_chat_reports_the_load_before_the_relayed_events(client_with, chat, autojump_clock):
    status = ModelStatus(
        model="slow",
        kind="command",
        node="command:slow",
        state="loading",
        load=LoadStatus(progress=None),
    )
    client = client_with(
        fleet=FakeFleet(statuses=[status], loading_state_of=["slow"]),
        gateway_script=remote_responses.event_stream,
    )
    client.gateway.wait_s = 2.0
    reply = await client.post(CHAT, chat(model="slow", stream=True))
    assert reasoning(reply).startswith("Loading the model slow\nstarting, position 2 in the queue")
    assert reply.body.endswith(b"".join(remote_responses.EVENTS))
