"""Makes all applications of a process share the functions that Werkzeug compiles for their routes.

Werkzeug compiles two functions for each route of an application, which takes 25 ms. They build URLs, which
nothing here does.
"""

from collections.abc import Callable
from typing import Any

from werkzeug.routing import Rule

_compile_builder = Rule._compile_builder
_builders: dict[tuple[str, bool], Callable[..., Any]] = {}


def _shared_builder(rule: Rule, append_unknown: bool = True) -> Callable[..., Any]:
    key = rule.rule, append_unknown
    if key not in _builders:
        _builders[key] = _compile_builder(rule, append_unknown)
    return _builders[key]


def install() -> None:
    """Share the functions from now on."""
    Rule._compile_builder = _shared_builder  # type: ignore[method-assign, assignment]
