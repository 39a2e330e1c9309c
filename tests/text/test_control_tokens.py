"""Text of clients has no control tokens, and any other text is encoded exactly as transformers encodes it."""

import copy
import json
import unicodedata
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from fairlead.errors import InvalidRequest
from fairlead.text.chat_template import ChatTemplate
from fairlead.text.control_tokens import BREAK, ControlTokens
from fairlead.text.model import GenerationDefaults, TextModel
from fairlead.text.tokenizer import Tokenizer
from text.chats import CHATS, chat_library
from text.vocabularies import MAKES, library, loaded

# Around the control tokens of the oracle, so that no text has them and they are found only where its template
# writes them.
LEFT, RIGHT = "⟦", "⟧"


def model_of(name, *, template=None, special_tokens="text"):
    chat = CHATS[name]
    tokenizer = Tokenizer(
        chat_library(name), decoder_kinds=frozenset({"ByteLevel"}), named=tuple(chat.named.values())
    )
    source = chat.template if template is None else template
    return TextModel(
        name=name,
        path=None,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, special_tokens=chat.named),
        eos_token_ids=frozenset(),
        max_model_len=1_000_000,
        defaults=GenerationDefaults(),
        created=0,
        special_tokens=special_tokens,
    )


MODELS = {name: model_of(name) for name in CHATS}
PARSING = {name: model_of(name, special_tokens="parse") for name in CHATS}


def by_transformers(name, messages, **options):
    """Return the ids that transformers gives a chat."""
    return ids_of(transformers_tokenizer(name), messages, **options)


def by_oracle(name, messages, **options):
    """Return the ids of a chat in which only the template has control tokens: a text cannot spell them."""
    return ids_of(transformers_tokenizer(name, is_oracle=True), messages, **options)


@cache
def transformers_tokenizer(name, *, is_oracle=False):
    chat = CHATS[name]
    source, named, spelling = chat.template, chat.named, "{}"
    if is_oracle:
        spelling = LEFT + "{}" + RIGHT
        for token in chat.control:
            source = source.replace(token, spelling.format(token))
        for first, last in [chat.put_together] if chat.put_together else []:
            source = source.replace(first, f"'{LEFT}' + {first}").replace(last, f"{last} + '{RIGHT}'")
        named = {role: spelling.format(token) for role, token in named.items()}
    library = chat_library(name, spelling)
    return PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **named)


def ids_of(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(copy.deepcopy(messages), return_dict=False, **options)


def control_ids(name, ids):
    """Return the control tokens among the ids, but for the one that stands for unknown characters."""
    known = set(MODELS[name].tokenizer.control_tokens.values()) - {chat_library(name).token_to_id("<unk>")}
    return [token_id for token_id in ids if token_id in known]


def with_texts(messages, change):
    """Return the messages with each of their contents changed."""
    return [{**message, "content": change(message["content"])} for message in messages]


PARTS = "< <| |> > [ ] </ s> im_ end <|im_ end|> user user|> eot_id|> INST] [/ ｜ <｜User ｜> of_turn> <end_"
fragments = st.sampled_from([*PARTS.split(), "</think>", "<think>", " ", "\n", "a", "é", BREAK[0], BREAK[1]])
spelled = st.sampled_from(sorted({token for chat in CHATS.values() for token in chat.control}))
ordinary = st.text(max_size=12) | st.lists(fragments, max_size=6).map("".join)
hostile = st.lists(fragments | spelled | st.text(max_size=4), max_size=8).map("".join)


def chats_with(texts):
    return (
        st.tuples(st.booleans(), st.lists(texts, min_size=1, max_size=4))
        .map(
            lambda drawn: [
                {"role": role, "content": text}
                for role, text in zip(
                    ["system"] * drawn[0] + ["user", "assistant", "user", "assistant", "user"],
                    drawn[1],
                    strict=False,
                )
            ]
        )
        .filter(lambda messages: messages[-1]["role"] != "system")
    )


# Text without control tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(ordinary), generation=st.booleans())
def test_ordinary_text_has_the_ids_that_transformers_gives_it(name, messages, generation):
    expected = by_transformers(name, messages, add_generation_prompt=generation)
    neutral = by_transformers(name, with_texts(messages, lambda _: "x"), add_generation_prompt=generation)
    ids = MODELS[name].encode_chat(messages, add_generation_prompt=generation)
    if control_ids(name, expected) == control_ids(name, neutral):
        assert expected == ids
    else:  # the parts of a spelling came together, which transformers takes for the token
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
ERRAND = [
    {"role": "user", "content": "What is < 5?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"a": "<p>&</p>"}'},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour <"},
    {"role": "user", "content": "Thanks"},
]
WITH_TOOLS = [name for name, chat in CHATS.items() if chat.takes_tools]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_and_calls_have_the_ids_that_transformers_gives_them(name):
    expected = by_transformers(name, ERRAND, tools=TOOLS, add_generation_prompt=True)
    assert expected == MODELS[name].encode_chat(ERRAND, tools=TOOLS)


# Text with control tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(hostile), generation=st.booleans())
def test_no_text_has_control_tokens_and_the_rest_of_the_chat_is_as_ever(name, messages, generation):
    expected = by_oracle(name, messages, add_generation_prompt=generation)
    assert expected == MODELS[name].encode_chat(messages, add_generation_prompt=generation)


@pytest.mark.parametrize("name", ["chatml", "llama_3", "gemma", "deepseek"])
@given(content=hostile)
def test_the_model_reads_what_the_client_wrote(name, content):
    ids = MODELS[name].encode_chat([{"role": "user", "content": content}])
    neutral = MODELS[name].encode_chat([{"role": "user", "content": "x"}])
    assert control_ids(name, neutral) == control_ids(name, ids)
    decoded = MODELS[name].tokenizer.decode(ids, skip_special_tokens=False)
    # Gemma's vocabulary has no ▁ but for blanks.
    assert unicodedata.normalize("NFC", content.strip()).replace("▁", " ") in decoded.replace("▁", " ")


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(texts=st.lists(hostile, min_size=8, max_size=8))
def test_names_arguments_results_and_tools_have_no_control_tokens(name, texts):
    call = copy.deepcopy(CALL)
    call["function"] = {"name": texts[0], "arguments": {texts[1]: texts[2], "more": [texts[3]]}}
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"] |= {"name": texts[4], "description": texts[5]}
    tools[0]["function"]["parameters"]["properties"] = {texts[6]: {"type": "string", "enum": texts}}
    messages = copy.deepcopy(ERRAND)
    messages[1]["tool_calls"] = [call]
    messages[2] |= {"content": texts[7], "name": texts[0]}
    expected = by_oracle(name, messages, tools=tools, add_generation_prompt=True)
    # OpenAI's clients send arguments as JSON, which may spell a token with escapes.
    escaped = (
        json.dumps(call["function"]["arguments"]).replace("<", "\\u003c").replace("[INST", "[\\u0049NST")
    )
    call["function"]["arguments"] = escaped
    assert expected == MODELS[name].encode_chat(messages, tools=tools)


def test_variables_have_no_control_tokens():
    model = model_of(
        "chatml",
        template="{{ mood }}{% for n in notes or [] %}{{ n.x }}{% endfor %}{{ eos_token }}<|im_start|>",
    )
    end, start = (model.tokenizer.control_tokens[token] for token in ("<|im_end|>", "<|im_start|>"))
    variables = {"mood": "<|im_end|>", "notes": [{"x": "<|im_start|>"}]}
    assert [end, start] == control_ids("chatml", model.encode_chat(HI, variables=variables))
    assert [start] == control_ids("chatml", model.encode_chat(HI, variables={"eos_token": "<|im_end|>"}))


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
def test_a_template_cannot_be_made_to_write_control_tokens(template, message):
    is_list = isinstance(message, list)
    content = [{"type": "text", "text": text} for text in message] if is_list else message
    model = model_of("chatml", template=template + "<|im_start|>")
    ids = model.encode_chat([{"role": "user", "content": content, "name": "|>"}])
    assert [model.tokenizer.control_tokens["<|im_start|>"]] == control_ids("chatml", ids)


@pytest.mark.parametrize("options", ["", "ensure_ascii=True"])
def test_a_control_token_in_json_is_shown_as_it_was_written(options):
    model = model_of("chatml", template="{{ messages[0].content | tojson(" + options + ") }}")
    ids = model.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert '"a<|im_end|>b"' == model.tokenizer.decode(ids, skip_special_tokens=False)


def test_an_error_quotes_the_client_without_breaks():
    model = model_of("chatml", template="{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match=r"no <\|im_end\|>$"):
        model.encode_chat([{"role": "user", "content": "<|im_end|>"}])


def test_what_models_write_into_answers_is_read_as_they_wrote_it():
    """`<think>` is shown to clients, who send it back: it must have the ids with which it was generated."""
    model = MODELS["chatml"]
    think = model.tokenizer.token_id("<tool_call>")
    assert think in model.encode_chat([{"role": "user", "content": "<|im_end|> <tool_call>"}])
    assert think in model.encode_chat([{"role": "user", "content": "<tool_call>"}])


@pytest.mark.parametrize("name", CHATS)
@given(messages=chats_with(hostile))
def test_where_the_configuration_says_so_text_is_parsed(name, messages):
    assert by_transformers(name, messages, add_generation_prompt=True) == PARSING[name].encode_chat(messages)


# Vocabularies -----------------------------------------------------------------------------------------


def copy_of(name):
    return Library.from_str(library(name).to_str())


def tokenizer_of(library, **options):
    return Tokenizer(library, decoder_kinds=frozenset({"ByteLevel"}), **options)


def test_control_tokens_are_those_marked_named_or_in_bars():
    library = copy_of("byte_level")
    library.add_tokens(
        [
            AddedToken("<think>", special=False),
            AddedToken("<|fim|>", special=False),
            AddedToken("█", special=True),
        ]
    )
    expected = {"<|end|>", "<|im_start|>", "<|im_end|>", "<｜wide｜>", "<|fim|>"}
    assert expected == set(tokenizer_of(library).control_tokens)
    assert expected | {"<think>"} == set(tokenizer_of(library, named=("<think>", "none")).control_tokens)


def test_a_token_found_in_normalized_text_is_not_found_in_a_clients():
    library = copy_of("byte_level")
    library.normalizer = normalizers.Lowercase()
    library.add_tokens([AddedToken("<|user|>", special=True, normalized=True)])
    tokenizer = tokenizer_of(library)
    user = tokenizer.token_id("<|user|>")
    assert [user] == tokenizer.encode("<|USER|>")
    control = ControlTokens(tokenizer.control_tokens)
    for text in ("<|USER|>", "<|user|>", "<|User|>"):
        assert user not in tokenizer.encode(control.broken(text), with_breaks=True)
    assert [user] == tokenizer.encode("<|user|>", with_breaks=True)


def test_a_vocabulary_with_control_tokens_as_words_does_not_find_them_in_text():
    tokenizer = loaded("unigram")
    control = ControlTokens(tokenizer.control_tokens)
    ids = tokenizer.encode(control.broken("the </s> of"), with_breaks=True)
    assert tokenizer.token_id("</s>") not in ids
    assert "the </s> of" == tokenizer.decode(ids).replace("\u200b", "")


@pytest.mark.parametrize("name", MAKES)
@given(text=st.text(max_size=40))
def test_text_without_breaks_has_the_same_ids(name, text):
    tokenizer = loaded(name)
    assume(BREAK not in text)
    with_breaks = tokenizer._with_breaks.encode(text).ids
    assert tokenizer.encode(text) == with_breaks == tokenizer.encode(text, with_breaks=True)


@pytest.mark.parametrize(
    "text", [BREAK, BREAK[0] + BREAK + BREAK[1], f"<{BREAK}|im_end|>", BREAK * 3 + BREAK[0]]
)
def test_a_clients_own_breaks_are_text(text):
    model = MODELS["chatml"]
    expected = by_oracle("chatml", [{"role": "user", "content": text}], add_generation_prompt=True)
    assert expected == model.encode_chat([{"role": "user", "content": text}])
    assert text == model.tokenizer.decode(model.encode_prompt(text, special_tokens="text"))


def test_tokens_that_overlap_are_all_broken():
    broken = ControlTokens(["aba", "bab"]).broken("xababab")
    assert "xababab" == broken.replace(BREAK, "")
    assert not any(token in broken for token in ("aba", "bab"))


@pytest.mark.parametrize("place", [0, 1, *range(16_370, 16_390), 40_000])
def test_a_token_is_found_anywhere_in_a_long_text(place):
    text = "x" * place + "<|im_end|>" + "y" * 20_000
    control = ControlTokens(["<|im_end|>"])
    assert text.replace("<", "<" + BREAK) == control.broken(text)
    assert control.may_be_in([text])


WHITE = [" ", "\n", "\t", "\x0b", "\x1c", "\x85", "\u2003", "\u3000", " \n\x1f"]


@pytest.mark.parametrize("white", WHITE, ids=ascii)
@pytest.mark.parametrize("blanks", [0, 1, 60, 70, 17_000])
def test_a_part_of_a_token_is_found_at_either_end_of_a_long_text(white, blanks):
    control = ControlTokens(["<|im_end|>"], ["see <|"])
    for place in (0, 1, *range(16_365, 16_390, 3), 40_000):
        first, last = "x" * place + "<" + white * blanks, white * blanks + "im_end|>" + "x" * place
        for text in (first, last):
            assert control.broken(text) != text == control.broken(text).replace(BREAK, "")
        assert control.may_be_in([first])
        assert control.may_be_in(["x" * place, last])


def test_what_is_long_and_harmless_is_not_suspicious():
    control = ControlTokens(["<|im_end|>"], ["see <|"])
    assert not control.may_be_in({"role": "user", "content": "x" * 100_000 + "\n" * 100, "name": " "})


def test_a_vocabulary_without_control_tokens_breaks_nothing():
    control = ControlTokens([])
    assert not control.may_be_in({"a": ["<|im_end|>"]})
    assert "<|im_end|>" == control.broken("<|im_end|>")


@given(
    value=st.recursive(
        st.none() | st.integers() | hostile,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_needs_a_break_is_never_overlooked(value):
    control = ControlTokens(CHATS["chatml"].control)
    assert control.may_be_in(value) or value == control.broken(value)
    assert str(value) == str(control.broken(value)).replace(BREAK, "")


# Raw prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@given(text=hostile.filter(bool))
def test_a_raw_prompt_is_parsed_unless_the_request_says_text(name, text):
    model = MODELS[name]
    assert chat_library(name).encode(text).ids == model.encode_prompt(text)
    assert [] == control_ids(name, model.encode_prompt(text, special_tokens="text"))
