"""Parameter values that crashed similar servers: each is refused by name before it reaches the engine."""

import pytest

from advisories.target import CHAT, COMPLETIONS, Target, chat, completion
from advisories.tries import tries

VOCABULARY = 1536  # of the demonstration model: its token ids are 0…1535


@tries("CVE-2024-8768")
@pytest.mark.parametrize("prompt", ["", [], [[]], ["hello", ""], [[5], []]], ids=str)
def test_empty_prompt_is_refused(server: Target, prompt):
    server.refuses(COMPLETIONS, completion(prompt=prompt), "prompt")


@tries("CVE-2024-8939", "CVE-2024-11040")
@pytest.mark.parametrize("best_of", [2, 1_000_000, 10**30])
def test_best_of_is_refused_however_many(server: Target, best_of):
    server.refuses(COMPLETIONS, completion(best_of=best_of), "best_of")


@tries("CVE-2024-11040")
@pytest.mark.parametrize(
    "value", [None, {}, [None], [{}], [[["hello"]]], [1, "hello"], [-1], "hello"], ids=str
)
def test_embeddings_of_invalid_input_are_refused(server: Target, value):
    server.refuses("/v1/embeddings", {"input": value}, None)


@tries("CVE-2026-34756")
@pytest.mark.parametrize("n", [65, 10_000_000, 2**31, 10**30])
def test_number_of_answers_is_bounded(server: Target, n):
    server.refuses(CHAT, chat(n=n), "n")
    server.refuses(COMPLETIONS, completion(n=n), "n")


@tries("CVE-2026-73559")
@pytest.mark.parametrize(
    "prompts", [["hello"] * 65, ["hello"] * 50_000, [[5]] * 50_000], ids=[65, "texts", "ids"]
)
def test_number_of_prompts_is_bounded(server: Target, prompts):
    server.refuses(COMPLETIONS, completion(prompt=prompts), "prompt")


@tries("CVE-2026-94623")
def test_prompts_of_varying_lengths_get_the_same_answers_as_separately(server: Target):
    prompts = ["owl " * length for length in (1, 40, 3, 90, 17)]
    batched = server.post(COMPLETIONS, completion(prompt=prompts))
    assert batched.status_code == 200
    separate = [server.text(completion(prompt=prompt)) for prompt in prompts]
    assert [choice["text"] for choice in batched.json()["choices"]] == separate


@tries("CVE-2026-54235")
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(server: Target, field, value):
    body = f'{{"prompt": "hello", "max_tokens": 4, "{field}": {value}}}'.encode()
    server.refuses(COMPLETIONS, body, field)


@tries("CVE-2026-44223")
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"frequency_penalty": 2}, {"presence_penalty": -2}], ids=str
)
def test_penalties_do_not_stop_the_engine(server: Target, penalty):
    assert server.post(COMPLETIONS, completion(max_tokens=16, **penalty)).status_code == 200


@tries("GHSA-4xqp-c3mv-qff7")
@pytest.mark.parametrize("min_tokens", [5, 1_000_000, 2**31, 10**30, -1])
def test_min_tokens_beyond_max_tokens_is_refused(server: Target, min_tokens):
    server.refuses(COMPLETIONS, completion(min_tokens=min_tokens), "min_tokens")


@tries("CVE-2026-93436")
def test_answer_of_zero_tokens_is_refused(server: Target):
    for _ in range(32):
        server.refuses(COMPLETIONS, completion(max_tokens=0), "max_tokens")
        server.refuses(CHAT, chat(max_completion_tokens=0), "max_completion_tokens")


@tries("CVE-2026-100652", "CVE-2026-100654", "GHSA-v5gm-qgmv-gc6c", "GHSA-qff2-492f-9fm4")
@pytest.mark.parametrize("token_id", [VOCABULARY, 2**31 - 1, 10**30, -1])
def test_stop_tokens_that_the_model_lacks_are_refused(server: Target, token_id):
    server.refuses(COMPLETIONS, completion(min_tokens=1, stop_token_ids=[token_id]), "stop_token_ids")
    server.refuses(CHAT, chat(min_tokens=1, stop_token_ids=[token_id]), "stop_token_ids")


@tries("CVE-2026-93592", "CVE-2026-93841")
@pytest.mark.parametrize("token_id", [-1, -(2**31), VOCABULARY, 2**31 - 1, 2**40])
def test_token_ids_that_the_model_lacks_are_refused(server: Target, token_id):
    for prompt in ([5, token_id], [[5], [token_id]]):
        server.refuses(COMPLETIONS, completion(prompt=prompt, repetition_penalty=1.1), "prompt")
    server.refuses("/detokenize", {"tokens": [token_id]}, "tokens")
    server.refuses("/v1/embeddings", {"input": [token_id]}, None)


@tries("CVE-2026-93840")
@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**31 - 1])
def test_biased_tokens_that_the_model_lacks_are_refused(server: Target, token_id):
    server.refuses(COMPLETIONS, completion(logit_bias={str(token_id): 1}), "logit_bias")


@tries("CVE-2026-21869", "CVE-2026-43628")
@pytest.mark.parametrize(
    "fields",
    [
        {"n_discard": -1, "n_keep": -5},
        {"n_discard": -(2**31)},
        {"dry_allowed_length": -(2**31), "dry_multiplier": 1.0},
    ],
    ids=str,
)
def test_parameters_of_another_engine_are_refused_or_ignored(server: Target, fields):
    server.refuses_or_ignores(**fields)


@tries("CVE-2026-21869", "CVE-2026-43627", "CVE-2026-100651")
@pytest.mark.parametrize("tokens", [1024, 1025, 100_000])
def test_prompt_beyond_the_context_is_refused_and_never_truncated(server: Target, tokens):
    server.refuses(COMPLETIONS, completion(prompt=[5] * tokens), "prompt")
    server.refuses(CHAT, chat(content="owl " * tokens), "messages")


@tries("CVE-2026-100647", "CVE-2026-105756")
@pytest.mark.parametrize("salt", ["x" * 4_000_000, "a/b", "x" * 129], ids=["4 MB", "slash", "129"])
def test_cache_salt_is_refused_or_ignored(server: Target, salt):
    server.refuses_or_ignores(cache_salt=salt)


@tries(*(f"CVE-2026-9462{last}" for last in (2, 4, 5, 6, 7)), "CVE-2026-102634")
def test_parameters_of_a_cache_transfer_are_refused_or_ignored(server: Target):
    for transfer in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_block_ids": [0]},
        {"do_remote_decode": True, "tp_size": 2**31},
        {"transfer_id": "same"},
        "no object",
    ):
        server.refuses_or_ignores(kv_transfer_params=transfer)
    for _ in range(2):
        server.refuses_or_ignores(bootstrap_host="127.0.0.1", bootstrap_port=9, bootstrap_room=7)


@tries("CVE-2025-52566")
@pytest.mark.parametrize("letter", ["a", " ", "\u0301", "\U0001f9d1\u200d", "\x00", "￿"], ids=ascii)
def test_texts_that_a_tokenizer_may_not_expect_are_counted_or_refused(server: Target, letter):
    answer = server.post("/tokenize", {"prompt": letter * 1000})
    assert answer.status_code in {200, 400}
    if answer.status_code == 200:
        tokens = answer.json()["tokens"]
        assert answer.json()["count"] == len(tokens)
        assert all(0 <= token_id < VOCABULARY for token_id in tokens)


@tries("CVE-2025-46560")
@pytest.mark.parametrize("placeholder", ["<|image_1|>", "<|audio_1|>", "<|user|>", "<"])
def test_thousands_of_placeholders_are_counted_or_refused(server: Target, placeholder):
    for body in (chat(content=placeholder * 20_000), completion(prompt=placeholder * 20_000)):
        path = CHAT if "messages" in body else COMPLETIONS
        server.refuses(path, body, None)
    assert server.post("/tokenize", {"prompt": placeholder * 20_000}).status_code in {200, 400}
