"""From the error of another server to ours: the same for a status and for an error with the status 200."""

from http import HTTPStatus

from fairlead.answer.upstream_stream import RelayFailed
from fairlead.errors import FairleadError, NodeFull, NodeRefused
from fairlead.upstream_events import UpstreamError


def refusal_of(name: str, error: UpstreamError, *, has_begun: bool = False) -> FairleadError:
    """Return our error for an error that the server `name` has sent with the status 200.

    What it says in place of a status counts as the status would. Without that the server has failed.
    `has_begun`: in the middle of an answer, where a server that is full has failed as well.
    """
    failed = RelayFailed(f"{name} failed: {error.message}")
    if error.status is None:
        return failed
    refused = refusal(name, error.status, f"{name} answered {error.status}: {error.message}")
    return failed if has_begun and isinstance(refused, NodeFull) else refused


def refusal(
    name: str, status: int, message: str, *, shown: bytes = b"", retry_after_s: int | None = None
) -> FairleadError:
    """Return our error for a status of another server.

    name: The server.
    status: From 400 on.
    message: What it has answered.
    shown: The body for the client, if it may get the server's own.
    retry_after_s: When it may have room again, if it has said that.
    """
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return NodeFull(f"{name} is at capacity", retry_after_s=retry_after_s)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
        return RelayFailed(f"{name} rejected our API key")  # the client cannot change that
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return NodeRefused(message, status=status, body=shown)
    return RelayFailed(message)
