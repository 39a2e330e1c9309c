"""Anthropic's typed tools that the client runs: `bash_*`, `text_editor_*`, `computer_*` and `memory_*`.

A request names only their type; Anthropic's models know the rest. Other models do not, so they get a schema
and a description, as for the client's own tools. The dates in the types are versions. A later one has more
commands, which earlier clients refuse with an error that the model reads. Source: Anthropic's documentation.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_POINT = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}


class ClientTool(NamedTuple):
    """What the model is told of a typed tool, and the schema of its calls."""

    description: str
    schema: dict[str, Any]


def _commands(names: str, properties: Mapping[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a tool whose first property is one of these commands."""
    name, _, values = names.partition(": ")
    return {
        "type": "object",
        "properties": {name: {"enum": values.split()}, **properties},
        "required": [name, *required],
        "additionalProperties": False,
    }


_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _WHOLE,
    "insert_text": _TEXT,
    "view_range": _POINT,
}
_KNOWN = {
    "bash_": ClientTool(
        "Run a command in a bash shell, which keeps its state from call to call. restart begins a new shell.",
        {
            "type": "object",
            "properties": {"command": _TEXT, "restart": {"type": "boolean"}},
            "additionalProperties": False,
        },
    ),
    "text_editor_": ClientTool(
        "View and edit files. view shows a file, the lines of view_range, or a folder; create writes "
        "file_text; str_replace replaces the only occurrence of old_str by new_str; insert adds text after "
        "insert_line.",
        _commands("command: view create str_replace insert undo_edit", _EDITS, ("path",)),
    ),
    "computer_": ClientTool(
        "Use the screen, the mouse and the keyboard. screenshot shows the screen; coordinates are pixels "
        "from its upper left corner; text is what is typed, or the keys that are pressed or held.",
        _commands(
            "action: key type mouse_move left_click left_click_drag right_click middle_click double_click "
            "triple_click left_mouse_down left_mouse_up scroll hold_key wait screenshot cursor_position zoom",
            {
                "coordinate": _POINT,
                "start_coordinate": _POINT,
                "text": _TEXT,
                "scroll_direction": {"enum": ["up", "down", "left", "right"]},
                "scroll_amount": _WHOLE,
                "duration": {"type": "number"},
                "region": {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4},
            },
            (),
        ),
    ),
    "memory_": ClientTool(
        "Keep notes in files below /memories, which later conversations can read.",
        _commands(
            "command: view create str_replace insert delete rename",
            {**_EDITS, "old_path": _TEXT, "new_path": _TEXT},
            (),
        ),
    ),
}


def client_tool(kind: str, settings: Mapping[str, Any]) -> ClientTool | None:
    """Return a typed tool, or None for a type that the client does not run.

    kind: its type in the request, such as `bash_20250124`.
    settings: its further fields that the model should know, such as the size of the screen.
    """
    found = next((tool for prefix, tool in _KNOWN.items() if kind.startswith(prefix)), None)
    if found is None or not settings:
        return found
    told = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in settings.items())
    return ClientTool(f"{found.description} ({told})", found.schema)
