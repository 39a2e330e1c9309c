"""Makes all applications of a process share what Werkzeug compiles for the rules of their routes.

Werkzeug parses each rule and compiles two functions for it, which takes 25 ms for an application. The
functions build URLs, which nothing here does.
"""

from typing import Any

from werkzeug.routing import Rule

COMPILED = ("_parts", "_trace", "_converters", "arguments", "_build", "_build_unknown")
_compile = Rule.compile
_compiled: dict[tuple[object, ...], dict[str, Any]] = {}


def _shared_compile(rule: Rule) -> None:
    key = rule.rule, rule.subdomain, rule.host, rule.merge_slashes
    if key not in _compiled:
        _compile(rule)
        _compiled[key] = {name: getattr(rule, name) for name in COMPILED}
    vars(rule).update(_compiled[key])


def install() -> None:
    """Share it from now on."""
    Rule.compile = _shared_compile  # type: ignore[method-assign, assignment]
