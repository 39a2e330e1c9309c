"""`usage` over the API for models whose layers have sliding windows: a shared beginning is cached."""

import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from engine.models.tiny import SIZES
from fairlead.base.config import demonstration_model
from settings.documents import file_with
from settings.prompts import random_text
from settings.served import Served, serve

BLOCK = 16
SLIDING = {"sliding_window": 32, "max_position_embeddings": 2048}
FAMILIES = {
    "every layer slides": (transformers.MistralConfig, {}),
    "two of three layers slide": (
        transformers.Gemma3TextConfig,
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_usage_counts_a_shared_beginning_that_has_slid_out_of_the_windows(family, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (demonstration_model() / name).exists():
            shutil.copy(demonstration_model() / name, tmp_path / name)
    vocabulary = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    config_class, more = FAMILIES[family]
    config = config_class(**{**SIZES, **SLIDING, "vocab_size": vocabulary}, **more)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    usages = []

    async def ask_three_questions(server: Served) -> None:
        system = random_text(900)
        for number in range(3):
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": random_text(40, 1 + number)},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": 20, "user": "A"}
            answer = await server.fetch("/v1/chat/completions", body)
            assert answer.status == 200, answer
            usages.append(answer.document["usage"])

    serve(ask_three_questions, file_with({"models": {"m": {"path": str(tmp_path)}}}))
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] % BLOCK == cached[2] % BLOCK == 0
    assert min(cached[1:]) >= 896, cached
    assert max(cached) <= 928, "and nothing else"
