"""The wire format that is found for a model."""

import re
from typing import Any

import pytest

from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallBegin
from fairlead.language.structured.probing import DetectedFormat, detect, reasoning_state
from fairlead.language.text.chat_template import ChatTemplate
from language.structured.families import FAMILIES
from language.structured.rendering import WIRE_FORMATS, written_calls
from language.structured.test_families import TOKENS
from language.text.chats import CHATS

QWEN_XML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
            {%- for name, value in tool_call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
GLM = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}
{%- for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}
{%- for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{%- endfor %}
</tool_call>{% endfor %}{% endfor %}"""


def detected(template: ChatTemplate, **options: Any) -> DetectedFormat:
    return detect(template.render, template.literals, **options)


def chat(name: str) -> ChatTemplate:
    found = CHATS[name]
    return ChatTemplate(found.template, special_tokens=found.named)


@pytest.mark.parametrize(
    ("template", "name"),
    [("chatml", "hermes"), ("llama_3", "llama-3"), ("mistral", "mistral-list")],
)
def test_format_is_found_by_rendering_a_call(template: str, name: str) -> None:
    found = detected(chat(template))
    assert found.wire_format.name == name
    assert found.source == "chat template"
    assert not found.explains_tools


@pytest.mark.parametrize(("source", "name"), [(QWEN_XML, "qwen-xml"), (GLM, "glm")])
def test_format_with_tags_is_found_before_the_general_one(source: str, name: str) -> None:
    assert detected(ChatTemplate(source)).wire_format.name == name


@pytest.mark.parametrize("template", ["gemma", "phi_3"])
def test_template_without_tools_gets_the_generic_format(template: str) -> None:
    found = detected(chat(template))
    assert found.wire_format.name == "json"
    assert found.source == "default"
    assert found.explains_tools


# It writes calls of its own, and does not mention the tools.
DEAF = ("DeepSeek R1", "DeepSeek V3.1", "Qwen2.5", "Qwen3-Coder", "Mistral v3", "gpt-oss", "GLM-4.5")


@pytest.mark.parametrize("family", DEAF)
def test_template_that_writes_calls_but_ignores_tools_gets_what_is_explained(family: str) -> None:
    source = f"{{%- set tools = none %}}{FAMILIES[family].template}"
    found = detected(ChatTemplate(source, special_tokens=TOKENS))
    assert (found.wire_format.name, found.source, found.explains_tools) == ("json", "default", True)
    assert found.wire_format.calls == WIRE_FORMATS["json"].calls
    assert found.shown == FAMILIES[family].format
    # The model may write its own format nevertheless.
    text = written_calls(found.shown, [("f", {"a": "b"})])
    parser = AnswerParser(found.wire_format, tools={"f": None})
    pieces = [piece for one in text for piece in parser.push(one)] + parser.finish()
    assert CallBegin(0, "f") in pieces


def test_format_is_not_taken_from_a_call_that_its_parser_does_not_read() -> None:
    """As MiniMax M3 writes it: with the texts of Hermes, and others between them."""
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content or '' }}"
        '{% for call in m.tool_calls or [] %}]~[<tool_call>]~[<invoke name="{{ call.function.name }}">'
        "{% for key, value in call.function.arguments.items() %}]~[<{{ key }}>{{ value }}]~[</{{ key }}>"
        "{% endfor %}]~[</invoke>]~[</tool_call>{% endfor %}{% endfor %}"
    )
    found = detected(ChatTemplate(source))
    assert (found.wire_format.name, found.explains_tools, found.shown) == ("json", True, "")


def test_reasoning_is_found_by_its_mark_in_the_template() -> None:
    assert detected(chat("chatml")).wire_format.reasoning is not None
    without = CHATS["chatml"].template.replace("think>", "other>")
    assert detected(ChatTemplate(without)).wire_format.reasoning is None


def test_model_record_has_precedence_over_the_template() -> None:
    record = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<r>", "close": "</r>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True},
            "content": {},
        },
    }
    found = detected(chat("chatml"), record=record)
    assert found.source == "response_template"
    assert found.wire_format.calls is not None


@pytest.mark.parametrize(
    ("region", "fault"),
    [
        ({"open": 5}, "open"),
        ({"open": ["<c>", ""]}, "must not be empty"),
        ({"open": []}, "must not be empty"),
        ({"open_pattern": "(?:<c>)?"}, "must not be empty"),
        ({"open_pattern": "[z-a]"}, "bad character range"),
        ({"open_pattern": "(" * 5000}, "nested too deeply"),
        ({"open": "<c>", "content": "yaml"}, "yaml"),
        ({"open": "<c>", "transform": {"function": {"name": "{name}", "arguments": "{content}"}}}, "group"),
        ({"open": "<c>", "content_args": {"string_delims": [["'"]]}}, "string_delims"),
        (
            {
                "open_pattern": "<(?P<name>x)>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": "<(?P<key>a)>"},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "tag_pattern",
        ),
    ],
)
def test_fault_of_a_record_is_named_and_the_template_used_instead(region: Any, fault: str) -> None:
    record = {"fields": {"tool_calls": {"content": "json", **region}}}
    found = detected(chat("chatml"), record=record)
    assert found.source == "chat template"
    assert fault in found.fault
    with pytest.raises(ValueError, match=re.escape(fault)):
        detected(chat("chatml"), configured=record)


def test_tools_are_explained_only_in_the_format_of_the_explanation() -> None:
    ignoring = chat("gemma")
    assert detected(ignoring, configured="json").explains_tools
    assert detected(ignoring, configured="hermes").explains_tools
    assert not detected(ignoring, configured="llama-3").explains_tools
    assert not detected(chat("chatml"), configured="json").explains_tools


def test_configuration_has_precedence_over_all() -> None:
    found = detected(chat("chatml"), record={"fields": {"content": {}}}, configured="mistral")
    assert found.wire_format == WIRE_FORMATS["mistral"]
    assert found.source == "configuration"
    with pytest.raises(ValueError, match="known are"):
        detected(chat("chatml"), configured="no such format")


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("<|im_start|>assistant\n", "not opened"),
        ("<|im_start|>assistant\n<think>\n", "opened"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
    ],
)
def test_prompt_tells_what_is_open(end: str, state: str) -> None:
    assert reasoning_state(WIRE_FORMATS["hermes"].reasoning, end) == state


def test_format_without_reasoning_has_it_closed() -> None:
    assert reasoning_state(None, "anything") == "closed"


def test_tools_that_a_template_writes_after_a_call_are_no_part_of_it() -> None:
    source = (
        "{% for message in messages %}{{ message.content }}{{ message.tool_calls }}{% endfor %}"
        '{"name": "{{ tools[0].function.name }}", "parameters": {}}'
    )
    assert detected(ChatTemplate(source)).wire_format.name == "json"
