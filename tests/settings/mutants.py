"""Servers with one broken line each, in composition, placement, limits and reload. A scenario must fail.

A mutant is a function of the product with some text replaced. If that text is no longer found, the test
reports it: the line has changed, and the mutant must be adapted.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from fairlead.base.registry import Registry


class Mutant(NamedTuple):
    """`old` is replaced by `new` in the function; `how` and `scenario` say what must fail then.

    `play` and `reload` run the scenario of a setting; `behaviour` runs one that belongs to no setting. The
    server has this many `fronts`.
    """

    function: str
    old: str
    new: str
    how: Literal["play", "reload", "behaviour"]
    scenario: str
    fronts: int = 1

    @property
    def name(self) -> str:
        """Its name in the tests' output."""
        return f"{self.function}: {self.old.strip()[:60]} -> {self.new.strip()[:40]}"


def broken(mutant: Mutant) -> AbstractContextManager[None]:
    """Replace the function by the mutant."""

    def change(source: str) -> str:
        count = source.count(mutant.old)
        if count != 1:  # no assertion: it would look like a failed scenario
            raise LookupError(f"{mutant.function} has {mutant.old!r} {count} times, not once")
        return source.replace(mutant.old, mutant.new)

    return replaced_in_product(mutant.function, lambda original: changed_function(original, change))


@contextmanager
def replaced_in_product(
    path: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a function: in modules under its name, in registries under every name.

    `path` is its module and its name in that, as `module:Class.method`, with `.fget` for a property.
    """
    module_name, _, inner = path.partition(":")
    module = import_module(module_name)
    *owners, name = inner.removesuffix(".fget").split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    changed: Any = change(original.fget if isinstance(original, property) else original)
    if isinstance(original, property):
        changed = property(changed)
    with ExitStack() as stack:
        if owners:
            stack.enter_context(patch.object(owner, name, changed))
        else:
            for other in list(sys.modules.values()):
                if not other.__name__.startswith("fairlead"):
                    continue
                if vars(other).get(name) is original:
                    stack.enter_context(patch.object(other, name, changed))
                for registry in [value for value in vars(other).values() if isinstance(value, Registry)]:
                    named = {key: changed for key, part in registry._parts.items() if part is original}
                    stack.enter_context(patch.dict(registry._parts, named))
        yield


def changed_function(function: Callable[..., Any], change: Callable[[str], str]) -> Callable[..., Any]:
    """Return the function with another source."""
    source = change(textwrap.dedent(inspect.getsource(function))).removeprefix("@property\n")
    # `super()` reads the class from the surrounding scope.
    made = f"def make(__class__):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    scope: dict[str, Any] = {}
    unwrapped: Any = inspect.unwrap(function)
    exec(compile(made, f"<changed {function.__qualname__}>", "exec"), unwrapped.__globals__, scope)
    *owners, _ = function.__qualname__.split(".")
    owner: Any = import_module(function.__module__)
    for part in owners:
        owner = getattr(owner, part)
    result: Callable[..., Any] = scope["make"](owner if owners else None)
    return result
