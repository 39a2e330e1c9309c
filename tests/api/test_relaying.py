"""Requests for other servers' models: passed on as they came, and their answers passed back as they come."""

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
    STREAMING,
    asking,
    streamed,
    whole,
)
from fairlead.api.relaying import PATHS, USUAL_TOKENS
from fairlead.config import ApiKey, KeyLimits
from fairlead.job import Delta
from fake_fleet import FakeFleet

# What goes there and comes back --------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_a_request_goes_as_it_came_and_its_answer_too(far, path):
    body = asking(unheard_of=[{"of": None}], tools=3, response_format={"type": "json_schema"})
    reply = await far.post(path, body, headers={"X-Request-Id": "mine"})
    assert (200, ANSWER, KIND) == (reply.status, reply.body, reply.headers["content-type"])
    assert "mine" == reply.headers["x-request-id"]
    job = far.gateway.job
    assert (path, body, False) == (job.relay.path, job.relay.body, job.relay.stream)
    assert ("far", (), len(body) // 4, "mine") == (
        job.model,
        job.prompts,
        job.prompt_tokens,
        job.request_id,
    )


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_is_their_events_and_nothing_else(far, path, choices):
    far.gateway.script = streamed
    reply = await far.post(path, asking(stream=True, n=choices))
    assert (200, b"".join(EVENTS)) == (reply.status, reply.body)
    assert "text/event-stream" == reply.headers["content-type"]
    assert reply.whole
    assert far.gateway.job.stream
    assert far.gateway.job.relay.stream


async def test_what_is_streamed_goes_out_as_it_comes(far):
    far.gateway.script = lambda job: [[Delta(0, "far", raw=EVENTS[:2])], None]
    pieces, left = [], trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: far.post(CHAT, asking(stream=True), pieces=pieces, left=left))
        await trio.testing.wait_all_tasks_blocked()
        assert b"".join(EVENTS[:2]) == b"".join(pieces)
        left.set()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens"])
async def test_where_nothing_is_generated_a_wish_to_stream_is_their_affair(far, path):
    body = asking(stream=True)
    reply = await far.post(path, body)
    assert ANSWER == reply.body
    assert (False, False, body) == (
        far.gateway.job.stream,
        far.gateway.job.relay.stream,
        far.gateway.job.relay.body,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_waited_says_how_long_it_was_to_be(far, stream):
    far.gateway.script = streamed if stream else whole
    far.gateway.estimated_wait_s, far.gateway.queue_position = 24, 3
    reply = await far.post(CHAT, asking(stream=stream))
    assert ("24", "3") == (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"])


async def test_while_a_stream_waits_our_comments_come_before_their_events(far, autojump_clock):
    far.gateway.script, far.gateway.wait_s = streamed, 17.0
    reply = await far.post(CHAT, asking(stream=True))
    assert b": queued position=2 estimated_wait=16\n\n" + b"".join(EVENTS) == reply.body


async def test_an_answer_of_no_choice_but_many_is_one_body(far):
    reply = await far.post(CHAT, asking(n=8))
    assert ANSWER == reply.body
    assert 8 == far.gateway.job.sequences


# What we must know of it ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("path", PATHS)
async def test_where_there_are_no_choices_n_means_nothing(far, path):
    await far.post(path, asking(n=5, prompt=["one", "two"]))
    assert 1 == far.gateway.job.sequences


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"n": 9}), (COMPLETIONS, {"n": 3, "prompt": ["a", "b", "c"]})]
)
async def test_more_answers_than_a_request_may_have_are_refused(far, path, fields):
    reply = await far.post(path, asking(**fields))
    assert (400, "n") == (reply.status, reply.error["param"])
    assert [] == far.gateway.jobs


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, (USUAL_TOKENS, 1.0, None)),
        (CHAT, {"max_tokens": 7, "temperature": 0}, (7, 0.0, None)),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 8, "seed": -1}, (8, 1.0, -1)),
        (CHAT, {"max_tokens": -1}, (USUAL_TOKENS, 1.0, None)),  # llama.cpp's way to say without end
        (CHAT, {"max_tokens": 10**30, "seed": 10**30}, (2**31 - 1, 1.0, 10**30)),
        ("/v1/responses", {"max_output_tokens": 9}, (9, 1.0, None)),
        (MESSAGES, {"max_tokens": 10, "temperature": 0.5}, (10, 0.5, None)),
        ("/v1/embeddings", {"max_tokens": 10, "temperature": 0}, (1, 1.0, None)),
        ("/v1/messages/count_tokens", {"max_tokens": 10}, (1, 1.0, None)),
    ],
)
async def test_the_queue_and_a_failover_know_how_long_it_may_be_and_whether_it_repeats(
    far, path, fields, expected
):
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
async def test_a_body_that_lies_about_what_we_must_know_is_refused_by_name(far, path, field, lie):
    reply = await far.post(path, asking(**{field: lie}))
    assert (400, field) == (reply.status, reply.json["error"]["param"])
    assert field in reply.json["error"]["message"]
    assert [] == far.gateway.jobs


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
async def test_what_is_no_json_object_goes_nowhere(far, path, body):
    reply = await far.post(path, body)
    assert 400 == reply.status
    assert "error" in reply.json
    assert [] == far.gateway.jobs


async def test_of_members_that_come_twice_the_last_one_counts_for_all(far):
    body = b'{"model": "small", "stream": true, "model": "far", "stream": false}'
    assert ANSWER == (await far.post(CHAT, body)).body
    assert ("far", False) == (far.gateway.job.model, far.gateway.job.relay.stream)


# Which model, and who may ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
async def test_a_model_that_nobody_has_is_not_found(far, path):
    reply = await far.post(path, asking(model="huge"))
    assert (404, "model_not_found") == (reply.status, reply.json["error"]["code"])
    assert [] == far.gateway.jobs


@pytest.mark.parametrize("path", ALL)
async def test_an_alias_is_the_model(far, path):
    body = asking(model="away")
    await far.post(path, body)
    assert ("far", body) == (far.gateway.job.model, far.gateway.job.relay.body)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["small", "tiny"])
async def test_our_own_models_have_no_such_route(far, path, name):
    reply = await far.post(path, asking(model=name))
    assert (400, "model") == (reply.status, reply.json["error"]["param"])
    assert f"'small' is not served under {path}" in reply.json["error"]["message"]


async def test_a_key_has_the_models_it_may_have_by_any_name(client_with):
    near, away = ApiKey("sk-near", models=("small",)), ApiKey("sk-away", models=("away",))
    client = client_with(
        near, away, fleet=FakeFleet(["small"], ["far"]), aliases={"away": "far"}, gateway_script=whole
    )
    for path in ALL:
        refused = await client.post(path, asking(), headers={"x-api-key": near.key})
        assert (403, "forbidden") == (refused.status, refused.json["error"]["code"])
        assert 401 == (await client.post(path, asking())).status
        assert 200 == (await client.post(path, asking(), headers={"x-api-key": away.key})).status
    assert len(ALL) == len(client.gateway.jobs)
    unnamed = await client.post(CHAT, asking(model=None), headers={"x-api-key": away.key})
    assert 200 == unnamed.status
    assert "far" == client.gateway.jobs[-1].model


async def test_without_a_name_one_of_several_cannot_be_meant(far):
    reply = await far.post(CHAT, asking(model=None))
    assert (400, "model") == (reply.status, reply.error["param"])


async def test_an_estimate_can_be_had_for_a_model_elsewhere_and_its_tokens_cannot(far):
    assert 200 == (await far.get("/queue/estimate?model=away")).status
    reply = await far.post("/tokenize", {"model": "far", "prompt": "hello"})
    assert (400, "model") == (reply.status, reply.error["param"])


async def test_an_estimate_of_a_long_prompt_does_not_shut_a_key_out_for_good(client_with):
    key = ApiKey("sk", limits=KeyLimits(tokens_per_minute=100))
    client = client_with(key, fleet=FakeFleet([], ["far"]), gateway_script=whole)
    headers = {"Authorization": f"Bearer {key.key}"}
    picture = asking(image="x" * 100_000)
    assert 200 == (await client.post(CHAT, picture, headers=headers)).status
    assert 429 == (await client.post(CHAT, asking(), headers=headers)).status


async def test_who_asks_is_read_from_the_body_as_ever(far):
    await far.post(CHAT, asking(user="alice", priority="low"), headers={"X-No-Queue": "1"})
    job = far.gateway.job
    assert ("user/alice", 2, True) == (job.tenant, job.priority, job.no_queue)


async def test_vllms_priority_is_read_and_passed_on_as_it_is(far):
    await far.post(CHAT, asking(priority=-1))
    job = far.gateway.job
    assert (job.priority, json.loads(job.relay.body)["priority"]) == (0, -1)


async def test_fields_of_likelihood_evaluations_are_passed_on(far):
    fields = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 5}
    await far.post("/v1/completions", {"model": "far", **fields})
    assert fields.items() <= json.loads(far.gateway.job.relay.body).items()
