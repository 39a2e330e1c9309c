"""Small chat templates, each of which cannot take one thing, and conversations that clients send."""

from typing import Any, NamedTuple

# A template that takes everything. Each of the others has a snippet more, or another one at a place.
BEFORE = ""
EACH = ""
CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
REASONING = "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>"
    "{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>{% endfor %}"


def template(*, before=BEFORE, each=EACH, content=CONTENT, reasoning=REASONING, calls=CALLS, tools=TOOLS):
    """Return a chat template of these snippets."""
    return (
        f"{before}{tools}{{% for m in messages %}}{each}{{{{ '<|im_start|>' + m.role + '\\n' }}}}"
        f"{reasoning}{content}{calls}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def refusal(condition, reason):
    """Return a snippet that refuses the messages if a condition holds."""
    return f"{{% if {condition} %}}{{{{ raise_exception('{reason}') }}}}{{% endif %}}"


_IS_CALL = "m.tool_calls is defined"
_TURNS = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role not in ('system', 'tool') and not "
    f"({_IS_CALL}) %}}"
    + refusal("(m.role == 'user') != (ns.at % 2 == 0)", "roles must alternate")
    + "{% set ns.at = ns.at + 1 %}{% endif %}{% endfor %}"
)
_KEYS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
_EACH_CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}BODY</call>{% endfor %}"

TAKES_EVERYTHING = template()
LIMITED = {
    "no system message": template(each=refusal("m.role == 'system'", "system is not supported")),
    "system message not first": template(each=refusal("m.role == 'system' and not loop.first", "first")),
    "system message is dropped unless first": template(
        content="{% if m.role != 'system' or loop.first %}" + CONTENT + "{% endif %}"
    ),
    "only the last system message is shown": template(
        before="{% for m in messages %}{% if m.role == 'system' %}{% set last = loop.index0 %}{% endif %}"
        "{% endfor %}{% set s = messages | selectattr('role', 'equalto', 'system') | list %}",
        content="{% if m.role != 'system' or m == s[-1] %}" + CONTENT + "{% endif %}",
    ),
    "no user message": template(
        before=refusal("not messages | selectattr('role', 'equalto', 'user') | list", "no user")
    ),
    "no user message with tools": template(
        before=refusal("tools and not messages | selectattr('role', 'equalto', 'user') | list", "no user")
    ),
    "turns of users and assistants": template(before=_TURNS),
    "turns of all messages": template(
        each=refusal("m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0)", "turns")
    ),
    "roles in a row": template(
        each=refusal(
            f"not loop.first and m.role == loop.previtem.role and m.role != 'tool' and not ({_IS_CALL})",
            "in a row",
        )
    ),
    "empty answers": template(
        before=_TURNS, each=refusal(f"m.role == 'assistant' and not m.content and not ({_IS_CALL})", "empty")
    ),
    "two calls": template(each=refusal(f"{_IS_CALL} and m.tool_calls | length != 1", "one call at a time")),
    "second call is dropped": template(
        calls=f"{{% if {_IS_CALL} %}}{{% set c = m.tool_calls[0] %}}"
        "<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>{% endif %}"
    ),
    "empty list of calls": template(each=refusal(f"{_IS_CALL} and not m.tool_calls", "no calls")),
    "long ids": template(
        calls=_EACH_CALL.replace(
            "BODY", refusal("not c.id or c.id | length != 9", "nine") + "{{ c.function.arguments | tojson }}"
        ),
        each=refusal("m.role == 'tool' and (not m.tool_call_id or m.tool_call_id | length != 9)", "nine"),
    ),
    "results without a call": template(
        before="{% set ns = namespace(calls=false) %}",
        each="{% if m.role != 'tool' %}{% set ns.calls = m.tool_calls is defined %}{% endif %}"
        + refusal("m.role == 'tool' and not ns.calls", "no call before"),
    ),
    "results": template(each=refusal("m.role == 'tool'", "unknown role")),
    "null content": template(each=refusal("'x' in m.content", "x")),
    "null is written as None": template(
        content="{% if m.content is none %}None{% else %}" + CONTENT + "{% endif %}"
    ),
    "calls beside content": template(calls="{% if m.content is none %}" + CALLS + "{% endif %}"),
    "reasoning beside content and calls": template(
        each=refusal(f"{_IS_CALL} and m.content and m.thinking", "both")
    ),
    "arguments that are no object": template(calls=_EACH_CALL.replace("BODY", _KEYS)),
    "arguments as objects": template(
        calls=_EACH_CALL.replace("BODY", "{{ '(' + c.function.arguments + ')' }}")
    ),
    "calls without an id": template(calls=_EACH_CALL.replace("BODY", "{{ '#' + c.id + c.type }}" + _KEYS)),
    "parts": template(content="{{ m.content + '' }}"),
    "parts of all but users": template(
        content="{% if m.role == 'user' %}" + CONTENT + "{% else %}{{ m.content + '' }}{% endif %}"
    ),
    "text": template(content="{% for p in m.content or [] %}{{ p['text'] + '' }}{% endfor %}"),
    "tools without a description": template(
        tools="{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}"
    ),
    "tools without parameters": template(
        tools="{% for t in tools or [] %}<tool>{{ t.function.name ~ t.function.description }}"
        "{% for k, v in t.function.parameters.properties.items() %}{{ k }}{% endfor %}{% endfor %}"
    ),
    "parameters without a description": template(
        tools="{% for t in tools or [] %}<tool>{{ t.function.name + t.function.description }}"
        "{% for k, v in t.function.parameters.properties.items() %}{{ k + v.description }}{% endfor %}"
        "{% endfor %}"
    ),
    "parameters of several types": template(
        tools="{% macro show(s) %}{% if s.type in ('string', 'object') %}s{% elif s.type is iterable %}"
        "{% for t in s.type %}{{ show({'type': t}) }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for t in tools or [] %}<tool>{{ t.function.name ~ t.function.description }}"
        "{% for v in t.function.parameters.properties.values() %}{{ show(v) }}{% endfor %}{% endfor %}"
    ),
    "parameters that are objects": template(
        tools="{% for t in tools or [] %}<tool>{{ t.function.name ~ t.function.description }}"
        "{% for v in t.function.parameters.properties.values() if v.type == 'object' %}"
        "{{ v.additionalProperties.type }}{% endfor %}{% endfor %}"
    ),
    "no tools": template(tools="{% for t in tools %}<tool>{{ t.function | tojson }}{% endfor %}"),
    "reasoning unless named reasoning": template(reasoning=REASONING.replace("thinking", "reasoning")),
    "reasoning unless named reasoning_content": template(
        reasoning=REASONING.replace("thinking", "reasoning_content")
    ),
}


class Conversation(NamedTuple):
    """What a client sends, and the texts of it that a prompt must have."""

    messages: list[dict[str, Any]]
    texts: str
    tools: list[dict[str, Any]] | None = None


def call(arguments, call_id="call_81f1a88f063d", name="horloge"):
    """Return a call as clients send it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(**members):
    """Return the tool `horloge`."""
    return [{"type": "function", "function": {"name": "horloge", **members}}]


def parts(*texts):
    """Return content in parts."""
    return [{"type": "text", "text": text} for text in texts]


USER = {"role": "user", "content": "Uno"}
NEXT = {"role": "user", "content": "Duo"}
ANSWER = {"role": "assistant", "content": "Ans"}
SYSTEM = {"role": "system", "content": "Sys"}
LATE = {"role": "system", "content": "Late"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call('{"k": "Arg"}')]}
RESULT = {"role": "tool", "tool_call_id": "call_81f1a88f063d", "content": "Res"}
TWO = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call('{"k": "Arg"}'), call('{"k": "Brg"}', "toolu_01")],
}
OTHER = {"role": "tool", "tool_call_id": "toolu_01", "content": "Sec"}
UNNAMED = [{name: value for name, value in call('{"k": "Arg"}', None).items() if name != "type"}]
TOOL = tool(description="Tells", parameters={"type": "object", "properties": {"k": {"type": "string"}}})


def calls_and_results(*arguments):
    """Return a question, an answer with a call for each of these arguments, and their results."""
    calls = [call(one, f"call_{at}") for at, one in enumerate(arguments)]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "Res"} for one in calls]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


CONVERSATIONS = {
    "question": Conversation([USER], "Uno"),
    "turns": Conversation([SYSTEM, USER, ANSWER, NEXT], "Sys Uno Ans Duo"),
    "system only": Conversation([SYSTEM], "Sys"),
    "system only with tools": Conversation([SYSTEM], "Sys horloge", TOOL),
    "system twice": Conversation([SYSTEM, LATE, USER], "Sys Late Uno"),
    "system later": Conversation([SYSTEM, USER, ANSWER, LATE, NEXT], "Sys Uno Ans Late Duo"),
    "system at the end": Conversation([USER, LATE], "Uno Late"),
    "system and tools": Conversation([SYSTEM, USER], "Sys Uno horloge", TOOL),
    "system in parts": Conversation(
        [{"role": "system", "content": parts("Sys", "Tem")}, USER], "Sys Tem Uno"
    ),
    "answer first": Conversation([ANSWER, USER], "Ans Uno"),
    "answer only": Conversation([ANSWER], "Ans"),
    "users in a row": Conversation([USER, NEXT], "Uno Duo"),
    "answers in a row": Conversation(
        [USER, ANSWER, {"role": "assistant", "content": "Bns"}, NEXT], "Ans Bns"
    ),
    "parts in a row": Conversation(
        [USER, {"role": "user", "content": parts("Par", "Tis")}, ANSWER], "Uno Par Tis Ans"
    ),
    "empty answer": Conversation([USER, {"role": "assistant", "content": ""}, NEXT], "Uno Duo"),
    "null answer": Conversation([USER, {"role": "assistant", "content": None}, NEXT], "Uno Duo"),
    "empty list of calls": Conversation([USER, {**ANSWER, "tool_calls": []}, NEXT], "Uno Ans Duo"),
    "null calls": Conversation([USER, {**ANSWER, "tool_calls": None}, NEXT], "Uno Ans Duo"),
    "null names": Conversation([{**USER, "name": None}, {**ANSWER, "reasoning": None}, NEXT], "Uno Ans Duo"),
    "call and result": Conversation([USER, CALLING, RESULT], "Uno Arg Res", TOOL),
    "call without content": Conversation([USER, {**CALLING, "content": ""}, RESULT], "Uno Arg Res", TOOL),
    "call and reasoning": Conversation(
        [USER, {**CALLING, "reasoning_content": "Why"}, RESULT], "Arg Why Res", TOOL
    ),
    "call, text and reasoning": Conversation(
        [USER, {**CALLING, "content": "Ans", "reasoning": "Why"}, RESULT], "Uno Arg Res", TOOL
    ),
    "reasoning named thinking": Conversation(
        [USER, {**CALLING, "thinking": "Why"}, RESULT], "Arg Why Res", TOOL
    ),
    "two calls": Conversation([USER, TWO, RESULT, OTHER], "Arg Brg Res Sec", TOOL),
    "two calls with results in another order": Conversation(
        [USER, TWO, OTHER, RESULT], "Arg Brg Res Sec", TOOL
    ),
    "two calls with a result": Conversation([USER, TWO, OTHER, NEXT], "Arg Brg Sec Duo", TOOL),
    "two calls in two steps": Conversation(
        [USER, CALLING, RESULT, {**CALLING, "tool_calls": TWO["tool_calls"][1:]}, OTHER],
        "Arg Res Brg Sec",
        TOOL,
    ),
    "result in parts": Conversation(
        [USER, CALLING, {**RESULT, "content": parts("Res", "Ult")}], "Arg Res Ult", TOOL
    ),
    "answer after a result": Conversation([USER, CALLING, RESULT, ANSWER, NEXT], "Arg Res Ans Duo", TOOL),
    "user interrupts a call": Conversation([USER, CALLING, NEXT], "Uno Arg Duo", TOOL),
    "user interrupts after a result": Conversation([USER, CALLING, RESULT, NEXT], "Arg Res Duo", TOOL),
    "user before the result": Conversation([USER, CALLING, NEXT, RESULT], "Arg Duo Res", TOOL),
    "result without a call": Conversation([USER, RESULT, NEXT], "Uno Res Duo", TOOL),
    "result first": Conversation([RESULT, NEXT], "Res Duo", TOOL),
    "results between answers": Conversation([USER, ANSWER, RESULT, ANSWER, NEXT], "Ans Res Duo", TOOL),
    "result of another call": Conversation([USER, CALLING, OTHER, RESULT], "Arg Sec Res", TOOL),
    "no ids": Conversation(
        [USER, {**CALLING, "tool_calls": UNNAMED}, {**RESULT, "tool_call_id": None}], "Arg Res", TOOL
    ),
    "calls without tools": Conversation([USER, CALLING, RESULT], "Uno Arg Res"),
    "empty arguments": Conversation(calls_and_results("", None, "{}", " "), "Uno horloge", TOOL),
    "truncated arguments": Conversation(calls_and_results('{"k": "Arg'), "Arg", TOOL),
    "arguments that are no object": Conversation(
        calls_and_results('["Arg"]', '"Brg"', "null"), "Arg Brg", TOOL
    ),
    "arguments as an object": Conversation(calls_and_results({"k": "Arg"}), "Arg", TOOL),
    "arguments encoded twice": Conversation(calls_and_results('"{\\"k\\": \\"Arg\\"}"'), "Arg", TOOL),
    "tool with a name only": Conversation([USER], "Uno horloge", tool()),
    "tool without parameters": Conversation([USER], "horloge Tells", tool(description="Tells")),
    "tool without a description": Conversation(
        [USER], "horloge", tool(parameters=TOOL[0]["function"]["parameters"])
    ),
    "tool with empty parameters": Conversation([USER], "horloge", tool(parameters={})),
    "tool with an empty object": Conversation([USER], "horloge", tool(parameters={"type": "object"})),
    "parameters that may be null": Conversation(
        [USER],
        "Uno horloge",
        tool(
            description="Tells",
            parameters={
                "type": "object",
                "properties": {
                    "k": {"type": ["string", "null"]},
                    "l": {"type": "null"},
                    "m": {"type": "object"},
                },
            },
        ),
    ),
    "parameters of any type": Conversation(
        [USER], "horloge", tool(parameters={"type": "object", "properties": {"k": {}, "l": {"enum": [1]}}})
    ),
}
