"""The form of an answer in OpenAI's and vLLM's fields: response formats, tools, constraints."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import Meta

from fairlead.base.errors import quoted
from fairlead.dialects.body import MAX_QUOTED_CHARS, invalid_field
from fairlead.dialects.openai.messages import Tool, Tools
from fairlead.language.structured.grammar import ChoiceAnswer, JsonAnswer, LarkAnswer, RegexAnswer
from fairlead.language.structured.request import AnswerSpec, AnyAnswer, ToolSpec

MAX_CHOICES = 10_000
MAX_PATTERN_CHARS = 64 * 1024
# What precedes the names of vLLM's constraints in a body, today and in its releases until 2025.
OUTPUTS, FORMER_OUTPUTS = "structured_outputs.", "guided_"

Schema = dict[str, Any] | bool
Pattern = Annotated[str, Meta(max_length=MAX_PATTERN_CHARS)]
Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A schema for the answer.

    name: Has no effect.
    description: Has no effect.
    schema: The JSON schema.
    strict: Has no effect: the answer always follows the schema.
    lenient: Ignore keywords that are not supported, which are refused otherwise.
    """

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    lenient: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of the text: any, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's constraints, of which a request has one.

    json: A JSON schema, also as a text.
    json_object: Any JSON object.
    regex: A regular expression for the whole answer.
    choice: One of these texts.
    grammar: A grammar: Lark as llguidance reads it, or GBNF.
    lenient: Ignore keywords of the schema that are not supported, which are refused otherwise.
    """

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Annotated[Choices, Meta(min_length=1)] | None = None
    grammar: Pattern | None = None
    lenient: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that must be called."""

    name: ToolName


class NamedToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The choice of one function."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, frozen=True):
    """One of the allowed functions."""

    function: NamedFunction
    type: Literal["function"]


class AllowedTools(msgspec.Struct, frozen=True):
    """The functions that may be called, or with the mode `required` one of which must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=2048)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """A choice among some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


def constrained_answer(
    text_format: ResponseFormat | None, outputs: StructuredOutputs | None, within: str = OUTPUTS
) -> tuple[AnyAnswer | None, str, bool]:
    """Return the form of the text, the field that has it, and whether it is lenient.

    `within`: what precedes the names of `outputs` in the body.
    """
    if outputs is not None and (constraint := _of_outputs(outputs, within)) is not None:
        if text_format is not None and text_format.type != "text":
            raise invalid_field(_whole(constraint[1]), "cannot be combined with response_format")
        return *constraint, bool(outputs.lenient)
    if text_format is None or text_format.type == "text":
        return None, "response_format", False
    if text_format.type == "json_object":
        return JsonAnswer({"type": "object"}), "response_format", False
    described = text_format.json_schema
    if described is None or described.schema is None:
        raise invalid_field("response_format.json_schema", "needs a schema")
    answer = JsonAnswer(object_schema(described.schema))
    return answer, "response_format.json_schema.schema", bool(described.lenient)


def answer_spec(
    text_format: ResponseFormat | None,
    outputs: StructuredOutputs | None,
    tools: Tools | None = None,
    tool_choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    within: str = OUTPUTS,
) -> AnswerSpec | None:
    """Return the form of the answer, None if it is any text. Raises `InvalidRequest`.

    text_format: OpenAI's form of the text; None: any.
    outputs: vLLM's constraint; None: none.
    tools: what the model may call.
    tool_choice: which of them, and whether it must; None: as it likes.
    parallel: whether an answer may have several calls.
    within: what precedes the names of `outputs` in the body.
    """
    answer, field, lenient = constrained_answer(text_format, outputs, within)
    listed, is_required = _chosen(_tool_specs(tools or ()), tool_choice)
    if answer is None and not listed:
        return None
    return AnswerSpec(
        tools=listed,
        choice="required" if is_required else "auto",
        named=tool_choice.function.name if isinstance(tool_choice, NamedToolChoice) else None,
        parallel=parallel,
        answer=answer,
        answer_field=field,
        is_lenient=lenient,
    )


def _chosen(tools: tuple[ToolSpec, ...], choice: ToolChoice | None) -> tuple[tuple[ToolSpec, ...], bool]:
    """Return the tools that the model may call, and whether it must. Raises `InvalidRequest`."""
    names = {tool.name for tool in tools}
    match choice:
        case NamedToolChoice(function):
            _check_name(function, names, "tool_choice.function.name")
        case AllowedToolsChoice(allowed):
            for index, tool in enumerate(allowed.tools):
                at = f"tool_choice.allowed_tools.tools[{index}].function.name"
                _check_name(tool.function, names, at)
            kept = {tool.function.name for tool in allowed.tools}
            return tuple(tool for tool in tools if tool.name in kept), allowed.mode == "required"
        case "required" if not tools:
            raise invalid_field("tool_choice", "needs tools")
        case "none":
            return (), False
    return tools, choice == "required"


def _check_name(function: NamedFunction, names: Collection[str], field: str) -> None:
    if function.name not in names:
        raise invalid_field(field, f"{quoted(function.name)} is not among the tools")


def _of_outputs(outputs: StructuredOutputs, within: str) -> tuple[AnyAnswer, str] | None:
    given = {name: value for name, value in msgspec.structs.asdict(outputs).items() if value is not None}
    given.pop("lenient", None)
    if not given.get("json_object", True):
        del given["json_object"]
    if len(given) > 1:
        raise invalid_field(
            _whole(f"{within}{next(iter(given))}"), f"has {' and '.join(given)}, of which it may have one"
        )
    if outputs.json is not None:
        return JsonAnswer(object_schema(outputs.json, f"{within}json")), f"{within}json"
    if outputs.json_object:
        return JsonAnswer({"type": "object"}), f"{within}json_object"
    if outputs.regex is not None:
        return RegexAnswer(outputs.regex), f"{within}regex"
    if outputs.choice is not None:
        return ChoiceAnswer(outputs.choice), f"{within}choice"
    if outputs.grammar is not None:
        return LarkAnswer(lark_of(outputs.grammar, f"{within}grammar")), f"{within}grammar"
    return None


def _whole(field: str) -> str:
    """Return the member of a body that has a constraint."""
    return field.partition(".")[0]


def lark_of(text: str, field: str) -> str:
    """Return a grammar in Lark; one in GBNF is converted. `field` has it in the body."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises various types, and RecursionError
        raise invalid_field(field, str(error)[:MAX_QUOTED_CHARS]) from error


def object_schema(schema: Schema | str, field: str = f"{OUTPUTS}json") -> dict[str, Any]:
    """Return a schema as an object, from its JSON text too. `field` has it in the body."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=Schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid_field(field, f"is not a JSON schema: {error}") from error
    if isinstance(schema, dict):
        return schema
    return {} if schema else {"not": {}}


def _tool_specs(tools: Sequence[Tool]) -> tuple[ToolSpec, ...]:
    specs = [
        ToolSpec(
            tool.function.name,
            tool.function.parameters,
            bool(tool.function.strict),
            f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(tools)
    ]
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        if spec.name in seen:
            raise invalid_field(
                f"tools[{index}].function.name", f"{quoted(spec.name)} is the name of another tool"
            )
        seen.add(spec.name)
    return tuple(specs)
