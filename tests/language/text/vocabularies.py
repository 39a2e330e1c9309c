"""Small tokenizers of each kind that decodes differently: the Rust library's and our `Tokenizer`."""

import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from fairlead.language.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "hello world, hello words; unbelievable internationalisation",
    "naïve café — déjà vu; e\u0301 combining; 日本語のテキスト 中文 русский",
    "😀😀 👩\u200d👩\u200d👧 🏳️\u200d🌈 and the rest 12345 \n\n  indented\n",
] * 4
CONTROL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Library:
    """Build a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["added word", "<｜wide｜>"])
    return tokenizer


def byte_level_in_sequence() -> Library:
    """Build one with a decoder step after the bytes: `Tokenizer` does not treat it as byte-level."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("q", "Q")])
    return tokenizer


def llama() -> Library:
    """Build a tokenizer like those of Llama 2 and Mistral: blanks as ▁, unknown characters as bytes."""
    words = ["▁", *"abcdefghilmnoprstuwxyz.,;日本", "th", "▁th", "▁the", "▁▁", "el", "lo"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "▁"), ("e", "l"), ("l", "o")]
    vocabulary = {token: token_id for token_id, token in enumerate([*CONTROL, *BYTES, *words])}
    tokenizer = Library(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def gemma() -> Library:
    """Build one like those of Gemma: as `llama`, but a text's first blank stays."""
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Library:
    """Build one like those of T5 and XLNet, with bytes: pieces have scores, the decoder is Metaspace."""
    words = ["▁", "▁the", "the", "▁a", *"abcdefghijklmnopqrstuvwxyz", "ing", "▁q", "日"]
    scored = [(token, 0.0) for token in CONTROL + BYTES] + [(word, -len(word) / 2) for word in words]
    tokenizer = Library(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


def word_piece() -> Library:
    """Build a tokenizer like that of BERT: blanks are not in the vocabulary, ## continues a word."""
    tokenizer = Library(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def end_of_word() -> Library:
    """Build one like that of the first GPT: a word's last token ends in `</w>`, a blank if more follows."""
    tokenizer = Library(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def no_decoder() -> Library:
    """Build a tokenizer that was saved without a decoder: tokens are words."""
    words = ["<unk>", "the", "dog", "sleeps", "", "日本"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Library(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


MAKES = {
    make.__name__: make for make in (byte_level, llama, gemma, unigram, word_piece, end_of_word, no_decoder)
} | {"byte_level_in_sequence": byte_level_in_sequence}
EXACT = [name for name in MAKES if name != "byte_level_in_sequence"]


@cache
def library(name: str) -> Library:
    """Return the Rust library's tokenizer of that kind (a key of `MAKES`)."""
    return MAKES[name]()


@cache
def loaded(name: str) -> Tokenizer:
    """Return our tokenizer of that kind, saved to a file and loaded."""
    with tempfile.TemporaryDirectory() as directory:
        library(name).save(f"{directory}/tokenizer.json")
        return Tokenizer.load(Path(directory))
