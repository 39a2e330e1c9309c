"""How a text is divided into words before the merges of a byte-level vocabulary, by `tokenizer.ggml.pre`.

The expressions are those of the models' own `tokenizer.json`, which llama.cpp knows by these names
(`llama-vocab.cpp`). They divide one after another: each what the ones before it left whole.
"""

import msgspec

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _SUFFIXES
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words in which capitals only begin a word, as in "camelCase".
_FIRST, _THEN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _END = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_BEFORE}{_FIRST}*{_THEN}+|{_BEFORE}{_FIRST}+{_THEN}*|" + r"\p{N}" + _END
_GPT4O = (
    f"{_BEFORE}{_FIRST}*{_THEN}+{_SUFFIXES}?|{_BEFORE}{_FIRST}+{_THEN}*{_SUFFIXES}?|" + r"\p{N}{1,3}" + _END
)
_CHINESE_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_MARKS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CHINESE_AND_KANA, _MARKS)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")


class PreTokenizer(msgspec.Struct, frozen=True):
    """The rule of one name.

    patterns: the expressions, in the syntax of Oniguruma.
    ignore_merges: whether a word that is a token is that token, whatever the merges make of it.
    add_bos: whether texts begin with the token for that, if the file does not say it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_RULES = {
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_LLAMA3,), ignore_merges=True): "glm4 glm5",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((_QWEN2,)): (
        "qwen2 stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan grok-2 solar-open"
    ),
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer(
        (_GPT2,)
    ): "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    PreTokenizer((r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer(_FALCON): "falcon",
    PreTokenizer(_DEFAULT): "default",
}
PRE_TOKENIZERS = {name: rule for rule, names in _RULES.items() for name in names.split()}
"""By name."""
