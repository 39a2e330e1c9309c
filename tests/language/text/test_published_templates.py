"""In published templates, no cut of a control token makes a token, and the templates' own tokens are kept."""

import json
import re
from functools import cache

import pytest
from jinja2 import nodes

from fairlead.base.errors import InvalidRequest
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.control_tokens import BREAK, ControlTokens
from fairlead.language.text.sandbox import environment
from language.text.chats import CHATS
from language.text.limited_templates import LIMITED
from language.text.published_templates import COUNT, FOLDER
from language.text.template_operations import control_tokens_in, rendered_by_jinja

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
# Texts in a template that look like control tokens, such as <|im_end|>, </s>, [INST], ]~b[ and ]<]minimax[>[.
SPELLED = re.compile(r"<[^<>\s'\"{}%]+>|\[/?[A-Z_]+\]|\][~<][\]~\w]+\[(?:>\[)?")

# Snippets of templates, by what they do with a text: those of the collection are in each of these kinds.
KINDS = {
    "removes a word": "{{ m.content.replace('/think', '').replace('/no_think', '').strip() }}",
    "replaces with a filter": "{{ m.content | replace('[img]', '') | trim }}",
    "splits off reasoning": "{{ m.content.split('</think>')[-1].lstrip('\\n') }}",
    "keeps the ends": "{{ m.content.split('</think>')[0] ~ m.content.split('</think>')[-1] }}",
    "changes the case": "{{ m.content | upper }}{{ m.content.lower() }}{{ m.content | title }}",
    "joins parts": "{{ m.content.split(' ') | join }}{{ m.content | list | join }}",
    "joins halves of its own": "{{ '<|im_' + m.content + 'end|>' }}<{{ m.content }}|im_end|>",
    "writes JSON": "{{ m | tojson }}{{ m.tool_calls | tojson if m.tool_calls }}{{ tools | tojson }}",
    "writes a dictionary": "{{ m }}{{ m.items() | list }}{{ tools | string }}",
    "escapes": "{{ m.content | e }}{{ m.content | urlencode }}{{ m.content | safe }}{{ m.content | pprint }}",
    "cuts": "{{ m.content[1:] }}{{ m.content[:-1] }}{{ m.content | truncate(9, true, '') }}",
    "collects": "{% set n.text = n.text ~ m.content %}{{ n.text }}{{ n.text.replace('x', '') }}",
    "calls a macro": "{{ show(m.content) }}{% call show('<') %}{{ m.content }}{% endcall %}",
    "names": "{{ m.name ~ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}",
    "arguments": "{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}"
    "{{ k ~ v }}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}{% endfor %}",
    "describes tools": "{% for t in tools %}{{ t.function.name ~ t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k ~ v.enum }}{% endfor %}{% endfor %}",
    "variables": "{{ note ~ documents[0].title }}{{ documents[0].text | trim }}",
}
FRAME = (
    "{%- macro show(t) %}{{ t }}{{ caller() if caller }}{{ t }}{% endmacro %}{% set n = namespace(text='') %}"
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}SNIPPET<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations(text, effort):
    """Yield chats with a text at each place that a client writes; `effort`: the value of an option."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": text, "arguments": {text: text, "qa": [text], "qb": {"qc": text}}},
    }
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "description": text, "enum": [text]},
            text: {"type": "string", "description": text},
        },
        "required": ["qa"],
    }
    tools = [
        {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}},
    ]
    variables = {
        **dict.fromkeys(("note", "functions", "datetime"), text),
        "documents": [{"title": text, "text": text}],
        "reasoning_effort": effort,
    }
    user = {"role": "user", "content": text, "name": text}
    answer = {"role": "assistant", "content": text, "reasoning_content": text, "name": text}
    system = {"role": "system", "content": text}
    calling = {**answer, "tool_calls": [call]}
    result = {"role": "tool", "content": text, "name": text, "tool_call_id": "abcdefghi"}
    yield [system, user, answer, user], {**variables, "tools": None}
    yield (
        [system, user, calling, result, answer, user],
        {**variables, "tools": tools, "enable_thinking": True},
    )
    yield [user, answer, user, answer], {"tools": None, "enable_thinking": False}


def separators(template_source):
    """Return the short strings that a template removes or splits at, with those that `strip` removes."""
    found = {"", " ", "\n"}
    for node in environment.parse(template_source).find_all((nodes.Filter, nodes.Call)):
        name = node.name if isinstance(node, nodes.Filter) else getattr(node.node, "attr", "")
        if name in ("replace", "split", "rsplit", "strip", "lstrip", "rstrip", "trim", "join"):
            texts = [each.value for each in node.args if isinstance(each, nodes.Const)]
            found.update(text for text in texts if isinstance(text, str) and len(text) <= 20)
    return sorted(found)


def tokens_of(template):
    literals = {spelled for text in template.literals for spelled in SPELLED.findall(text)}
    return sorted({*SPECIAL.values(), *literals})


def attack(token, at, between):
    """Return a text with the token cut at a place: around all separators, and at both of its ends."""
    first, last = token[:at], token[at:]
    middle = "".join(f"{first}{separator}{last} " for separator in between)
    return f"{last} {middle}{token[:at].lower()}{token[at:].lower()} {token} {first}"


def harmless(text, between):
    """Return a text of the same form without a character of a control token."""
    kept = "|".join(re.escape(separator) for separator in sorted(between, key=len, reverse=True) if separator)
    return re.sub(f"({kept})|.", lambda match: match[1] or "q", text, flags=re.DOTALL)


class Checked:
    """A template, its control tokens, and what the checks have counted."""

    def __init__(self, source):
        self.source = source
        self.template = ChatTemplate(source, special_tokens=SPECIAL)
        self.tokens = tokens_of(self.template)
        self.control = ControlTokens(self.tokens)
        self.between = separators(source)
        self.rendered = self.cuts = 0
        self.own = set()

    def found(self, messages, variables):
        """Return the control tokens of a rendered chat; None if the template refuses it."""
        try:
            text = self.template.render(messages, self.control, **variables)
        except InvalidRequest:
            return None
        self.rendered += 1
        return control_tokens_in(text, self.tokens)

    def check(self, token, at):
        self.cuts += 1
        text = attack(token, at, self.between)
        chats = zip(
            conversations(text, "high"), conversations(harmless(text, self.between), "high"), strict=True
        )
        for (messages, variables), (same, same_variables) in chats:
            found, expected = self.found(messages, variables), self.found(same, same_variables)
            if found != expected and None not in (found, expected):
                # The template wrote other tokens of its own, because it looks for this text in a message.
                assert found == self.by_marked_template(messages, variables), (token, at)
            self.own.update(expected or ())

    def by_marked_template(self, messages, variables):
        """Return the template's tokens by Jinja alone: here it writes them between marks of its own."""
        spellings = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        source = re.sub(spellings, lambda match: f"⟦{match[0]}⟧", self.source)
        special = {name: f"⟦{token}⟧" for name, token in SPECIAL.items()}
        template = self.template
        names = {
            "documents": None,
            **special,
            **variables,
            **dict(zip(("messages", "tools"), template._written(messages, variables["tools"]), strict=True)),
            "add_generation_prompt": True,
        }
        text = rendered_by_jinja(source, **names)
        return list(re.findall(f"⟦({spellings})⟧", text))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_tokens_stay_text_in_each_kind_of_template(kind):
    checked = Checked(FRAME.replace("SNIPPET", KINDS[kind]))
    assert {"<|im_start|>", "<|im_end|>"} <= set(checked.tokens)
    for token in ("<|im_end|>", "</think>", "<|bos|>"):
        if token in checked.tokens:
            for at in range(1, len(token)):
                checked.check(token, at)
    assert checked.own >= {"<|bos|>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("name", LIMITED)
def test_cut_tokens_stay_text_in_templates_for_which_chats_are_rewritten(name):
    checked = Checked(LIMITED[name])
    for at in range(1, len("<|im_end|>"), 3):
        checked.check("<|im_end|>", at)
    assert checked.own >= {"<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("name", CHATS)
def test_cut_tokens_stay_text_in_templates_like_those_of_well_known_models(name):
    checked = Checked(CHATS[name].template)
    for token in checked.tokens:
        for at in range(1, len(token)):
            checked.check(token, at)
    assert checked.own


# The collection ---------------------------------------------------------------------------------------

PATHS = sorted(FOLDER.glob("*.jinja"))
published = pytest.mark.parametrize("path", PATHS or [None], ids=lambda path: path.stem if path else "none")


@cache
def source_of(path):
    if path is None:
        pytest.skip(
            f"{COUNT} templates are not here; tests/language/text/published_templates.py fetches them"
        )
    return path.read_text(encoding="utf-8")


@published
def test_cut_tokens_stay_text_in_published_templates(path):
    checked = Checked(source_of(path))
    for token in checked.tokens:
        for at in range(1, len(token)):
            checked.check(token, at)
    assert checked.rendered


@published
def test_published_template_is_rendered_as_by_jinja_and_keeps_its_tokens(path):
    """A token is kept unless a client's text is in it, such as <parameter=NAME>, or a schema's key."""
    checked = Checked(source_of(path))
    template, rendered = checked.template, 0
    for messages, variables in conversations("q", "high"):
        try:
            text = template.render(messages, **variables)
        except InvalidRequest:
            continue
        rendered += 1
        names = {
            "documents": None,
            **SPECIAL,
            **variables,
            **dict(zip(("messages", "tools"), template._written(messages, variables["tools"]), strict=True)),
            "add_generation_prompt": True,
        }
        assert text == rendered_by_jinja(checked.source, **names)
        tokens = {
            *checked.tokens,
            *(spelled for spelled in SPELLED.findall(text) if not re.search("q|enum", spelled)),
        }
        broken = ControlTokens(tokens).broken(text)
        lost = [token for token in tokens if broken.count(token) != text.count(token)]
        assert lost == [], json.dumps(broken.replace(BREAK, "⟦⟧"))
    assert rendered
