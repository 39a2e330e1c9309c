"""Answers of a model, written by a test and divided into their parts as a node divides them."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from fairlead.base.job import Job
from fairlead.base.messages import Output
from fairlead.language.structured.vocabulary import token_vocabulary
from fairlead.language.text.answer import ChoiceText
from fairlead.language.text.model import TextModel
from server.routes.conftest import Client, Reply, Script, Step, client_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Reasoning between tags, and calls as Hermes and Qwen write them.
HERMES = """\
{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}{% for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or "" }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}
{% endif %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
OPENED = HERMES + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
SIMPLE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
MISTRAL = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}[INST]{{ message.content or "" }}[/INST]
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{% endfor %}"""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a tool of a request."""
    function = {"name": name, "description": f"It does {name}.", "parameters": parameters or WEATHER, **more}
    return {"type": "function", "function": function}


def call(name: str, arguments: str) -> str:
    """Return a call as Hermes writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def writing(model: TextModel, *texts: str, is_cut: bool = False) -> Script:
    """Return a script in which choice i writes text i, token by token. `is_cut`: to its limit of tokens."""

    def script(job: Job) -> list[Step]:
        steps: list[Step] = []
        for index, text in enumerate(texts):
            parsing: dict[str, Any] = {}
            if job.parts is not None and model.answer_format is not None:
                parser = model.answer_format.parser(job.parts)
                parsing = {"parser": parser, "is_named": job.parts.is_named}
            choice = ChoiceText(
                model.tokenizer, job.stop, index, eos_token_ids=model.eos_token_ids, **parsing
            )
            deltas = [choice.push_token(token) for token in model.tokenizer.encode(text)]
            end = Output(0, [], finish_reason="length") if is_cut else Output(0, [0], [], "stop", 0)
            deltas.append(choice.push(end))
            steps += [[delta] for delta in deltas if delta is not None]
        return steps

    return script


def client_writing(model: TextModel, *texts: str, is_cut: bool = False, **services: Any) -> Client:
    """Return a client of a server with a model that answers with these texts."""
    return client_of(model, gateway_script=writing(model, *texts, is_cut=is_cut), **services)


def vocabulary_of(model: TextModel) -> LLTokenizer:
    """Return the model's vocabulary for `accepts`."""
    return token_vocabulary(
        model.tokenizer.token_bytes,
        vocab_size=model.tokenizer.vocab_size,
        special_ids=model.tokenizer.special_ids,
        eos_token_ids=sorted(model.eos_token_ids),
    )


def accepts(model: TextModel, vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    """Return whether a text is a whole answer that a grammar of llguidance allows."""
    matcher = LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return all(map(matcher.consume_token, model.tokenizer.encode(text))) and matcher.is_accepting()


async def refusal(client: Client, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the field and the message of a request's refusal, which is a 400 before the queue."""
    reply = await client.post(path, body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request"), reply.body
    assert reply.error["type"] == "invalid_request_error"
    assert client.gateway is not None
    assert client.gateway.jobs == []
    return reply.error["param"], reply.error["message"]


def merged(reply: Reply, index: int = 0) -> dict[str, Any]:
    """Return the message that a client makes of a stream's chunks for one choice, as OpenAI's does."""
    message: dict[str, Any] = {"finish_reason": None}
    for choice in (choice for chunk in reply.chunks for choice in chunk["choices"]):
        if choice["index"] != index:
            continue
        delta = choice["delta"]
        for name in {"role", "content", "reasoning_content"} & delta.keys():
            message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                function = {"name": piece["function"]["name"], "arguments": ""}
                calls.append({"id": piece["id"], "type": piece["type"], "function": function})
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message
