"""Embeddings over HTTP, by the official client, from a real server with a tiny random model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tokenizers
import torch
import transformers
import trio

from e2e.real_server import RealServer, real_server
from engine.models.tiny import SIZES
from fairlead.base.config import demonstration_model
from language.checkpoint.test_pooling import NORMALIZE, POOLING, TRANSFORMER, save_modules

TEXTS = ["Count from 1 to 5.", "a", "the quick brown fox " * 20, "Fairlead is a server."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demonstration_model() / name, path / name)
    size = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    transformers.Qwen3Model(transformers.Qwen3Config(**{**SIZES, "vocab_size": size})).save_pretrained(path)
    return save_modules(path, [TRANSFORMER, POOLING, NORMALIZE], pooling_mode="mean")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    with real_server(str(directory), "--served-model-name", "vectors") as running:
        yield running


def test_vectors_equal_those_of_transformers(server: RealServer, directory: Path):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.embeddings.create(model="vectors", input=TEXTS)
        repeated = client.embeddings.create(model="vectors", input=TEXTS[2], encoding_format="float")
        fewer = client.embeddings.create(model="vectors", input=TEXTS[2], dimensions=5)
    assert answer.data[2].embedding == repeated.data[0].embedding
    assert len(fewer.data[0].embedding) == 5
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    reference = transformers.Qwen3Model.from_pretrained(directory).eval()
    total = 0
    for text, one in zip(TEXTS, answer.data, strict=True):
        ids = tokenizer.encode(text).ids
        total += len(ids)
        with torch.inference_mode():
            mean = reference(torch.tensor([ids])).last_hidden_state[0].double().mean(0)
        expected = (mean / mean.norm()).tolist()
        assert expected == pytest.approx(one.embedding, abs=1e-5)
    assert total == answer.usage.prompt_tokens


def test_embedding_model_refuses_completions(server: RealServer):
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["task"] == "embed"
    refused = server.http.post("/v1/completions", json={"model": "vectors", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_texts_of_disconnected_clients_are_removed(server: RealServer):
    body = json.dumps({"model": "vectors", "input": ["once upon a time " * 60] * 500}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def disconnect(after_s: float) -> None:
        connection = await trio.open_tcp_stream(*server.address)
        with trio.move_on_after(after_s):
            await connection.send_all(head + body)
            await connection.receive_some(65536)
        await trio.aclose_forcefully(connection)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(disconnect, 0.02 * number)
    counts = await trio.to_thread.run_sync(server.wait_until_at_rest)
    assert not any(counts.values()), counts
    answer = server.http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
    assert answer.status_code == 200
