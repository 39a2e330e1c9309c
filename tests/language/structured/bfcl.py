"""The ground truth of the Berkeley Function Calling Leaderboard: calls of tools, as people describe both.

    python tests/language/structured/bfcl.py

fetches it with pip, from the package `bfcl-eval`. It belongs to its authors and is not kept here. Without it,
its tests are skipped.

The leaderboard names types as Python, Java and JavaScript do, and converts them to JSON Schema for models.
`json_schema` does the same. A ground truth lists the values that each argument may have; "" means that it may
be left out.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "bfcl-eval==2026.3.23"
FOLDER = Path(__file__).parents[3] / "build" / "bfcl"
CATEGORIES = {
    "simple_python": 400,
    "simple_java": 100,
    "simple_javascript": 50,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 200,
    "live_simple": 258,
    "live_multiple": 1053,
    "live_parallel": 16,
    "live_parallel_multiple": 24,
    "multi_turn_base": 200,
}
"""The categories with calls as ground truth, and their numbers of questions."""

_MULTI_TURN = "multi_turn_base"
_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""The file that describes the functions of each class of the conversations of several turns."""

JSON_TYPES = {
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
}
"""The types of JSON Schema for those of the leaderboard. All others are strings: "any", "char", "String"."""

Call = tuple[str, dict[str, Any]]


class Question(NamedTuple):
    """The schemas of the arguments of some tools by their names, and the calls that answer the question."""

    id: str
    tools: dict[str, Any]
    calls: list[Call]


def fetch(folder: Path) -> int:
    """Write the files of `CATEGORIES` into a folder; return the number of their questions."""
    wanted = [f"{kind}BFCL_v4_{name}.json" for name in CATEGORIES for kind in ("", "possible_answer/")]
    wanted += [f"multi_turn_func_doc/{name}.json" for name in _DOCUMENTS.values()]
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--no-deps", "--only-binary", ":all:", "--dest", temporary]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            for name in wanted:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(f"bfcl_eval/data/{name}"))
    return sum(1 for _ in questions(folder))


def is_present(folder: Path = FOLDER) -> bool:
    """Return whether the files were fetched."""
    return (folder / "possible_answer").is_dir()


def questions(folder: Path = FOLDER) -> Iterator[Question]:
    """Yield all questions. The functions' names are as the leaderboard shows them to models."""
    for category in CATEGORIES:
        truths = {one["id"]: one["ground_truth"] for one in _lines(folder / "possible_answer", category)}
        for one in _lines(folder, category):
            truth = truths[one["id"]]
            if category == _MULTI_TURN:
                tools = _functions_of_classes(folder, one["involved_classes"])
                calls = [_python_call(text, tools) for turn in truth for text in turn]
            else:
                tools = {tool["name"]: tool["parameters"] for tool in one["function"]}
                calls = [call for each in truth for call in _calls(each)]
            schemas = {_shown(name): json_schema(parameters) for name, parameters in tools.items()}
            yield Question(one["id"], schemas, [(_shown(name), arguments) for name, arguments in calls])


def json_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a parameter, or of all parameters of a function."""
    schema = dict(described)
    kind = described.get("type", "string")
    schema["type"] = JSON_TYPES.get(kind, "string")
    if isinstance(properties := described.get("properties"), Mapping):
        schema["properties"] = {name: _property(one) for name, one in properties.items()}
    if isinstance(items := described.get("items"), Mapping):
        schema["items"] = json_schema(items)
    return schema


def _property(described: Mapping[str, Any]) -> dict[str, Any]:
    marks = {"format": "float"} if described.get("type") == "float" else {}
    return json_schema(described) | marks


def _lines(folder: Path, category: str) -> list[dict[str, Any]]:
    text = (folder / f"BFCL_v4_{category}.json").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def _shown(name: str) -> str:
    """Return a function's name as most models' APIs allow it."""
    return name.replace(".", "_")


def _calls(truth: Mapping[str, Mapping[str, list[Any]]]) -> Iterator[Call]:
    for name, arguments in truth.items():
        yield name, _members(arguments)


def _members(possible: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the first of the values that each member may have, without those that are left out."""
    chosen = {}
    for name, values in possible.items():
        given = [value for value in values if value != ""] if isinstance(values, list) else [values]
        if given:
            chosen[name] = _value(given[0])
    return chosen


def _value(value: Any) -> Any:
    match value:
        case dict():
            return _members(value)
        case list():
            return [_value(one) for one in value]
    return value


def _functions_of_classes(folder: Path, classes: list[str]) -> dict[str, Any]:
    files = [folder / "multi_turn_func_doc" / f"{_DOCUMENTS[name]}.json" for name in classes]
    documents = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
    return {one["name"]: one["parameters"] for one in documents}


def _python_call(text: str, tools: Mapping[str, Any]) -> Call:
    """Return a call that is written in Python, as in `cd(folder='document')`."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    named = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
    positional = dict(zip(tools[call.func.id]["properties"], map(ast.literal_eval, call.args), strict=False))
    return call.func.id, positional | named


if __name__ == "__main__":
    found, expected = fetch(FOLDER), sum(CATEGORIES.values())
    sys.exit(f"{found} questions instead of {expected}" if found != expected else 0)
