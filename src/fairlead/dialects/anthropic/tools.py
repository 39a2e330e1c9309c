"""The form of an answer in Anthropic's fields: tools and their choice, the format of the text."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead.base.errors import quoted
from fairlead.dialects.anthropic.client_tools import client_tool
from fairlead.dialects.body import invalid_field
from fairlead.dialects.openai.messages import Function, Tool, template_tools
from fairlead.dialects.openai.structured import Schema, ToolName
from fairlead.language.structured.grammar import JsonAnswer
from fairlead.language.structured.request import AnswerSpec, ToolSpec


class CustomTool(msgspec.Struct, frozen=True):
    """A tool that the client runs.

    name: The name that calls have.
    type: `custom`, or none; or that of one of Anthropic's tools whose schema is known (`client_tools`).
    description: What it does, for the model.
    input_schema: The JSON schema of its arguments; a custom tool must have one.
    strict: Its arguments follow the schema exactly, or the request is refused.
    defer_loading: The model gets it once a result refers to it.
    display_width_px: The width of the screen, for `computer_*`.
    display_height_px: Its height.
    """

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None


CustomTools = Annotated[list[CustomTool], Meta(max_length=2048)]


class _Choice(msgspec.Struct, frozen=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, frozen=True, tag="auto"):
    """The model may call tools."""


class AnyChoice(_Choice, frozen=True, tag="any"):
    """The model has to call a tool."""


class NamedChoice(_Choice, frozen=True, tag="tool", kw_only=True):
    """The model has to call this tool."""

    name: ToolName


class NoChoice(_Choice, frozen=True, tag="none"):
    """The model gets no tools."""


MessageToolChoice = AutoChoice | AnyChoice | NamedChoice | NoChoice


class JsonOutputFormat(msgspec.Struct, frozen=True):
    """The schema of the text."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(msgspec.Struct, frozen=True):
    """`effort` is the `reasoning_effort` of chat templates."""

    effort: str | None = None
    format: JsonOutputFormat | None = None


def offered_tools(
    tools: list[CustomTool], choice: MessageToolChoice | None, changes: Mapping[str, bool]
) -> dict[int, CustomTool]:
    """Return the tools that the model has, by their index in the body.

    `changes`: whether it has those that the messages give or take. It does not have others with
    `defer_loading`. Raises `InvalidRequest` for a tool that is not the client's own, or has the name of
    another, and for a choice that the tools do not allow.
    """
    tools = list(map(_described, tools))
    _check_tools(tools)
    offered = {
        index: tool
        for index, tool in enumerate(tools)
        if changes.get(tool.name, not tool.defer_loading) and not isinstance(choice, NoChoice)
    }
    if isinstance(choice, NamedChoice) and choice.name not in {tool.name for tool in offered.values()}:
        raise invalid_field("tool_choice.name", f"{quoted(choice.name)} is not among the tools")
    if isinstance(choice, AnyChoice) and not offered:
        raise invalid_field("tool_choice", "needs tools")
    return offered


def _described(tool: CustomTool) -> CustomTool:
    """Return a tool with the description and schema of its type, if Anthropic's clients know these."""
    if tool.type in (None, "custom"):
        return tool
    sizes = {"display_width_px": tool.display_width_px, "display_height_px": tool.display_height_px}
    known = client_tool(tool.type, {name: size for name, size in sizes.items() if size is not None})
    if known is None:
        return tool
    return msgspec.structs.replace(
        tool,
        type="custom",
        description=known.description,
        input_schema=known.schema,
        strict=tool.strict is not False,  # the model has not learned these tools
    )


def _check_tools(tools: list[CustomTool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            reason = f"tools of type {quoted(tool.type)} are not served, only those that the client runs"
            raise invalid_field(f"tools[{index}].type", reason)
        if tool.input_schema is None:
            raise invalid_field(f"tools[{index}].input_schema", "is missing")
        if tool.name in seen:
            raise invalid_field(f"tools[{index}].name", f"{quoted(tool.name)} is the name of another tool")
        seen.add(tool.name)


def template_custom_tools(tools: Mapping[int, CustomTool]) -> list[dict[str, Any]] | None:
    """Return tools as chat templates read them."""
    return template_tools(
        [
            Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in tools.values()
        ]
    )


def message_spec(
    tools: Mapping[int, CustomTool],
    choice: MessageToolChoice | None,
    output: JsonOutputFormat | None,
    output_field: str,
) -> AnswerSpec | None:
    """Return the form of the answer, None if it is any text. Raises `InvalidRequest`."""
    if output is None and not tools:
        return None
    specs = (
        ToolSpec(tool.name, tool.input_schema, bool(tool.strict), f"tools[{index}].input_schema")
        for index, tool in tools.items()
    )
    return AnswerSpec(
        tools=tuple(specs),
        choice="required" if isinstance(choice, AnyChoice) else "auto",
        named=choice.name if isinstance(choice, NamedChoice) else None,
        parallel=choice is None or not choice.disable_parallel_tool_use,
        answer=None if output is None else JsonAnswer(_object_schema(output.schema)),
        answer_field=output_field,
    )


def _object_schema(schema: Schema) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    return {} if schema else {"not": {}}
