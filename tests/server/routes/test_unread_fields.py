"""Fields that nothing reads are ignored, and named in the header `Warning` of the answer."""

import dataclasses

import pytest

from fairlead.base.config import Limits
from fairlead.dialects.dialect import fields_of
from fairlead.dialects.unread import MAX_NAMES, warning_of
from fairlead.dialects.unserved import IGNORED
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.server.routes.route_table import ROUTES, dialects_of
from server.routes import test_embeddings
from server.routes.comparing import scorer_client
from server.routes.conftest import FakeFleet, client_of

MESSAGES = [{"role": "user", "content": "hello"}]
GENERATING = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "hello"},
}
EMBEDDING = {
    "/v1/embeddings": {"input": "hello"},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
}
COMPARING = {
    "/v1/rerank": {"query": "hello", "documents": ["world"]},
    "/v2/rerank": {"query": "hello", "documents": ["world"]},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
}


@pytest.fixture
def clients(client_with, model):
    embedder = client_with(
        models={"small": dataclasses.replace(model, embedding=EmbeddingSettings(4, normalized=False))}
    )
    embedder.gateway.script = test_embeddings.script
    return {
        **dict.fromkeys(GENERATING, client_of(model)),
        **dict.fromkeys(EMBEDDING, embedder),
        **dict.fromkeys(COMPARING, scorer_client(model)),
    }


BODIES = GENERATING | EMBEDDING | COMPARING


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_named(clients, path):
    reply = await clients[path].post(path, BODIES[path] | {"temprature": 0, "never_heard_of": [1]})
    assert reply.status == 200, reply.body
    assert reply.headers["warning"] == '299 - "fields without effect: temprature, never_heard_of"'


@pytest.mark.parametrize("path", BODIES)
async def test_known_and_harmless_fields_and_nulls_cause_no_warning(clients, path):
    fields = {"user": "ana", "absent": None, "prediction": {"type": "content"}, "verbose": True}
    reply = await clients[path].post(path, fields | BODIES[path])
    assert reply.status == 200, reply.body
    assert "warning" not in reply.headers


@pytest.mark.parametrize("path", GENERATING)
async def test_stream_names_them_too(clients, path):
    reply = await clients[path].post(path, GENERATING[path] | {"stream": True, "surprise": 1})
    assert reply.headers["warning"] == '299 - "fields without effect: surprise"'


def test_every_dialect_of_our_models_knows_its_own_fields():
    for dialect in dialects_of(ROUTES):
        if hasattr(dialect, "unread"):
            names = fields_of(type(dialect))
            assert {"model", *IGNORED} <= names
            assert {*(dialect.refused_fields or ())} - {"messages.images"} <= names | {
                name for name in dialect.refused_fields or () if name.startswith("options.")
            }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [10]}),
        ("/apply-template", {"messages": MESSAGES}),
    ],
)
async def test_routes_without_a_job_name_them_too(client_with, path, body):
    client = client_with()
    assert "warning" not in (await client.post(path, body | {"model": "small", "absent": None})).headers
    reply = await client.post(path, body | {"surprise": 1})
    assert (reply.status, reply.headers["warning"]) == (200, '299 - "fields without effect: surprise"')


async def test_ollamas_template_and_context_are_ignored_with_a_warning(client_with):
    client = client_with()
    body = {"prompt": "hello", "template": "{{ .Prompt }}", "context": [1, 2, 3], "stream": False}
    reply = await client.post("/api/generate", body)
    assert reply.status == 200
    assert reply.headers["warning"] == '299 - "fields without effect: template, context"'


async def test_options_of_ollama_are_named_by_their_path(client_with):
    client = client_with()
    options = {"num_ctx": 512, "num_thread": 2, "num_gpu": 1, "temprature": 1, "top_k": 2}
    for path in ("/api/chat", "/api/generate"):
        reply = await client.post(path, GENERATING[path] | {"options": options, "stream": False})
        assert reply.headers["warning"] == '299 - "fields without effect: options.temprature"'
        reply = await client.post(path, GENERATING[path] | {"options": None, "stream": False})
        assert "warning" not in reply.headers


async def test_header_is_short_and_has_safe_characters_only(client_with):
    client = client_with()
    names = {f'a{number}"\r\nSet-Cookie: é;\\': 1 for number in range(1000)}
    names |= {"x" * 5000: 1}
    reply = await client.post("/v1/completions", {"prompt": "hello"} | names)
    header = reply.headers["warning"]
    assert header.isascii()
    assert header.isprintable()
    assert header.count('"') == 2
    assert "\\" not in header
    assert header.endswith('a7???Set-Cookie????? and 993 more"')
    assert len(warning_of(tuple("x" * 5000 for _ in range(5000)))) < 50 * MAX_NAMES
    assert Limits().body_values > 1000


async def test_fields_of_a_relayed_request_are_the_other_servers(client_with):
    fleet = FakeFleet(remote={"remote"})
    client = client_with(fleet=fleet)
    reply = await client.post("/v1/completions", {"model": "remote", "prompt": "hello", "surprise": 1})
    assert "warning" not in reply.headers
