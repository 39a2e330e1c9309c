"""Tools and the form of the text in OpenAI's Responses API, and the form of the answer that they require."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fairlead.base.errors import InvalidRequest, quoted
from fairlead.dialects.body import invalid_field
from fairlead.dialects.openai.structured import (
    Schema,
    StructuredOutputs,
    ToolName,
    constrained_answer,
    object_schema,
)
from fairlead.language.structured.grammar import JsonAnswer
from fairlead.language.structured.request import AnswerSpec, AnyAnswer, ToolSpec

# Tools of OpenAI's own servers without which a model can answer: it does not get them.
LEFT_OUT = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview"})
# Between the name of a namespace and that of its function, in the prompt.
SEPARATOR = "__"


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call, or a group of such functions.

    type: `function`, or `namespace` for a group. Tools that search the web are left out, others refused.
    name: The name of the function or of the group.
    description: What it does, for the model.
    parameters: The JSON schema of a function's arguments; None: any object.
    strict: Its arguments follow the schema exactly, or the request is refused.
    tools: The functions of a group.
    """

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list["FunctionTool"], Meta(max_length=2048)] | None = None


FunctionTools = Annotated[list[FunctionTool], Meta(max_length=2048)]


class OfferedFunction(NamedTuple):
    """A function that the model may call.

    name: Its name in the prompt, which is unique: with a namespace, that precedes it.
    tool: The function as it was sent.
    at: Its path in the body, for errors.
    namespace: The group that it belongs to; None: it belongs to none.
    """

    name: str
    tool: FunctionTool
    at: str
    namespace: str | None = None


class FunctionChoice(msgspec.Struct, frozen=True):
    """A function, by its name."""

    type: str
    name: ToolName | None = None


class ChosenTools(msgspec.Struct, frozen=True):
    """Which tools may or must be called.

    type: `function`: the named function must be called. `allowed_tools`: the listed ones may be.
    name: The function that must be called.
    mode: With `required`, one of the allowed functions must be called.
    tools: The functions that may be called.
    """

    type: str
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=2048)] | None = None


AnyToolChoice = Literal["none", "auto", "required"] | ChosenTools


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text.

    type: Any text, a JSON object, or JSON of a schema.
    name: Has no effect; the response repeats it.
    description: Has no effect; the response repeats it.
    schema: The JSON schema.
    strict: Has no effect: the answer always follows the schema.
    lenient: Ignore keywords that are not supported, which are refused otherwise.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    lenient: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The form of the text. Of `verbosity`, only OpenAI's default `medium` is served."""

    format: TextFormat | None = None
    verbosity: str | None = None


def offered_functions(tools: Sequence[FunctionTool]) -> list[OfferedFunction]:
    """Return the functions among the tools. Raises `InvalidRequest`."""
    offered = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if tool.type == "namespace":
            namespace = _required_name(tool.name, at)
            for number, member in enumerate(tool.tools or ()):
                place = f"{at}.tools[{number}]"
                name = qualify(namespace, _function_name(member, place))
                offered.append(OfferedFunction(name, member, place, namespace))
        elif tool.type not in LEFT_OUT:
            offered.append(OfferedFunction(_function_name(tool, at), tool, at))
    return offered


def qualify(namespace: str | None, name: str) -> str:
    """Return the name of a function in the prompt."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def answer_form(
    text: TextConfig | None,
    outputs: StructuredOutputs | None,
    functions: Sequence[OfferedFunction],
    choice: AnyToolChoice | None,
    *,
    parallel: bool,
) -> AnswerSpec | None:
    """Return the form of the answer, None if it is any text. Raises `InvalidRequest`."""
    if text is not None and text.verbosity not in (None, "medium"):
        raise InvalidRequest("text.verbosity: is not served", param="text.verbosity")
    answer, field, is_lenient = _text_form(text, outputs)
    specs = _tool_specs(functions)
    listed, is_required, named = _chosen(specs, choice)
    if answer is None and not listed:
        return None
    return AnswerSpec(
        tools=listed,
        choice="required" if is_required else "auto",
        named=named,
        parallel=parallel,
        answer=answer,
        answer_field=field,
        is_lenient=is_lenient,
    )


def template_functions(functions: Sequence[OfferedFunction]) -> list[dict[str, Any]] | None:
    """Return functions as chat templates read them, which is the form of chat completions; None for none."""
    return [
        {"type": "function", "function": _given(one.tool, but="type") | {"name": one.name}}
        for one in functions
    ] or None


def tools_echo(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Return tools as a response repeats them, without those that were left out."""
    return [_echoed(tool) for tool in tools if tool.type not in LEFT_OUT]


def choice_echo(choice: AnyToolChoice | None) -> Any:
    """Return the choice of tools as a response repeats it."""
    if not isinstance(choice, ChosenTools):
        return choice or "auto"
    echo = _given(choice)
    if choice.tools is not None:
        echo["tools"] = [_given(tool) for tool in choice.tools]
    return echo


def text_echo(text: TextConfig | None) -> dict[str, Any]:
    """Return the form of the text as a response repeats it."""
    form = text.format if text is not None else None
    if form is None:
        return {"format": {"type": "text"}}
    if form.type != "json_schema":
        return {"format": {"type": form.type}}
    return {"format": {**msgspec.structs.asdict(form), "name": form.name or "response"}}


def _text_form(
    text: TextConfig | None, outputs: StructuredOutputs | None
) -> tuple[AnyAnswer | None, str, bool]:
    """Return the form of the text, the field that has it, and whether it is lenient."""
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return constrained_answer(None, outputs)
    if constrained_answer(None, outputs)[0] is not None:
        raise invalid_field("structured_outputs", "cannot be combined with text.format")
    if form.type == "json_object":
        return JsonAnswer({"type": "object"}), "text.format", False
    if form.schema is None:
        raise invalid_field("text.format.schema", "must be given for this type")
    return JsonAnswer(object_schema(form.schema)), "text.format.schema", bool(form.lenient)


def _tool_specs(functions: Sequence[OfferedFunction]) -> tuple[ToolSpec, ...]:
    specs: dict[str, ToolSpec] = {}
    for name, tool, at, _ in functions:
        if name in specs:
            raise invalid_field(f"{at}.name", f"{quoted(name)} is the name of another tool")
        specs[name] = ToolSpec(name, tool.parameters, bool(tool.strict), f"{at}.parameters")
    return tuple(specs.values())


def _echoed(tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "namespace":
        return _given(tool, but="tools") | {"parameters": tool.parameters, "strict": tool.strict}
    members = {"type": tool.type, "name": tool.name, "description": tool.description or ""}
    return {**members, "tools": [_given(one) for one in tool.tools or ()]}


def _function_name(tool: FunctionTool | FunctionChoice | ChosenTools, at: str) -> str:
    if tool.type != "function":
        raise invalid_field(f"{at}.type", f"{quoted(tool.type)} is not served, only 'function'")
    return _required_name(tool.name, at)


def _required_name(name: str | None, at: str) -> str:
    if name is None:
        raise invalid_field(f"{at}.name", "must be given")
    return name


def _chosen(
    tools: tuple[ToolSpec, ...], choice: AnyToolChoice | None
) -> tuple[tuple[ToolSpec, ...], bool, str | None]:
    """Return the tools that may be called, whether one must be, and the only one that may be.

    Raises `InvalidRequest`.
    """
    if not isinstance(choice, ChosenTools):
        if choice == "required" and not tools:
            raise invalid_field("tool_choice", "needs tools")
        return (() if choice == "none" else tools), choice == "required", None
    names = {tool.name for tool in tools}
    if choice.type != "allowed_tools":
        name = _function_name(choice, "tool_choice")
        _check_name(name, names, "tool_choice.name")
        return tools, False, name
    if choice.mode is None or choice.tools is None:
        missing = "mode" if choice.mode is None else "tools"
        raise invalid_field(f"tool_choice.{missing}", "must be given for this type")
    kept = set()
    for index, allowed in enumerate(choice.tools):
        at = f"tool_choice.tools[{index}]"
        kept.add(name := _function_name(allowed, at))
        _check_name(name, names, f"{at}.name")
    return tuple(tool for tool in tools if tool.name in kept), choice.mode == "required", None


def _check_name(name: str, names: set[str], field: str) -> None:
    if name not in names:
        raise invalid_field(field, f"{quoted(name)} is not among the tools")


def _given(fields: msgspec.Struct, but: str = "") -> dict[str, Any]:
    """Return the fields that are set. Not recursive: JSON schemas may be nested as deep as Python goes."""
    given = msgspec.structs.asdict(fields).items()
    return {name: value for name, value in given if value is not None and name != but}
