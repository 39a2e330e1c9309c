"""Routes that generate nothing: models, tokens, health, queue and version."""

from importlib.metadata import version

import pytest
import trio
from openai.types import Model

from fairlead.base.config import ApiKey
from fairlead.router.fleet.status import ModelStatus
from fake_fleet import FakeFleet


async def test_models_are_listed_under_their_canonical_names(client, model):
    reply = await client.get("/v1/models")
    assert reply.json["object"] == "list"
    (card,) = reply.json["data"]
    Model.model_validate(card, strict=True)
    assert card == {
        "id": "small",
        "object": "model",
        "created": model.created,
        "owned_by": "fairlead",
        "root": "small",
        "parent": None,
        "max_model_len": 4096,
        "task": "generate",
    }


def fleet_with_aliases(*, lists_aliases: bool) -> FakeFleet:
    statuses = [
        ModelStatus(
            model="small", kind="engine", node="engine:small", state="ready", aliases=("tiny", "mini")
        ),
        ModelStatus(model="other", kind="command", node="command:other", state="ready", aliases=("second",)),
    ]
    return FakeFleet(statuses=statuses, lists_aliases=lists_aliases)


async def test_aliases_are_listed_as_models_of_their_own_if_configured(client_with):
    client = client_with(fleet=fleet_with_aliases(lists_aliases=True))
    cards = {card.pop("id"): card for card in (await client.get("/v1/models")).json["data"]}
    assert list(cards) == ["small", "other", "tiny", "mini", "second"]
    assert cards["tiny"] == cards["mini"] == cards["small"]
    assert cards["second"] == cards["other"] != cards["small"]


async def test_aliases_are_not_listed_by_default(client_with):
    client = client_with(fleet=fleet_with_aliases(lists_aliases=False))
    cards = (await client.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["small", "other"]


async def test_aliases_of_a_model_that_a_key_may_not_use_are_not_listed(client_with):
    key = ApiKey("sk-other", models=("second",))
    client = client_with(key, fleet=fleet_with_aliases(lists_aliases=True), aliases={"second": "other"})
    reply = await client.get("/v1/models", headers={"Authorization": "Bearer sk-other"})
    assert [card["id"] for card in reply.json["data"]] == ["other", "second"]


@pytest.mark.parametrize("name", ["small", "tiny"])
async def test_model_is_found_by_name_and_alias(client, name):
    reply = await client.get(f"/v1/models/{name}")
    assert reply.json["id"] == "small"


async def test_name_may_have_slashes(client_with, model):
    client = client_with(models={"org/small": model})
    assert (await client.get("/v1/models/org/small")).status == 200


async def test_detokenize_reverses_tokenize(client, model):
    reply = await client.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})
    tokens = model.tokenizer.encode("hello world")
    assert reply.json == {
        "count": len(tokens),
        "max_model_len": 4096,
        "tokens": tokens,
        "token_strs": [model.tokenizer.token(token) for token in tokens],
    }
    reply = await client.post("/detokenize", {"model": "small", "tokens": tokens})
    assert reply.json == {"prompt": "hello world"}


async def test_messages_are_tokenized_with_the_chat_template(client, model):
    messages = [{"role": "user", "content": "hello"}]
    reply = await client.post("/tokenize", {"messages": messages})
    assert reply.json["tokens"] == model.encode_chat(messages)
    assert reply.json["token_strs"] is None
    reply = await client.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert reply.json["tokens"] == model.encode_chat(messages, add_generation_prompt=False)


async def test_special_tokens_are_shown_by_detokenize(client):
    reply = await client.post("/detokenize", {"tokens": [0]})
    assert reply.json == {"prompt": "<eos>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_invalid_body_is_refused_by_field(client, path, body, param):
    reply = await client.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_empty_tokens_and_empty_text_are_accepted(client):
    assert (await client.post("/detokenize", {"tokens": []})).json == {"prompt": ""}
    assert (await client.post("/tokenize", {"prompt": ""})).json["count"] == 0


async def test_server_that_is_loading_is_live_but_not_ready(client_with):
    client = client_with(ready=lambda: False)
    health, ready = await client.get("/health"), await client.get("/ready")
    assert (health.status, health.json["status"]) == (200, "ok")
    assert (ready.status, ready.json) == (503, {"status": "loading"})
    assert ready.headers["retry-after"] == "2"


async def test_server_that_is_being_stopped_is_live_but_not_ready_and_takes_jobs(client_with):
    client = client_with(stopping=lambda: True)
    health, ready = await client.get("/health"), await client.get("/ready")
    assert (health.status, ready.status, ready.json) == (200, 503, {"status": "stopping"})
    assert (await client.post("/v1/completions", {"model": "small", "prompt": "a"})).status == 200


async def test_server_that_is_draining_refuses_jobs_and_answers_probes(client_with):
    client = client_with(draining=lambda: True)
    reply = await client.post("/v1/completions", {"model": "small", "prompt": "a"})
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "draining", "5")
    assert (await client.get("/metrics")).status == 200


async def test_server_with_a_stuck_model_is_unhealthy_and_names_it(client_with):
    reply = await client_with(problems=lambda: {"small": "it made no progress for 30 s"}).get("/health")
    assert reply.status == 503
    assert reply.json["status"] == "stuck"
    assert reply.json["models"] == {"small": "it made no progress for 30 s"}


async def test_health_waits_for_no_other_process(client_with):
    with trio.fail_after(10):
        assert (await client_with(refresh=trio.sleep_forever).get("/health")).status == 200


async def test_loaded_server_is_ready(client):
    reply = await client.get("/ready")
    assert (reply.status, reply.json) == (200, {"status": "ready"})


async def test_queue_and_the_running_models_are_reported(client):
    assert (await client.get("/queue")).json == {"waiting": 2, "running": 1, "capacity": 100, "seats": 1}
    (running,) = (await client.get("/running")).json
    assert {"model": "small", "kind": "engine", "state": "ready", "seats": 8}.items() <= running.items()


async def test_version_is_the_packages(client):
    assert (await client.get("/version")).json == {"version": version("fairlead")}


async def test_head_is_answered_where_get_is(client):
    reply = await client.send("HEAD", "/health", b"")
    assert (reply.status, reply.body) == (200, b"")
