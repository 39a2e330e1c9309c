"""Likelihood evaluations with the requests of lm-eval's `local-completions`, compared with torch.

It sends a context and a continuation as one prompt of token ids, several in a request. It reads the
continuation's `token_logprobs` and `top_logprobs`.
"""

import json
import shutil
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from e2e.real_server import RealServer, real_server
from engine.models.tiny import SIZES
from fairlead.base.config import demonstration_model

MODEL = "scored"
PAIRS = [
    ("Question: What is the capital of France?\nAnswer:", " Paris"),
    ("Question: What is the capital of France?\nAnswer:", " The Eiffel tower, and a café ☕"),
    ("a", " b"),
    ("One two three " * 40, "four five six " * 20),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scored")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demonstration_model() / name, path / name)
    size = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, "vocab_size": size})).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    with real_server(str(directory), "--served-model-name", MODEL, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def logprobs(directory: Path):
    """Return a function that computes the log-probabilities after each token with torch: [P − 1, V]."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def of(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)

    return of


def read_as_lm_eval_does(answer: dict, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Return each continuation's log-likelihood, and whether greedy decoding would generate it."""
    found = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


def check(
    found: list[tuple[float, bool]], contexts: list[list[int]], texts_with_contexts: list[list[int]], logprobs
) -> None:
    for (likelihood, greedy), context, whole in zip(found, contexts, texts_with_contexts, strict=True):
        rows = logprobs(whole)[len(context) - 1 :]
        ids = torch.tensor(whole[len(context) :])
        assert likelihood == pytest.approx(float(rows.gather(1, ids[:, None]).sum()), rel=1e-4)
        assert greedy == bool((rows.argmax(-1) == ids).all())


def test_lm_evals_requests_give_torchs_sums(server: RealServer, tokenizer, logprobs):
    contexts = [tokenizer.encode(context).ids for context, _ in PAIRS]
    texts_with_contexts = [tokenizer.encode(context + more).ids for context, more in PAIRS]
    # The model's most likely continuation, so that one of them is greedy.
    greedy = list(contexts[0])
    for _ in range(5):
        greedy.append(int(logprobs([*greedy, 0])[-1].argmax()))
    contexts.append(contexts[0])
    texts_with_contexts.append(greedy)
    body = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.http.post("/v1/completions", json={**body, "prompt": texts_with_contexts}).json()
    found = read_as_lm_eval_does(answer, list(map(len, contexts)))
    check(found, contexts, texts_with_contexts, logprobs)
    assert [is_greedy for _, is_greedy in found] == [False] * len(PAIRS) + [True]
    assert answer["usage"]["completion_tokens"] == len(texts_with_contexts)
    one = server.http.post("/v1/completions", json={**body, "prompt": texts_with_contexts[3]}).json()
    assert one["choices"][0]["logprobs"] == answer["choices"][3]["logprobs"]


def test_echoed_logprobs_line_up_with_the_text(server: RealServer, tokenizer, logprobs):
    text = "One, two, three."
    body = {"model": MODEL, "prompt": text, "echo": True, "logprobs": 2, "temperature": 0}
    whole = server.http.post("/v1/completions", json={**body, "max_tokens": 3}).json()["choices"][0]
    listed = whole["logprobs"]
    prompt = tokenizer.encode(text).ids
    assert len(listed["tokens"]) == len(prompt) + 3
    assert (listed["token_logprobs"][0], listed["top_logprobs"][0]) == (None, None)
    assert None not in listed["token_logprobs"][1:]
    assert whole["text"].startswith(text)
    assert (listed["tokens"][0], listed["text_offset"][:2]) == ("<|bos|>", [0, 0])  # which has no text
    for token, offset in list(zip(listed["tokens"], listed["text_offset"], strict=True))[1 : len(prompt)]:
        assert text[offset : offset + len(token)] == token
    unbatched = server.http.post("/v1/completions", json={**body, "max_tokens": 0}).json()
    choice = unbatched["choices"][0]
    assert (choice["text"], choice["finish_reason"], unbatched["usage"]["completion_tokens"]) == (
        text,
        "length",
        0,
    )
    assert choice["logprobs"] == {name: values[: len(prompt)] for name, values in listed.items()}


def test_streamed_echo_begins_with_the_prompts_logprobs(server: RealServer):
    body = {"model": MODEL, "prompt": ["One, two", "a b c"], "echo": True, "logprobs": 1, "temperature": 0}
    body |= {"max_tokens": 4, "ignore_eos": True}
    whole = server.http.post("/v1/completions", json=body).json()["choices"]
    streamed = [{"text": "", "logprobs": {}} for _ in whole]
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                add(streamed, line)
    for reported, expected in zip(streamed, whole, strict=True):
        assert reported["text"] == expected["text"]
        assert reported["logprobs"] == expected["logprobs"]


def add(streamed: list[dict], line: str) -> None:

    for choice in json.loads(line.removeprefix("data: "))["choices"]:
        reported = streamed[choice["index"]]
        reported["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            reported["logprobs"].setdefault(name, []).extend(values)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_listed_as_vllm_does(server: RealServer, tokenizer, logprobs, path):
    text = "One, two, three."
    body_base = {"model": MODEL, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    if path == "/v1/completions":
        answer = server.http.post(path, json={**body_base, "prompt": text}).json()
        listed, ids = answer["choices"][0]["prompt_logprobs"], tokenizer.encode(text).ids
    else:
        messages = [{"role": "user", "content": text}]
        answer = server.http.post(path, json={**body_base, "messages": messages}).json()
        listed = answer["prompt_logprobs"]
        ids = server.http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()["tokens"]
    assert listed[0] is None
    assert len(listed) == len(ids)
    for entries, token_id, expected in zip(listed[1:], ids[1:], logprobs(ids), strict=True):
        assert entries[str(token_id)]["logprob"] == pytest.approx(float(expected[token_id]), rel=1e-4)
        assert entries[str(token_id)]["rank"] == int((expected >= expected[token_id]).sum())
        likeliest = [entry["rank"] for key, entry in entries.items() if key != str(token_id)]
        assert set(likeliest) <= {1, 2}
        assert set(entries) == {str(token_id), *map(str, expected.topk(2).indices.tolist())}
        assert next(iter(entries)) == str(token_id)
        assert all(isinstance(entry["decoded_token"], str) for entry in entries.values())


def test_cached_tokens_are_in_the_usage(server: RealServer):
    prompt = list(range(300, 364))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    cached = []
    for body_base in (body, body, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        text = server.http.post("/v1/completions", json=body_base).text
        cached.append('"prompt_tokens_details":{"cached_tokens":48}' in text)
    assert cached == [False, True, True]
