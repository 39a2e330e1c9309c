"""A token that the tokenizer has and the network lacks is a 400 of the field that it came in."""

import dataclasses
import json

import pytest
import tokenizers

from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.language.text.infill import SPELLINGS
from fairlead.language.text.model import TextModel
from server.routes.conftest import TEMPLATE, client_of, small_model

PAD = "[PAD]"


@pytest.fixture(scope="module")
def larger_tokenizer(tmp_path_factory) -> TextModel:
    """Return a model whose network has no token [PAD]. Its template writes that for every system message."""
    directory = tmp_path_factory.mktemp("larger")
    small_model(directory, template=TEMPLATE.replace("<|{{", "{{ '[PAD]' if message.role == 'system' }}<|{{"))
    path = directory / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([PAD, *SPELLINGS[0].marks])
    tokenizer.save(str(path))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = tokenizer.token_to_id(PAD)
    (directory / "config.json").write_text(json.dumps(config))
    return TextModel.load(directory, name="small")


@pytest.fixture
def pad(larger_tokenizer):
    return larger_tokenizer.tokenizer.token_id(PAD)


def body_of(pad, body):
    """Return a body with the id in place of "ID"."""
    return json.loads(json.dumps(body).replace('"ID"', str(pad)).replace("KEY", str(pad)))


USER = {"role": "user", "content": "hello"}
CHAT = {"messages": [USER]}
ROADS = [
    ("/v1/completions", {"prompt": f"hello {PAD} x"}, "prompt"),
    ("/v1/completions", {"prompt": [1, "ID"]}, "prompt"),
    ("/v1/completions", {"prompt": [[1], [1, "ID"]]}, "prompt"),
    ("/v1/completions", {"prompt": "hello", "logit_bias": {"KEY": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "hello", "stop_token_ids": ["ID"]}, "stop_token_ids"),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}, USER]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"KEY": 1}}, "logit_bias"),
    ("/v1/chat/completions", {**CHAT, "stop_token_ids": ["ID"]}, "stop_token_ids"),
    ("/v1/responses", {"input": "hello", "instructions": "a"}, "input"),
    ("/v1/messages", {**CHAT, "system": "a", "max_tokens": 4}, None),
    ("/api/generate", {"prompt": f"hello {PAD}", "raw": True}, None),
    ("/detokenize", {"tokens": [1, "ID"]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), ROADS, ids=str)
async def test_token_beyond_the_network_is_refused_with_its_field(larger_tokenizer, pad, path, body, param):
    client = client_of(larger_tokenizer)
    reply = await client.post(path, {"model": "small", **body_of(pad, body)})
    assert reply.status == 400, reply.body
    assert f"the model has no token {pad} ({PAD}); its ids are 0...{pad - 1}" in str(reply.json)
    if param is not None:
        assert reply.json["error"]["param"] == param
    assert client.gateway.jobs == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["hello", f"{PAD}"]}, "input"),
        ("/v1/embeddings", {"input": [1, "ID"]}, "input"),
        ("/v1/rerank", {"query": f"{PAD}", "documents": ["hello"]}, "query"),
        ("/v1/rerank", {"query": "hello", "documents": ["hello", f"{PAD}"]}, "documents"),
    ],
    ids=str,
)
async def test_token_beyond_the_network_is_refused_by_models_of_vectors(
    larger_tokenizer, pad, path, body, param
):
    embedder = dataclasses.replace(larger_tokenizer, embedding=EmbeddingSettings(4, normalized=False))
    reply = await client_of(embedder).post(path, {"model": "small", **body_of(pad, body)})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert f"{param}: the model has no token {pad} ({PAD})" in reply.json["error"]["message"]


async def test_text_of_a_chat_may_spell_the_token(larger_tokenizer, pad):
    client = client_of(larger_tokenizer)
    reply = await client.post(
        "/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": f"a {PAD}"}]}
    )
    assert reply.status == 200
    assert pad not in client.gateway.job.prompts[0]


async def test_marks_that_the_network_lacks_are_none(larger_tokenizer):
    """Such a model cannot fill in, and its answers have no such tokens."""
    reply = await client_of(larger_tokenizer).post(
        "/v1/completions", {"model": "small", "prompt": "a", "suffix": "b"}
    )
    assert (reply.status, reply.json["error"]["param"]) == (400, "suffix")
    assert "fill-in-the-middle" in reply.json["error"]["message"]
    assert PAD not in larger_tokenizer.answer_format.special
