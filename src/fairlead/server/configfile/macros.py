"""Macros of a llama-swap configuration, and the ports of its commands. Pure: a tree in, a tree out.

Follows llama-swap. Macros are substituted from the last one defined to the first, so each may use earlier
ones. A model's macros override those of the file. A value that is only a macro takes the macro's type. Models
that use a port get one, in the order of their names. `${PID}` stays in `cmdStop`, for the code that stops a
process.

Three differences: llama-swap refuses a command with neither `${PORT}` nor a `proxy`. Here, such a command
gets its port in its environment. A model keeps its port when the file is read again. `${PORT}` stays in
`cmd`, `cmdStop`, `env` and `proxy`, because another program may have the port when the command is started.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fairlead.base.config.models import PORT_MACRO
from fairlead.base.config.spelling import Fault, Key, KeyPath, written

DEFAULT_PROXY = f"http://localhost:{PORT_MACRO}"
DEFAULT_START_PORT = 5800
LAST_PORT = 65535
MAX_TEXT_CHARS = 100_000
MAX_EXPANDED_CHARS = 4_000_000

Macro = str | int | float | bool
Macros = list[tuple[str, Macro]]

_RESERVED = ("PID", "PORT", "MODEL_ID")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,63}")
_USE = re.compile(r"\$\{([a-zA-Z0-9_-]+)\}")
_WITH_PORT = ("cmd", "cmdStop", "env", "proxy")
_THIS_MACHINE = ("localhost", "0.0.0.0", "::", "::1")  # noqa: S104  # addresses of servers, not ours


class Expansion:
    """Substitutes the macros of one file. `faults` are errors, `remarks` are notes on valid settings.

    `ports` are those of the models that use one; `earlier_ports` are those of an earlier reading.
    """

    def __init__(self, earlier_ports: Mapping[str, int] | None = None) -> None:
        self.faults: list[Fault] = []
        self.remarks: list[Fault] = []
        self.ports: dict[str, int] = {}
        self._earlier = earlier_ports or {}
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
        expanded = dict.fromkeys(models)  # in the file's order
        users = []
        for name in sorted(models):
            model = models[name]
            if not isinstance(model, dict):
                expanded[name] = model
                continue
            path = ("models", name)
            own = self._defined(model.get("macros"), (*path, "macros"))
            body = _prepare(model)
            body = self._substitute_in_model(body, _merge(name, everywhere, own), path)
            uses_port = PORT_MACRO in str(body.get("cmd", ""))
            if body.get("cmd") is not None and not uses_port and model.get("proxy") is None:
                uses_port = self._add_port_variable(body, path)
            if uses_port:
                users.append(name)
            elif "cmd" in body and PORT_MACRO in str(body.get("proxy")):
                body["proxy"] = None  # reported once, without errors that follow from it
                self.faults.append(Fault((*path, "proxy"), "uses ${PORT}, but cmd does not"))
            expanded[name] = body
        first = start_port if isinstance(start_port, int) else DEFAULT_START_PORT
        self._assign_ports(users, first, _ports_in_use(expanded.values()))
        for name, port in self.ports.items():
            expanded[name] = self._with_port(expanded[name], port, ("models", name))
        return expanded

    def _assign_ports(self, names: list[str], first: int, fixed: set[int]) -> None:
        """Give each of these models a port: its earlier one, or else the lowest that no other has."""
        kept = {name: self._earlier[name] for name in names if name in self._earlier}
        kept = {name: port for name, port in kept.items() if port >= first and port not in fixed}
        taken = fixed.union(kept.values())
        others = (port for port in range(first, LAST_PORT + 1) if port not in taken)
        for name in names:
            port = kept.get(name) or next(others, None)
            if port is None:
                self.faults.append(Fault(("models", name, "cmd"), "no port is left for it above startPort"))
                port = first
            self.ports[name] = port

    def _with_port(self, body: Any, port: int, path: KeyPath) -> dict[str, Any]:
        """Substitute `${PORT}`, but not where another port may be put when the command is started."""
        late = {key: body[key] for key in _WITH_PORT if key in body}
        rest = {key: value for key, value in body.items() if key not in late}
        substituted = self._substitute_in_model(rest, [("PORT", port)], path)
        return {key: late.get(key, substituted.get(key)) for key in body}

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
        more = {"PORT": PORT_MACRO}
        body["env"] = raw | more if isinstance(raw, dict) else [*raw, f"PORT={PORT_MACRO}"]
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

    def _put_later(self, path: KeyPath) -> set[str]:
        """Return the macros that a value may have until its command is started or stopped."""
        if path[0] != "models" or len(path) < 3:
            return set()
        has_port = path[1] in self.ports and path[2] in _WITH_PORT
        return {*(["PORT"] if has_port else []), *(["PID"] if path[2] == "cmdStop" else [])}

    def _refuse_unknown(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, str):
            allowed = self._put_later(path)
            for name in dict.fromkeys(_USE.findall(value)):
                if name not in allowed:
                    self.faults.append(Fault(path, f"there is no macro ${{{name}}}"))
        elif isinstance(value, dict):
            for key, item in value.items():
                if path[-1:] == ("setParamsByID",):
                    self._refuse_unknown(key, path)
                self._refuse_unknown(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._refuse_unknown(item, (*path, index))


def _ports_in_use(models: Iterable[Any]) -> set[int]:
    """Return the ports of this machine on which commands without `${PORT}` have their servers."""
    ports = set()
    for body in models:
        proxy = body.get("proxy") if isinstance(body, dict) else None
        if isinstance(proxy, str) and PORT_MACRO not in proxy:
            with suppress(ValueError):  # reported elsewhere
                parts = urlsplit(proxy)
                host = parts.hostname or ""
                if parts.port is not None and (host in _THIS_MACHINE or host.startswith("127.")):
                    ports.add(parts.port)
    return ports


def _prepare(model: dict[str, Any]) -> dict[str, Any]:
    """Remove `macros`, and comments in commands, before a macro in them can become part of a command."""
    prepared = {key: value for key, value in model.items() if key != "macros"}
    for key in ("cmd", "cmdStop"):
        if isinstance(prepared.get(key), str):
            lines = prepared[key].split("\n")
            prepared[key] = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    if "cmd" in prepared and prepared.get("proxy") is None:
        prepared["proxy"] = DEFAULT_PROXY
    return prepared


def _merge(model: str, everywhere: Macros, own: Macros) -> Macros:
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
