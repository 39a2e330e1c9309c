"""Answers of the pipeline as responses: their bodies, and in headers what else is known of them."""

from fairlead.dialects.unread import warning_of
from fairlead.generation.event_stream import EventStream
from fairlead.generation.job_service import AnswerNotes, WrittenAnswer
from fairlead.server.routes.request import NO_SNIFFING, Response, json_response

EVENT_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers a page of events
    **NO_SNIFFING,
}
MAX_WARNING_CHARS = 1000


def answer_response(answer: WrittenAnswer) -> Response:
    """Return the response with an answer."""
    headers = answer_headers(answer.notes)
    if isinstance(answer.body, bytes):
        return json_response(answer.body, headers=headers)
    return stream_response(answer.body, headers)


def stream_response(body: EventStream, headers: dict[str, str]) -> Response:
    """Return the streamed response; `headers` are added to those that prevent buffering."""
    return Response(body, 200, {"Content-Type": body.dialect.stream_type, **EVENT_HEADERS, **headers})


def answer_headers(notes: AnswerNotes) -> dict[str, str]:
    """Return the headers about a job's wait, if it did wait, a translated answer, and warnings."""
    headers: dict[str, str] = {}
    if notes.estimated_wait_s is not None:
        headers["X-Estimated-Wait"] = str(notes.estimated_wait_s)
    if notes.queue_position is not None:
        headers["X-Queue-Position"] = str(notes.queue_position)
    if notes.estimated_wait_p90_s is not None:
        headers["X-Estimated-Wait-P90"] = str(notes.estimated_wait_p90_s)
    if notes.translated_from is not None:
        headers["X-Fairlead-Translated"] = notes.translated_from
    if notes.warning:
        headers["X-Fairlead-Warning"] = _in_ascii(notes.warning)
    if notes.unread_fields:
        headers["Warning"] = warning_of(notes.unread_fields)
    if notes.budgets:
        headers["X-Fairlead-Budget"] = notes.budgets
    return headers


def _in_ascii(warning: str) -> str:
    """Return a warning that fits a header. Names in it are the client's, and may have any characters."""
    text = warning.encode("unicode_escape").decode("ascii")
    return text if len(text) <= MAX_WARNING_CHARS else f"{text[:MAX_WARNING_CHARS]}..."
