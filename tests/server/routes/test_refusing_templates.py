"""Conversations that a chat template refuses in the form of the API are answered, in each dialect."""

import json

import pytest

from language.text.limited_templates import refusal
from server.routes.conftest import client_of, small_model

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name + ': ' + t.function.description }}</tool>{% endfor %}"
    "{% for m in messages %}"
    + refusal("m.role == 'system'", "System role not supported")
    + refusal("m.tool_calls is defined and m.tool_calls | length != 1", "only single tool-calls at once")
    + refusal("m.role == 'tool' and m.tool_call_id | length != 9", "nine letters")
    + refusal(
        "m.role == 'assistant' and m.tool_calls is not defined and "
        "messages[loop.index0 - 1].role == 'assistant'",
        "turns",
    )
    + "<|{{ m.role }}|>{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = (
    "<tool>now: </tool><|user|>Be brief.\n\nWhen?<|assistant|>(Why)"
    '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|tool|>12:00'
    '<|assistant|><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|tool|>13:00'
    "<|assistant|>At noon.<|user|>Sure?<|assistant|>"
)
PARAMETERS = {"type": "object", "properties": {}}
IDS = ("call_81f1a88f063d", "toolu_01A09q90qw90lq917835lq9")
ARGUMENTS = ({"zone": "UTC"}, {})
CALLS = [
    {"id": call_id, "type": "function", "function": {"name": "now", "arguments": json.dumps(arguments)}}
    for call_id, arguments in zip(IDS, ARGUMENTS, strict=True)
]
USER, LAST = {"role": "user", "content": "When?"}, {"role": "user", "content": "Sure?"}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "At noon."}
CHAT = [
    *(SYSTEM, USER),
    {"role": "assistant", "content": None, "thinking": "Why", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": IDS[0], "content": "12:00"},
    {"role": "tool", "tool_call_id": IDS[1], "content": "13:00"},
    *({**ANSWER, "tool_calls": []}, LAST),
]
TOOL = {"type": "function", "function": {"name": "now"}}
BODIES = {
    "/v1/chat/completions": {"messages": CHAT, "tools": [TOOL]},
    "/v1/responses": {
        "instructions": SYSTEM["content"],
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Why"}]},
            *(
                {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": "now",
                    "arguments": call["function"]["arguments"],
                }
                for call in CALLS
            ),
            {"type": "function_call_output", "call_id": IDS[1], "output": "13:00"},
            {"type": "function_call_output", "call_id": IDS[0], "output": "12:00"},
            *(ANSWER, LAST),
        ],
        "tools": [{"type": "function", "name": "now"}],
    },
    "/v1/messages": {
        "system": SYSTEM["content"],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Why"},
                    *(
                        {"type": "tool_use", "id": call_id, "name": "now", "input": arguments}
                        for call_id, arguments in zip(IDS, ARGUMENTS, strict=True)
                    ),
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call_id, "content": content}
                    for call_id, content in zip(IDS, ("12:00", "13:00"), strict=True)
                ],
            },
            *(ANSWER, LAST),
        ],
        "tools": [{"name": "now", "input_schema": PARAMETERS}],
        "max_tokens": 5,
    },
    "/api/chat": {
        "messages": [
            *(SYSTEM, USER),
            {
                "role": "assistant",
                "content": "",
                "thinking": "Why",
                "tool_calls": [{"function": {"name": "now", "arguments": one}} for one in ARGUMENTS],
            },
            *({"role": "tool", "tool_name": "now", "content": text} for text in ("12:00", "13:00")),
            *(ANSWER, LAST),
        ],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("refusing"), TEMPLATE)


async def prompt_of(model, path, body):
    client = client_of(model)
    reply = await client.post(path, {"model": "small", **body})
    assert reply.status == 200, reply.body
    return model.tokenizer.decode(client.gateway.job.prompts[0])


@pytest.mark.parametrize("path", BODIES)
async def test_conversation_is_written_as_the_template_takes_it_in_each_dialect(refusing, path):
    assert await prompt_of(refusing, path, BODIES[path]) == PROMPT


async def test_tools_that_the_template_ignores_are_explained_in_the_first_user_message(tmp_path):
    source = refusal("messages[0].role == 'system'", "no system")
    model = small_model(
        tmp_path, source + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    prompt = await prompt_of(model, "/v1/chat/completions", {"messages": [USER], "tools": [TOOL]})
    assert prompt.startswith("<|user|>You can call functions.")
    assert '{"type": "function", "function": {"name": "now"}}' in prompt
    assert prompt.endswith("</tool_response>.\n\nWhen?")


ASSISTANT = {"role": "assistant"}
OLDER = {"name": "now", "arguments": '{"zone": "UTC"}'}
WRITTEN = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{**ASSISTANT, "refusal": "No."}], "<|assistant|>No."),
        ([{**ASSISTANT, "content": "Yes.", "refusal": None, "function_call": None}], "<|assistant|>Yes."),
        ([{**ASSISTANT, "content": [{"type": "refusal", "refusal": "No."}]}], "<|assistant|>No."),
        (
            [{**ASSISTANT, "function_call": OLDER}, {"role": "function", "name": "now", "content": "12:00"}],
            f"<|assistant|>{WRITTEN}<|tool|>12:00",
        ),
        (
            [
                {**ASSISTANT, "tool_calls": [{"id": None, "type": "function", "function": OLDER}]},
                {"role": "tool", "tool_call_id": None, "content": "12:00"},
            ],
            f"<|assistant|>{WRITTEN}<|tool|>12:00",
        ),
        (
            [
                {**ASSISTANT, "tool_calls": [{"id": "a", "function": {"name": "now", "arguments": None}}]},
                {"role": "tool", "tool_call_id": "a", "content": None},
            ],
            f"<|assistant|>{WRITTEN.replace(json.dumps({'zone': 'UTC'}), '{}')}<|tool|>",
        ),
    ],
)
async def test_messages_as_openais_types_allow_them(refusing, messages, expected):
    prompt = await prompt_of(refusing, "/v1/chat/completions", {"messages": [USER, *messages, LAST]})
    assert prompt == f"<|user|>When?{expected}<|user|>Sure?<|assistant|>"


async def test_refusals_of_responses_are_text(refusing):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    prompt = await prompt_of(refusing, "/v1/responses", {"input": [USER, refused, LAST]})
    assert prompt == "<|user|>When?<|assistant|>No.<|user|>Sure?<|assistant|>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER, ASSISTANT]}, "messages[1].content[0].refusal"),
        ("/v1/responses", {"input": [USER, {"role": "assistant"}]}, "input[1].content[0].refusal"),
    ],
)
async def test_refusal_without_text_is_refused_by_its_path(refusing, path, body, param):
    *before, last = next(value for value in body.values())
    reply = await client_of(refusing).post(
        path, {next(iter(body)): [*before, {**last, "content": [{"type": "refusal"}]}]}
    )
    assert (reply.status, reply.error["param"]) == (400, param)
