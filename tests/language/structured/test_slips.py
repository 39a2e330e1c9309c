"""Slips of models that public reports show, and what is not a call. Each is the same however it is cut."""

import json
from typing import Any

import pytest

from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning
from language.structured.rendering import WIRE_FORMATS, written_calls
from language.structured.test_parser import parsed

TOOLS: dict[str, Any] = {"glob": {"properties": {"pattern": {"type": "string"}}}, "read": {}}
ARGUMENTS = {"pattern": "*.md"}
JSON = '{"name": "glob", "arguments": {"pattern": "*.md"}}'
TAGS = "<function=glob>\n<parameter=pattern>\n*.md\n</parameter>\n</function>"
OF_JSON, OF_TAGS = ("hermes", "json"), ("qwen-xml",)
ALL = (*OF_JSON, *OF_TAGS, "glm")

# What a model has written, in the wire formats of these names, instead of a call.
CALLS = [
    # ollama/ollama#16686, ollama/ollama#18530, ollama/ollama#17353: the opening tag is missing
    ("bare function", (*OF_JSON, *OF_TAGS), f"I list them.\n\n{TAGS}\n</tool_call>"),
    # ollama/ollama#17742: so are both tags
    ("bare function without an end", (*OF_JSON, *OF_TAGS), f"I list them.\n\n{TAGS}"),
    # vllm-project/vllm#42021: tags from a model whose template has JSON
    ("tags in place of JSON", OF_JSON, f"<tool_call>\n{TAGS}\n</tool_call>"),
    # ROCm/ATOM#1427: JSON from a model whose template has tags
    ("JSON in place of tags", (*OF_TAGS, "glm"), f"<tool_call>\n{JSON}\n</tool_call>"),
    # vllm-project/vllm#32926 and jyjeanne/crustly#39: Qwen2.5-Coder
    ("fence", ALL, f"```json\n{JSON}\n```"),
    ("fence without a language", ALL, f"\n```\n{JSON}\n```\n"),
    ("JSON without tags", ALL, JSON),
    ("tools", OF_JSON, f"<tools>\n{JSON}\n</tools>"),
    # monoes/monomind#242: the fence has a name of its own
    ("fence of calls", ALL, f"```tool_call\n{JSON}\n```"),
    ("fence in tags", (*OF_JSON, *OF_TAGS), f"<tool_call>\n```json\n{JSON}\n```\n</tool_call>"),
    # vllm-project/vllm#39056: an answer that ends without its last marks
    ("no end of tags", (*OF_JSON, *OF_TAGS), f"<tool_call>\n{JSON}"),
    ("no end of a fence", ALL, f"```json\n{JSON}"),
    # ml-explore/mlx-lm#1374: a list where the template has names, and the other way round
    ("list", ("mistral",), f"[TOOL_CALLS] [{JSON}]"),
    ("name", ("mistral-list",), '[TOOL_CALLS]glob[ARGS]{"pattern": "*.md"}'),
    # raullenchai/Rapid-MLX#579
    ("name without a mark", ("mistral", "mistral-list"), '[TOOL_CALLS]glob{"pattern": "*.md"}'),
]


@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param(one, text, id=f"{slip}, {one}") for slip, names, text in CALLS for one in names],
)
def test_slip_is_a_call(name: str, text: str) -> None:
    pieces = parsed(name, text, TOOLS)
    assert [piece for piece in pieces if isinstance(piece, CallBegin)] == [CallBegin(0, "glob")]
    (arguments,) = (piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(arguments) == ARGUMENTS
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert content.strip() in ("", "I list them.")


@pytest.mark.parametrize("name", ["hermes", "json", "mistral-list", "llama-3"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        # ahwurm/localharness#104, shell-nlp/gpt_server#47: the arguments were lost
        ('"name": "glob", "parameters": {"a": 1}', {"a": 1}),
        ('"name": "glob", "arguments": {"a": 1}', {"a": 1}),
        ('"name": "glob", "arguments": {"a": 1}, "parameters": {"b": 2}', {"a": 1}),
        # vllm-project/vllm#25729, vllm-project/vllm#54964: Granite 4 writes them as a string
        (r'"name": "glob", "arguments": "{\n \"a\": \"\\n\"\n}"', {"a": "\n"}),
        (r'"arguments": "{\"a\": 1}", "name": "glob"', {"a": 1}),
        ('"name": "glob", "arguments": null', {}),
        ('"name": "glob", "arguments": ""', {}),
        ('"name": "glob", "arguments": "words"', "words"),
        ('"name": "glob", "arguments": [1]', [1]),
        # vllm-project/vllm#40531
        ('"name": "glob"', {}),
    ],
)
def test_arguments_are_found_however_they_are_written(name: str, written: str, arguments: Any) -> None:
    call = f"{{{written}}}"
    forms = {"mistral-list": f"[TOOL_CALLS][{call}]", "llama-3": call}
    if name == "llama-3" and not written.startswith('"name"'):
        return  # its calls begin with the name
    begin, found = parsed(name, forms.get(name, f"<tool_call>{call}</tool_call>"), TOOLS)
    assert begin == CallBegin(0, "glob")
    assert json.loads(found.text) == arguments


def test_arguments_in_a_string_that_ends_early_are_what_was_read() -> None:
    found = parsed("hermes", r'<tool_call>{"name": "glob", "arguments": "{\"a\": ', TOOLS)
    assert found == [CallBegin(0, "glob"), CallArguments(0, r'"{\"a\": ')]


@pytest.mark.parametrize("name", OF_TAGS)
def test_several_slips_are_several_calls(name: str) -> None:
    for text in (f"{TAGS}\n{TAGS}", f"```json\n{JSON}\n```\n```json\n{JSON}\n```"):
        begun = [piece.name for piece in parsed(name, text, TOOLS) if isinstance(piece, CallBegin)]
        assert begun == ["glob", "glob"]


@pytest.mark.parametrize("name", ALL)
def test_slip_after_reasoning_is_a_call(name: str) -> None:
    found = parsed(name, f"<think>\nhmm\n</think>\n\n```json\n{JSON}\n```", TOOLS)
    assert found == [Reasoning("hmm"), CallBegin(0, "glob"), CallArguments(0, json.dumps(ARGUMENTS))]


# ggml-org/llama.cpp#26787: a grammar began at `<function` in `#include <functional>`
# ahwurm/localharness#105: any JSON with a name in a fence was a call
# lmstudio-ai/lmstudio-bug-tracker#1592: words about the syntax were calls
PROSE = {
    "C++": "#include <functional>\n\nstd::function<int(int)> glob;",
    "syntax": "Some models use `<function=glob>`, others <tool_call> or <function=...>.",
    "a function's name": "Call <function=glob> with a pattern.",
    "another function": "<function=find>\n<parameter=x>\n1\n</parameter>\n</function>",
    "another function in a fence": '```json\n{"name": "find", "arguments": {"pattern": "x"}}\n```',
    "package": '```json\n{"name": "glob", "version": "1.0.0"}\n```',
    "package with arguments": '```json\n{"name": "glob", "arguments": ["-x"]}\n```',
    "definition": '```json\n{"name": "glob", "parameters": {"type": "object"}}\n```',
    "people": '[{"name": "glob", "age": 30}]',
    "JSON": '{"name": "glob", "age": 30}',
    "answer in JSON": '{"pattern": "*.md", "name": "glob"}',
    "an example": f"A call looks like this:\n```json\n{JSON}\n```\nThat is all.",
    "example without a fence": f"A call is {JSON} here.",
    "tags in HTML": "<tools><tool>glob</tool></tools>",
    "a fence": "```\nls *.md\n```",
    "names of functions": "glob and read",
    "a list": "[TOOL_CALLS] is a mark",
}


@pytest.mark.parametrize("name", sorted(set(WIRE_FORMATS) - {"llama-3"}))
@pytest.mark.parametrize("kind", PROSE)
def test_prose_is_no_call(name: str, kind: str) -> None:
    assert parsed(name, PROSE[kind], TOOLS) == [Content(PROSE[kind])]


@pytest.mark.parametrize("name", ALL)
def test_slip_is_text_without_tools(name: str) -> None:
    for text in (JSON, TAGS, f"```json\n{JSON}\n```"):
        assert parsed(name, text, {}) == [Content(text)]


@pytest.mark.parametrize("name", ALL)
def test_draft_of_a_call_in_reasoning_is_reasoning(name: str) -> None:
    """PrimeIntellect-ai/renderers#80: drafts were executed."""
    found = parsed(name, f"<think>\nPerhaps {TAGS} or {JSON}.\n</think>\n\nDone", TOOLS)
    assert found == [Reasoning(f"Perhaps {TAGS} or {JSON}."), Content("Done")]


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_call_in_its_own_format_is_no_slip(name: str) -> None:
    """The function need not be one of the request's, and its name is returned as soon as it is known."""
    (begin, _) = parsed(name, written_calls(name, [("unknown", {"a": "b"})]), TOOLS)
    assert begin == CallBegin(0, "unknown")


# Marks of reasoning ---------------------------------------------------------------------------------

CLOSED = [name for name, one in WIRE_FORMATS.items() if one.reasoning is not None and one.content is None]
CLOSING = {"mistral": "[/THINK]", "gemma": "<channel|>"}


# sgl-project/sglang#26873 and sgl-project/sglang#36285, QwenLM/qwen-code#6033
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("MARK\n\nHello", "Hello"),
        ("\nMARK\n\nHello", "\nHello"),
        ("hmm\nMARK\n\nHello", "hmm\nHello"),
        ("Let me write it.MARKHello", "Let me write it.Hello"),
        ("Let me write it. MARK\nHello", "Let me write it. Hello"),
        ("hmm\nMARK", "hmm\n"),
        ("hmmMARKUse <b> or MARK.", "hmmUse <b> or MARK."),
    ],
)
def test_mark_that_closes_reasoning_which_was_not_opened_is_dropped(
    name: str, text: str, content: str
) -> None:
    mark = CLOSING.get(name, "</think>")
    assert parsed(name, text.replace("MARK", mark)) == [Content(content.replace("MARK", mark))]


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(
    "text",
    [
        "The tag MARK ends it.",
        "Use `MARK` or 'MARK'.",
        "It ends with MARK",
        "Write OPEN first.MARKLast",
        "(MARK)",
    ],
)
def test_mark_of_reasoning_that_a_text_is_about_is_kept(name: str, text: str) -> None:
    opening = {"mistral": "[THINK]", "gemma": "<|channel>thought\n"}.get(name, "<think>")
    text = text.replace("MARK", CLOSING.get(name, "</think>")).replace("OPEN", opening)
    assert parsed(name, text) == [Content(text)]


@pytest.mark.parametrize("name", [*OF_JSON, *OF_TAGS])
def test_call_after_reasoning_that_was_not_opened_is_a_call(name: str) -> None:
    found = parsed(name, f"I look it up.</think>\n{written_calls(name, [('glob', ARGUMENTS)])}", TOOLS)
    assert found == [
        Content("I look it up."),
        CallBegin(0, "glob"),
        CallArguments(0, json.dumps(ARGUMENTS)),
    ]
