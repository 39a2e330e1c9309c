"""Answers and errors of Ollama's routes: one JSON object, or one in each line of a stream."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from fairlead.base.config import DialectName
from fairlead.base.errors import FairleadError, NodeRefused
from fairlead.base.job import Delta
from fairlead.base.reported import decoded
from fairlead.dialects.answer_events import AnswerEnd, AnswerEvent, AnswerEvents, CallEnd, TokenUsage
from fairlead.dialects.dialect import COMMENT_INTERVAL_S, REQUEST_ID_HEADERS, AnswerContext, AnswerTimes
from fairlead.dialects.ollama.shapes import (
    OllamaAnswerMessage,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaError,
    OllamaGeneratedCall,
    OllamaStatistics,
    OllamaText,
)
from fairlead.dialects.openai.common import call_id, encode, full_message
from fairlead.dialects.openai.logprobs import chat_logprobs
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning
from fairlead.router.dispatch.estimates import WaitEstimate

LINES = "application/x-ndjson"

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class EmptyParts:
    """`WaitingEvents` as parts of the answer without content. `chat`: the answer is a message.

    Each line of a stream must be such an object: Ollama's clients parse every line, also an empty one.
    """

    interval_s = COMMENT_INTERVAL_S

    def __init__(self, *, chat: bool) -> None:
        self._is_chat = chat

    def write(self, waiting: WaitEstimate | None, model: str) -> bytes:  # noqa: ARG002  # of the interface
        """Return the event for now, once every `interval_s`; `waiting` is None if the job is not queued."""
        return encode(answer_of({}, model=model, chat=self._is_chat)) + b"\n"

    def end(self) -> bytes:
        """Return the end of these events when the answer begins."""
        return b""


class OllamaErrors:
    """Writes errors as Ollama does: an object with only a message, also as the last line of a stream."""

    name: ClassVar[DialectName] = "ollama"
    request_id_headers: ClassVar[tuple[str, ...]] = REQUEST_ID_HEADERS

    def error_body(self, error: FairleadError) -> bytes:
        """Return the body of an error response."""
        return encode(OllamaError(full_message(error)))

    def error_event(self, error: FairleadError) -> bytes:
        """Return the line of an error that ends a stream. Another server's message is kept."""
        body = decoded(_decode_object, error.body) if isinstance(error, NodeRefused) else None
        message = body.get("error") if body is not None else None
        return (self.error_body(error) if message is None else encode({"error": message})) + b"\n"


def timestamp() -> str:
    """Return the current time as Ollama writes times."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def statistics(context: AnswerContext, usage: TokenUsage) -> dict[str, int]:
    """Return the token counts, and the durations in nanoseconds.

    `load_duration` is the wait for a seat, in which the model is loaded if it has to be.
    """
    times = context.times or AnswerTimes()
    ended_ns = time.perf_counter_ns()
    return {
        "total_duration": ended_ns - times.requested_ns,
        "load_duration": times.waited_ns,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": max(0, times.begun_ns - times.requested_ns - times.waited_ns),
        "eval_count": usage.completion_tokens,
        "eval_duration": ended_ns - times.begun_ns,
    }


class OllamaAnswer:
    """The writer of one answer, as lines or as a whole. `chat`: it is a message, not only a text."""

    def __init__(self, context: AnswerContext, *, chat: bool) -> None:
        self._context = context
        self._is_chat = chat
        self._events = AnswerEvents(context.job)
        self._errors = OllamaErrors()
        self._call: tuple[str, list[str]] = ("", [])
        self._end: AnswerEnd | None = None

    # Lines -------------------------------------------------------------------------------------------

    def write(self, deltas: list[Delta]) -> bytes:
        """See `StreamWriter`. A tool call is one line, when it is complete."""
        created_at = timestamp()
        lines = []
        for delta in deltas:
            parts = list(filter(None, map(self._part, self._events.of([delta]))))
            if delta.logprobs:
                parts = parts or [{}]
                parts[0]["logprobs"] = self._logprobs([delta])
            lines += [encode(self._answer(part, created_at=created_at)) for part in parts]
        return b"\n".join([*lines, b""])

    def end(self) -> bytes:
        """See `StreamWriter`. The last line comes here, as token counts may follow the last delta."""
        return encode(self._answer(self._ending())) + b"\n"

    def fail(self, error: FairleadError) -> bytes:
        """Return the events that end an incomplete answer, of which nothing may have been written yet."""
        return self._errors.error_event(error)

    def skip_beginnings(self) -> None:
        """See `AnswerWriter`: an answer has no beginning."""

    # The whole ---------------------------------------------------------------------------------------

    def whole(self, deltas: list[Delta]) -> bytes:
        """Return the answer as one object."""
        parts = list(filter(None, map(self._part, self._events.of(deltas))))
        merged: dict[str, Any] = {}
        for part in parts:
            for name, value in part.items():
                merged[name] = merged[name] + value if name in merged else value
        if any(delta.logprobs for delta in deltas):
            merged["logprobs"] = self._logprobs(deltas)
        return encode(self._answer(merged | self._ending()))

    # Members -----------------------------------------------------------------------------------------

    def _answer(self, part: dict[str, Any], created_at: str | None = None) -> OllamaStatistics:
        return answer_of(part, model=self._context.job.model, chat=self._is_chat, created_at=created_at)

    def _part(self, event: AnswerEvent) -> dict[str, Any] | None:
        """Return the part of a message for an event; None if there is nothing to show yet."""
        match event:
            case Reasoning(text):
                return {"thinking": text}
            case Content(text):
                return {"content": text}
            case CallBegin(_, name):
                self._call = (name, [])
            case CallArguments(_, text):
                self._call[1].append(text)
            case CallEnd(number):
                return self._finish_call(number)
            case AnswerEnd():
                self._end = event
        return None

    def _finish_call(self, number: int) -> dict[str, Any] | None:
        """Return the call; None if its arguments are cut, as this dialect only has whole ones."""
        name, pieces = self._call
        text = "".join(pieces).strip() or "{}"
        if decoded(_decode_object, text.encode()) is None:
            return None
        # As the model wrote them, but in one line.
        arguments: Any = msgspec.Raw(msgspec.json.format(text.encode(), indent=-1))
        function = OllamaCalledFunction(number, name, arguments)
        return {"tool_calls": [OllamaGeneratedCall(call_id(self._context, 0, number), function)]}

    def _logprobs(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        tokens = [token for delta in deltas for token in delta.logprobs]
        listed: list[dict[str, Any]] = chat_logprobs(self._context.own_model.tokenizer, tokens)["content"]
        return listed

    def _ending(self) -> dict[str, Any]:
        is_cut = self._end is not None and self._end.finish_reason == "length"
        usage = statistics(self._context, self._events.usage)
        return {"done": True, "done_reason": "length" if is_cut else "stop", **usage}


def answer_of(
    part: dict[str, Any], *, model: str, chat: bool, created_at: str | None = None
) -> OllamaStatistics:
    """Return an answer, or a line of one.

    part: Its members. Those of a message are beside the others.
    model: The model that answers.
    chat: It has a message, not only a text.
    created_at: Its time; None: now.
    """
    members = {"model": model, "created_at": created_at or timestamp(), "done": False, **part}
    if not chat:
        return OllamaText(response=members.pop("content", ""), **members)
    parts = {name: members.pop(name) for name in ("content", "thinking", "tool_calls") if name in members}
    return OllamaChatAnswer(message=OllamaAnswerMessage("assistant", **parts), **members)
