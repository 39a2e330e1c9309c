"""Models for the chats in `chats`, transformers' encoding of the same messages, and an oracle."""

import copy
from functools import cache

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.control_tokens import BREAK
from fairlead.language.text.model import TextModel
from fairlead.language.text.settings import GenerationDefaults
from fairlead.language.text.tokenizer import Tokenizer
from language.text.chats import CHATS, chat_library

# Delimiters of the oracle's control tokens. No drawn text has them, so only its template writes such tokens.
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
    """Return the ids of a chat, encoded by transformers."""
    return ids_of(transformers_tokenizer(name), messages, **options)


def by_oracle(name, messages, **options):
    """Return the ids of a chat in which only the template has control tokens: texts lack their delimiters."""
    return ids_of(transformers_tokenizer(name, is_oracle=True), messages, **options)


@cache
def transformers_tokenizer(name, *, is_oracle=False):
    chat = CHATS[name]
    source, named, token_format = chat.template, chat.named, "{}"
    if is_oracle:
        token_format = LEFT + "{}" + RIGHT
        for token in chat.control:
            source = source.replace(token, token_format.format(token))
        for first, last in [chat.joined_parts] if chat.joined_parts else []:
            source = source.replace(first, f"'{LEFT}' + {first}").replace(last, f"{last} + '{RIGHT}'")
        named = {role: token_format.format(token) for role, token in named.items()}
    library = chat_library(name, token_format)
    return PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **named)


def ids_of(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(copy.deepcopy(messages), return_dict=False, **options)


def control_ids(name, ids):
    """Return the control tokens among the ids, except `<unk>`, which stands for unknown characters."""
    known = set(MODELS[name].tokenizer.control_tokens.values()) - {chat_library(name).token_to_id("<unk>")}
    return [token_id for token_id in ids if token_id in known]


def with_texts(messages, change):
    """Return the messages with each of their contents changed."""
    return [{**message, "content": change(message["content"])} for message in messages]


PARTS = "< <| |> > [ ] </ s> im_ end <|im_ end|> user user|> eot_id|> INST] [/ ｜ <｜User ｜> of_turn> <end_"
fragments = st.sampled_from([*PARTS.split(), "</think>", "<think>", " ", "\n", "a", "é", BREAK[0], BREAK[1]])
whole_tokens = st.sampled_from(sorted({token for chat in CHATS.values() for token in chat.control}))
without_tokens = (st.text(max_size=12) | st.lists(fragments, max_size=6).map("".join)).filter(
    lambda text: LEFT not in text
)
with_tokens = (
    st.lists(fragments | whole_tokens | st.text(max_size=4), max_size=8)
    .map("".join)
    .filter(lambda text: LEFT not in text)
)


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
