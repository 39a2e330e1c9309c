"""The hierarchy of errors. Uses no HTTP framework: attributes are hints for the response.

Every error that may be reported to a client is a `FairleadError`. Any other that escapes is a bug and becomes
a 500. Only `server/routes/errors.py` reads the hints.
"""

from typing import Any, ClassVar

QUOTED_CHARS = 100  # of a name in an error message


class FairleadError(Exception):
    """An error that is reported to a client.

    Hints: `status` (HTTP), `code` (machine-readable), `param` (the field at fault), `retry_after_s` (whole
    seconds, 1...60 except for `BudgetExceeded`), `estimated_wait_s` and `queue_position` (estimated for a
    repetition of the request now), `should_retry` (None: the client's own rule).
    """

    status: int = 500
    code: ClassVar[str] = "internal_error"
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        estimated_wait_s: int | None = None,
        queue_position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.estimated_wait_s = estimated_wait_s
        self.queue_position = queue_position


# Invalid requests ----------------------------------------------------------------------------------


class InvalidRequest(FairleadError):
    """The request is invalid, or cannot be fulfilled; `param` names the field."""

    status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt is too long, alone or together with the answer; a shorter one may be served.

    Clients then drop or summarize old messages. Some recognize the code, others the words of OpenAI's own
    messages, so both must stay:

    - LangChain (`OpenAIContextOverflowError`): the code, or `Input tokens exceed the configured limit`.
    - LiteLLM (`ContextWindowExceededError`): that phrase, or `this model's maximum context length is`.
    - opencode (compaction): the code, or `maximum context length is N tokens`.
    """

    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, tokens: int, what: str, *, param: str) -> "ContextLengthExceeded":
        """Return the error for a prompt that does not fit a context of `tokens`; `what` states its size."""
        return cls.of_context(tokens, f"a prompt must be shorter, and {what}", param=param)

    @classmethod
    def of_context(cls, tokens: int, what: str, *, param: str) -> "ContextLengthExceeded":
        """Return the error for anything that does not fit a context of `tokens`."""
        return cls(f"this model's maximum context length is {tokens} tokens; {what}", param=param)

    @classmethod
    def of_input(cls, tokens: int, what: str, *, param: str) -> "ContextLengthExceeded":
        """Return the error for a prompt of more tokens than the configuration allows."""
        return cls(f"Input tokens exceed the configured limit of {tokens} tokens; {what}", param=param)


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request continues is not kept here. The code is OpenAI's: clients recognize it."""

    code = "previous_response_not_found"


class InvalidApiKey(FairleadError):
    """There is no API key, or it is unknown."""

    status = 401
    code = "invalid_api_key"


class Forbidden(FairleadError):
    """The API key is known, but may not do this."""

    status = 403
    code = "forbidden"


class InsufficientRole(Forbidden):
    """The API key is valid, but its role is too low; the message names the role that is needed."""

    code = "insufficient_role"


class NotFound(FairleadError):
    """There is no such route or request."""

    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """No model of that name is served here."""

    code = "model_not_found"


class MethodNotAllowed(FairleadError):
    """The route exists, but not with this method. `allowed`: the methods that it has."""

    status = 405
    code = "method_not_allowed"
    allowed: tuple[str, ...] = ()


class NotServed(FairleadError):
    """Another server's route that clients know, and that this server does not have."""

    status = 501
    code = "not_served"


class BodyTooLarge(FairleadError):
    """The body exceeds `limits.bodyBytes` or `limits.bodiesBytes`; a form, `limits.uploadBytes`."""

    status = 413
    code = "body_too_large"


class UnknownCoding(FairleadError):
    """The body has a `Content-Encoding` that is not decoded here. `known`: what to use; empty: the usual."""

    status = 415
    code = "unknown_coding"
    known: tuple[str, ...] = ()


class StorageFull(FairleadError):
    """A tenant's files and results take `batches.tenantBytes` on the disk. Only deleting some helps."""

    status = 413
    code = "storage_full"


class Conflict(FairleadError):
    """The object is in use, so that it cannot be changed or removed now."""

    status = 409
    code = "conflict"


# Exhausted capacity --------------------------------------------------------------------------------


class QueueFull(FairleadError):
    """The queue already holds `queue.capacity` jobs, or the job's estimated wait is too long."""

    status = 429
    code = "queue_full"


class Displaced(FairleadError):
    """The job was removed from a full queue for a tenant with fewer queued jobs, or from an idle seat."""

    status = 429
    code = "displaced"


class NoQueue(FairleadError):
    """The job would have to be queued, and its client requested not to wait."""

    status = 429
    code = "no_queue"


class BodiesFull(FairleadError):
    """The bodies in memory reach `limits.bodiesBytes`, and this tenant has more of them than others."""

    status = 429
    code = "bodies_full"


class UploadsFull(FairleadError):
    """The forms on disk reach `limits.uploadsBytes`, and this tenant has more of them than others."""

    status = 429
    code = "uploads_full"


class RateLimited(FairleadError):
    """The API key has exhausted its limits for now."""

    status = 429
    code = "rate_limited"


class BudgetExceeded(FairleadError):
    """A budget of the key, its user or its team is spent for this day or month.

    It cannot be retried soon: `retry_after_s` is the time until the budget renews, up to a month.
    """

    status = 429
    code = "budget_exceeded"
    should_retry = False


# Cancelled requests ---------------------------------------------------------------------------------


class Cancelled(FairleadError):
    """The job was cancelled by its request id. The status is the one that nginx introduced."""

    status = 499
    code = "cancelled"
    should_retry = False


class ModelUnloaded(FairleadError):
    """The model was unloaded while the request waited, or is not loaded and the request does not load it.

    Another request loads the model.
    """

    status = 409
    code = "unloaded"


# Timeouts ------------------------------------------------------------------------------------------


class RequestTimeout(FairleadError):
    """The request ran longer than `requestTimeout`."""

    status = 408
    code = "request_timeout"
    should_retry = False


class BodyTimeout(FairleadError):
    """The client took too long to send its request."""

    status = 408
    code = "body_timeout"
    should_retry = False


class QueueTimeout(FairleadError):
    """The job was queued longer than `queue.timeout`."""

    status = 504
    code = "queue_timeout"
    should_retry = False


class StoreUnavailable(FairleadError):
    """The store of keys and usage cannot be used now. `reason` is for the log: it may name hosts."""

    status = 503
    code = "store_unavailable"

    def __init__(
        self, message: str = "the store cannot be used now", *, reason: str = "", **hints: Any
    ) -> None:
        super().__init__(message, **hints)
        self.reason = reason or message


# Failures of the server ----------------------------------------------------------------------------


class EngineFailed(FairleadError):
    """One sequence failed in the engine, for example by NaN logits; the others continue."""

    status = 500
    code = "engine_failed"


class NodeFailed(FairleadError):
    """The node failed or went down while it ran the job."""

    status = 502
    code = "node_failed"


class NodeFull(NodeFailed):
    """The node reported that it is full. The job is queued again, which does not count as a failure.

    `retry_after_s` is the time for which the node reports this, None if it names none.
    """


class NodeLimited(NodeFull):
    """The same, with the status 429: the client gets that one, not 503, if no node has room in time."""


class NodeUnsuited(NodeFailed):
    """The node refused the request because of its own key or set-up. Another node may serve it."""

    answer: FairleadError | None = None  # for the client, if no other node serves the request either

    @classmethod
    def of(cls, answer: FairleadError) -> "NodeUnsuited":
        """Return the error of an attempt that got this answer."""
        error = cls(answer.message)
        error.answer = answer
        return error


class StaleGrant(NodeFailed):
    """The node refused the job's grant: it is of an earlier dispatcher, or in use by another front.

    The job is queued again, which does not count as a failure.
    """


class NodeRefused(FairleadError):
    """The node answered that the request itself is at fault; the client gets the node's own message.

    `status` is the node's, and `body` the JSON object that it sent; empty if it sent anything else.
    """

    status = 400
    code = "refused"

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, body: bytes = b""
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.body = body


class QuotaExhausted(NodeRefused):
    """The node's account has no quota left. Its status may be 429, but waiting does not help."""

    should_retry = False


class LoadFailed(FairleadError):
    """The model could not be loaded; the message has the reason."""

    status = 502
    code = "load_failed"


class FaultyModel(LoadFailed):
    """The files or the settings of a model are invalid. Repeating the request does not help.

    `reason` is the message without the model's name: the file, the key, and what is wrong there.
    """

    should_retry = False
    reason: str = ""  # not sent to other processes

    @classmethod
    def of(cls, model: str, reason: str) -> "FaultyModel":
        """Return the error for a model."""
        error = cls(f"the model {model} cannot be loaded: {reason}", param="model")
        error.reason = reason
        return error


class LoadCancelled(LoadFailed):
    """The model was unloaded, or its configuration replaced, before it was ready."""


class ModelLoading(FairleadError):
    """The model is being loaded, and the configuration does not let jobs wait for it."""

    status = 503
    code = "model_loading"


class NoNode(FairleadError):
    """No healthy node holds the model."""

    status = 503
    code = "no_node"


class NodesFull(FairleadError):
    """All nodes that have the model reported that they are full, until the job could not wait any longer."""

    status = 503
    code = "nodes_full"


class NodesLimited(NodesFull):
    """The same, and the node answered 429."""

    status = 429


class NoOtherNode(NoNode):
    """Every node that could run the job has refused it because of its own key or set-up."""


class UploadFailed(FairleadError):
    """A form cannot be written to the disk, or not be read from there."""

    status = 503
    code = "upload_failed"


class Draining(FairleadError):
    """The server is shutting down."""

    status = 503
    code = "draining"


class NotStarted(FairleadError):
    """The application got a request although its lifespan does not run."""

    status = 503
    code = "not_started"


def printable(text: str, *, kept: str = "", blank: bool = False) -> str:
    """Return a text that cannot end a line or control a terminal.

    text: From a client, a server, a file or a model.
    kept: Characters that stay as they are, such as tabs.
    blank: Unprintable characters become spaces; else they are escaped, as in `\\x1b`.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in kept else " " if blank else ascii(letter)[1:-1]
        for letter in text
    )


def quoted(name: str) -> str:
    """Return a name from a request, quoted and shortened for an error message."""
    return repr(name if len(name) <= QUOTED_CHARS else f"{name[:QUOTED_CHARS]}…")
