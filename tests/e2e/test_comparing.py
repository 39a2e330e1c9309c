"""Rerank and score over HTTP, from real servers with a tiny embedding model and a tiny cross-encoder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from e2e.real_server import RealServer, real_server
from engine.models.tiny import SIZES
from fairlead.base.config import demonstration_model
from language.checkpoint.test_pooling import NORMALIZE, POOLING, TRANSFORMER, save_modules

QUERY = "How do I count?"
TEXTS = ["Count from 1 to 5.", "a", "the quick brown fox " * 20, "Fairlead is a server."]


def directory_with_tokenizer(path: Path) -> int:
    """Copy the demonstration model's tokenizer; return the size of its vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demonstration_model() / name, path / name)
    torch.manual_seed(0)
    size: int = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    return size


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Iterator[tuple[RealServer, Path]]:
    path = tmp_path_factory.mktemp("embedder")
    size = directory_with_tokenizer(path)
    transformers.Qwen3Model(transformers.Qwen3Config(**{**SIZES, "vocab_size": size})).save_pretrained(path)
    save_modules(path, [TRANSFORMER, POOLING, NORMALIZE], pooling_mode="mean")
    with real_server(str(path), "--served-model-name", "vectors") as running:
        yield running, path


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Iterator[tuple[RealServer, Path]]:
    path = tmp_path_factory.mktemp("scorer")
    config = transformers.Qwen3Config(
        **{**SIZES, "vocab_size": directory_with_tokenizer(path), "num_labels": 1, "pad_token_id": None}
    )
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(path)
    with real_server(str(path), "--served-model-name", "pairs") as running:
        yield running, path


def answered(server: RealServer, path: str, **body):
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_answers(server: RealServer, model: str, expected: np.ndarray) -> None:
    """Fail unless the scores of QUERY with TEXTS are these, from all routes."""
    scored = answered(server, "/v1/score", model=model, text_1=QUERY, text_2=TEXTS)
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected.tolist(), abs=1e-5)
    order = np.argsort(-expected, kind="stable").tolist()
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ranked = answered(server, path, model=model, query=QUERY, documents=TEXTS, top_n=3)
        assert [one["index"] for one in ranked["results"]] == order[:3]
        assert [one["document"]["text"] for one in ranked["results"]] == [TEXTS[index] for index in order[:3]]
        assert ranked["usage"] == scored["usage"]


def test_embedding_model_compares_by_the_cosine_of_the_vectors_it_serves(embedder):
    server, path = embedder
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reference = transformers.Qwen3Model.from_pretrained(path).eval()
    vectors = []
    for text in (QUERY, *TEXTS):
        with torch.inference_mode():
            states = reference(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        vectors.append(states.double().mean(0).numpy())
    query, *texts = [vector / np.linalg.norm(vector) for vector in vectors]
    check_answers(server, "vectors", np.array(texts) @ query)


def test_cross_encoder_scores_as_transformers_do(scorer):
    server, path = scorer
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["task"] == "score"
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reference = transformers.Qwen3ForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        logits = [
            reference(torch.tensor([tokenizer.encode(QUERY, text).ids])).logits.item() for text in TEXTS
        ]
    check_answers(server, "pairs", 1 / (1 + np.exp(-np.array(logits))))
    refused = server.http.post("/v1/embeddings", json={"model": "pairs", "input": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
