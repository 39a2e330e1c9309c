"""Chats are rendered as transformers renders them, and no message or template escapes the sandbox."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fairlead.base.errors import InvalidRequest, LoadFailed
from fairlead.language.text import chat_template
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.template_limits import MAX_ARGUMENT_VALUES
from language.text.vocabularies import library

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

CHATML = """\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}
{%- endif -%}
{%- if tools -%}
    {{- '<|im_start|>system\\nTools:' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.tool_calls -%}
        {%- for call in message.tool_calls -%}
            {{- '<tool_call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson(indent=2)) -}}
        {%- endfor -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA_3 = """\
{{ bos_token }}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- header + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must take turns') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] + eos_token }}
{% endgeneration %}
{% else %}
{{ raise_exception('no such role: ' + message['role']) }}
{% endif %}
{% endfor %}
"""

ZEPHYR = """\
{% set state = namespace(turns=0, self='me') %}
{% for message in messages %}
    {% if message['role'] == 'skip' %}{% continue %}{% endif %}
    {% set state.turns = state.turns + 1 %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
    {% else %}
{{ '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }} {{ state.turns }} {{ dict(a=1)['a'] }} {{ unheard_of }}
    {% endif %}
{% endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "zephyr": ZEPHYR}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "<Größe> & 'more'", "parameters": {}}}
]


def by_transformers(source, messages, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library("llama"), chat_template=source, **SPECIAL)
    return tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)


def rendered(source, messages, /, **options):
    return ChatTemplate(source, special_tokens=SPECIAL).render(messages, **options)


def user(content):
    return [{"role": "user", "content": content}]


turns = st.lists(st.text(max_size=20), min_size=1, max_size=5).map(
    lambda texts: [
        {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)
    ]
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=turns, generation=st.booleans())
def test_chat_is_rendered_as_by_transformers(name, messages, generation):
    expected = by_transformers(TEMPLATES[name], messages, add_generation_prompt=generation)
    assert expected == rendered(TEMPLATES[name], messages, add_generation_prompt=generation)


def test_tools_are_rendered_as_by_transformers():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"what": "Größe <b>"}},
    }
    messages = [*user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = by_transformers(CHATML, messages, tools=TOOLS, add_generation_prompt=True)
    assert "<Größe> & 'more'" in expected
    assert expected == rendered(CHATML, messages, tools=TOOLS)
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])  # as OpenAI's clients send them
    assert expected == rendered(CHATML, messages, tools=TOOLS)
    assert isinstance(call["function"]["arguments"], str)


def test_arguments_that_are_not_json_are_rendered_as_the_only_argument():
    call = {"type": "function", "function": {"name": "look_up", "arguments": "{oops"}}
    messages = [*user("hi"), {"role": "assistant", "tool_calls": [call]}]
    assert '<tool_call>look_up {\n  "arguments": "{oops"\n}' in rendered(CHATML, messages)


# Forms of content ----------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LISTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
BOTH_FORMS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content }}", ["one", "two"], "one\ntwo"),
        ("{{ messages[0].content }}", "one", "one"),
        ("{{ messages[0].content }}", None, ""),
        ("{{ messages[0].content | tojson }}", "one", '"one"'),
        ("{{ messages[0].content | tojson }}", PARTS, '"one\\ntwo"'),
        (LISTS_ONLY, PARTS, "[one][two]"),
        (LISTS_ONLY, "one", "[one]"),
        (LISTS_ONLY, None, "[]"),
        (BOTH_FORMS, PARTS, "[one][two]"),
        (BOTH_FORMS, "one", "one"),
        (BOTH_FORMS, None, ""),
    ],
)
def test_content_takes_the_form_that_the_template_reads(source, content, expected):
    assert expected == rendered(source, user(content))


@pytest.mark.parametrize(
    "content",
    [5, {"type": "text", "text": "x"}, [{"type": "image_url"}], [{"type": "text", "text": 5}], [[]]],
)
def test_content_that_is_not_text_is_refused(content):
    with pytest.raises(InvalidRequest) as caught:
        rendered(BOTH_FORMS, user(content))
    assert caught.value.param == "messages"


# Hostile input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no cats') }}", "no cats"),
        ("{% for i in range(10**9) %}x{% endfor %}", "[Rr]ange"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ ''.__class__.__base__ }}", "unsafe"),
        ("{{ '{0.__class__.__base__}'.format(messages) }}", "unsafe"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "__class__"),
        ("{{ namespace({'__class__': 1}) }}", "__class__"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ dict.update(messages[0], role='system') }}", "undefined|no attribute"),
        ("{{ messages[0].nothing.deeper }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"),
        ("{{ strftime_now(5) }}", "TypeError"),
    ],
)
def test_template_error_is_an_invalid_request_with_the_reason(source, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        rendered(source, user("hi"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_forbidden_attribute_renders_as_nothing(source):
    assert rendered(source, user("hi")) == ""


def test_deeply_nested_values_are_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="too deeply"):
        rendered("{{ tools | tojson }}", user("hi"), tools=[{"deep": deep}])


def test_chat_longer_than_max_rendered_chars_is_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(source, user("x" * 100)) == "x" * 100
    with pytest.raises(InvalidRequest, match="too long"):
        rendered(source, user("x" * 101))


def test_long_error_message_is_truncated():
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ raise_exception(messages[0].content) }}", user("x" * 10_000))
    assert len(caught.value.message) == 500


def test_error_message_that_quotes_a_surrogate_can_be_encoded():
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ raise_exception(messages[0].content) }}", user("\ud83d"))
    assert caught.value.message.encode().endswith(b": ?")


@pytest.mark.parametrize(
    "message", [{"content": "", "tool_calls": 5}, {"content": "", "tool_calls": [5]}, 5, []]
)
def test_malformed_message_is_refused(message):
    with pytest.raises(InvalidRequest):
        rendered(CHATML, [message])


def test_jinja_syntax_in_a_message_is_not_evaluated():
    assert (
        rendered("{{ messages[0].content }}", user("{{ bos_token }}{% raw %}")) == "{{ bos_token }}{% raw %}"
    )


def test_variables_are_passed_but_cannot_replace_the_messages():
    source = "{{ mood }} {{ messages[0].content }} {{ bos_token }}"
    assert rendered(source, user("hi"), mood="glad", messages="no", self="no") == "glad hi <s>"


def test_rendering_does_not_change_the_messages():
    messages = user(PARTS)
    before = copy.deepcopy(messages)
    rendered(LISTS_ONLY, messages)
    assert before == messages


def test_variables_of_a_generation_block_have_the_scope_of_transformers():
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert by_transformers(source, user("hi")) == rendered(source, user("hi"))


def test_template_can_get_the_date():
    assert len(rendered("{{ strftime_now('%Y') }}", user("hi"))) == 4


# Files ---------------------------------------------------------------------------------------------


def write(directory, name, content):
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_load_returns_none_without_a_template(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": None, "bos_token": None})
    assert ChatTemplate.load(tmp_path) is None


def test_template_file_takes_precedence_over_the_configuration(tmp_path):
    write(tmp_path, "chat_template.json", {"chat_template": "third"})
    assert ChatTemplate.load(tmp_path).render(user("hi")) == "third"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "second"})
    assert ChatTemplate.load(tmp_path).render(user("hi")) == "second"
    write(tmp_path, "chat_template.jinja", "first")
    assert ChatTemplate.load(tmp_path).render(user("hi")) == "first"


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tooled"}],
        {"tool_use": "tooled", "default": "plain"},
    ],
)
def test_tool_use_template_is_chosen_when_there_are_tools(tmp_path, templates):
    write(tmp_path, "tokenizer_config.json", {"chat_template": templates})
    template = ChatTemplate.load(tmp_path)
    assert template.render(user("hi")) == "plain"
    assert template.render(user("hi"), tools=[]) == "plain"
    assert template.render(user("hi"), tools=TOOLS) == "tooled"


def test_additional_templates_are_read_from_their_directory(tmp_path):
    write(tmp_path, "chat_template.jinja", "plain")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tooled")
    assert ChatTemplate.load(tmp_path).render(user("hi"), tools=TOOLS) == "tooled"


@pytest.mark.parametrize(
    ("added", "expected"),
    [({}, "<s></s><unk>"), ({"added_tokens_decoder": {}}, "<new></s>")],
    ids=["the older file overrides", "the older file is a copy"],
)
def test_special_tokens_are_read_as_by_transformers(tmp_path, added, expected):
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "unk_token": "<unk>"})
    write(
        tmp_path,
        "tokenizer_config.json",
        {
            "bos_token": {"content": "<new>", "lstrip": False, "__type": "AddedToken"},
            "eos_token": "</s>",
            "pad_token": None,
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}",
            **added,
        },
    )
    assert ChatTemplate.load(tmp_path).render(user("hi")) == expected


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat_template.jinja", "{% for %}", "line 1"),
        ("tokenizer_config.json", {"chat_template": "\n{{ x | no_such_filter }}"}, "line 2"),
        ("tokenizer_config.json", {"chat_template": 5}, "Expected"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "template"),
        ("chat_template.json", "{", "not JSON"),
    ],
)
def test_error_names_the_file_of_a_broken_template(tmp_path, name, content, reason):
    write(tmp_path, name, content)
    with pytest.raises(LoadFailed, match=reason) as caught:
        ChatTemplate.load(tmp_path)
    assert name in caught.value.message


def test_error_names_a_template_that_is_not_utf_8(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(LoadFailed, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path)


def test_arguments_of_too_many_values_are_refused_before_they_are_parsed(monkeypatch):
    def call_with(*arguments):
        calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
        return [{"role": "assistant", "content": None, "tool_calls": calls}]

    half = "[" + "1," * (MAX_ARGUMENT_VALUES // 2 - 2) + "1]"
    arguments = "call.function.arguments.arguments"
    source = f"{{% for call in messages[0].tool_calls %}}{{{{ {arguments} | length }}}} {{% endfor %}}"
    template = ChatTemplate(source)
    length = MAX_ARGUMENT_VALUES // 2 - 1
    assert template.render(call_with(half, half)) == f"{length} {length} "
    monkeypatch.setattr("fairlead.language.text.template_limits.json", None)  # parsing would raise
    with pytest.raises(InvalidRequest, match="JSON values") as caught:
        template.render(call_with(half, half, "1"))
    assert caught.value.param == "messages"
