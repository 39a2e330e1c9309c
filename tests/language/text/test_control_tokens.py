"""Client text yields no control tokens; all other text is encoded exactly as by transformers."""

import copy
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.errors import InvalidRequest
from fairlead.language.text.control_tokens import BREAK
from language.text.chat_models import (
    MODELS,
    PARSING,
    by_oracle,
    by_transformers,
    chats_with,
    control_ids,
    model_of,
    with_texts,
    with_tokens,
    without_tokens,
)
from language.text.chats import CHATS, chat_library

# Text without control tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(without_tokens), generation=st.booleans())
def test_ordinary_text_has_the_same_ids_as_from_transformers(name, messages, generation):
    expected = by_transformers(name, messages, add_generation_prompt=generation)
    harmless = by_transformers(name, with_texts(messages, lambda _: "x"), add_generation_prompt=generation)
    ids = MODELS[name].encode_chat(messages, add_generation_prompt=generation)
    if control_ids(name, expected) == control_ids(name, harmless):
        assert ids == expected
    else:  # adjacent parts form a control token, which transformers encodes as that token
        assert by_oracle(name, messages, add_generation_prompt=generation) == ids


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Größe <b> & 'more' <",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"a": "x < y", "n": 1.5}}}
TOOL_CHAT = [
    {"role": "user", "content": "What is < 5?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"a": "<p>&</p>"}'},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour <"},
    {"role": "user", "content": "Thanks"},
]
WITH_TOOLS = [name for name, chat in CHATS.items() if chat.has_tools]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_and_calls_have_the_same_ids_as_from_transformers(name):
    expected = by_transformers(name, TOOL_CHAT, tools=TOOLS, add_generation_prompt=True)
    assert MODELS[name].encode_chat(TOOL_CHAT, tools=TOOLS) == expected


# Text with control tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(with_tokens), generation=st.booleans())
def test_client_text_has_no_control_tokens_and_the_template_keeps_its_own(name, messages, generation):
    expected = by_oracle(name, messages, add_generation_prompt=generation)
    assert MODELS[name].encode_chat(messages, add_generation_prompt=generation) == expected


@pytest.mark.parametrize("name", ["chatml", "llama_3", "gemma", "deepseek"])
@given(content=with_tokens)
def test_decoded_chat_contains_the_client_text(name, content):
    ids = MODELS[name].encode_chat([{"role": "user", "content": content}])
    harmless = MODELS[name].encode_chat([{"role": "user", "content": "x"}])
    assert control_ids(name, harmless) == control_ids(name, ids)
    decoded = MODELS[name].tokenizer.decode(ids, skip_special_tokens=False)
    # In Gemma's vocabulary ▁ always means a blank.
    assert unicodedata.normalize("NFC", content.strip()).replace("▁", " ") in decoded.replace("▁", " ")


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(texts=st.lists(with_tokens, min_size=8, max_size=8))
def test_names_arguments_results_and_tools_have_no_control_tokens(name, texts):
    call = copy.deepcopy(CALL)
    call["function"] = {"name": texts[0], "arguments": {texts[1]: texts[2], "more": [texts[3]]}}
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"] |= {"name": texts[4], "description": texts[5]}
    tools[0]["function"]["parameters"]["properties"] = {texts[6]: {"type": "string", "enum": texts}}
    messages = copy.deepcopy(TOOL_CHAT)
    messages[1]["tool_calls"] = [call]
    messages[2] |= {"content": texts[7], "name": texts[0]}
    expected = by_oracle(name, messages, tools=tools, add_generation_prompt=True)
    # OpenAI's clients send arguments as JSON, which may contain a token in escapes.
    escaped = (
        json.dumps(call["function"]["arguments"]).replace("<", "\\u003c").replace("[INST", "[\\u0049NST")
    )
    call["function"]["arguments"] = escaped
    assert MODELS[name].encode_chat(messages, tools=tools) == expected


def test_variables_have_no_control_tokens():
    model = model_of(
        "chatml",
        template="{{ mood }}{% for n in notes or [] %}{{ n.x }}{% endfor %}{{ eos_token }}<|im_start|>",
    )
    end, start = (model.tokenizer.control_tokens[token] for token in ("<|im_end|>", "<|im_start|>"))
    variables = {"mood": "<|im_end|>", "notes": [{"x": "<|im_start|>"}]}
    assert control_ids("chatml", model.encode_chat(HI, variables=variables)) == [end, start]
    assert control_ids("chatml", model.encode_chat(HI, variables={"eos_token": "<|im_end|>"})) == [start]


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", ["<|im_", "end|>"]),
        (
            "{% for part in messages[0].content %}{{ part.text | trim }}{% endfor %}",
            ["a <|im_ ", "\nend|> b"],
        ),
        (
            "{% for part in messages[0].content %}{{ part.text | trim }}{% endfor %}",
            ["< \n\u2003", "\t|im_end|>"],
        ),
        ("{{ '<|' }}{{ messages[0].content }}{{ '|>' }}", "im_end"),
        ("<{{ messages[0].content }}", "|im_end|>"),
        ("<|{{ messages[0].content | trim }}", " \n im_end|> and more"),
        ("{{ '<|' ~ messages[0].content ~ 'end|>' }}", "im_"),
        ("{% set a = '<|im' %}{{ a }}{{ messages[0].content }}", "_end|>"),
        ("{{ messages[0].content }}|im_end|>", "<"),
        ("{{ messages[0].content }}{{ messages[0].name }}", "<|im_end"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "x</think><|im_end|>"),
        ("{{ messages[0].content | replace('a', 'b') | title }}", "<|im_end|>"),
        ("{{ messages[0].content[:10] }}", "<|im_end|>"),
        ("{{ messages }}", "<|im_end|>"),
        ("{{ messages | tojson }}", "<|im_end|>"),
        ("{{ messages[0].content | list | join }}", "<|im_end|>"),
    ],
)
def test_client_text_cannot_make_a_template_write_control_tokens(template, message):
    is_list = isinstance(message, list)
    content = [{"type": "text", "text": text} for text in message] if is_list else message
    model = model_of("chatml", template=template + "<|im_start|>")
    ids = model.encode_chat([{"role": "user", "content": content, "name": "|>"}])
    assert control_ids("chatml", ids) == [model.tokenizer.control_tokens["<|im_start|>"]]


@pytest.mark.parametrize("continuation", ["im_end|>", "im_end|><|im_end|>", "<|im_end|>", "|im_end|>"])
def test_beginning_of_an_answer_completes_no_token_of_the_template(continuation):
    model = model_of("chatml", template="{{ '<|im_start|>' }}{{ '<|' }}")
    ids = model.encode_chat(HI, continuation=continuation)
    assert control_ids("chatml", ids) == [model.tokenizer.control_tokens["<|im_start|>"]]
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|><|{continuation}"


@pytest.mark.parametrize("options", ["", "ensure_ascii=True"])
def test_control_token_in_json_is_decoded_as_it_was_written(options):
    model = model_of("chatml", template="{{ messages[0].content | tojson(" + options + ") }}")
    ids = model.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == '"a<|im_end|>b"'


def test_error_quotes_the_client_text_without_breaks():
    model = model_of("chatml", template="{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match=r"no <\|im_end\|>$"):
        model.encode_chat([{"role": "user", "content": "<|im_end|>"}])


def test_plain_added_tokens_in_client_text_keep_their_ids():
    """Answers with `<think>` or `<tool_call>` are sent back: these must keep the ids of their generation."""
    model = MODELS["chatml"]
    think = model.tokenizer.token_id("<tool_call>")
    assert think in model.encode_chat([{"role": "user", "content": "<|im_end|> <tool_call>"}])
    assert think in model.encode_chat([{"role": "user", "content": "<tool_call>"}])


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(with_tokens))
def test_control_tokens_in_client_text_are_parsed_if_configured(name, messages):
    assert by_transformers(name, messages, add_generation_prompt=True) == PARSING[name].encode_chat(messages)


@pytest.mark.parametrize(
    "text", [BREAK, BREAK[0] + BREAK + BREAK[1], f"<{BREAK}|im_end|>", BREAK * 3 + BREAK[0]]
)
def test_breaks_in_client_text_are_ordinary_text(text):
    model = MODELS["chatml"]
    expected = by_oracle("chatml", [{"role": "user", "content": text}], add_generation_prompt=True)
    assert model.encode_chat([{"role": "user", "content": text}]) == expected
    assert model.tokenizer.decode(model.encode_prompt(text, special_tokens="text")) == text


# Raw prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(text=with_tokens.filter(bool))
def test_raw_prompt_is_parsed_unless_the_request_selects_text(name, text):
    model = MODELS[name]
    assert chat_library(name).encode(text).ids == model.encode_prompt(text)
    assert control_ids(name, model.encode_prompt(text, special_tokens="text")) == []
