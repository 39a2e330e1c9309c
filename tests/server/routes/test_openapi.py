"""The OpenAPI document has every existing route, no other, and the schemas of their actual responses."""

import json
import re

import msgspec
import pytest
from openapi_spec_validator import validate

from fairlead.base.config import ApiKey
from fairlead.dialects import shapes, unserved
from fairlead.dialects.anthropic.shapes import AnthropicMessage, CountedTokens
from fairlead.dialects.openai.chat import ChatCompletionRequest
from fairlead.dialects.openai.completions import CompletionRequest
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.fleet.status import ModelStatus, NodeStatus
from fairlead.server.routes import openapi, schemas
from fairlead.server.routes.route_table import ROUTES

MESSAGE = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(msgspec.json.encode(openapi.document(ROUTES)))


def test_document_is_openapi(document):
    validate(document)


async def test_document_has_every_route_and_no_other(client, document):
    routes = {(method.lower(), path) for method, path in client.app._views}
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    files = {("get", "/dashboard/{name}")}  # of the dashboard: not part of the API
    assert described == routes - files


async def test_document_is_served_and_needs_a_key_if_keys_are_configured(client_with):
    client = client_with(ApiKey("sk-1"))
    assert (await client.get("/openapi.json")).status == 401
    reply = await client.get("/openapi.json", headers={"Authorization": "Bearer sk-1"})
    assert (reply.headers["content-type"], reply.json["openapi"]) == ("application/json", "3.1.0")


def test_document_has_each_field_of_a_request(document):
    for kind in (ChatCompletionRequest, CompletionRequest, schemas.AddNodeRequest):
        described = document["components"]["schemas"][kind.__name__]["properties"]
        assert set(kind.__struct_fields__) == set(described)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", unserved.CHAT),
        ("/v1/completions", unserved.COMPLETION),
        ("/v1/embeddings", unserved.EMBEDDING),
        ("/v1/messages", unserved.MESSAGES),
        ("/tokenize", unserved.TOKENIZE),
    ],
)
def test_fields_that_are_refused_or_ignored_are_named(document, path, fields):
    refused, ignored = document["paths"][path]["post"]["description"].split("\n\n")
    assert set(fields) == set(re.findall(r"`(\w+)`", refused))
    assert set(unserved.IGNORED) == set(re.findall(r"`(\w+)`", ignored))


def test_fields_have_the_texts_of_the_docstring(document):
    status = document["components"]["schemas"]["ModelStatus"]
    assert status["description"] == "A model that is known now."
    assert (
        status["properties"]["engine"]["description"] == "the state of a ready engine; null for other models."
    )
    assert all("description" in field for field in status["properties"].values())


def test_all_error_statuses_are_described(document):
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    statuses = {status for operation in operations for status in operation["responses"]}
    assert {"400", "401", "403", "404", "408", "413", "429", "500", "502", "503", "504"} <= statuses


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/chat/completions", shapes.ChatCompletion, {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", shapes.TextCompletion, {"prompt": "hello", "n": 2}),
        ("/v1/messages", AnthropicMessage, MESSAGE | {"max_tokens": 9}),
        ("/v1/messages/count_tokens", CountedTokens, MESSAGE),
        ("/tokenize", shapes.Tokenized, {"prompt": "hello", "return_token_strs": True}),
        ("/detokenize", shapes.Detokenized, {"tokens": [10]}),
        ("/v1/completions", shapes.ErrorAnswer, {"prompt": 7}),
        ("/v1/models", shapes.ModelList, None),
        ("/v1/models/small", shapes.ModelCard, None),
        ("/v1/models/nothing", shapes.ErrorAnswer, None),
        ("/queue/estimate", WaitEstimate, None),
        ("/running", list[ModelStatus], None),
        ("/nodes", list[NodeStatus], None),
        ("/health", shapes.ServerState, None),
        ("/ready", shapes.ServerState, None),
        ("/version", shapes.Version, None),
    ],
)
async def test_response_has_exactly_the_described_members(client, path, kind, body):
    reply = await (client.get(path) if body is None else client.post(path, {"model": "small", **body}))
    read = msgspec.json.decode(reply.body, type=kind)
    written = json.loads(msgspec.json.encode(read))
    assert _without_nulls(reply.json) == _without_nulls(written)


def _without_nulls(value):
    """Remove nulls, which mean the same as absence. A member that the type lacks would still differ."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
