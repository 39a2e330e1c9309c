"""Everything that a template can do with a text, and what shows which control tokens result.

The tables have a case for each filter and each method; a test compares them with those of Jinja and Python.
"""

import re
from collections.abc import Iterable
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from fairlead.language.text.control_tokens import BREAK
from fairlead.language.text.sandbox import environment
from fairlead.language.text.template_text import concat

# With {e}, the text that is changed, {a} and {b}, two others, and {n}, a small number.
FILTERS = {
    "abs": "({n} | abs)",
    "attr": "({e} | attr({a}))",
    "batch": "({e} | batch({n}, {a}) | map('join') | join({b}))",
    "capitalize": "({e} | capitalize)",
    "center": "({e} | center(20))",
    "count": "({e} | count)",
    "d": "({e} | d({a}, true))",
    "default": "({e} | default({a}, true))",
    "dictsort": "({{({e}): {a}}} | dictsort | first | join({b}))",
    "e": "({e} | e)",
    "escape": "({e} | escape)",
    "filesizeformat": "({n} | filesizeformat)",
    "first": "([{e}, {a}] | first)",
    "float": "({e} | float)",
    "forceescape": "({e} | forceescape)",
    "format": "('%s' | format({e}))",
    "groupby": "([{{'k': {e}}}, {{'k': {a}}}] | groupby('k') | map(attribute=0) | join)",
    "indent": "({e} | indent(1, true, true))",
    "int": "({e} | int)",
    "items": "({{({e}): {a}}} | items | first | join)",
    "join": "([{e}, {a}, {e}] | join({b}))",
    "last": "([{a}, {e}] | last)",
    "length": "({e} | length)",
    "list": "({e} | list | join)",
    "lower": "({e} | lower)",
    "map": "([{e}, {a}] | map('upper') | join)",
    "max": "([{e}, {a}] | max)",
    "min": "([{e}, {a}] | min)",
    "pprint": "({e} | pprint)",
    "random": "({e} | random)",
    "reject": "([{e}, {a}] | reject('eq', {a}) | join)",
    "rejectattr": "([{{'k': {e}}}] | rejectattr('x') | map(attribute='k') | join)",
    "replace": "({e} | replace({a}, {b}, {n}))",
    "reverse": "({e} | reverse)",
    "round": "({n} | round)",
    "safe": "({e} | safe)",
    "select": "([{e}, {a}] | select | join)",
    "selectattr": "([{{'k': {e}}}] | selectattr('k') | map(attribute='k') | join)",
    "slice": "([{e}, {a}] | slice(2, {b}) | map('join') | join)",
    "sort": "([{e}, {a}] | sort | join)",
    "string": "({e} | string)",
    "striptags": "({e} | striptags)",
    "sum": "([[{e}], [{a}]] | sum(start=[]) | join)",
    "title": "({e} | title)",
    "tojson": "({e} | tojson)",
    "trim": "({e} | trim({a}))",
    "truncate": "({e} | truncate(5, true, {a}, 0))",
    "unique": "([{e}, {a}, {e}] | unique | join)",
    "upper": "({e} | upper)",
    "urlencode": "({e} | urlencode)",
    "urlize": "({e} | urlize)",
    "wordcount": "({e} | wordcount)",
    "wordwrap": "({e} | wordwrap(3, true, {a}))",
    "xmlattr": "({{'k': {e}}} | xmlattr)",
}
METHODS = {
    "capitalize": "({e}.capitalize())",
    "casefold": "({e}.casefold())",
    "center": "({e}.center(20))",
    "count": "({e}.count({a}))",
    "encode": "({e}.encode().decode())",
    "endswith": "({e}.endswith({a}))",
    "expandtabs": "({e}.expandtabs())",
    "find": "({e}.find({a}))",
    "format": "({e}.format({a}, {b}))",
    "format_map": "('{{k}}'.format_map({{'k': {e}}}))",
    "index": "({e}.index({e}))",
    "isalnum": "({e}.isalnum())",
    "isalpha": "({e}.isalpha())",
    "isascii": "({e}.isascii())",
    "isdecimal": "({e}.isdecimal())",
    "isdigit": "({e}.isdigit())",
    "isidentifier": "({e}.isidentifier())",
    "islower": "({e}.islower())",
    "isnumeric": "({e}.isnumeric())",
    "isprintable": "({e}.isprintable())",
    "isspace": "({e}.isspace())",
    "istitle": "({e}.istitle())",
    "isupper": "({e}.isupper())",
    "join": "({e}.join([{a}, {b}, {a}]))",
    "ljust": "({e}.ljust(20))",
    "lower": "({e}.lower())",
    "lstrip": "({e}.lstrip({a}))",
    "maketrans": "({e}.maketrans({{}}))",
    "partition": "({e}.partition({a} or 'x') | join)",
    "removeprefix": "({e}.removeprefix({a}))",
    "removesuffix": "({e}.removesuffix({a}))",
    "replace": "({e}.replace({a}, {b}))",
    "rfind": "({e}.rfind({a}))",
    "rindex": "({e}.rindex({e}))",
    "rjust": "({e}.rjust(20))",
    "rpartition": "({e}.rpartition({a} or 'x') | join)",
    "rsplit": "({e}.rsplit({a} or none, {n}) | join({b}))",
    "rstrip": "({e}.rstrip({a}))",
    "split": "({e}.split({a} or none) | join)",
    "splitlines": "({e}.splitlines() | join)",
    "startswith": "({e}.startswith({a}))",
    "strip": "({e}.strip({a}))",
    "swapcase": "({e}.swapcase())",
    "title": "({e}.title())",
    "translate": "({e}.translate({{}}))",
    "upper": "({e}.upper())",
    "zfill": "({e}.zfill(20))",
}
OPERATORS = (
    "({e} ~ {a})",
    "({e} ~ {n} ~ {a})",
    "({e} + {a})",
    "({a} + {e})",
    "({e} * {n})",
    "({n} * {e})",
    "('%s' % {e})",
    "({e}[{n}:])",
    "({e}[:{n}])",
    "({e}[{n}])",
    "({e}[{n}:-{n}])",
    "({e}[::-1])",
    "({e}[{n}:] ~ {e}[:{n}])",
    "({e} if {a} else {b})",
    "(({e} | safe) + {a})",
    "({a} + ({e} | safe))",
    "([{e}, {a}] | string)",
    "('{{}}{{}}'.format({e}, {a}))",
    "('{{1}}{{0}}{{0.real}}'.format({e}, {a}))",
    "('{{!r}}{{:>9}}{{:{{}}}}'.format({e}, {a}, {b}, ''))",
    "(dict(k={e})['k'] ~ dict(k={a}).k)",
    "(strftime_now({e}))",
    "(cycler({e}, {a}).next())",
    "(joiner({e})() ~ {a})",
)
# With {e} as before, and {s}, a template in a template.
STATEMENTS = (
    "{{{{ {e} }}}}{s}",
    "{{% set x %}}{s}{{{{ {e} }}}}{s}{{% endset %}}{{{{ x }}}}",
    "{{% set x | upper %}}{s}{{% endset %}}{{{{ x ~ {e} }}}}",
    "{{% set x = {e} %}}{{% set y = x ~ x %}}{{{{ x + y }}}}",
    "{{% macro f(p, q={e}) %}}{s}{{{{ p ~ q ~ varargs | join }}}}{{% endmacro %}}{{{{ f({e}, {e}, {e}) }}}}",
    "{{% macro g() %}}{{{{ caller() }}}}{s}{{% endmacro %}}{{% call g() %}}{{{{ {e} }}}}{{% endcall %}}",
    "{{% filter replace({e}, {e}) %}}{s}{{{{ {e} }}}}{s}{{% endfilter %}}",
    "{{% filter lower %}}{s}{{{{ {e} }}}}{{% endfilter %}}",
    "{{% for c in {e} %}}{{{{ c }}}}{s}{{% endfor %}}",
    "{{% for c in [{e}, {e}] %}}{s}{{{{ loop.cycle({e}, c) }}}}{{{{ loop.previtem }}}}{{% endfor %}}",
    "{{% for c in [[{e}], {e}] recursive %}}{{{{ c if c is string else loop(c) }}}}{s}{{% endfor %}}",
    "{{% set n = namespace(t={e}) %}}{{% set n.t = n.t ~ {e} %}}{s}{{{{ n.t }}}}",
    "{{% autoescape true %}}{s}{{{{ {e} ~ {e} }}}}{{{{ {e} + ({e} | safe) }}}}{{% endautoescape %}}",
    "{{% with x = {e} %}}{s}{{{{ x }}}}{{% endwith %}}",
    "{{% if {e} %}}{s}{{% else %}}{{{{ {e} }}}}{{% endif %}}",
    "{{% generation %}}{s}{{{{ {e} }}}}{{% endgeneration %}}",
)
BLOCK = "{{% block b %}}{s}{{% endblock %}}{{{{ self.b() }}}}"  # at most once in a template

# Jinja without the changes of ours, for the same names.
plain_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=list(environment.extensions)
)
plain_environment.filters["tojson"] = environment.filters["tojson"]
plain_environment.globals.update(environment.globals)


def rendered_by_jinja(source: str, **names: Any) -> str:
    """Return what Jinja renders, without tracing anything."""
    return plain_environment.from_string(source).render(names)


def traced(source: str, **names: Any) -> str:
    """Return what our sandbox renders."""
    return concat(environment.from_string(source).generate(names))


def control_tokens_in(text: str, tokens: Iterable[str]) -> list[str]:
    """Return the control tokens that a tokenizer finds in a text with breaks."""
    spellings = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return [found for piece in text.split(BREAK) for found in re.findall(spellings, piece)]
