"""Routes of vLLM, llama.cpp and SageMaker that describe a model, render chats, or choose a dialect."""

import dataclasses
import json

import msgspec
import pytest

from fairlead.base.config import ApiKey
from fairlead.base.config.access import KeyLimits
from fairlead.base.version import VERSION
from fairlead.language.text.embedding import EmbeddingSettings
from fake_fleet import FakeFleet
from server.routes.comparing import embedder_client, scorer_client
from server.routes.conftest import TEMPLATE, client_of
from server.routes.test_embeddings import script

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(model):
    """Return a client of a server with a model of its own, and one of another server."""
    fleet = FakeFleet(["small"], ["remote"])
    made = client_of(model, fleet=fleet, aliases={"tiny": "small"})
    made.fleet = fleet
    return made


# /apply-template ------------------------------------------------------------------------------------


async def test_template_is_applied_as_a_chat_applies_it(client, model):
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"mood": "calm"}}
    prompt = (await client.post("/apply-template", body)).json["prompt"]
    assert prompt == "<|user|>hello\n(calm)<|assistant|>"
    await client.post("/v1/chat/completions", body)
    assert model.encode_prompt(prompt) == list(client.gateway.job.prompts[0])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_generation_prompt": False}, "<|user|>hello\n"),
        ({"continue_final_message": True}, "<|user|>hello"),
    ],
)
async def test_end_of_the_rendered_chat_is_chosen(client, fields, expected):
    reply = await client.post("/apply-template", {"model": "small", "messages": MESSAGES} | fields)
    assert reply.json == {"prompt": expected}


async def test_rendered_chat_is_charged_like_a_tokenized_one(model):
    key = ApiKey("sk-1", limits=KeyLimits(tokens_per_minute=40))
    client = client_of(model, key)
    body = {"messages": [{"role": "user", "content": "hello " * 20}]}
    headers = {"Authorization": "Bearer sk-1"}
    statuses = [(await client.post("/apply-template", body, headers=headers)).status for _ in range(2)]
    assert statuses == [200, 429]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "small"}, 400, "messages"),
        ({"model": "small", "messages": [{"role": "robot"}]}, 400, "messages[0].role"),
        ({"model": "remote", "messages": MESSAGES}, 400, "model"),
        ({"model": "nothing", "messages": MESSAGES}, 404, "model"),
    ],
)
async def test_wrong_chat_is_refused(client, body, status, param):
    reply = await client.post("/apply-template", body)
    assert (reply.status, reply.error["param"]) == (status, param)


# /props and /slots ----------------------------------------------------------------------------------


async def test_props_describe_a_model(client):
    props = (await client.get("/props?model=tiny")).json
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["top_k"] == 20
    assert (props["model_alias"], props["chat_template"]) == ("small", TEMPLATE)
    assert (props["bos_token"], props["eos_token"]) == ("", "<eos>")
    assert props["build_info"] == f"fairlead-{VERSION}"
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["total_slots"] == next(one.seats for one in client.fleet.models() if one.model == "small")


async def test_props_of_another_servers_model_are_what_is_known(client):
    props = (await client.get("/props?model=remote")).json
    assert (props["default_generation_settings"], props["chat_template"]) == ({"n_ctx": 0}, "")


async def test_slots_are_the_models_seats_without_what_runs_in_them(client):
    status = next(one for one in client.fleet.models() if one.model == "small")
    client.fleet.statuses = [msgspec.structs.replace(status, seats=3, busy=2)]
    slots = (await client.get("/slots?model=small")).json
    assert slots == [
        {"id": number, "id_task": -1, "n_ctx": 4096, "speculative": False, "is_processing": number < 2}
        for number in range(3)
    ]
    assert (await client.get("/slots?model=small&fail_on_no_slot=1")).status == 200
    client.fleet.statuses = [msgspec.structs.replace(status, seats=2, busy=2)]
    reply = await client.get("/slots?model=small&fail_on_no_slot=1")
    assert (reply.status, reply.error["message"]) == (503, "no slot is available")


# /tokenizer_info ------------------------------------------------------------------------------------


async def test_tokenizer_info_is_the_models_file_with_its_template(client, model):
    info = (await client.get("/tokenizer_info?model=small")).json
    written = json.loads((model.path / "tokenizer_config.json").read_text())
    assert info == {"tokenizer_class": "PreTrainedTokenizerFast", **written}
    assert info["chat_template"] == TEMPLATE


async def test_tokenizer_info_names_no_path_of_a_machine(client, model, tmp_path):
    path = model.path / "tokenizer_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"name_or_path": "/home/ana/x", "x": float("inf")}))
    try:
        reply = await client.get("/tokenizer_info?model=small")
    finally:
        path.write_text(before)
    assert (reply.status, b"/home" in reply.body) == (200, False)
    assert reply.json["x"] is None


@pytest.mark.parametrize("path", ["/props", "/slots", "/tokenizer_info"])
async def test_model_must_be_one_that_the_key_may_use(model, path):
    keys = (ApiKey("sk-1", models=("other",)), ApiKey("sk-2", models=("small",)))
    client = client_of(model, *keys, fleet=FakeFleet(["small", "other"]))
    for key, query, status in (
        ("sk-1", "?model=small", 403),
        ("sk-2", "?model=small", 200),
        ("sk-2", "", 200),
        ("sk-2", "?model=nothing", 404),
    ):
        reply = await client.get(path + query, headers={"Authorization": f"Bearer {key}"})
        assert reply.status == status, (key, query)


async def test_model_must_be_named_if_there_are_several(client):
    for path in ("/props", "/slots", "/tokenizer_info"):
        assert (await client.get(path)).error["param"] == "model"
    assert (await client.get("/tokenizer_info?model=remote")).status == 400


# /invocations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": MESSAGES}, "chat.completion"),
        ({"prompt": "hello"}, "text_completion"),
        ({"messages": MESSAGES, "stream": True}, "chat.completion.chunk"),
        ({"prompt": "hello", "stream": True}, "text_completion"),
    ],
)
async def test_invocation_is_of_the_dialect_that_its_fields_show(client, body, kind):
    reply = await client.post("/invocations", {"model": "small"} | body)
    assert reply.status == 200, reply.body
    assert {chunk["object"] for chunk in (reply.chunks if body.get("stream") else [reply.json])} == {kind}
    assert client.gateway.job.path == "/invocations"


async def test_invocation_makes_embeddings_rankings_and_scores(model, client_with):
    embedder = client_with(
        models={"small": dataclasses.replace(model, embedding=EmbeddingSettings(4, normalized=False))}
    )
    embedder.gateway.script = script
    assert (await embedder.post("/invocations", {"input": "hello"})).json["object"] == "list"
    for client in (embedder_client(model), scorer_client(model)):
        ranked = await client.post("/invocations", {"query": "q", "documents": ["same"]})
        assert ranked.json["results"][0]["index"] == 0
        for fields in ({"text_1": "q", "text_2": "same"}, {"queries": "q", "documents": ["same"]}):
            assert (await client.post("/invocations", fields)).json["data"][0]["object"] == "score"


async def test_invocation_for_another_server_is_relayed_to_the_dialects_path(client):
    await client.post("/invocations", {"model": "remote", "messages": MESSAGES})
    assert client.gateway.job.relay.path == "/v1/chat/completions"


@pytest.mark.parametrize("body", [{}, {"model": "small"}, {"query": "q"}, {"text_1": "a"}])
async def test_invocation_without_a_prompt_is_refused(client, body):
    reply = await client.post("/invocations", body)
    assert reply.status == 400
    assert reply.error["message"].startswith("the body has none of these fields: messages, prompt, input, ")


async def test_faults_of_an_invocation_are_the_dialects(client):
    reply = await client.post("/invocations", {"model": "small", "prompt": "a", "top_p": 7})
    assert reply.error["param"] == "top_p"
    reply = await client.post("/invocations", b"[1]")
    assert reply.status == 400
    reply = await client.post("/invocations", {"model": "small", "prompt": "a", "surprise": 1})
    assert reply.headers["warning"] == '299 - "fields without effect: surprise"'
