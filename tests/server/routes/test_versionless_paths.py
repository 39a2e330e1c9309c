"""OpenAI's routes respond under the same paths without `/v1`, for clients with a base URL that lacks it."""

import pytest

from fairlead.base.config import ApiKey

REMOTE_REQUEST = {"model": "remote", "input": "hello"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}),
        ("/completions", {"prompt": "hello", "max_tokens": 5}),
    ],
)
async def test_generating_route_answers_without_v1(client, path, body):
    with_version = await client.post(f"/v1{path}", body)
    without = await client.post(path, body)
    assert without.status == with_version.status == 200
    assert without.json["choices"] == with_version.json["choices"]


@pytest.mark.parametrize("path", ["/models", "/models/small", "/models/tiny", "/models/nothing"])
async def test_models_are_listed_without_v1(client, path):
    with_version, without = await client.get(f"/v1{path}"), await client.get(path)
    assert (without.status, without.json) == (with_version.status, with_version.json)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/chat/completions"])
async def test_relayed_request_is_passed_on_to_the_path_with_v1(relay_client, path):
    reply = await relay_client.post(path.removeprefix("/v1"), REMOTE_REQUEST)
    assert reply.status == 200
    assert relay_client.gateway.job.relay.path == path


async def test_other_routes_have_one_path_only(client):
    for path in ("/messages", "/requests/mine/cancel"):
        assert (await client.post(path, {})).status == 404


async def test_post_to_models_load_works_and_get_looks_up_a_model_named_load(client):
    assert (await client.post("/models/load", {"model": "small"})).status == 200
    assert (await client.get("/models/load")).error["code"] == "model_not_found"


async def test_key_is_needed_without_v1_too(client_with, chat):
    client = client_with(ApiKey("sk-1"))
    assert (await client.post("/chat/completions", chat())).status == 401
    assert (await client.get("/models")).status == 401
