"""GGUF files answer as llama.cpp answers: the same ids of texts, and the same greedy text."""

import json
import subprocess
import sys
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

from engine.models.tiny import SIZES, generate, load, save
from fairlead.base.job import Sampling
from fairlead.language.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS
from fairlead.language.text.tokenizer import Tokenizer
from language.checkpoint.gguf_files import convert, vocabulary
from language.checkpoint.test_gguf_vocabulary import byte_level, merges_of, sentence_piece, texts
from peers.gguf_reference import TOKENS

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs xllamacpp")
PROMPTS = ["hello there", "12 words", "Once upon"]


def of_llama_cpp(path, prompts=()):
    asked = json.dumps({"texts": texts(150), "prompts": list(prompts)})
    script = Path(__file__).with_name("gguf_reference.py")
    command = [sys.executable, str(script), str(path)]
    ran = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=200, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def model(tmp_path, metadata, **sizes):
    config = transformers.LlamaConfig(**{**SIZES, **sizes})
    save(config, tmp_path)
    return convert(tmp_path, tmp_path / "model.gguf", metadata=metadata)


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "deepseek-v3", "default"]
)
def test_byte_level_texts_have_the_ids_of_llama_cpp(pre, tmp_path):
    rule = PRE_TOKENIZERS[pre]
    library = byte_level(rule.patterns, ignore_merges=rule.ignore_merges)
    metadata = vocabulary(library, model="gpt2", pre=pre, merges=merges_of(library), add_bos_token=False)
    metadata["tokenizer.ggml.eos_token_id"] = 0
    path = model(tmp_path, metadata, vocab_size=library.get_vocab_size())
    found = of_llama_cpp(path, PROMPTS)
    tokenizer = Tokenizer.load(path)
    for text, ids in zip(texts(150), found["ids"], strict=True):
        # Its expressions of these two know no combining marks; ours are those of the models' own tokenizers.
        if pre not in ("tekken", "gpt-4o") or not any(map(unicodedata.combining, text)):
            assert tokenizer.encode(text) == ids, text
    prompts, greedy = (
        [tokenizer.encode(prompt) for prompt in PROMPTS],
        Sampling(max_tokens=TOKENS, temperature=0),
    )
    ours, reference = (
        generate(load(path, kv_cache_bytes=4 << 20, compiled=compiled), prompts, greedy)
        for compiled in (True, False)
    )
    # Its cache is float16, so that texts part where two tokens are nearly equal.
    for one, other, expected in zip(ours, reference, found["completions"], strict=True):
        assert expected
        assert equal_tokens(one, expected) >= equal_tokens(other, expected)
    assert any(
        one[: len(expected)] == expected for one, expected in zip(ours, found["completions"], strict=True)
    )


def equal_tokens(one, other):
    pairs = zip(one, other, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(one), len(other)))


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece_texts_have_the_ids_of_llama_cpp(adds_space, tmp_path):
    library, metadata = sentence_piece(adds_space=adds_space)
    path = model(tmp_path, metadata, vocab_size=library.get_vocab_size())
    tokenizer = Tokenizer.load(path)
    assert [tokenizer.encode(text) for text in texts(150)] == of_llama_cpp(path)["ids"]
