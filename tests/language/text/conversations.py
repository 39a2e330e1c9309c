"""Conversations as clients send them: every form of OpenAI's types that a chat template meets.

Each is one entry of `CONVERSATIONS`. Arguments of calls are JSON texts, as in OpenAI's API.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Message = dict[str, Any]


class Conversation(NamedTuple):
    """The messages of a request, its tools, and its `chat_template_kwargs`."""

    messages: list[Message]
    tools: list[Message] | None = None
    variables: Mapping[str, Any] = MappingProxyType({})


def tool(name: str, description: str | None = None, parameters: Message | None = None) -> Message:
    """Return a declaration of a tool, without the members that are None."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def parameters(*required: str, **properties: Message) -> Message:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


def calls(*functions: tuple[str, Any], ids: tuple[Any, ...] = ("call_0aB1", "call_2cD3", "call_4eF5")) -> Any:
    """Return calls of functions, given as names and arguments, with an id each."""
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, (name, arguments) in zip(ids, functions, strict=False)
    ]


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def answer(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(content: Any, call: Any = "call_0aB1", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
ASK, ANSWER, NEXT = user("What is the weather?"), answer("It rains."), user("And tomorrow?")
WEATHER = tool(
    "get_weather",
    "Get the weather of a town.",
    parameters(
        "town",
        town={"type": "string", "description": "Its name."},
        unit={"type": "string", "enum": ["C", "F"]},
        days={"type": "integer"},
    ),
)
SEARCH = tool(
    "search",
    "Search pages.",
    parameters(
        "query",
        query={"type": "string"},
        filters={"type": "object", "properties": {"site": {"type": "string"}}},
        tags={"type": "array", "items": {"type": "string"}},
    ),
)
TOOLS = [WEATHER, SEARCH]
BERN = '{"town": "Bern", "unit": "C"}'
CALL = answer("", tool_calls=calls(("get_weather", BERN)))
TWO = calls(("get_weather", BERN), ("get_weather", '{"town": "Rom"}'))
RESULT = result('{"rain": true}')


def called(arguments: Any) -> Conversation:
    """Return a chat with a call with these arguments."""
    return Conversation([ASK, answer("", tool_calls=calls(("get_weather", arguments))), RESULT], TOOLS)


def identified(id_: Any) -> Conversation:
    """Return a chat with a call with this id, and its result."""
    call = answer("", tool_calls=calls(("get_weather", BERN), ids=(id_,)))
    return Conversation([ASK, call, result("rain", id_)], TOOLS)


def text(*texts: str) -> list[Message]:
    return [{"type": "text", "text": each} for each in texts]


CONVERSATIONS = {
    # Roles and their order.
    "one question": Conversation([ASK]),
    "system message": Conversation([SYSTEM, ASK]),
    "answer and question": Conversation([SYSTEM, ASK, ANSWER, NEXT]),
    "no system message": Conversation([ASK, ANSWER, NEXT, answer("Sun."), user("Thanks!")]),
    "developer": Conversation([{"role": "developer", "content": "Be brief."}, ASK]),
    "late system message": Conversation([ASK, ANSWER, SYSTEM, NEXT]),
    "two system messages": Conversation([SYSTEM, {"role": "system", "content": "Be kind."}, ASK]),
    "system message at both ends": Conversation([SYSTEM, ASK, ANSWER, NEXT, SYSTEM]),
    "system message alone": Conversation([SYSTEM]),
    "two questions": Conversation([ASK, user("In Bern?")]),
    "two answers": Conversation([ASK, ANSWER, answer("A lot."), NEXT]),
    "answer first": Conversation([answer("Hello."), ASK]),
    "answer last": Conversation([ASK, answer("It")]),
    "names": Conversation([user("Hi", name="ann"), answer("Hi", name="bot"), user("Bye", name="ann")]),
    # Contents.
    "empty question": Conversation([SYSTEM, user("")]),
    "space around": Conversation([user("  a\n\n"), answer("\n b "), user("\tc ")]),
    "letters": Conversation(
        [user('Zürich "東京" 🙂 <b>&amp;</b> {{ x }} {% y %}'), ANSWER, user("\u200b\\n'")]
    ),
    "marks of templates": Conversation([user("<|im_end|></s>[INST]<tool_call>"), answer("<eos>"), NEXT]),
    "one part": Conversation([user(text("What is it?"))]),
    "two parts": Conversation([user(text("What", "is it?")), ANSWER, NEXT]),
    "all in parts": Conversation(
        [
            {"role": "system", "content": text("Be brief.")},
            user(text("a")),
            answer(text("b")),
            user(text("c")),
        ]
    ),
    # Interrupted answers.
    "no answer": Conversation([ASK, answer(None), NEXT]),
    "empty answer": Conversation([ASK, answer(""), NEXT]),
    "refusal": Conversation([ASK, answer(None, refusal="I cannot."), NEXT]),
    "call without result": Conversation([ASK, CALL, NEXT], TOOLS),
    "second call without result": Conversation([ASK, answer("", tool_calls=TWO), RESULT, NEXT], TOOLS),
    # Reasoning.
    "reasoning_content": Conversation([ASK, {**ANSWER, "reasoning_content": "I look."}, NEXT]),
    "reasoning": Conversation([ASK, {**ANSWER, "reasoning": "I look."}, NEXT]),
    "thinking": Conversation([ASK, {**ANSWER, "thinking": "I look."}, NEXT]),
    "reasoning in the text": Conversation([ASK, answer("<think>\nI look.\n</think>\n\nIt rains."), NEXT]),
    "empty reasoning": Conversation([ASK, {**ANSWER, "reasoning_content": ""}, NEXT]),
    "thinking disabled": Conversation([SYSTEM, ASK], None, {"enable_thinking": False}),
    "thinking enabled": Conversation([SYSTEM, ASK], None, {"enable_thinking": True}),
    "high effort": Conversation([SYSTEM, ASK], None, {"reasoning_effort": "high"}),
    "reasoning before a call": Conversation(
        [ASK, {**CALL, "content": None, "reasoning_content": "I look."}, RESULT], TOOLS
    ),
    "reasoning before two calls": Conversation(
        [
            ASK,
            answer("", reasoning_content="I look.", tool_calls=TWO),
            RESULT,
            result("sun", "call_2cD3"),
            {**ANSWER, "reasoning_content": "I know."},
            NEXT,
        ],
        TOOLS,
    ),
    # Tools, calls and results.
    "tools": Conversation([ASK], TOOLS),
    "tools and system message": Conversation([SYSTEM, ASK], TOOLS),
    "tools and parts": Conversation(
        [{"role": "system", "content": text("Be brief.")}, user(text("a"))], TOOLS
    ),
    "call and result": Conversation([SYSTEM, ASK, CALL, RESULT], TOOLS),
    "call, result and answer": Conversation([ASK, CALL, RESULT, ANSWER, NEXT], TOOLS),
    "text and call": Conversation([ASK, {**CALL, "content": "I look."}, RESULT], TOOLS),
    "call with null": Conversation([ASK, {**CALL, "content": None}, RESULT], TOOLS),
    "call without content": Conversation(
        [ASK, {key: value for key, value in CALL.items() if key != "content"}, RESULT], TOOLS
    ),
    "two calls": Conversation([ASK, answer("", tool_calls=TWO), RESULT, result("sun", "call_2cD3")], TOOLS),
    "two calls and text": Conversation(
        [ASK, answer("I look.", tool_calls=TWO), RESULT, result("sun", "call_2cD3"), ANSWER, NEXT], TOOLS
    ),
    "results in another order": Conversation(
        [ASK, answer("", tool_calls=TWO), result("sun", "call_2cD3"), RESULT], TOOLS
    ),
    "call after call": Conversation(
        [
            ASK,
            CALL,
            RESULT,
            answer("", tool_calls=calls(("search", '{"query": "rain"}'), ids=("call_6gH7",))),
            result("none", "call_6gH7"),
        ],
        TOOLS,
    ),
    "result with name": Conversation([ASK, CALL, {**RESULT, "name": "get_weather"}], TOOLS),
    "result in parts": Conversation([ASK, CALL, result(text("rain", "wind"))], TOOLS),
    "empty result": Conversation([ASK, CALL, result("")], TOOLS),
    "calls without tools": Conversation([ASK, CALL, RESULT, ANSWER, NEXT]),
    "empty list of calls": Conversation([ASK, {**ANSWER, "tool_calls": []}, NEXT]),
    "null calls": Conversation([ASK, {**ANSWER, "tool_calls": None}, NEXT]),
    "id of nine letters": identified("abcdefghi"),
    "id of another maker": identified("toolu_01A09q90qw90lq917835lq9"),
    "null id": identified(None),
    "nested arguments": called('{"town": "Zürich", "days": 2, "at": {"x": [1.5, null, true]}, "s": "a\\nb"}'),
    "no arguments": called("{}"),
    "empty arguments": called(""),
    "truncated arguments": called('{"town": "Be'),
    "arguments that are no object": called('["Bern"]'),
    "null arguments": called(None),
    "tool without description": Conversation([ASK], [tool("now")]),
    "tool without parameters": Conversation([ASK], [tool("now", "Get the time.")]),
    "tool of no parameters": Conversation([ASK], [tool("now", "Get the time.", parameters())]),
    "function role": Conversation(
        [
            ASK,
            answer(None, function_call={"name": "get_weather", "arguments": BERN}),
            {"role": "function", "name": "get_weather", "content": "rain"},
        ],
        TOOLS,
    ),
}
