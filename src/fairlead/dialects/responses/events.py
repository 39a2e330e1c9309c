"""Answers in OpenAI's Responses API: the response object, and the events of its stream.

An answer is a list of items: reasoning, messages and function calls. In a stream they come one at a time, and
the object of the last event has all of them.
"""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from msgspec import UNSET

from fairlead.base.errors import FairleadError
from fairlead.base.formats.server_sent_events import encode_event
from fairlead.base.job import Delta, TokenLogprob
from fairlead.dialects.answer_events import AnswerEnd, AnswerEvent, AnswerEvents, CallEnd, TokenUsage
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.openai.common import call_id, encode, full_message
from fairlead.dialects.openai.logprobs import chat_logprobs
from fairlead.dialects.responses.output import OpenItem
from fairlead.dialects.responses.relayed import RelayedBeginning
from fairlead.dialects.responses.shapes import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning


class ResponseOptions(NamedTuple):
    """What writers of responses need of a request.

    `echo`: the members of the response object that repeat it. `namespaces`: the namespace and the name of
    each function of a namespace, by its name in the prompt.
    """

    echo: dict[str, Any]
    namespaces: Mapping[str, tuple[str, str | None]] = MappingProxyType({})


SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""The parameters of sampling that a response repeats, or has from the model's defaults."""


def response_object(
    context: AnswerContext,
    status: ResponseStatus,
    *,
    output: Sequence[OutputItem] = (),
    usage: TokenUsage | None = None,
    error: FairleadError | None = None,
    completed_at: int | None = None,
    response_id: str | None = None,
) -> ResponseObject:
    """Return the response object. Pure.

    context: Of its answer.
    status: Whether it is complete.
    output: Its items so far.
    usage: Its token counts; None: it has not begun.
    error: Why it failed; None: it did not.
    completed_at: When its answer was complete, in seconds since 1970; None: it is not.
    response_id: The id of another server's response that begins the answer; None: the job's id.
    """
    job = context.job
    sampling = {name: getattr(job.sampling, name) for name in SAMPLING}
    return ResponseObject(
        id=response_id or job.id,
        object="response",
        created_at=context.created,
        completed_at=completed_at,
        status=status,
        error=None if error is None else _fault(error),
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        model=job.model,
        output=list(output),
        usage=None if usage is None else _usage(usage),
        **(sampling | context.options.echo),
    )


def _usage(usage: TokenUsage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens, 0),
        usage.completion_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def _fault(error: FairleadError) -> ResponseFault:
    """Return an error as a member of a response. OpenAI's types allow few codes, so `type` has ours."""
    code = "server_error"
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status == 400:
        code = "invalid_prompt"
    return ResponseFault(code, full_message(error), error.param, error.code)


class ResponseEvents:
    """A writer of deltas as typed events. One object per answer, which also makes the response object."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._answer = AnswerEvents(context.job)
        self._has_logprobs = context.job.sampling.logprobs is not None and context.model is not None
        self._logprobs: list[TokenLogprob] = []  # of tokens with text that was not written yet
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._sequence = 0
        self._relayed = RelayedBeginning()
        self._has_begun = self._is_queued = self._is_cut = self._has_ended = False

    def response(self) -> ResponseObject:
        """Return the response object of a complete answer."""
        status: ResponseStatus = "incomplete" if self._is_cut else "completed"
        completed_at = None if self._is_cut else int(time.time())
        return self._object(status, self._output, completed_at=completed_at)

    def queue(self) -> bytes:
        """Return the first events of a response that is created before its answer begins."""
        self._is_queued = True
        response = response_object(self._context, "queued")
        created = self._event("response.created", response=response)
        return created + self._event("response.queued", response=response)

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""
        events = [self._beginning()]
        for delta in deltas:
            if self._has_logprobs:
                self._logprobs += delta.logprobs[delta.reasoning_tokens :]
            events += [self._write(event) for event in self._answer.of((delta,))]
        return b"".join(events)

    def end(self) -> bytes:
        """Return the events that end a complete answer; empty if it has ended already."""
        if self._has_ended:
            return b""
        self._has_ended = True
        response = self.response()
        return self._beginning() + self._event(f"response.{response.status}", response=response)

    def fail(self, error: FairleadError, status: Literal["failed", "cancelled"] = "failed") -> bytes:
        """See `StreamWriter`. The response keeps what was written. OpenAI has no event for cancelled ones."""
        self._has_ended = True
        beginning = self._beginning()
        output = [*self._output, self._open.end("incomplete")] if self._open is not None else self._output
        response = self._object(status, output, error=error)
        return beginning + self._event("response.failed", response=response)

    def follow(self, delta: Delta) -> None:
        """Read a piece of another server, which the client has received."""
        self._answer.of((Delta(delta.index, relayed_tokens=delta.relayed_tokens),))
        for events in delta.raw:
            self._relayed.read(events)

    def skip_beginnings(self) -> None:
        """See `AnswerWriter`. What follows has the ids of the other server's events."""
        self._has_begun = True
        relayed = self._relayed
        self._sequence, self._output = relayed.events, list(relayed.output)
        self._open = None
        if relayed.message is not None:
            item = MessageItem(relayed.message.get("id", ""), "in_progress", "assistant", [])
            self._open = OpenItem(len(self._output), item)
            self._open.pieces += relayed.texts

    def _object(self, status: ResponseStatus, output: list[OutputItem], **more: Any) -> ResponseObject:
        response_id = self._relayed.response_id
        usage = self._answer.usage
        return response_object(
            self._context, status, output=output, usage=usage, response_id=response_id, **more
        )

    # Events --------------------------------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> bytes:
        data = encode({"type": kind, **members, "sequence_number": self._sequence})
        self._sequence += 1
        return encode_event(data, name=kind)

    def _beginning(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = response_object(self._context, "in_progress")
        created = b"" if self._is_queued else self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _write(self, event: AnswerEvent) -> bytes:
        match event:
            case Content(text):
                return self._add_text(MessageItem, text)
            case Reasoning(text):
                return self._add_text(ReasoningItem, text)
            case CallBegin(number, name):
                namespace, own = self._context.options.namespaces.get(name, (None, name))
                closed = self._close("completed")
                item_id, called = self._item_id("fc"), call_id(self._context, 0, number)
                space = UNSET if namespace is None else namespace
                item = FunctionCallItem(item_id, "in_progress", called, own, "", space)
                return closed + self._begin(item)
            case CallArguments(_, text):
                assert self._open is not None
                return self._delta(self._open, text)
            case CallEnd():
                return b""  # the next event ends it: only the end of the answer shows if it was cut
            case AnswerEnd(reason):
                return self._finish(is_cut=reason == "length")

    def _add_text(self, kind: type[ReasoningItem | MessageItem], text: str) -> bytes:
        begin = b""
        if self._open is None or not isinstance(self._open.item, kind):
            begin = self._begin_text(kind)
        assert self._open is not None
        return begin + self._delta(self._open, text)

    def _begin_text(self, kind: type[ReasoningItem | MessageItem]) -> bytes:
        closed = self._close("completed")
        item: OutputItem
        if kind is ReasoningItem:
            item = ReasoningItem(self._item_id("rs"), "in_progress", [], [])
        else:
            item = MessageItem(self._item_id("msg"), "in_progress", "assistant", [])
        return closed + self._begin(item)

    def _begin(self, item: OutputItem) -> bytes:
        self._open = OpenItem(len(self._output), item)
        added = self._event("response.output_item.added", output_index=self._open.index, item=item)
        if isinstance(item, FunctionCallItem):
            return added
        part = self._open.part("")
        return added + self._event("response.content_part.added", **self._open.place, part=part)

    def _item_id(self, prefix: Literal["rs", "msg", "fc"]) -> str:
        """Return the id of the next item: the same whenever the job is run again."""
        name = f"{self._context.job.id}/{len(self._output)}".encode()
        return f"{prefix}_{blake2b(name, digest_size=16).hexdigest()}"

    def _delta(self, item: OpenItem, text: str) -> bytes:
        item.pieces.append(text)
        tail = b""
        if item.is_message:
            tail = b',"logprobs":' + (encode(self._listed(item)) if self._logprobs else b"[]")
        event = item.head + encode(text) + tail + b',"sequence_number":%d}\n\n' % self._sequence
        self._sequence += 1
        return event

    def _listed(self, item: OpenItem) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of a text, which the item keeps."""
        listed: list[dict[str, Any]] = chat_logprobs(self._context.own_model.tokenizer, self._logprobs)[
            "content"
        ]
        self._logprobs = []
        item.logprobs += listed
        return listed

    def _close(self, status: ItemStatus) -> bytes:
        """Return the events that end the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        events = self._delta(item, "") if item.is_message and self._logprobs else b""
        text = "".join(item.pieces)
        if isinstance(item.item, FunctionCallItem):
            events += self._event(f"{item.kind}.done", **item.place, name=item.item.name, arguments=text)
        else:
            logprobs = {"logprobs": item.logprobs} if item.is_message else {}
            events += self._event(f"{item.kind}.done", **item.place, text=text, **logprobs)
            events += self._event("response.content_part.done", **item.place, part=item.part(text))
        ended = item.end(status)
        self._output.append(ended)
        return events + self._event("response.output_item.done", output_index=item.index, item=ended)

    def _finish(self, *, is_cut: bool) -> bytes:
        """Return the events that end the last item. An answer has a message, if an empty one, or a call."""
        self._is_cut = is_cut
        status: ItemStatus = "incomplete" if is_cut else "completed"
        is_reasoning = self._open is not None and isinstance(self._open.item, ReasoningItem)
        if self._open is None and self._output:
            return b""  # another server has written all items
        if self._open is not None and (is_cut or not is_reasoning):
            return self._close(status)
        return self._begin_text(MessageItem) + self._close(status)
