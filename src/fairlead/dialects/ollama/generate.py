"""Ollama's generated texts: `POST /api/generate`."""

from typing import Any

from fairlead.base.config import Limits
from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, GenerationRequest, StreamingDialect
from fairlead.dialects.ollama import shapes
from fairlead.dialects.ollama.fields import (
    DOCUMENTED_GENERATE,
    GENERATE,
    OllamaEnvelope,
    OllamaRequest,
    check_served,
    parser_of,
    unread_options,
)
from fairlead.dialects.ollama.reader import LineReader
from fairlead.dialects.ollama.writer import LINES, EmptyParts, OllamaAnswer, OllamaErrors
from fairlead.dialects.openai.common import encode


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """`POST /api/generate`. Without a prompt, the model is loaded, or with a `keep_alive` of 0 unloaded.

    prompt: What is answered, as the user's message of a chat.
    system: A system message before it.
    suffix: The answer is the text between the prompt and this, for models with tokens for that.
    raw: The answer continues the prompt, without a chat.
    """

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None


_parse = parser_of(OllamaGenerateRequest, GENERATE)


class OllamaGenerateDialect(OllamaErrors, StreamingDialect):
    """Generated texts."""

    name = "ollama"
    path = "/api/generate"
    body_type = OllamaGenerateRequest
    answer_type = shapes.OllamaText
    refused_fields = DOCUMENTED_GENERATE
    stream_type = LINES
    job_prefix = "generate"
    read_envelope = BodyParser(OllamaEnvelope)
    reader = LineReader()
    waiting_events = EmptyParts(chat=False)

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        check_served(request, GENERATE)
        is_chat = not (request.raw or request.suffix)
        if request.system and not is_chat:
            raise invalid_field("system", f"cannot be combined with {'suffix' if request.suffix else 'raw'}")
        options, prompt = request.given_options, request.prompt or ""
        content: dict[str, Any] = {"prompts": (prompt,)}
        if request.suffix:
            content |= {"suffix": request.suffix, "special_tokens": "text"}
        elif is_chat:
            system = [{"role": "system", "content": request.system}] if request.system else []
            messages = [*system, {"role": "user", "content": prompt}]
            content = {"messages": messages, "template_variables": request.template_variables}
        return GenerationRequest(
            **content,
            is_chat=is_chat,
            answer=request.answer(),
            sampling=options.sampling(),
            max_tokens=options.max_tokens,
            stop=options.stop_strings,
            logprobs=request.listed_logprobs,
        )

    def error_body(self, error: FairleadError) -> bytes:
        """See `RelayDialect`. What is wrong with the messages made here is wrong with the prompt."""
        if error.status == 400 and error.param == "messages":
            return encode({"error": f"prompt: {error.message.removeprefix('messages: ')}"})
        return super().error_body(error)

    def unread(self, body: bytes) -> tuple[str, ...]:
        """Return the names of the fields and options of a decoded body that nothing reads."""
        return super().unread(body) + unread_options(body)

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        return OllamaAnswer(context, chat=False).whole(deltas)

    def stream_writer(self, context: AnswerContext) -> OllamaAnswer:
        """Return the writer of a streamed response."""
        return OllamaAnswer(context, chat=False)
