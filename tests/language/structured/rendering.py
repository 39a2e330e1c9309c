"""How models write reasoning, text and calls in each wire format: an oracle beside the parser."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from fairlead.base.wire_formats.formats import FORMATS, GENERIC
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.language.structured.vocabulary import token_vocabulary
from fairlead.language.text.tokenizer import Tokenizer
from language.text.vocabularies import byte_level

Call = tuple[str, dict[str, Any]]

WIRE_FORMATS: dict[str, WireFormat] = {record.name: record.wire_format for record in (*FORMATS, GENERIC)}


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma, value)) + "]"
    return dumped(value)


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'\n<tool_call>\n{{"name": {dumped(name)}, "arguments": {dumped(arguments)}}}\n</tool_call>'


def _qwen_xml(name: str, arguments: dict[str, Any]) -> str:
    tags = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    tags = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"\n<tool_call>{name}\n{tags}</tool_call>"


def _deepseek(name: str, arguments: dict[str, Any]) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _deepseek_v3_1(name: str, arguments: dict[str, Any]) -> str:
    call = f"{name}<｜tool▁sep｜>{dumped(arguments)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _harmony(name: str, arguments: dict[str, Any]) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{dumped(arguments)}<|call|>"


def _mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}"


def _llama(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": {dumped(name)}, "parameters": {dumped(arguments)}}}'


def _gemma_call(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>"


_CALLS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "hermes": _hermes,
    "json": _hermes,
    "qwen-xml": _qwen_xml,
    "glm": _glm,
    "gemma": _gemma_call,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "deepseek-v3.1": _deepseek_v3_1,
    "harmony": _harmony,
    "llama-3": _llama,
}

SINGLE = frozenset({"harmony"})
"""Formats with one call in an answer: the mark that closes it ends the answer."""

CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "mistral-list": ("[TOOL_CALLS]",),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
    "llama-3": ("<|python_tag|>",),
}
CONTROL_TOKENS["deepseek-v3.1"] = CONTROL_TOKENS["deepseek"]


def written_calls(name: str, calls: Sequence[Call]) -> str:
    """Return calls as a model writes them."""
    if name == "mistral-list":
        listed = [{"name": function, "arguments": arguments} for function, arguments in calls]
        return f"[TOOL_CALLS] {dumped(listed)}" if calls else ""
    separator = "; " if name == "llama-3" else ""
    return separator.join(_CALLS[name](*call) for call in calls)


def written_reasoning(name: str, reasoning: str) -> str:
    """Return reasoning as a model writes it; empty if the format has none."""
    if WIRE_FORMATS[name].reasoning is None or not reasoning:
        return ""
    match name:
        case "gemma":
            return f"<|channel>thought\n{reasoning}<channel|>"
        case "mistral":
            return f"[THINK]{reasoning}[/THINK]"
        case "harmony":
            return f"<|channel|>analysis<|message|>{reasoning}<|end|>"
    return f"<think>\n{reasoning}\n</think>\n\n"


def written_content(name: str, content: str) -> str:
    """Return the text of an answer as a model writes it."""
    if name != "harmony" or not content:
        return content
    return f"<|start|>assistant<|channel|>commentary<|message|>{content}<|end|>"


class Vocabulary:
    """A small vocabulary with the control tokens of a format, as the engine and llguidance have it."""

    def __init__(self, name: str) -> None:
        self.library: Library = byte_level()
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        for texts, special in ((CONTROL_TOKENS.get(name, ()), True), (marks, False)):
            self.library.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
        self.tokenizer = Tokenizer(self.library, decoder_kinds=frozenset({"ByteLevel"}))
        self.end = self.id("<|im_end|>")
        self.special = {text: self.id(text) for text in CONTROL_TOKENS.get(name, ())}
        self.matching: LLTokenizer = token_vocabulary(
            self.tokenizer.token_bytes,
            vocab_size=self.library.get_vocab_size() + 3,  # logits are often wider than the vocabulary
            special_ids=self.tokenizer.special_ids,
            eos_token_ids=[self.end],
        )

    def id(self, token: str) -> int:
        found = self.library.token_to_id(token)
        assert found is not None
        return int(found)

    def ids(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False).ids)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether a text is a complete answer of a grammar."""
        matcher = LLMatcher(self.matching, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


vocabulary = cache(Vocabulary)
