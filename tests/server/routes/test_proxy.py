"""Requests for other servers' models are relayed unchanged, and so are their responses."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.job import Delta
from fairlead.generation.relays import USUAL_TOKENS
from fake_fleet import FakeFleet
from server.routes.remote_responses import (
    ALL,
    ANSWER,
    CHAT,
    COMPLETIONS,
    EVENTS,
    KIND,
    MESSAGES,
    STREAMING,
    WITHOUT_CHOICES,
    complete_response,
    event_stream,
    relay_body,
)

# Requests and responses ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_request_and_its_response_are_relayed_unchanged(relay_client, path):
    body = relay_body(unheard_of=[{"of": None}], tools=3, response_format={"type": "json_schema"})
    reply = await relay_client.post(path, body, headers={"X-Request-Id": "mine"})
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, ANSWER, KIND)
    assert reply.headers["x-request-id"] == "mine"
    job = relay_client.gateway.job
    assert (path, body, False) == (job.relay.path, job.relay.body, job.relay.stream)
    assert (
        job.model,
        job.prompts,
        job.prompt_tokens,
        job.request_id,
    ) == ("remote", (), len(body) // 4, "mine")


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize("choices", [1, 3])
async def test_relayed_stream_has_only_the_events_of_the_other_server(relay_client, path, choices):
    relay_client.gateway.script = event_stream
    reply = await relay_client.post(path, relay_body(stream=True, n=choices))
    assert (reply.status, reply.body) == (200, b"".join(EVENTS))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.is_complete
    assert relay_client.gateway.job.stream
    assert relay_client.gateway.job.relay.stream


async def test_events_are_relayed_as_they_arrive(relay_client):
    relay_client.gateway.script = lambda job: [[Delta(0, "remote", raw=EVENTS[:2])], None]
    pieces, disconnected = [], trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: relay_client.post(CHAT, relay_body(stream=True), pieces=pieces, disconnected=disconnected)
        )
        await trio.testing.wait_all_tasks_blocked()
        assert b"".join(EVENTS[:2]) == b"".join(pieces)
        disconnected.set()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens"])
async def test_stream_is_relayed_but_ignored_where_nothing_is_generated(relay_client, path):
    body = relay_body(stream=True)
    reply = await relay_client.post(path, body)
    assert reply.body == ANSWER
    assert (
        relay_client.gateway.job.stream,
        relay_client.gateway.job.relay.stream,
        relay_client.gateway.job.relay.body,
    ) == (False, False, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_queued_response_reports_its_estimated_wait(relay_client, stream):
    relay_client.gateway.script = event_stream if stream else complete_response
    relay_client.gateway.estimated_wait_s, relay_client.gateway.queue_position = 24, 3
    reply = await relay_client.post(CHAT, relay_body(stream=stream))
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("24", "3")


async def test_comments_of_a_queued_stream_precede_the_relayed_events(relay_client, autojump_clock):
    relay_client.gateway.script, relay_client.gateway.wait_s = event_stream, 17.0
    reply = await relay_client.post(CHAT, relay_body(stream=True))
    assert b": queued position=2 estimated_wait=16\n\n" + b"".join(EVENTS) == reply.body


async def test_response_with_many_choices_is_one_body(relay_client):
    reply = await relay_client.post(CHAT, relay_body(n=8))
    assert reply.body == ANSWER
    assert relay_client.gateway.job.sequences == 8


# Fields that are read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [ ], "n": 2}, 2),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": None}, 1),
        ({"prompt": {"of": "what kind"}}, 1),
        ({}, 1),
    ],
)  # fmt: skip
async def test_each_prompt_of_a_text_completion_has_its_choices(relay_client, fields, choices):
    await relay_client.post(COMPLETIONS, relay_body(**fields))
    assert choices == relay_client.gateway.job.sequences


@pytest.mark.parametrize("path", WITHOUT_CHOICES)
async def test_n_is_ignored_where_there_are_no_choices(relay_client, path):
    await relay_client.post(path, relay_body(n=5, prompt=["one", "two"]))
    assert relay_client.gateway.job.sequences == 1


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"n": 9}), (COMPLETIONS, {"n": 3, "prompt": ["a", "b", "c"]})]
)
async def test_more_choices_than_a_request_may_have_are_refused(relay_client, path, fields):
    reply = await relay_client.post(path, relay_body(**fields))
    assert (reply.status, reply.error["param"]) == (400, "n")
    assert relay_client.gateway.jobs == []


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, (USUAL_TOKENS, 1.0, None)),
        (CHAT, {"max_tokens": 7, "temperature": 0}, (7, 0.0, None)),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 8, "seed": -1}, (8, 1.0, -1)),
        (CHAT, {"max_tokens": -1}, (USUAL_TOKENS, 1.0, None)),  # no limit, as in llama.cpp
        (CHAT, {"max_tokens": 10**30, "seed": 10**30}, (2**31 - 1, 1.0, 10**30)),
        ("/v1/responses", {"max_output_tokens": 9}, (9, 1.0, None)),
        (MESSAGES, {"max_tokens": 10, "temperature": 0.5}, (10, 0.5, None)),
        ("/v1/embeddings", {"max_tokens": 10, "temperature": 0}, (1, 1.0, None)),
        ("/v1/messages/count_tokens", {"max_tokens": 10}, (1, 1.0, None)),
    ],
)
async def test_token_limit_temperature_and_seed_are_read_for_queue_and_failover(
    relay_client, path, fields, expected
):
    await relay_client.post(path, relay_body(**fields))
    sampling = relay_client.gateway.job.sampling
    assert expected == (sampling.max_tokens, sampling.temperature, sampling.seed)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 1),
        ("model", ["remote"]),
        ("stream", "yes"),
        ("stream", 1),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", "many"),
        ("temperature", "hot"),
        ("seed", {}),
        ("user", 7),
        ("priority", 1.5),
    ],
)
async def test_invalid_field_that_is_read_is_refused_by_name(relay_client, path, field, value):
    reply = await relay_client.post(path, relay_body(**{field: value}))
    assert (reply.status, reply.json["error"]["param"]) == (400, field)
    assert field in reply.json["error"]["message"]
    assert relay_client.gateway.jobs == []


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"remote"',
        b'{"model": "remote"',
        b'{"model": "remote", "x": NaN}',
        b'{"model": "remote", "x": "\xff"}',
        b'{"model": "remote", "x": ' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_body_that_is_no_json_object_is_not_relayed(relay_client, path, body):
    reply = await relay_client.post(path, body)
    assert reply.status == 400
    assert "error" in reply.json
    assert relay_client.gateway.jobs == []


async def test_of_duplicate_members_the_last_one_counts(relay_client):
    body = b'{"model": "small", "stream": true, "model": "remote", "stream": false}'
    assert (await relay_client.post(CHAT, body)).body == ANSWER
    assert (relay_client.gateway.job.model, relay_client.gateway.job.relay.stream) == ("remote", False)


# Models and permissions --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_unknown_model_is_not_found(relay_client, path):
    reply = await relay_client.post(path, relay_body(model="huge"))
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert relay_client.gateway.jobs == []


@pytest.mark.parametrize("path", ALL)
async def test_alias_is_resolved_to_its_model(relay_client, path):
    body = relay_body(model="away")
    await relay_client.post(path, body)
    assert (relay_client.gateway.job.model, relay_client.gateway.job.relay.body) == ("remote", body)


async def test_key_may_use_its_models_by_any_name(client_with):
    local_key, remote_key = ApiKey("sk-local", models=("small",)), ApiKey("sk-remote", models=("alias",))
    client = client_with(
        local_key,
        remote_key,
        fleet=FakeFleet(["small"], ["remote"]),
        aliases={"alias": "remote"},
        gateway_script=complete_response,
    )
    for path in ALL:
        refused = await client.post(path, relay_body(), headers={"x-api-key": local_key.key})
        assert (refused.status, refused.json["error"]["code"]) == (403, "forbidden")
        assert (await client.post(path, relay_body())).status == 401
        assert (await client.post(path, relay_body(), headers={"x-api-key": remote_key.key})).status == 200
    assert len(ALL) == len(client.gateway.jobs)
    unnamed = await client.post(CHAT, relay_body(model=None), headers={"x-api-key": remote_key.key})
    assert unnamed.status == 200
    assert client.gateway.jobs[-1].model == "remote"


async def test_with_several_models_a_name_is_required(relay_client):
    reply = await relay_client.post(CHAT, relay_body(model=None))
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_remote_model_has_an_estimate_but_cannot_be_tokenized(relay_client):
    assert (await relay_client.get("/queue/estimate?model=away")).status == 200
    reply = await relay_client.post("/tokenize", {"model": "remote", "prompt": "hello"})
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_prompt_with_an_estimate_above_the_token_limit_is_admitted(client_with):
    key = ApiKey("sk", limits=KeyLimits(tokens_per_minute=100))
    client = client_with(key, fleet=FakeFleet([], ["remote"]), gateway_script=complete_response)
    headers = {"Authorization": f"Bearer {key.key}"}
    image_request = relay_body(image="x" * 100_000)
    assert (await client.post(CHAT, image_request, headers=headers)).status == 200
    assert (await client.post(CHAT, relay_body(), headers=headers)).status == 429


async def test_user_and_priority_are_read_from_the_body(relay_client):
    await relay_client.post(CHAT, relay_body(user="alice", priority="low"), headers={"X-No-Queue": "1"})
    job = relay_client.gateway.job
    assert (job.tenant, job.priority, job.no_queue) == ("user/alice", 2, True)


async def test_vllms_priority_is_read_and_relayed_unchanged(relay_client):
    await relay_client.post(CHAT, relay_body(priority=-1))
    job = relay_client.gateway.job
    assert (job.priority, json.loads(job.relay.body)["priority"]) == (0, -1)


async def test_fields_of_likelihood_evaluations_are_relayed(relay_client):
    fields = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 5}
    await relay_client.post("/v1/completions", {"model": "remote", **fields})
    assert fields.items() <= json.loads(relay_client.gateway.job.relay.body).items()
