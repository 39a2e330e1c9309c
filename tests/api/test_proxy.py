"""Requests for other servers' models are relayed unchanged, and so are their responses."""

import json

import pytest
import trio
import trio.testing

from api.far_away import (
    ALL,
    ANSWER,
    CHAT,
    COMPLETIONS,
    EVENTS,
    KIND,
    MESSAGES,
    RELAYED_ONLY,
    STREAMING,
    asking,
    streamed,
    whole,
)
from fairlead.api.generate import USUAL_TOKENS
from fairlead.config import ApiKey, KeyLimits
from fairlead.job import Delta
from fake_fleet import FakeFleet

# Requests and responses ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_a_request_and_its_response_are_relayed_unchanged(far, path):
    body = asking(unheard_of=[{"of": None}], tools=3, response_format={"type": "json_schema"})
    reply = await far.post(path, body, headers={"X-Request-Id": "mine"})
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, ANSWER, KIND)
    assert reply.headers["x-request-id"] == "mine"
    job = far.gateway.job
    assert (path, body, False) == (job.relay.path, job.relay.body, job.relay.stream)
    assert (
        job.model,
        job.prompts,
        job.prompt_tokens,
        job.request_id,
    ) == ("far", (), len(body) // 4, "mine")


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_relayed_stream_has_only_the_events_of_the_other_server(far, path, choices):
    far.gateway.script = streamed
    reply = await far.post(path, asking(stream=True, n=choices))
    assert (reply.status, reply.body) == (200, b"".join(EVENTS))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.whole
    assert far.gateway.job.stream
    assert far.gateway.job.relay.stream


async def test_events_are_relayed_as_they_arrive(far):
    far.gateway.script = lambda job: [[Delta(0, "far", raw=EVENTS[:2])], None]
    pieces, left = [], trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: far.post(CHAT, asking(stream=True), pieces=pieces, left=left))
        await trio.testing.wait_all_tasks_blocked()
        assert b"".join(EVENTS[:2]) == b"".join(pieces)
        left.set()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens"])
async def test_stream_is_relayed_but_ignored_where_nothing_is_generated(far, path):
    body = asking(stream=True)
    reply = await far.post(path, body)
    assert reply.body == ANSWER
    assert (
        far.gateway.job.stream,
        far.gateway.job.relay.stream,
        far.gateway.job.relay.body,
    ) == (False, False, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_queued_response_reports_its_estimated_wait(far, stream):
    far.gateway.script = streamed if stream else whole
    far.gateway.estimated_wait_s, far.gateway.queue_position = 24, 3
    reply = await far.post(CHAT, asking(stream=stream))
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("24", "3")


async def test_comments_of_a_queued_stream_precede_the_relayed_events(far, autojump_clock):
    far.gateway.script, far.gateway.wait_s = streamed, 17.0
    reply = await far.post(CHAT, asking(stream=True))
    assert b": queued position=2 estimated_wait=16\n\n" + b"".join(EVENTS) == reply.body


async def test_a_response_with_many_choices_is_one_body(far):
    reply = await far.post(CHAT, asking(n=8))
    assert reply.body == ANSWER
    assert far.gateway.job.sequences == 8


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
async def test_each_prompt_of_a_text_completion_has_its_choices(far, fields, choices):
    await far.post(COMPLETIONS, asking(**fields))
    assert choices == far.gateway.job.sequences


@pytest.mark.parametrize("path", RELAYED_ONLY)
async def test_n_is_ignored_where_there_are_no_choices(far, path):
    await far.post(path, asking(n=5, prompt=["one", "two"]))
    assert far.gateway.job.sequences == 1


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"n": 9}), (COMPLETIONS, {"n": 3, "prompt": ["a", "b", "c"]})]
)
async def test_more_choices_than_a_request_may_have_are_refused(far, path, fields):
    reply = await far.post(path, asking(**fields))
    assert (reply.status, reply.error["param"]) == (400, "n")
    assert far.gateway.jobs == []


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
async def test_token_limit_temperature_and_seed_are_read_for_queue_and_failover(far, path, fields, expected):
    await far.post(path, asking(**fields))
    sampling = far.gateway.job.sampling
    assert expected == (sampling.max_tokens, sampling.temperature, sampling.seed)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("model", 1),
        ("model", ["far"]),
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
async def test_an_invalid_field_that_is_read_is_refused_by_name(far, path, field, lie):
    reply = await far.post(path, asking(**{field: lie}))
    assert (reply.status, reply.json["error"]["param"]) == (400, field)
    assert field in reply.json["error"]["message"]
    assert far.gateway.jobs == []


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"far"',
        b'{"model": "far"',
        b'{"model": "far", "x": NaN}',
        b'{"model": "far", "x": "\xff"}',
        b'{"model": "far", "x": ' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_a_body_that_is_no_json_object_is_not_relayed(far, path, body):
    reply = await far.post(path, body)
    assert reply.status == 400
    assert "error" in reply.json
    assert far.gateway.jobs == []


async def test_of_duplicate_members_the_last_one_counts(far):
    body = b'{"model": "small", "stream": true, "model": "far", "stream": false}'
    assert (await far.post(CHAT, body)).body == ANSWER
    assert (far.gateway.job.model, far.gateway.job.relay.stream) == ("far", False)


# Models and permissions --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_an_unknown_model_is_not_found(far, path):
    reply = await far.post(path, asking(model="huge"))
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert far.gateway.jobs == []


@pytest.mark.parametrize("path", ALL)
async def test_an_alias_is_resolved_to_its_model(far, path):
    body = asking(model="away")
    await far.post(path, body)
    assert (far.gateway.job.model, far.gateway.job.relay.body) == ("far", body)


@pytest.mark.parametrize("path", RELAYED_ONLY)
@pytest.mark.parametrize("name", ["small", "tiny"])
async def test_local_models_are_refused_on_routes_for_relayed_models(far, path, name):
    reply = await far.post(path, asking(model=name))
    assert (reply.status, reply.json["error"]["param"]) == (400, "model")
    assert f"'small' is not served under {path}" in reply.json["error"]["message"]


async def test_a_key_may_use_its_models_by_any_name(client_with):
    near, away = ApiKey("sk-near", models=("small",)), ApiKey("sk-away", models=("away",))
    client = client_with(
        near, away, fleet=FakeFleet(["small"], ["far"]), aliases={"away": "far"}, gateway_script=whole
    )
    for path in ALL:
        refused = await client.post(path, asking(), headers={"x-api-key": near.key})
        assert (refused.status, refused.json["error"]["code"]) == (403, "forbidden")
        assert (await client.post(path, asking())).status == 401
        assert (await client.post(path, asking(), headers={"x-api-key": away.key})).status == 200
    assert len(ALL) == len(client.gateway.jobs)
    unnamed = await client.post(CHAT, asking(model=None), headers={"x-api-key": away.key})
    assert unnamed.status == 200
    assert client.gateway.jobs[-1].model == "far"


async def test_with_several_models_a_name_is_required(far):
    reply = await far.post(CHAT, asking(model=None))
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_a_remote_model_has_an_estimate_but_cannot_be_tokenized(far):
    assert (await far.get("/queue/estimate?model=away")).status == 200
    reply = await far.post("/tokenize", {"model": "far", "prompt": "hello"})
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_a_prompt_whose_estimate_exceeds_the_token_limit_is_admitted(client_with):
    key = ApiKey("sk", limits=KeyLimits(tokens_per_minute=100))
    client = client_with(key, fleet=FakeFleet([], ["far"]), gateway_script=whole)
    headers = {"Authorization": f"Bearer {key.key}"}
    image_request = asking(image="x" * 100_000)
    assert (await client.post(CHAT, image_request, headers=headers)).status == 200
    assert (await client.post(CHAT, asking(), headers=headers)).status == 429


async def test_user_and_priority_are_read_from_the_body(far):
    await far.post(CHAT, asking(user="alice", priority="low"), headers={"X-No-Queue": "1"})
    job = far.gateway.job
    assert (job.tenant, job.priority, job.no_queue) == ("user/alice", 2, True)


async def test_vllms_priority_is_read_and_relayed_unchanged(far):
    await far.post(CHAT, asking(priority=-1))
    job = far.gateway.job
    assert (job.priority, json.loads(job.relay.body)["priority"]) == (0, -1)


async def test_fields_of_likelihood_evaluations_are_relayed(far):
    fields = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 5}
    await far.post("/v1/completions", {"model": "far", **fields})
    assert fields.items() <= json.loads(far.gateway.job.relay.body).items()
