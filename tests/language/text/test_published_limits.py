"""Every published template takes every conversation of clients, in a form that shows its texts."""

import time
from dataclasses import fields

import pytest

from fairlead.base.errors import InvalidRequest
from fairlead.language.structured.instructions import explained
from fairlead.language.structured.probing import detect
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.template_limits import TemplateLimits, normalized
from fairlead.language.text.template_probes import probe
from language.text.limited_templates import CALLING, CONVERSATIONS, RESULT, TOOL, USER
from language.text.published_templates import COUNT, FOLDER

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
PATHS = sorted(FOLDER.glob("*.jinja"))
published = pytest.mark.parametrize("path", PATHS or [None], ids=lambda path: path.stem if path else "none")

# Jinja's sandbox or Jinja itself cannot run these, neither here nor in transformers: `append` of a list, and
# JSON of a generator. Where the format is not known, their calls and results are written as text before.
NEVER_CALLS = {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "llama-cpp-deepseek-r1"}
# It reads variables that no client has: `functions` and `datetime`.
NEVER_RENDERS = {"fireworks-ai-llama-3-firefunction-v2"}
DROPPED = {
    # A system message is written in the last user message, but only at the end of the chat.
    "mistralai-Mistral-Nemo-Instruct-2407": {"Sys", "Tem", "Late"},
}


def read(path):
    if path is None:
        pytest.skip(
            f"{COUNT} templates are not here; tests/language/text/published_templates.py fetches them"
        )
    if path.stem in NEVER_RENDERS:
        pytest.skip("it needs variables that no client has")
    return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=SPECIAL)


def rendered(template, messages, tools):
    try:
        return template.render(messages, tools=tools)
    except InvalidRequest as error:
        return error


def lost(template, shown, write):
    """Return the reasons of refusals and the texts that are lost, by kind of conversation."""
    found = {}
    for kind, (messages, texts, tools) in CONVERSATIONS.items():
        prompt = rendered(template, *write(messages, tools))
        wanted = [text for text in texts.split() if shown(text)]
        missing = [text for text in wanted if not isinstance(prompt, str) or text not in prompt]
        if missing or not isinstance(prompt, str):
            found[kind] = missing if isinstance(prompt, str) else prompt.message
    return found


@published
def test_published_template_takes_each_conversation_as_it_is_served(path):
    template = read(path)
    explains = detect(template.render, template.literals).explains_tools

    def write(messages, tools):
        return (explained(normalized(messages), tools or ()), None) if explains else (messages, tools)

    # Reasoning is not for all of them; some show it only after the last question.
    dropped = {"Why", *DROPPED.get(path.stem, ())}
    assert lost(template, lambda text: text not in dropped, write) == {}


@published
def test_published_template_takes_each_conversation_by_itself(path):
    template = read(path)
    if path.stem in NEVER_CALLS:
        pytest.skip("no Jinja can run its calls")
    prompt = template.render([USER, CALLING, RESULT], tools=TOOL)
    named = {"Why", *DROPPED.get(path.stem, ())}
    named |= set() if "Arg" in prompt else {"Arg", "Brg"}
    named |= set() if "horloge" in template.render([USER], tools=TOOL) else {"horloge", "Tells"}
    assert lost(template, lambda text: text not in named, lambda *given: given) == {}


@pytest.mark.parametrize(
    "name", ["openai-gpt-oss-120b", "LFM2.5-8B-A1B", "Qwen3.5-4B", "upstage-Solar-Open-100B"]
)
@pytest.mark.parametrize("kind", ["call and reasoning", "reasoning named thinking"])
def test_reasoning_before_a_call_is_shown_under_any_name(name, kind):
    messages, _, tools = CONVERSATIONS[kind]
    assert "Why" in read(FOLDER / f"{name}.jinja" if PATHS else None).render(messages, tools=tools)


@published
def test_probing_a_published_template_takes_less_than_50_ms(path):
    template = read(path)
    durations = []
    for _ in range(5):
        begun = time.process_time()
        limits = probe(template._probed)
        durations.append(time.process_time() - begun)
    assert limits == template.limits
    assert min(durations) < 50e-3


# What these templates refuse in so many words, but for the form of content.
KNOWN = {
    "google-gemma-2-2b-it": {
        "system": "never",
        "user": "first",
        "merges_neighbours": True,
        "results": "never",
    },
    "meta-llama-Llama-3.1-8B-Instruct": {"one_call": True, "user": "with_tools"},
    "mistralai-Mistral-Nemo-Instruct-2407": {
        "system": "first",
        "user": "first",
        "merges_neighbours": True,
        "closes_turns": True,
        "short_ids": True,
        "results": "after_calls",
    },
    "openai-gpt-oss-120b": {
        "system": "first",
        "one_call": True,
        "joins_reasoning": True,
        "results": "after_calls",
        "tool_members": frozenset({"description"}),
    },
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"system": "first", "null_content": True},
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": {
        "tool_members": frozenset({"description", "parameters", "types"}),
        "tool_list": True,
    },
    "Qwen3.5-4B": {"system": "first", "user": "always"},
    "Qwen-Qwen2.5-7B-Instruct": {},
}


@pytest.mark.parametrize("name", KNOWN)
def test_limits_of_well_known_templates_are_found(name):
    limits = read(FOLDER / f"{name}.jinja" if PATHS else None).limits
    others = TemplateLimits()
    found = {field.name: getattr(limits, field.name) for field in fields(limits)}
    forms = ("parts_as_text", "text_as_parts")
    assert {one: v for one, v in found.items() if one not in forms and v != getattr(others, one)} == KNOWN[
        name
    ]
