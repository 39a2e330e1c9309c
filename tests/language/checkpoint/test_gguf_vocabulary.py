"""Vocabularies of GGUF files: texts become the ids that the model's own tokenizer makes of them."""

import json
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.gguf.checkpoint import GgufCheckpoint
from fairlead.language.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS
from fairlead.language.text import tokenizer as text_tokenizer
from language.checkpoint.gguf_files import vocabulary, write
from language.checkpoint.test_gguf_header import LLAMA, tensors
from language.text.vocabularies import CORPUS

PIECES = [
    *("hello", "Hello", "HELLO", "camelCase", "don't", "I'LL", "it's", "we've"),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "a\n b",
        " \n",
        ".",
        "...",
        "!?",
        "(x)",
        "_",
        "#tag",
        "$5.30",
        "~`|",
    ),
    *(
        "1",
        "12",
        "123",
        "1234567",
        "3.14",
        "²",
        "Ⅷ",
        "é",
        "e\u0301",
        "日本語",
        "ひらがな",
        "中文。",
        "한국어",
        "русский",
    ),
    *(
        "👩\u200d👩\u200d👧",
        "😀",
        "العربية",
        "हिन्दी",
        "\u00a0",
        "\u3000",
        "<|im_start|>",
        "<|end|>",
        "added word",
        "▁",
        "\x00",
        "�",
    ),
]


def texts(count=400):
    draw = random.Random(7)
    return ["", *PIECES, *("".join(draw.choices(PIECES, k=draw.randint(1, 9))) for _ in range(count))]


def as_gguf(tmp_path, metadata):
    plain = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer")}
    return write(tmp_path / "a.gguf", "llama", plain | metadata, tensors())


def byte_level(patterns, *, ignore_merges=False):
    """Train a tokenizer with these expressions, and return it with its merges as text."""
    library = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([*CORPUS, *PIECES * 2], trainer)
    library.add_tokens(["added word"])
    return library


def merges_of(library):
    return [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]


RULES = sorted({rule: name for name, rule in PRE_TOKENIZERS.items()}.values())


@pytest.mark.parametrize("name", RULES)
def test_byte_level_texts_have_the_ids_of_the_library(name, tmp_path):
    rule = PRE_TOKENIZERS[name]
    library = byte_level(rule.patterns, ignore_merges=rule.ignore_merges)
    metadata = vocabulary(library, model="gpt2", pre=name, merges=merges_of(library), add_bos_token=False)
    found = text_tokenizer.Tokenizer.load(as_gguf(tmp_path, metadata))
    assert found.byte_level
    for text in texts():
        ids = library.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == library.decode(ids)


def sentence_piece(*, adds_space=True):
    """Build a tokenizer like Llama 2's, with tokens in the order of their scores."""
    words = [
        "▁",
        *"abcdefghilmnoprstuwxyz.,;日本",
        "th",
        "el",
        "lo",
        "▁th",
        "▁the",
        "▁▁",
        "▁▁▁▁",
        "hel",
        "hello",
        "▁hello",
    ]
    ids = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    pairs = [
        ("t", "h"),
        ("e", "l"),
        ("l", "o"),
        ("▁", "th"),
        ("▁th", "e"),
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("h", "el"),
        ("hel", "lo"),
        ("▁", "hello"),
    ]
    library = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(ids)},
            merges=pairs,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    library.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))]
    return library, vocabulary(
        library,
        model="llama",
        types=kinds,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=adds_space,
    )


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece_texts_have_the_ids_of_the_library(adds_space, tmp_path):
    library, metadata = sentence_piece(adds_space=adds_space)
    found = text_tokenizer.Tokenizer.load(as_gguf(tmp_path, metadata))
    assert found.special_ids == {0, 1, 2}
    for text in texts():
        ids = library.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre: 'klingon' is not supported"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: 't5' is not supported"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: has 1 entries for 3 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokenizer.ggml.tokens: must be a list of str, not of int"),
        ({"tokenizer.ggml.eos_token_id": 9}, "tokenizer.ggml.eos_token_id: 9 is not one of the 3 tokens"),
        ({"tokenizer.ggml.bos_token_id": "a"}, "tokenizer.ggml.bos_token_id: must be an integer from 0"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token: must be true or false, not 1"),
    ],
)
def test_fault_of_a_vocabulary_is_named(change, reason, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA | {"tokenizer.ggml.bos_token_id": 0} | change, tensors())
    with pytest.raises(LoadFailed) as raised:
        text_tokenizer.Tokenizer.load(path)
    assert str(raised.value).startswith(f"{path}: {reason}")


def test_templates_ends_and_defaults_are_those_of_the_metadata(tmp_path):
    more = {
        "tokenizer.chat_template": "{{ 1 }}",
        "tokenizer.chat_template.tool_use": "{{ 2 }}",
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 20,
    }
    checkpoint = GgufCheckpoint(write(tmp_path / "a.gguf", "llama", LLAMA | more, tensors()))
    assert checkpoint.document("chat_template.jinja").read_bytes() == b"{{ 1 }}"
    [tools] = checkpoint.documents("additional_chat_templates/*.jinja")
    assert (tools.stem, tools.read_bytes()) == ("tool_use", b"{{ 2 }}")
    generation = json.loads(checkpoint.document("generation_config.json").read_bytes())
    assert generation == {"temperature": 0.25, "top_k": 20, "eos_token_id": [1, 2]}
    assert not checkpoint.document("modules.json").is_file()
