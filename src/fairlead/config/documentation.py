"""What each setting is for, as its type says it: the text that stands below a field in the source.

Python throws such a text away, so it is read from the source of the class. That is for whoever makes
documents (`fairlead config schema`, the README); no server does.
"""

import ast
import inspect
from functools import cache
from textwrap import dedent

import msgspec


@cache
def documentation_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text of each field that has one, in one line. What a base class says holds here too."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            texts |= _texts(owner)
    return texts


def summary_of(kind: type[msgspec.Struct]) -> str:
    """Return the first paragraph of what the type says about itself, without what it raises."""
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
