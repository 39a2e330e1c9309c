"""Extracts the documentation of settings: the docstrings below the fields of a struct.

Python discards these docstrings, so they are read from the source of the class. Only the generation of
documents (the JSON Schema, the README) needs them; a server does not.
"""

import ast
import inspect
from functools import cache
from textwrap import dedent

import msgspec


@cache
def documentation_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each field that has one, on one line, including those of base classes."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            texts |= _texts(owner)
    return texts


def summary_of(kind: type[msgspec.Struct]) -> str:
    """Return the first paragraph of the struct's docstring, without what it raises."""
    first = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return _on_one_line(first).partition(" Raises ")[0]


def _texts(owner: type[msgspec.Struct]) -> dict[str, str]:
    (definition,) = ast.parse(dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        match below:
            case ast.Expr(ast.Constant(str(text))):
                texts[field.target.id] = _on_one_line(text)
    return texts


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
