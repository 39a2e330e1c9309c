"""Infilling over HTTP, from a real server with a tiny random model that has tokens for it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tokenizers
import torch
import transformers

from e2e.real_server import RealServer, real_server
from engine.models.tiny import SIZES
from fairlead.base.config import demonstration_model

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PROMPT, SUFFIX = "Count from <|fim_middle|>", "to five."


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("coder")
    shutil.copy(demonstration_model() / "tokenizer_config.json", path)
    tokenizer = tokenizers.Tokenizer.from_file(str(demonstration_model() / "tokenizer.json"))
    tokenizer.add_tokens(list(MARKS))
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, "vocab_size": tokenizer.get_vocab_size()})
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    with real_server(str(directory), "--served-model-name", "coder") as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_answer_is_that_to_the_models_own_infilling_prompt(client, server, directory):
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    [first, last, middle] = [tokenizer.token_to_id(mark) for mark in MARKS]
    # The mark that the prompt spells stays text.
    begin, *spelled = server.http.post("/tokenize", json={"prompt": PROMPT, "special_tokens": "text"}).json()[
        "tokens"
    ]
    assert middle not in spelled
    prompt = [begin, first, *spelled, last, *tokenizer.encode(SUFFIX, add_special_tokens=False).ids, middle]
    options = {"model": "coder", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    expected = client.completions.create(prompt=prompt, **options)
    found = client.completions.create(prompt=PROMPT, suffix=SUFFIX, **options)
    [choice] = found.choices
    assert choice.text == expected.choices[0].text
    assert choice.logprobs.tokens == expected.choices[0].logprobs.tokens
    assert found.usage.prompt_tokens == len(prompt)
    chunks = list(client.completions.create(prompt=PROMPT, suffix=SUFFIX, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    several = client.completions.create(prompt=[PROMPT, ""], suffix=SUFFIX, n=2, **options)
    assert [one.text for one in several.choices[:2]] == [choice.text] * 2
    assert len(several.choices) == 4


def test_a_mark_ends_the_answer(client, directory):
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    mark = tokenizer.token_to_id(MARKS[0])
    answer = client.completions.create(
        model="coder", prompt="a", suffix="b", max_tokens=5, logit_bias={str(mark): 100}
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("", "stop", 1)


def test_the_model_is_listed_as_one_that_can_infill(client):
    [card] = client.models.list().data
    assert card.model_dump()["infill"] is True
