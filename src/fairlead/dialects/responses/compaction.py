"""OpenAI's `POST /v1/responses/compact`: a conversation as its user's messages, and a summary of the rest.

The model writes the summary. Its item is opaque for clients, which send it back as it is; it is not secret,
so no server needs a key to read it.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from fairlead.base.config import Limits
from fairlead.base.job import Delta
from fairlead.dialects.body import BodyParser
from fairlead.dialects.dialect import AnswerContext, Dialect, GenerationRequest, check_texts
from fairlead.dialects.fields import TEXT_OR_TEXTS, describe_alternatives
from fairlead.dialects.openai.common import OpenAIErrors, encode
from fairlead.dialects.responses.events import ResponseEvents, ResponseOptions
from fairlead.dialects.responses.items import encode_summary
from fairlead.dialects.responses.responses import (
    ResponsesDialect,
    ResponsesEnvelope,
    ResponsesReader,
    ResponsesRequest,
)
from fairlead.dialects.responses.shapes import CompactedResponse, MessageItem, ResponseUsage
from fairlead.dialects.unserved import RESPONSES

SUMMARY_TOKENS = 1024
"""The most tokens of a summary, unless the request has `max_output_tokens`."""
INSTRUCTION = (
    "Summarize this conversation for yourself, so that you can go on without it: what was asked, decided, "
    "found and done, with all names and numbers that matter, and what is left to do. Write only the summary."
)


class _Options(NamedTuple):
    """`response`: as for a response. `messages`: the user's, in order."""

    response: ResponseOptions
    messages: tuple[str, ...]


class CompactionRequest(ResponsesRequest, frozen=True, kw_only=True):
    """`POST /v1/responses/compact`: the fields of `POST /v1/responses`.

    model: The model that writes the summary.
    """

    model: str


class CompactionDialect(OpenAIErrors, Dialect):
    """Compaction. `history` is as for `ResponsesDialect`."""

    name = "responses"
    path = "/v1/responses/compact"
    body_type = describe_alternatives(
        CompactionRequest, {"input": TEXT_OR_TEXTS}, {"previous_response_id": "string"}
    )
    answer_type = CompactedResponse
    refused_fields = RESPONSES
    job_prefix = "resp_"
    read_envelope = BodyParser(ResponsesEnvelope)
    reader = ResponsesReader()

    def __init__(self, *, history: Sequence[dict[str, Any]] = ()) -> None:
        self._responses = ResponsesDialect(history=history, is_stored=True)

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body: the conversation, and the instruction to summarize it."""
        request = self._responses.decode(body, limits)
        check_texts(request)
        messages = request.messages or []
        users = tuple(_text(message) for message in messages if message["role"] == "user")
        return msgspec.structs.replace(
            request,
            messages=_with_instruction(messages),
            tools=None,
            answer=None,
            drops_turns=True,
            max_tokens=request.max_tokens or SUMMARY_TOKENS,
            options=_Options(request.options, users),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response."""
        options: _Options = context.options
        events = ResponseEvents(context._replace(options=options.response))
        events.write(deltas)
        response = events.response()
        summary = "".join(
            part.text for item in response.output if isinstance(item, MessageItem) for part in item.content
        )
        job_id = context.job.id
        output: list[dict[str, Any]] = [
            {
                "id": _item_id("msg", job_id, index),
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
            for index, text in enumerate(options.messages)
        ]
        compaction = {"id": _item_id("cmp", job_id, len(output)), "type": "compaction"}
        output.append({**compaction, "encrypted_content": encode_summary(summary)})
        usage = response.usage
        assert isinstance(usage, ResponseUsage)
        return encode(CompactedResponse(job_id, "response.compaction", context.created, output, usage))


def _with_instruction(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the instruction: in the user's last one, because templates want turns."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": INSTRUCTION}]
    last = {**messages[-1], "content": f"{_text(messages[-1])}\n\n{INSTRUCTION}"}
    return [*messages[:-1], last]


def _text(message: dict[str, Any]) -> str:
    """Return the text of a user's message, which has a text or several."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _item_id(prefix: str, job_id: str, index: int) -> str:
    return f"{prefix}_{blake2b(f'{job_id}/{index}'.encode(), digest_size=16).hexdigest()}"
