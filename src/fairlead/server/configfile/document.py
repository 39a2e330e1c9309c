"""Parses YAML to plain values, and records the line of each.

Mappings, lists, text, numbers, true, false and null are as in YAML 1.2 (`on` and `1:30` are text, `010` is
ten). Anchors and merge keys (`<<`) are supported. Size, depth and the number of values are bounded.
`${env.NAME}` is replaced by the variable after parsing, so it cannot add keys. Independent of settings.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from fairlead.base.config.spelling import Fault, KeyPath

MAX_FILE_BYTES = 1024 * 1024
MAX_VALUES = 100_000
MAX_DEPTH = 50

# Stand for `${` and `}` while YAML is parsed: in flow style, braces would split `[${env.KEY}]`.
_OPEN, _CLOSE = "\ue000", "\ue001"
_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_VARIABLE = re.compile(rf"{_OPEN}env\.([A-Za-z_][A-Za-z0-9_]*){_CLOSE}")

_STANDARD = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class UnreadableError(ValueError):
    """The file is not a YAML mapping in UTF-8, or is too large. `line` (from 1) is where that was found."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Document:
    """A parsed file: the `tree` of plain values, and the line of each.

    `faults` are those of single values, such as a duplicate key or an infinite number. `anchors` are the
    keys at the top level with values to which aliases in other keys' values refer. Raises `UnreadableError`.
    """

    def __init__(self, content: bytes, environment: Mapping[str, str]) -> None:
        self.faults: list[Fault] = []
        self._environment = environment
        self._lines: dict[KeyPath, int] = {}
        self._texts: dict[KeyPath, str] = {}
        self._values = 0
        root = _compose(_decode(content))
        if root is None:
            raise UnreadableError(1, "the file is empty")
        if not isinstance(root, yaml.MappingNode):
            raise UnreadableError(root.start_mark.line + 1, "must be a mapping of settings")
        self.anchors = _referred_to(root)
        self.tree: dict[str, Any] = self._value(root, ())

    def line(self, path: KeyPath) -> int:
        """Return the line (from 1) of a value, or of the innermost existing value around it."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def text(self, path: KeyPath) -> str | None:
        """Return the original text of a number, boolean or null; None for other values."""
        return self._texts.get(path)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise UnreadableError(node.start_mark.line + 1, f"has more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise UnreadableError(node.start_mark.line + 1, f"is nested deeper than {MAX_DEPTH}")
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._check_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(path, f"line {key_node.start_mark.line + 1}: a key must be text")
                continue
            if key_node.value == "<<" and key_node.style is None:
                self._merge(value_node, path, merged)
                continue
            key = self._substitute(key_node.value, path)
            inner = (*path, key)
            if key in own:
                line = key_node.start_mark.line + 1
                self._fault(inner, f"occurs twice, on line {self.line(inner)} and on line {line}")
                continue
            self._lines[inner] = key_node.start_mark.line + 1
            own[key] = self._value(value_node, inner)
        return merged | own if merged else own

    def _merge(self, node: yaml.Node, path: KeyPath, merged: dict[str, Any]) -> None:
        """Add the entries of other mappings to `merged`. Existing entries are kept."""
        for other in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(other, yaml.MappingNode):
                self._fault(path, "<<: must be a mapping or a list of them")
                return
            for key, value in self._value(other, path).items():
                merged.setdefault(key, value)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = self._substitute(node.value, path)
        if node.style is not None and node.tag in (_STANDARD + "str", "!"):
            return text
        value = self._plain(text, path)
        if not isinstance(value, str):
            self._texts[path] = text
        return value

    def _plain(self, text: str, path: KeyPath) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            value = int(text, 0 if text[:2] in ("0o", "0x") else 10) if len(text) <= 24 else 2**64
            if -(2**63) <= value < 2**63:
                return value
            self._fault(path, "is too large a number")
            return 0
        if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        if _FLOAT.fullmatch(text) or _NO_NUMBER.fullmatch(text):
            self._fault(path, f"must be a finite number, not {text[:20]}")
            return 0.0
        return text

    def _substitute(self, text: str, path: KeyPath) -> str:
        def value_of(found: re.Match[str]) -> str:
            name = found[1]
            if not self._environment.get(name):
                state = "empty" if name in self._environment else "not set"
                self._fault(path, f"the environment variable {name} is {state}")
            return self._environment.get(name, "")

        return _VARIABLE.sub(value_of, text).replace(_OPEN, "${").replace(_CLOSE, "}")

    def _check_tag(self, node: yaml.Node, path: KeyPath) -> None:
        name = node.tag.removeprefix(_STANDARD)
        if name not in ("str", "int", "float", "bool", "null", "map", "seq", "!"):
            self._fault(path, f"the tag {node.tag[:60]} is not known here")

    def _fault(self, path: KeyPath, message: str) -> None:
        self.faults.append(Fault(path, message))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Resolves no plain scalars, because YAML 1.1 gives too many of them a type. `_plain` does that."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as in the base class


def _decode(content: bytes) -> str:
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableError(1, f"the file is larger than {MAX_FILE_BYTES // 1024} KiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(line, "is not text in UTF-8") from None
    for number, line_text in enumerate(text.split("\n"), 1):
        if _OPEN in line_text or _CLOSE in line_text:
            raise UnreadableError(number, "has a character for private use")
    return _MACRO.sub(rf"{_OPEN}\1{_CLOSE}", text)


def _compose(text: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        shown = reason.replace(_OPEN, "${").replace(_CLOSE, "}")
        raise UnreadableError(mark.line + 1 if mark else 1, f"is not YAML: {shown}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(line, f"is not YAML: {error.reason}") from None
    except RecursionError:
        raise UnreadableError(1, f"is nested deeper than {MAX_DEPTH}") from None
    except (yaml.YAMLError, ValueError) as error:  # an invalid \U escape or %YAML version
        raise UnreadableError(1, f"is not YAML: {error}") from None
    return root


def _referred_to(root: yaml.MappingNode) -> frozenset[str]:
    """Return the top-level keys with an anchor that the value of another key refers to.

    An alias is the same node as its anchor, which comes first. Each node is visited once.
    """
    owners: dict[int, str] = {}
    found = set()
    for key_node, value_node in root.value:
        waiting = [value_node]
        while waiting:
            node = waiting.pop()
            if id(node) in owners:
                if owners[id(node)] != key_node.value:
                    found.add(owners[id(node)])
                continue
            owners[id(node)] = str(key_node.value)
            for item in node.value if isinstance(node, yaml.CollectionNode) else ():
                waiting += item if isinstance(item, tuple) else [item]
    return frozenset(found)
