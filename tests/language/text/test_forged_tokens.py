"""No client makes a template write a control token, whatever the template does with the client's texts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.control_tokens import BREAK, ControlTokens
from fairlead.language.text.sandbox import environment
from fairlead.language.text.template_text import TemplateText, literal
from language.text.template_operations import (
    BLOCK,
    FILTERS,
    METHODS,
    OPERATORS,
    STATEMENTS,
    control_tokens_in,
    plain_environment,
    rendered_by_jinja,
    traced,
)

TOKEN = "<|S10|>"
# What a template may remove, and how it may change letters.
SEPARATORS = ("", "/think", "~", " ", "\n")
CUTS = range(len(TOKEN) + 1)


def test_every_filter_and_method_has_a_case():
    assert FILTERS.keys() == environment.filters.keys()
    assert METHODS.keys() == {name for name in dir(str) if not name.startswith("_")}


# One operation ----------------------------------------------------------------------------------------

OPERATIONS = [*FILTERS.values(), *METHODS.values(), *OPERATORS]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("text", ["(f ~ c)", "(c ~ l)", "(f ~ c ~ v ~ l)", "c"])
def test_operation_gives_no_token_of_which_the_client_wrote_a_part(operation, text):
    """`f` and `l` are of the template: what is before and after each cut."""
    source = "{{ " + operation.format(e=text, a="v", b="w", n="n") + " }}"
    by_jinja, ours = plain_environment.from_string(source), environment.from_string(source)
    for at in CUTS[1:-1]:
        first, last = TOKEN[:at], TOKEN[at:]
        for client in (last, first, TOKEN.lower(), f"{first}~{last}", f"{TOKEN}~"):
            names = {"c": client, "v": "~", "w": "", "n": at}
            own = {"f": literal(first if "l" not in text else first[:-1]), "l": literal(last)}
            check(by_jinja, ours, {**names, **own}, expected=[])


def check(by_jinja, ours, names, *, expected=None):
    """Compare what our sandbox and Jinja render, and the control tokens of ours with those expected."""
    random.seed(1)  # of the filter `random`
    try:
        text = by_jinja.render({name: plain(value) for name, value in names.items()})
    except Exception:  # noqa: BLE001 — a template may fail, but then in both
        with pytest.raises(Exception):  # noqa: B017
            ours.render(names)
        return
    random.seed(1)
    traced = ours.render(names)
    assert traced == text
    broken = ControlTokens([TOKEN]).broken(traced)
    if BREAK not in text:
        assert broken.replace(BREAK, "") == text
    if expected is not None:
        assert control_tokens_in(broken, [TOKEN]) == expected


def plain(value):
    return "".join(value) if isinstance(value, TemplateText) else value


# Whole templates --------------------------------------------------------------------------------------


@st.composite
def templates(draw, literals):
    """Draw a template of any operations on clients' texts and literals."""
    literal = literals.map(lambda text: f"'{text}'")
    texts = st.recursive(
        st.sampled_from(["c", "v", "w", "m.content", "m['name']"]) | literal,
        lambda inner: st.builds(
            lambda operation, e, a, b, n: operation.format(e=e, a=a, b=b, n=n),
            *(st.sampled_from(OPERATIONS), inner, inner, inner),
            st.sampled_from(["0", "1", "2", "n"]),
        ),
        max_leaves=8,
    )
    source = draw(literals)
    for statement in draw(st.lists(st.sampled_from(STATEMENTS), max_size=3, unique=True)):
        source = statement.format(e=draw(texts), s=source)
    return BLOCK.format(s=source) if draw(st.booleans()) else source


pieces = [TOKEN[first:last] for first in CUTS for last in CUTS if first < last]
split_tokens = st.builds(
    lambda at, separator: TOKEN[:at] + separator + TOKEN[at:],
    st.sampled_from(CUTS),
    st.sampled_from(SEPARATORS),
)
client_texts = (
    st.lists(st.sampled_from([*pieces, TOKEN.lower(), *SEPARATORS]), max_size=4).map("".join) | split_tokens
)
clients = st.fixed_dictionaries(
    {
        **dict.fromkeys(("c", "v", "w"), client_texts),
        "n": st.integers(0, 9),
        "m": st.fixed_dictionaries({"content": client_texts, "name": client_texts}),
    }
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # such as for `0[1]`
@given(missing=st.sampled_from(sorted(set(TOKEN))), data=st.data(), names=clients)
def test_template_without_a_character_of_a_token_never_writes_that_token(missing, data, names):
    """Its character comes from the client then, so the token is text."""
    own = [*(piece for piece in pieces if missing not in piece), "", " ", "/think"]
    source = data.draw(templates(st.sampled_from(own)))
    check(plain_environment.from_string(source), environment.from_string(source), names, expected=[])


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(data=st.data(), names=clients)
def test_template_with_all_characters_of_a_token_renders_as_by_jinja(data, names):
    source = data.draw(templates(st.sampled_from([*pieces, TOKEN, ""])))
    check(plain_environment.from_string(source), environment.from_string(source), names)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '#<|S10|>' + c }}",
        "{{ c + '#<|S10|>' ~ n }}",
        "#<|S10|>{{ c | trim + '#<|S10|>' }}",
        "{% set t = '#<|S10|>' + m.content + '#<|S10|> ' %}{{ t | trim }}{{ t.strip() ~ t[:-1] }}",
        "{% macro f(t) %}#<|S10|>{{ t }}{% endmacro %}{{ f(c) }}{{ f('#<|S10|>') | trim }}",
        "{% set n = namespace(t='') %}{% if c %}{% set n.t = n.t + '#<|S10|>' %}{% endif %}{{ n.t }}",
        "{% set t %}#<|S10|>{{ c }}{% endset %}{{ t.split('x') | join('#<|S10|>') }}{{ t.replace('x', '') }}",
        "{{ ['#<|S10|>', c] | join }}{{ '#<|S10|>'.join([c, c]) }}{{ [c, '#<|S10|>'] | join('#<|S10|>') }}",
        "{{ '#<|S10|>{}'.format(c) }}{{ '#{}'.format('<|S10|>') }}{{ '#<|{}10|>'.format('S') }}",
        "{{ {'a': '#<|S10|>'}['a'] }}{% for t in ['#<|S10|>', c] %}{{ t }}{% endfor %}",
        "{{ '#<|s10|>'.upper() }}{{ '#<|s10|>' | upper }}{{ ('#<|S10|>' ~ c) | safe }}",
        "{% filter trim %}#<|S10|>{{ c }}{% endfilter %}{{ ('#<|S10|>' ~ c) | default('') | string }}",
        "{% set start = '<|' %}#{{ start }}S10|>#{{ start ~ 'S' ~ '10' }}|>",
    ],
)
def test_token_that_a_template_writes_beside_clients_text_is_kept(source):
    """Each has a mark before it by which it is counted."""
    names = {"c": "x", "n": 1, "m": {"content": "x"}}
    text = traced(source, **names)
    assert text == rendered_by_jinja(source, **names)
    found = control_tokens_in(ControlTokens([TOKEN]).broken(text), [TOKEN])
    assert len(found) == text.count("#") == text.count(TOKEN)


def test_token_is_kept_before_markup():
    """Some of Mistral's templates have arguments that are marked as safe after a control token."""
    source = "{{ c + '[ARGS]' + (v | tojson | safe) }}{{ '[ARGS]' + (v | safe) + '[ARGS]' }}"
    text = traced(source, c="f", v={"a": "[ARGS]"})
    assert text == rendered_by_jinja(source, c="f", v={"a": "[ARGS]"})
    assert control_tokens_in(ControlTokens(["[ARGS]"]).broken(text), ["[ARGS]"]) == ["[ARGS]"] * 3


# What a client decides --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<|' ~ c ~ 'S10|>' }}",
        "<|{{ c }}S10|>",
        "{{ ('<|' ~ v ~ 'S10|>') | replace(v, '') }}",
        "{{ ('<|' ~ v ~ 'S10|>').replace(v, '') }}",
        "{{ '<|xS10|>'.replace(v, '') }}",
        "{{ '<|xS10|>'.split(v) | join }}",
        "{{ '<|S1xxx'[:n] ~ '0|>' }}",
        "{{ '<|S1' ~ 'xxx0|>'[n:] }}",
        "{{ '<|S1xx'.rstrip(v) ~ '0|>' }}",
        "{{ 'x<|S1x'[1:n + 1] ~ '0|>' }}",
        "{{ '<|S' ~ n ~ '0|>' }}",
        "{{ '<|S{}0|>'.format(n) }}",
        "{{ '<|S%s0|>' % n }}",
        "{{ '<|S1{}0|>'.format(c) }}",
        "{{ [('<|S1'), ('0|>')] | join(c) }}",
        "{{ '0|>{}' }}{{ '<|S1' }}{{ c }}{{ '0|>' }}",
    ],
)
def test_parts_that_meet_where_the_client_decides_are_text(source):
    """All characters are the template's, but the client removed what stood between them, or chose them."""
    names = {"c": "", "v": "x", "n": 1}
    for n in (1, 3, 4):
        text = traced(source, **{**names, "n": n})
        assert control_tokens_in(ControlTokens([TOKEN]).broken(text), [TOKEN]) == []


ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("role", "is_token"), [("user", True), ("tool", True), ("im_end", False), ("", False)]
)
def test_role_is_part_of_a_token_only_if_it_is_one_of_the_known_roles(role, is_token):
    tokens = ["<|user|>", "<|tool|>", "<|im_end|>", "<||>"]
    text = ChatTemplate(ROLES).render([{"role": role, "content": "a"}], ControlTokens(tokens))
    assert control_tokens_in(text, tokens) == [f"<|{role}|>"] * is_token


def test_word_of_a_role_elsewhere_is_no_part_of_a_token():
    tokens = ["<|user|>"]
    source = "{% for m in messages %}{{ '<|' ~ m.name ~ '|><|' ~ m.content ~ '|><|' ~ v ~ '|>' }}{% endfor %}"
    messages = [{"role": "user", "name": "user", "content": "user"}]
    text = ChatTemplate(source).render(messages, ControlTokens(tokens), v="user")
    assert control_tokens_in(text, tokens) == []


def test_template_keeps_its_tokens_beside_overlapping_ones_of_the_client():
    """A token of the client may overlap one of the template, on either side."""
    tokens = ["aba", "bab", "ab", "abab"]
    for before, after in (("", "b"), ("a", ""), ("b", ""), ("a", "b"), ("ab", "ab")):
        text = traced("{{ v }}aba{{ w }}", v=before, w=after)
        broken = ControlTokens(tokens).broken(text)
        assert broken.replace(BREAK, "") == text
        assert control_tokens_in(broken, tokens) == ["aba"]


# Cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('a' ~ c).replace('x', 'y') }}",
        "{{ ('a' ~ c).split('x') | length }}",
        "{{ ('a' ~ c) | replace('xx', 'y') }}",
    ],
)
def test_separators_of_a_client_are_not_traced_one_by_one(monkeypatch, source):
    """A client could write as many as its body has bytes."""
    calls = []
    cut = TemplateText._cut
    monkeypatch.setattr(TemplateText, "_cut", lambda self, *bounds: calls.append(1) or cut(self, *bounds))
    text = traced(source, c="x" * 100_000)
    assert text == rendered_by_jinja(source, c="x" * 100_000)
    assert len(calls) < 10
