"""Tracing with one deliberate mistake each, which the tests of forged tokens must catch."""

from functools import partial
from itertools import pairwise, product

import pytest
from jinja2.compiler import CodeGenerator
from jinja2.filters import do_join, do_mark_safe

from fairlead.language.text import chat_template, sandbox, template_text
from fairlead.language.text.control_tokens import ControlTokens
from fairlead.language.text.template_text import TemplateMarkup, TemplateText, literal
from language.text import test_forged_tokens as tests


def parametrized(test):
    """Yield the test with each of its parameters."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    names = [
        [name.strip() for name in str(each).strip("()[]'").replace("'", "").split(",")] for each, _ in marks
    ]
    for values in product(*(values for _, values in marks)):
        arguments = {}
        for keys, value in zip(names, values, strict=True):
            arguments |= dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
        yield partial(test, **arguments)


ALL = [
    test
    for name in (
        "test_token_that_a_template_writes_beside_clients_text_is_kept",
        "test_token_is_kept_before_markup",
        "test_parts_that_meet_where_the_client_decides_are_text",
        "test_role_is_part_of_a_token_only_if_it_is_one_of_the_known_roles",
        "test_word_of_a_role_elsewhere_is_no_part_of_a_token",
        "test_template_keeps_its_tokens_beside_overlapping_ones_of_the_client",
        "test_operation_gives_no_token_of_which_the_client_wrote_a_part",
    )
    for test in parametrized(getattr(tests, name))
]


def trusting(method):
    """Return a method of `TemplateText` whose result counts as the template's."""
    return lambda self, *arguments: literal("".join(method(self, *arguments)))


def all_is_the_templates(texts):
    texts = list(texts)
    plain = "".join(texts)
    return literal(plain) if TemplateText in map(type, texts) else plain


def constructor_trusts(cls, text=""):
    self = str.__new__(cls, text)
    self._foreign = ()
    return self


def markup_trusts(cls, text="", encoding=None, errors="strict"):
    self = str.__new__(cls, text)
    self._text = literal("".join(text)) if isinstance(text, str) else literal(str(text))
    return self


def cut_without_marks(self, begin, end):
    spans = ((max(first, begin) - begin, min(last, end) - begin) for first, last in self._foreign)
    return template_text._traced(
        str(self)[begin:end] and "".join(self)[begin:end],
        tuple((first, last) for first, last in spans if first < last),
    )


def only_whole_tokens_are_broken(self, text):
    spans = template_text.foreign_spans(text)
    positions = [
        begin + 1
        for begin, end in self._found(text)
        if any(first <= begin and end <= last for first, last in spans)
    ]
    bounds = [0, *positions, len(text)]
    return tests.BREAK.join("".join(text)[first:last] for first, last in pairwise(bounds))


def ignoring_what_is_empty(text):
    if type(text) is TemplateText:
        return tuple((begin, end) for begin, end in text._foreign if begin < end)
    return ((0, len(text)),) if text else ()


class AnyRole(dict):
    def get(self, role, default):
        return literal(role)


def wrap_trusting(self, value):
    wrapped = super(sandbox._Environment, self).wrap_str_format(value)
    return wrapped and (lambda *args, **kwargs: literal("".join(wrapped(*args, **kwargs))))


MUTANTS = {
    "the constructor trusts its text": (TemplateText, "__new__", constructor_trusts),
    "markup trusts its text": (TemplateMarkup, "__new__", markup_trusts),
    "joined output is the template's": (sandbox._Environment, "concat", staticmethod(all_is_the_templates)),
    "an added text is the template's": (TemplateText, "__add__", trusting(str.__add__)),
    "a text that is added to is the template's": (
        TemplateText,
        "__radd__",
        lambda self, other: literal(str.__add__(other, "".join(self))),
    ),
    "a joined text is the template's": (TemplateText, "join", trusting(str.join)),
    "a replacement is the template's": (TemplateText, "replace", trusting(str.replace)),
    "a slice is the template's": (TemplateText, "__getitem__", trusting(str.__getitem__)),
    "a stripped text is the template's": (TemplateText, "rstrip", trusting(str.rstrip)),
    "a cut has no mark": (TemplateText, "_cut", cut_without_marks),
    "parts are the template's": (
        TemplateText,
        "_located",
        lambda self, parts, sep: list(map(literal, parts)),
    ),
    "changed letters are the template's": (TemplateText, "_mapped", lambda self, plain: literal(plain)),
    "formatted values are the template's": (sandbox._Environment, "wrap_str_format", wrap_trusting),
    "entities are the template's": (template_text, "_escaped", lambda value: literal(str(value))),
    "empty spans do not count": (template_text, "foreign_spans", ignoring_what_is_empty),
    "spans of the second text are not moved": (
        template_text,
        "_appended",
        lambda first, second, offset: first + second,
    ),
    "only tokens in one span are broken": (ControlTokens, "broken", only_whole_tokens_are_broken),
    "any role counts": (chat_template, "_ROLES", AnyRole()),
    # Mistakes by which a template loses its tokens.
    "strings in expressions are not traced": (sandbox._Compiler, "visit_Const", CodeGenerator.visit_Const),
    "output is not traced": (sandbox._Compiler, "_output_const_repr", CodeGenerator._output_const_repr),
    "the operator ~ is not traced": (sandbox._Compiler, "visit_Concat", CodeGenerator.visit_Concat),
    "macros are not traced": (sandbox._Environment, "concat", "".join),
    "the filter join is not traced": (sandbox.environment, "filters", {"join": do_join}),
    "the filter safe is not traced": (sandbox.environment, "filters", {"safe": do_mark_safe}),
    "a stripped text is the client's": (TemplateText, "strip", str.strip),
    "parts are the client's": (TemplateText, "_located", lambda self, parts, sep: parts),
    "changed letters are the client's": (TemplateText, "_mapped", lambda self, plain: plain),
    "formatted text is the client's": (sandbox, "formatted", lambda plain, *rest: plain),
    "no role counts": (chat_template, "_ROLES", {}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    owner, attribute, mutant = MUTANTS[name]
    if attribute == "filters":
        mutant = sandbox.environment.filters | mutant
    monkeypatch.setattr(owner, attribute, mutant)
    assert any(map(fails, ALL))


def fails(test):
    try:
        test()
    except Exception:  # noqa: BLE001 — a template of the mutant may fail in any way
        return True
    except pytest.fail.Exception:
        return True
    return False


def test_tests_pass_without_a_mutant():
    assert not any(map(fails, ALL[:60]))
