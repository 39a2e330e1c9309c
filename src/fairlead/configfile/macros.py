"""Macros of a llama-swap configuration, and the ports of its commands. Pure: a tree in, a tree out.

Follows llama-swap. Macros are substituted from the last one defined to the first, so each may use earlier
ones. A model's macros override those of the file. A value that is only a macro takes the macro's type. Models
that use a port get one, in the order of their names. `${PID}` stays in `cmdStop`, for the code that stops a
process.

One difference: llama-swap refuses a command with neither `${PORT}` nor a `proxy`. Here, such a command gets
its port in its environment.
"""

import re
from collections.abc import Mapping
from typing import Any

from fairlead.config.spelling import Fault, Key, KeyPath, written

DEFAULT_PROXY = "http://localhost:${PORT}"
DEFAULT_START_PORT = 5800
MAX_TEXT_CHARS = 100_000
MAX_EXPANDED_CHARS = 4_000_000

Macro = str | int | float | bool
Macros = list[tuple[str, Macro]]

_RESERVED = ("PID", "PORT", "MODEL_ID")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,63}")
_USE = re.compile(r"\$\{([a-zA-Z0-9_-]+)\}")
_PORT_USE = "${PORT}"


class Expansion:
    """Substitutes the macros of one file. `faults` are errors, `remarks` are notes on valid settings."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.remarks: list[Fault] = []
        self._letters = 0

    def expand(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree with all macros substituted, and without `macros`."""
        everywhere = self._defined(tree.get("macros"), ("macros",))
        expanded = {
            key: self._substitute(value, everywhere, (key,))
            for key, value in tree.items()
            if key not in ("macros", "models")
        }
        models = tree.get("models")
        if isinstance(models, dict):
            expanded["models"] = self._models(models, everywhere, expanded.get("startPort"))
        elif "models" in tree:
            expanded["models"] = models
        for key, value in expanded.items():
            self._refuse_unknown(value, (key,))
        return expanded

    def _models(self, models: dict[str, Any], everywhere: Macros, start_port: object) -> dict[str, Any]:
        port = start_port if isinstance(start_port, int) else DEFAULT_START_PORT
        expanded = dict.fromkeys(models)  # in the file's order
        for name in sorted(models):
            model = models[name]
            if not isinstance(model, dict):
                expanded[name] = model
                continue
            path = ("models", name)
            own = self._defined(model.get("macros"), (*path, "macros"))
            body = _prepared(model)
            body = self._substitute_in_model(body, _merged(name, everywhere, own), path)
            uses_port = _PORT_USE in str(body.get("cmd", ""))
            if body.get("cmd") is not None and not uses_port and model.get("proxy") is None:
                uses_port = self._add_port_variable(body, path)
            if uses_port:
                if port > 65535:
                    self.faults.append(Fault((*path, "cmd"), "no port is left for it above startPort"))
                body = self._substitute_in_model(body, [("PORT", port)], path)
                port += 1
            elif "cmd" in body and _PORT_USE in str(body.get("proxy")):
                body["proxy"] = None  # reported once, without errors that follow from it
                self.faults.append(Fault((*path, "proxy"), "uses ${PORT}, but cmd does not"))
            expanded[name] = body
        return expanded

    def _add_port_variable(self, body: dict[str, Any], path: KeyPath) -> bool:
        """Add the port to the environment of a command without `${PORT}`; return whether that is possible.

        llama-swap refuses such a command, although its own example has one.
        """
        raw = body.get("env") or []
        if not isinstance(raw, dict | list):
            return False  # the type is refused elsewhere
        if any(str(entry).partition("=")[0] == "PORT" for entry in raw):
            body["proxy"] = None
            self.faults.append(Fault((*path, "env"), "sets PORT, so proxy must have the address of cmd"))
            return False
        more = {"PORT": _PORT_USE}
        body["env"] = raw | more if isinstance(raw, dict) else [*raw, f"PORT={_PORT_USE}"]
        remark = "uses neither ${PORT} nor a proxy, so its port is in the environment variable PORT"
        self.remarks.append(Fault((*path, "cmd"), remark))
        return True

    def _defined(self, raw: object, path: KeyPath) -> Macros:
        if raw is None:
            return []
        if not isinstance(raw, dict):
            self.faults.append(Fault(path, "must be a mapping"))
            return []
        macros: Macros = []
        for name, value in raw.items():
            wrong = _wrong_with(name, value)
            if wrong:
                self.faults.append(Fault((*path, name), wrong))
            else:
                macros.append((name, value))
        return macros

    def _substitute_in_model(self, model: dict[str, Any], macros: Macros, path: KeyPath) -> dict[str, Any]:
        """Substitute macros in a model, also in the keys of `setParamsByID`, but in no other keys."""
        put: dict[str, Any] = self._substitute(model, macros, path)
        filters = put.get("filters")
        if isinstance(filters, dict) and isinstance(filters.get("setParamsByID"), dict):
            inner = (*path, "filters", "setParamsByID")
            renamed: dict[str, Any] = {}
            for key, value in filters["setParamsByID"].items():
                name = written(self._substitute_in_text(key, macros, inner))
                if name in renamed:
                    self.faults.append(Fault((*inner, key), f"is {name}, which occurs already"))
                renamed[name] = value
            filters["setParamsByID"] = renamed
        return put

    def _substitute(self, value: Any, macros: Macros, path: KeyPath) -> Any:
        if isinstance(value, str):
            return self._substitute_in_text(value, macros, path)
        if isinstance(value, dict):
            return {key: self._substitute(item, macros, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._substitute(item, macros, (*path, index)) for index, item in enumerate(value)]
        return value

    def _substitute_in_text(self, text: str, macros: Macros, path: KeyPath) -> Macro:
        if self._letters > MAX_EXPANDED_CHARS:
            return ""
        for name, macro in reversed(macros):
            use = f"${{{name}}}"
            if text == use:
                if not isinstance(macro, str):
                    return macro
                text = macro
            elif use in text:
                put = written(macro)
                if len(text) + text.count(use) * len(put) > MAX_TEXT_CHARS:
                    self.faults.append(Fault(path, f"would have more than {MAX_TEXT_CHARS} characters"))
                    return ""
                text = text.replace(use, put)
                self._letters += len(text)
        if self._letters > MAX_EXPANDED_CHARS:
            self.faults.append(Fault(path, f"expands to more than {MAX_EXPANDED_CHARS} characters in all"))
        return text

    def _refuse_unknown(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, str):
            stopping = path[0] == "models" and path[2:3] == ("cmdStop",)
            for name in dict.fromkeys(_USE.findall(value)):
                if name != "PID" or not stopping:
                    self.faults.append(Fault(path, f"there is no macro ${{{name}}}"))
        elif isinstance(value, dict):
            for key, item in value.items():
                if path[-1:] == ("setParamsByID",):
                    self._refuse_unknown(key, path)
                self._refuse_unknown(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._refuse_unknown(item, (*path, index))


def _prepared(model: dict[str, Any]) -> dict[str, Any]:
    """Remove `macros`, and comments in commands, before a macro in them can become part of a command."""
    prepared = {key: value for key, value in model.items() if key != "macros"}
    for key in ("cmd", "cmdStop"):
        if isinstance(prepared.get(key), str):
            lines = prepared[key].split("\n")
            prepared[key] = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    if "cmd" in prepared and prepared.get("proxy") is None:
        prepared["proxy"] = DEFAULT_PROXY
    return prepared


def _merged(model: str, everywhere: Macros, own: Macros) -> Macros:
    """Return the macros of a model, in order; its own replace those of the same name."""
    merged: dict[str, Macro] = {"MODEL_ID": model, **dict(everywhere)}
    merged.update(own)
    return list(merged.items())


def _wrong_with(name: Key, value: object) -> str | None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "the name of a macro must be 1 to 63 letters, digits, - and _"
    if name in _RESERVED:
        return f"is reserved, as are all of {', '.join(_RESERVED)}"
    if not isinstance(value, str | int | float):  # a bool is an int
        return "must be text, a number, true or false"
    if isinstance(value, str) and f"${{{name}}}" in value:
        return "refers to itself"
    return None
