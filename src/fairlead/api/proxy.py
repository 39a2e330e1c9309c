"""Requests for other servers: relayed as they are, with their responses streamed back as they arrive.

Only the fields that scheduling needs are read: the model, the user, the size, and whether an answer is
repeatable. The rest of a body, and whether it is valid, is left to the server that answers it.
"""

import re
from collections.abc import Callable

import msgspec

from fairlead.answer.relay import rewritten
from fairlead.answer.reported import BYTES_A_TOKEN
from fairlead.api.answers import is_large
from fairlead.api.chunks import ChatChunks, Chunks
from fairlead.api.errors import error_event
from fairlead.api.job_service import JobService
from fairlead.api.loading import loading_progress
from fairlead.api.request import Request, Response, json_response
from fairlead.api.schemas import Addressed, Relayed
from fairlead.errors import FairleadError, InvalidRequest, quoted
from fairlead.job import Delta, Job, Relay, Sampling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"

# Routes where `stream` has no meaning, because nothing is generated.
_SILENT = frozenset({EMBEDDINGS, COUNT_TOKENS})
# The assumed length of an answer whose client sets no limit: the other server's limit is unknown.
USUAL_TOKENS = 256
_MOST_TOKENS = 2**31 - 1

_decoder = msgspec.json.Decoder(Relayed)
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\n\r]*["[]')


class Proxy:
    """The handling of relayed jobs. Every route calls `read` first, whichever server will answer."""

    def __init__(self, edge: JobService) -> None:
        self._edge = edge
        self._services = edge.services

    async def responses(self, call: Request) -> Response:
        """Handle `POST /v1/responses`."""
        return await self._answer(RESPONSES, call)

    async def messages(self, call: Request) -> Response:
        """Handle `POST /v1/messages`."""
        return await self._answer(MESSAGES, call)

    async def count_tokens(self, call: Request) -> Response:
        """Handle `POST /v1/messages/count_tokens`."""
        return await self._answer(COUNT_TOKENS, call)

    async def read(self, call: Request) -> tuple[bytes, Relayed, str]:
        """Return the body, the fields needed of any body, and the canonical name of its model.

        In a body for a selector, the model is replaced by the one that the job gets. Raises as
        `JobService.take` and `JobService.find` do.
        """
        body, wanted = await self._edge.take(call, _decoder)
        call.user = wanted.user or wanted.safety_identifier
        if wanted.model is not None and self._edge.selecting.is_selector(wanted.model):
            target = self._edge.selecting.take(call, wanted.model)
            return rewritten(body, target.name), wanted, target.model
        return body, wanted, self._edge.find(call, wanted.model)

    def beside(self, model: str, path: str, body: bytes, wanted: Addressed) -> Relay | None:
        """Return the relay of a job that our engine can run too; None if no other server may run it."""
        if not self._services.fleet.is_relayed(model):
            return None
        return Relay(path, body, bool(wanted.stream) and path not in _SILENT)

    async def pass_on(self, call: Request, path: str, body: bytes, wanted: Relayed, model: str) -> Response:
        """Relay the request to a node that has the model. Raises a `FairleadError`."""
        job = self._job(call, path, body, wanted, model)
        if job.stream:
            loading = loading_progress(self._services, job) if path == CHAT else None
            return await self._edge.stream(call, job, ProxyWriter(path), loading=loading)
        return await self.whole(call, job)

    async def stream(self, call: Request, job: Job, own: Chunks) -> Response:
        """Stream a job's answer. `own` writes what our engine generates of it."""
        writer = own if job.relay is None else ProxyWriter(job.relay.path, own)
        loading = loading_progress(self._services, job) if isinstance(own, ChatChunks) else None
        return await self._edge.stream(call, job, writer, loading=loading)

    async def whole(
        self, call: Request, job: Job, own: Callable[[list[Delta]], bytes] | None = None
    ) -> Response:
        """Run a job to its end. `own` writes an answer of our engine, in JSON."""
        answer, headers = await self._edge.whole(call, job)
        if own is not None and not answer[0].raw:
            large = is_large(answer)
            written = await self._edge.write(call, own, answer) if large else own(answer)
            return json_response(written, headers=headers)
        return json_response(b"".join(answer[0].raw), headers=headers)

    async def _answer(self, path: str, call: Request) -> Response:
        body, wanted, model = await self.read(call)
        if model in self._services.models:
            raise InvalidRequest(f"model: {quoted(model)} is not served under {path}", param="model")
        return await self.pass_on(call, path, body, wanted, model)

    def _job(self, call: Request, path: str, body: bytes, wanted: Relayed, model: str) -> Job:
        choices = _choices(path, wanted)
        most = self._services.config.limits.sequences
        if choices > most:
            raise InvalidRequest(
                f"n: {choices} answers were asked for; one request may have {most}", param="n"
            )
        return self._edge.job(
            call,
            wanted,
            model,
            kind="relay",
            sampling=_sampling(path, wanted),
            n=choices,
            relay=Relay(path, body, bool(wanted.stream) and path not in _SILENT),
            prompt_estimate=len(body) // BYTES_A_TOKEN,
        )


class ProxyWriter:
    """A `Writer` of other servers' events, which are passed on unchanged, including their end.

    After a failure, another node may go on with the answer: what our own engine generates is written by
    `own`.
    """

    def __init__(self, path: str, own: Chunks | None = None) -> None:
        self._path = path
        self._own = own
        self._is_theirs = own is None

    def write(self, deltas: list[Delta]) -> bytes:
        """See `Writer`."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.raw:
                events += delta.raw
                self._is_theirs = True
            elif self._own is not None:
                events.append(self._write_own(self._own, delta))
        return b"".join(events)

    def end(self) -> bytes:
        """See `Writer`. If another server wrote last, it has ended the answer itself."""
        return b"" if self._own is None or self._is_theirs else self._own.end()

    def error(self, error: FairleadError) -> bytes:
        """See `Writer`."""
        return error_event(error, self._path)

    def _write_own(self, own: Chunks, delta: Delta) -> bytes:
        if self._is_theirs:
            self._is_theirs = False
            own.skip_beginnings()
        return own.write([delta])


def _choices(path: str, wanted: Relayed) -> int:
    """Return the number of choices in the answer, as far as it distinguishes them."""
    if path == CHAT:
        return wanted.n or 1
    return (wanted.n or 1) * _prompts(wanted.prompt) if path == COMPLETIONS else 1


def _prompts(prompt: msgspec.Raw) -> int:
    """Return the number of prompts in that member: a list of numbers is one."""
    if _LIST_OF_PROMPTS.match(prompt) is None:
        return 1
    try:
        return len(_decode_list(prompt))
    except msgspec.MsgspecError:
        return 1


def _sampling(path: str, wanted: Relayed) -> Sampling:
    """Return what the queue and a failover use: the longest possible answer, and if it is repeatable."""
    if path in _SILENT:
        return Sampling(max_tokens=1)
    limits = (wanted.max_completion_tokens, wanted.max_tokens, wanted.max_output_tokens)
    limit = next((limit for limit in limits if limit is not None and limit > 0), USUAL_TOKENS)
    temperature = 1.0 if wanted.temperature is None else wanted.temperature
    return Sampling(max_tokens=min(limit, _MOST_TOKENS), temperature=temperature, seed=wanted.seed)
