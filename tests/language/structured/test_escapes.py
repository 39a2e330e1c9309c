"""The writings of strings in JSON: none that a mask lets begin is one that it does not let end."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from language.structured.rendering import WIRE_FORMATS, vocabulary
from language.structured.test_strict_schemas import TAGGED, grammar_of
from published_schemas import json_strings

TEXTS = (
    *(
        "Zürich",
        "a/b",
        'say "x"',
        "back\\slash",
        "tab\tline\n",
        "\x01\x1f",
        "\x7f",
        "😀 日本",
        "é" * 3,
        "\u2028",
    ),
    *("\U0010ffff", "\ud7ff\ue000", "\uffff", "", "A", "null", "\\u00fc", "end\\"),
)
LONGEST = max(map(len, TEXTS))
# Schemas of which every text of `TEXTS` is a value, by what they show.
SCHEMAS: dict[str, Any] = {
    "any": True,
    "string": {"type": "string"},
    "length": {"type": "string", "maxLength": LONGEST},
    "pattern": {"type": "string", "pattern": "^[^q]*$"},
    "pattern of lines": {"type": "string", "pattern": r"^[\s\S]*$"},
    "two patterns": {"type": "string", "pattern": "^[^q]*$", "allOf": [{"pattern": "^[^z]*$"}]},
    "unknown format": {"type": "string", "format": "path"},
    "enum": {"enum": list(TEXTS)},
    "union": {"anyOf": [{"type": "string", "pattern": "^[a-z/]+$"}, {"enum": list(TEXTS)}]},
    "left to llguidance": {"type": ["string", "number"], "multipleOf": 7},
}


def writings(text: str, chance: random.Random) -> str:
    """Return one of the writings of a text in JSON, without its quotation marks."""
    return "".join(chance.choice(list(_writings_of(character))) for character in text)


def _writings_of(character: str) -> Iterator[str]:
    yield json.dumps(character, ensure_ascii=False)[1:-1]
    yield json.dumps(character)[1:-1]
    units = character.encode("utf-16-be").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    yield escaped
    yield escaped.upper().replace("\\U", "\\u")
    if character == "/":
        yield "\\/"


class Walk:
    """Writes texts byte by byte, as long as the mask of a grammar allows it."""

    def __init__(self, grammar: str, name: str = "hermes", before: str = "") -> None:

        made = vocabulary(name)
        self._bytes = {
            made.tokenizer.token_bytes(token): token for token in range(made.library.get_vocab_size())
        }
        self._begun = LLMatcher(made.matching, grammar)
        assert not self._begun.is_error(), self._begun.get_error()
        ids = made.ids(before)
        assert self._begun.try_consume_tokens(ids) == len(ids), before

    def refused_at(self, text: str) -> int | None:
        """Return the index of the first byte that is refused; None if none is."""
        matcher = self._begun.deep_copy()
        tokens = [self._bytes[bytes([byte])] for byte in text.encode()]
        taken = matcher.try_consume_tokens(tokens)
        return None if taken == len(tokens) else taken


def assert_whole_or_refused_at_its_first_character(walk: Walk, written: str) -> bool:
    """Check a writing with its quotation marks; return whether it is accepted."""
    at = walk.refused_at(written)
    if at is None:
        return True
    before = written.encode()[:at]
    slashes = len(before) - len(before.rstrip(b"\\"))
    assert written.encode()[at : at + 1] == b"\\", (written, before)
    assert slashes % 2 == 0, (written, before)
    return False


@pytest.mark.parametrize("name", SCHEMAS)
def test_writing_of_a_value_is_accepted_to_its_end_or_no_escape_of_it_begins(name: str) -> None:
    walk, chance = Walk(answer_grammar(JsonAnswer(SCHEMAS[name]))), random.Random(name)
    accepted = 0
    for text in TEXTS:
        plain = json.dumps(text, ensure_ascii=name == "left to llguidance")
        assert walk.refused_at(plain) is None
        for _ in range(12):
            written = f'"{writings(text, chance)}"'
            assert json.loads(written) == text
            if name == "left to llguidance":
                written = written.replace("\\/", "/").replace("\x7f", "\\u007f")
            accepted += assert_whole_or_refused_at_its_first_character(walk, written)
    assert accepted == 12 * len(TEXTS), "an escape of these schemas is refused"


@pytest.mark.parametrize("pattern", ["^[a-z/]+$", "^[0-9]{3}$", r"^\w+$"])
def test_pattern_of_plain_characters_lets_no_escape_begin(pattern: str) -> None:
    walk = Walk(answer_grammar(JsonAnswer({"type": "string", "pattern": pattern})))
    assert walk.refused_at('"\\') == 1


@pytest.mark.parametrize(
    ("schema", "text", "is_valid"),
    [
        ({"maxLength": 2}, r"\u00fc\ud83d\ude00", True),
        ({"maxLength": 2}, r"\u00fc\ud83d\ude00x", False),
        ({"minLength": 2}, r"\ud83d\ude00", False),
        ({"minLength": 2}, r"\ud83d\ude00\/", True),
        ({"maxLength": 1, "pattern": "^.$"}, r"\ud83d\ude00", True),
    ],
)
def test_length_counts_characters_and_a_surrogate_pair_is_one(schema: Any, text: str, is_valid: bool) -> None:
    walk = Walk(answer_grammar(JsonAnswer({"type": "string", **schema})))
    assert (walk.refused_at(f'"{text}"') is None) == is_valid


@pytest.mark.parametrize("half", [r"\ud83d", r"\ud83dx", r"\ude00", r"\ud83d\u0041"])
def test_half_a_surrogate_pair_is_no_character(half: str) -> None:
    assert Walk(answer_grammar(JsonAnswer({"type": "string"}))).refused_at(f'"{half}"') is not None


def test_key_is_the_same_in_all_its_writings() -> None:
    schema = {
        "type": "object",
        "properties": {"für": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
    }
    walk = Walk(answer_grammar(JsonAnswer(schema)))
    assert walk.refused_at('{"f\\u00fcr": 1, "\\u0061/\\/": null}') is None
    assert walk.refused_at('{"f\\u00fcr": null}') is not None
    closed = Walk(answer_grammar(JsonAnswer({**schema, "additionalProperties": False})))
    chance = random.Random(1)
    for _ in range(20):
        assert_whole_or_refused_at_its_first_character(closed, f'{{"{writings("für", chance)}":1}}')


@pytest.mark.parametrize("name", sorted(set(WIRE_FORMATS) - set(TAGGED) - {"gemma"}))
@pytest.mark.parametrize("is_strict", [True, False])
def test_arguments_of_every_format_of_json_may_have_any_escapes(name: str, is_strict: bool) -> None:
    string = {"type": "string", "maxLength": LONGEST}
    schema = {"type": "object", "properties": {"x": string}, "required": ["x"], "additionalProperties": False}
    grammar = grammar_of(name, schema if is_strict else None)
    heads = {
        "mistral": "[TOOL_CALLS]f[ARGS]",
        "mistral-list": '[TOOL_CALLS] [{"name": "f", "arguments": ',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "harmony": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "llama-3": '{"name": "f", "parameters": ',
    }
    head = heads.get(name, '\n<tool_call>\n{"name": "f", "arguments": ')
    walk, chance = Walk(grammar, name, head + '{"x": "'), random.Random(name)
    for text in TEXTS:
        for _ in range(4):
            assert walk.refused_at(f'{writings(text, chance)}"}}') is None, text


@pytest.mark.parametrize("name", [*TAGGED, "gemma"])
def test_text_that_is_no_json_has_no_escapes(name: str) -> None:
    heads = {
        "qwen-xml": "\n<tool_call>\n<function=f>\n<parameter=x>\n",
        "glm": "\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>",
        "gemma": '<|tool_call>call:f{x:<|"|>',
    }
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    walk = Walk(grammar_of(name, schema), name, heads[name])
    for text in (r"Z\u00fcrich \/ \ud83d", "Zürich", "\\"):
        assert walk.refused_at(text) is None


def test_documents_of_the_json_test_suite_are_accepted() -> None:
    documents = json_strings()
    if not documents:
        pytest.skip("JSONTestSuite is not there: see published_schemas.py")
    arrays = Walk(answer_grammar(JsonAnswer({"type": "array", "items": {"type": "string", "maxLength": 99}})))
    anything = Walk(answer_grammar(JsonAnswer(True)))
    refused = [
        name
        for name, document in documents
        for text in [document.decode().strip()]
        if anything.refused_at(text) is not None or (text[0] == "[" and arrays.refused_at(text) is not None)
    ]
    assert refused == []
