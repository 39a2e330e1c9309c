"""Tools and the form of the text in OpenAI's Responses API, and the form of the answer that they require."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead.api.body import invalid_field
from fairlead.api.dialects.openai_structured import (
    Schema,
    StructuredOutputs,
    ToolName,
    constrained_answer,
    object_schema,
)
from fairlead.errors import quoted
from fairlead.structured.grammar import JsonAnswer
from fairlead.structured.request import AnswerSpec, AnyAnswer, FaultyRequest, ToolSpec


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call. Only the type `function` is served."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


FunctionTools = Annotated[list[FunctionTool], Meta(max_length=2048)]


class FunctionChoice(msgspec.Struct, frozen=True):
    """A function, by its name."""

    type: str
    name: ToolName | None = None


class ChosenTools(msgspec.Struct, frozen=True):
    """The type `function`: the function that must be called. `allowed_tools`: those that may be.

    With the mode `required`, one of the allowed functions must be called.
    """

    type: str
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=2048)] | None = None


AnyToolChoice = Literal["none", "auto", "required"] | ChosenTools


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text: any, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    lenient: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The form of the text. `verbosity` is ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None


def answer_form(
    text: TextConfig | None,
    outputs: StructuredOutputs | None,
    tools: Sequence[FunctionTool],
    choice: AnyToolChoice | None,
    *,
    parallel: bool,
) -> AnswerSpec | None:
    """Return the form of the answer, None if it is any text. Raises `InvalidRequest`."""
    answer, field, is_lenient = _text_form(text, outputs)
    specs = _tool_specs(tools)
    listed, is_required, named = _chosen(specs, choice)
    if answer is None and not listed:
        return None
    spec = AnswerSpec(
        tools=listed,
        choice="required" if is_required else "auto",
        named=named,
        parallel=parallel,
        answer=answer,
        answer_field=field,
        is_lenient=is_lenient,
    )
    try:
        spec.check()
    except FaultyRequest as fault:
        raise invalid_field(fault.field, fault.reason) from fault
    return spec


def template_functions(tools: Sequence[FunctionTool]) -> list[dict[str, Any]] | None:
    """Return tools as chat templates read them, which is the form of chat completions; None for none."""
    return [{"type": "function", "function": _given(tool, but="type")} for tool in tools] or None


def tools_echo(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Return tools as a response repeats them."""
    return [msgspec.structs.asdict(tool) for tool in tools]


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
        raise invalid_field("text.format.schema", "is missing")
    return JsonAnswer(object_schema(form.schema)), "text.format.schema", bool(form.lenient)


def _tool_specs(tools: Sequence[FunctionTool]) -> tuple[ToolSpec, ...]:
    specs: dict[str, ToolSpec] = {}
    for index, tool in enumerate(tools):
        name = _function_name(tool, f"tools[{index}]")
        if name in specs:
            raise invalid_field(f"tools[{index}].name", f"{quoted(name)} is the name of another tool")
        specs[name] = ToolSpec(name, tool.parameters, bool(tool.strict), f"tools[{index}].parameters")
    return tuple(specs.values())


def _function_name(tool: FunctionTool | FunctionChoice | ChosenTools, at: str) -> str:
    if tool.type != "function":
        raise invalid_field(f"{at}.type", f"{quoted(tool.type)} is not served, only 'function'")
    if tool.name is None:
        raise invalid_field(f"{at}.name", "is missing")
    return tool.name


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
        raise invalid_field(f"tool_choice.{missing}", "is missing")
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
