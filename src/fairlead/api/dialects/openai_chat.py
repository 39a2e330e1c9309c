"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from typing import Any

import msgspec

from fairlead.api import shapes
from fairlead.api.body import BodyParser, invalid_field
from fairlead.api.dialects.dialect import AnswerContext, GenerationRequest, StreamingDialect
from fairlead.api.dialects.fields import Envelope, PositiveCount, TemplateVariables, TopLogprobs
from fairlead.api.dialects.openai import (
    Generation,
    OpenAIErrors,
    check_generation,
    completion_response,
    encode,
    identity,
    stop_strings,
)
from fairlead.api.dialects.openai_chunks import Chunks
from fairlead.api.dialects.openai_events import ChunkReader
from fairlead.api.dialects.openai_logprobs import chat_logprobs, prompt_logprobs
from fairlead.api.dialects.openai_messages import Messages, Tools, template_messages, template_tools
from fairlead.api.dialects.unserved import CHAT, capturing, refuse_unserved
from fairlead.config import Limits
from fairlead.http.server_sent_events import encode_event
from fairlead.job import Delta, Job


class ChatEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body."""

    @property
    def choices(self) -> int:
        """See `Envelope`."""
        return self.n or 1


class ChatCompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`. `max_completion_tokens` is OpenAI's newer name for `max_tokens`."""

    messages: Messages
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tool_choice: str | dict[str, Any] | None = None


_parse = BodyParser(capturing(ChatCompletionRequest, CHAT))


class ChatReasoning:
    """`ReasoningEvents` as chunks of a chat completion."""

    def write(self, job: Job, created: int, text: str) -> bytes:
        """See `ReasoningEvents`. Without a role: clients that merge deltas would have it twice."""
        choice = {"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}
        chunk = identity(job, ChatChunks.kind, created) | {"choices": [choice]}
        return encode_event(encode(chunk))


class ChatDialect(OpenAIErrors, StreamingDialect):
    """Chat completions. Their `options` are `StreamOptions`."""

    path = "/v1/chat/completions"
    body_type = ChatCompletionRequest
    answer_type = shapes.ChatCompletion
    refused_fields = CHAT
    job_prefix = "chatcmpl"
    read_envelope = BodyParser(ChatEnvelope)
    reader = ChunkReader()
    reasoning_events = ChatReasoning()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """See `Dialect`."""
        request = _parse(body, limits)
        refuse_unserved(request, CHAT)
        check_generation(request)
        if request.top_logprobs and not request.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs: true")
        if request.tool_choice not in (None, "none", "auto"):
            raise invalid_field("tool_choice", "only 'none' and 'auto' are served")
        return GenerationRequest(
            messages=template_messages(request.messages),
            tools=None if request.tool_choice == "none" else template_tools(request.tools),
            template_variables=request.chat_template_kwargs,
            sampling=request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stop=stop_strings(request),
            n=request.n or 1,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            options=request.stream_options,
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """See `Dialect`."""
        job, tokenizer = context.job, context.model.tokenizer
        has_logprobs = job.sampling.logprobs is not None
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                # Encoded for each choice: one call for all of them would hold the GIL too long.
                "logprobs": (
                    msgspec.Raw(encode(chat_logprobs(tokenizer, delta.logprobs))) if has_logprobs else None
                ),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            for delta in deltas
        ]
        response = completion_response(job, "chat.completion", context.created, choices, deltas)
        if job.sampling.prompt_logprobs is not None:
            listed = prompt_logprobs(tokenizer, deltas[0].prompt_logprobs)
            response["prompt_logprobs"] = msgspec.Raw(encode(listed))
        return encode(response)

    def stream_writer(self, context: AnswerContext) -> "ChatChunks":
        """See `StreamingDialect`."""
        return ChatChunks(context, self.error_event)


class ChatChunks(Chunks):
    """The chunks of a chat completion. The first of a choice has the role, the last an empty `delta`."""

    kind = "chat.completion.chunk"
    opening = b'"delta":{"content":'
    closing = b"}"

    def _beginning(self, delta: Delta) -> bytes:
        return self._head + b'{"index":%d,"delta":{"role":"assistant","content":""' % delta.index + self._tail

    def _last(self, delta: Delta) -> bytes:
        content = b""
        if delta.text or delta.logprobs:
            before = Delta(delta.index, delta.text, logprobs=delta.logprobs)
            content = self._heads[delta.index] + encode(delta.text) + self._detailed_tail(before)
        end = Delta(delta.index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return content + self._head + b'{"index":%d,"delta":{' % delta.index + self._detailed_tail(end)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs)
