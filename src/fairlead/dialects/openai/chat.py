"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from typing import Annotated, Any

from msgspec import UNSET, Meta

from fairlead.base.config import Limits
from fairlead.base.job import Delta
from fairlead.base.upstream_events import chat_readers
from fairlead.dialects import shapes
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, GenerationRequest, StreamingDialect
from fairlead.dialects.fields import MAX_INT32, Envelope, TemplateVariables, TokenLimit, TopLogprobs
from fairlead.dialects.openai.chat_reader import OpenAIChatReader
from fairlead.dialects.openai.chunks import CHAT_CHUNK, ChunkOptions, Chunks, ReasoningChunks
from fairlead.dialects.openai.common import (
    Generation,
    OpenAIErrors,
    call_id,
    check_final_message,
    check_generation,
    encode,
    encode_member,
    stop_strings,
    token_limit,
    usage_of,
)
from fairlead.dialects.openai.events import ChunkReader
from fairlead.dialects.openai.logprobs import chat_logprobs, prompt_logprobs
from fairlead.dialects.openai.messages import (
    Messages,
    Tools,
    template_messages,
    template_tools,
    template_variables,
)
from fairlead.dialects.openai.structured import ToolChoice, answer_spec
from fairlead.dialects.unserved import CHAT, capturing, refuse_unserved


class ChatEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body."""

    @property
    def choices(self) -> int:
        """The number of choices in the answer, as far as it distinguishes them."""
        return self.n or 1


class ChatCompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`.

    messages: The conversation.
    max_completion_tokens: OpenAI's newer name for `max_tokens`.
    logprobs: List the tokens of the answer with their log-probabilities.
    top_logprobs: How many of the likeliest tokens are listed beside each.
    tools: The tools that the model may call.
    chat_template_kwargs: Further variables of the chat template.
    tool_choice: Whether the model may or must call a tool, or which one it must call.
    parallel_tool_calls: An answer may have several calls, which is the default.
    reasoning_effort: How much the model reasons, as its chat template names it.
    thinking_token_budget: The most tokens of the reasoning; -1: no limit.
    add_generation_prompt: End the prompt with the beginning of an answer, which is the default.
    continue_final_message: The answer continues the last message, which it does not repeat. Then no answer
        begins, so `add_generation_prompt` must not be true.
    """

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_parse = BodyParser(capturing(ChatCompletionRequest, CHAT))


class ChatDialect(OpenAIErrors, StreamingDialect):
    """Chat completions. Their `options` are `ChunkOptions`."""

    path = "/v1/chat/completions"
    body_type = ChatCompletionRequest
    answer_type = shapes.ChatCompletion
    refused_fields = CHAT
    job_prefix = "chatcmpl"
    read_envelope = BodyParser(ChatEnvelope)
    reader = ChunkReader()
    reasoning_events = ReasoningChunks()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, CHAT)
        check_generation(request)
        if request.top_logprobs and not request.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs: true")
        check_final_message(
            add_generation_prompt=request.add_generation_prompt, continues=request.continue_final_message
        )
        constraints, within = request.constraints()
        budget = request.thinking_token_budget
        limit = token_limit("max_tokens", request.max_tokens)
        if request.max_completion_tokens is not None:
            limit = token_limit("max_completion_tokens", request.max_completion_tokens)
        return GenerationRequest(
            messages=template_messages(request.messages),
            tools=None if request.tool_choice == "none" else template_tools(request.tools),
            template_variables=template_variables(request.reasoning_effort, request.chat_template_kwargs),
            is_chat=True,
            answer=answer_spec(
                request.response_format,
                constraints,
                request.tools,
                request.tool_choice,
                parallel=request.parallel_tool_calls is not False,
                within=within,
            ),
            add_generation_prompt=request.add_generation_prompt is not False,
            continues_last=bool(request.continue_final_message),
            reasoning_tokens=None if budget == -1 else budget,
            sampling=request,
            max_tokens=limit,
            stop=stop_strings(request.stop),
            n=request.n or 1,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            options=ChunkOptions(request.stream_options, bool(request.return_token_ids)),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        job, tokenizer = context.job, context.own_model.tokenizer
        has_logprobs = job.sampling.logprobs is not None
        has_ids = _returns_ids(context)
        choices = [
            shapes.ChatChoice(
                delta.index,
                _message(context, delta),
                encode_member(chat_logprobs(tokenizer, delta.logprobs)) if has_logprobs else None,
                delta.finish_reason,
                delta.stop_reason,
                delta.token_ids if has_ids else UNSET,
            )
            for delta in deltas
        ]
        listed: Any = None
        if job.sampling.prompt_logprobs is not None:
            listed = encode_member(prompt_logprobs(tokenizer, deltas[0].prompt_logprobs))
        return encode(
            shapes.ChatCompletion(
                id=job.id,
                object="chat.completion",
                created=context.created,
                model=job.model,
                system_fingerprint=None,
                choices=choices,
                usage=usage_of(job, deltas),
                prompt_logprobs=listed,
                prompt_token_ids=encode_member(list(job.prompts[0])) if has_ids else UNSET,
            )
        )

    def stream_writer(self, context: AnswerContext) -> "ChatChunks":
        """Return the writer of a streamed response."""
        return ChatChunks(context, self.error_event)


chat_readers[ChatDialect.path] = OpenAIChatReader()


def _returns_ids(context: AnswerContext) -> bool:
    return context.options is not None and context.options.token_ids


def _message(context: AnswerContext, delta: Delta) -> shapes.AssistantText:
    """Return the message of a choice; without content if it is only a call."""
    content = None if delta.calls and not delta.text else delta.text
    calls = [
        shapes.GeneratedCall(
            call_id(context, delta.index, call.number),
            "function",
            shapes.CalledFunction(call.name or "", call.arguments),
        )
        for call in delta.calls
    ]
    return shapes.AssistantText("assistant", content, None, delta.reasoning or None, calls or UNSET)


class ChatChunks(Chunks):
    """The chunks of a chat completion. The first of a choice has the role, the last an empty `delta`."""

    kind = CHAT_CHUNK
    opening = b'"delta":{"content":'
    closing = b"}"

    def _beginning(self, delta: Delta) -> bytes:
        head = self._head + b'{"index":%d,"delta":{"role":"assistant","content":""' % delta.index
        return head + self._first_tail(delta.index)

    def _parts(self, delta: Delta) -> bytes:
        members: list[dict[str, Any]] = [{"reasoning_content": delta.reasoning}] if delta.reasoning else []
        if delta.text:
            members.append({"content": delta.text})
        for piece in delta.calls:
            index = piece.number
            if piece.name is not None:
                identified = {"index": index, "id": call_id(self._context, delta.index, index)}
                function = {"name": piece.name, "arguments": ""}
                members.append({"tool_calls": [{**identified, "type": "function", "function": function}]})
            if piece.arguments:
                function = {"arguments": piece.arguments}
                members.append({"tool_calls": [{"index": index, "function": function}]})
        head = self._head + b'{"index":%d,"delta":' % delta.index
        return b"".join([head + encode(one)[:-1] + self._tail for one in members])

    def _last(self, delta: Delta) -> bytes:
        content = b""
        if delta.text or delta.logprobs or (self._returns_ids and delta.token_ids):
            before = Delta(delta.index, delta.text, delta.token_ids, logprobs=delta.logprobs)
            content = self._heads[delta.index] + encode(delta.text) + self._detailed_tail(before)
        end = Delta(delta.index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return content + self._head + b'{"index":%d,"delta":{' % delta.index + self._detailed_tail(end)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs)
