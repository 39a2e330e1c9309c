"""Chat templates × conversations: ours renders what transformers renders, or a form of it that is listed.

In short form for templates like those of well-known models and for a few published ones; with `--nightly` for
the whole collection. `transformers_rendering` says what is compared, and how the lists are written anew.
"""

import json

import pytest

pytest.importorskip("transformers")

from fairlead.language.structured.instructions import explained
from language.text.chats import CHATS
from language.text.conversations import ASK, CONVERSATIONS, Conversation
from language.text.published_templates import COUNT, FOLDER
from language.text.transformers_rendering import (
    REWRITES,
    Differences,
    chats_for,
    compare,
    decoded,
    explanation,
    rendered_by_us,
    template_of,
)

DIFFERENCES = Differences.read()
PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
FEW = {
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
}
PUBLISHED = [
    pytest.param(name, marks=() if name in FEW else pytest.mark.nightly)
    for name in (PATHS or sorted(FEW)[:1])
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_template_is_rendered_as_by_transformers_or_in_a_listed_form(name):
    if name not in PATHS:
        pytest.skip(
            f"{COUNT} templates are not here; tests/language/text/published_templates.py fetches them"
        )
    source = PATHS[name].read_text(encoding="utf-8")
    forms, listed = DIFFERENCES.forms.get(name, []), DIFFERENCES.listed(name)
    found = compare(source, forms, chats_for(name))
    assert {*found.refused, *found.unexplained} == set(listed), found
    assert found.needed == set(forms)


@pytest.mark.parametrize("name", CHATS)
def test_template_like_a_well_known_one_is_rendered_as_by_transformers_or_in_a_form(name):
    found = compare(CHATS[name].template, list(REWRITES), CONVERSATIONS)
    assert (set(found.refused), found.unexplained) == (set(), [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_tools_are_explained_in_every_conversation_for_a_template_that_ignores_them(name):
    if name not in PATHS:
        pytest.skip(
            f"{COUNT} templates are not here; tests/language/text/published_templates.py fetches them"
        )
    template = template_of(PATHS[name].read_text(encoding="utf-8"))
    for chat in chats_for(name).values():
        messages, tools = decoded(chat)
        text = template.render(explained(messages, tools), **chat.variables)
        assert all(json.dumps(tool, ensure_ascii=False) in text for tool in tools)


def test_each_listed_difference_is_of_a_template_and_a_form_that_exist():
    listed = {*DIFFERENCES.forms}.union(*(one.templates for one in DIFFERENCES.refused + DIFFERENCES.faults))
    assert listed <= (PATHS.keys() or listed)
    assert {form for forms in DIFFERENCES.forms.values() for form in forms} <= REWRITES.keys()
    named = {
        name
        for one in DIFFERENCES.refused + DIFFERENCES.faults
        for names in one.templates.values()
        for name in names
    }
    assert named <= CONVERSATIONS.keys()
    assert all(one.reason for one in DIFFERENCES.refused + DIFFERENCES.faults)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
PARTS = Conversation([ASK, {"role": "user", "content": [{"type": "text", "text": "a"}]}])


def test_other_text_than_that_of_transformers_is_found():
    ours = rendered_by_us(TEMPLATE, CONVERSATIONS["one question"])
    chat = CONVERSATIONS["one question"]
    assert explanation(TEMPLATE, chat, ours, list(REWRITES)) == ()
    for other in (ours + " ", ours.replace("What", "That"), ours.removesuffix("<|eos|>"), ""):
        assert explanation(TEMPLATE, chat, other, list(REWRITES)) is None


def test_form_explains_a_difference_only_if_it_is_listed():
    ours = rendered_by_us(TEMPLATE, PARTS)
    assert explanation(TEMPLATE, PARTS, ours, ["parts"]) == ("parts",)
    assert explanation(TEMPLATE, PARTS, ours, ["empty", "system"]) is None


@pytest.mark.parametrize(
    ("ids", "equal"), [("abcdefghi abcdefghi", True), ("abcdefghi abcdefghX", False), ("short short", False)]
)
def test_digest_of_an_id_may_be_any_nine_letters_that_are_the_same_at_each_place(ids, equal):
    source = "{% for m in messages %}{{ m.tool_call_id or m.tool_calls[0].id }} {% endfor %}"
    chat = Conversation(CONVERSATIONS["id of another maker"].messages[1:])
    assert (explanation(source, chat, f"{ids} ", ["ids"]) == ("ids",)) is equal
