"""Probes a remote server: whether it answers, and what it reports about itself.

A server that is itself Fairlead reports its seats and load. Numbers and names are checked, because the queue
relies on the seats, and people are shown the names.
"""

from http import HTTPStatus
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
import structlog
from msgspec import Meta

from fairlead.answer.reported import decoded
from fairlead.http.client import Upstream

# Largest bodies of `/health`, and of `/v1/models` and `/running`.
HEALTH_BYTES = 64 * 1024
LISTING_BYTES = 2 * 1024 * 1024
MODELS_AT_MOST = 1000
LONGEST_NAME = 256
SEATS_AT_MOST = 4096
JOBS_AT_MOST = 1_000_000

NO_SUCH_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
THIS_SERVER = "it is this server itself"

logger = structlog.get_logger("fairlead.node")


class ProbeAnswer(NamedTuple):
    """The response to a request of a probe."""

    status: int
    body: bytes


class ReportedLoad(msgspec.Struct, frozen=True):
    """The load of a Fairlead: its seats in total, 0 if no model runs, and its jobs per seat, 0 or more."""

    seats: int
    load: float


class _Health(msgspec.Struct):
    """The response of Fairlead's `GET /health`. `instance` is different for each server and each start."""

    instance: str | None = None


class _Listed(msgspec.Struct):
    """One model of the list."""

    id: str


class _Listing(msgspec.Struct):
    """The response of `GET /v1/models`."""

    data: list[_Listed]


class _Running(msgspec.Struct):
    """One model in the response of Fairlead's `GET /running`."""

    model: str
    seats: Annotated[int, Meta(ge=0, le=SEATS_AT_MOST)]
    sequences: Annotated[int, Meta(ge=0, le=JOBS_AT_MOST)] = 0
    waiting: Annotated[int, Meta(ge=0, le=JOBS_AT_MOST)] = 0


class ServerReport(NamedTuple):
    """What a server that answers reports: the load of a Fairlead, and its models; None if it reports none."""

    load: ReportedLoad | None
    models: frozenset[str] | None


class ServerProbe:
    """Probes the server at `upstream`, which is the node `node_id`.

    `requests_models`: whether its models are requested. A server that reports `own_instance` in its
    `GET /health` is this server, by whatever address. It counts as down, because its jobs would return to us
    forever. `has_answered`: whether the latest probe got a response, even of an error.
    """

    def __init__(
        self, node_id: str, upstream: Upstream, *, requests_models: bool, own_instance: str | None
    ) -> None:
        self.is_this_server = False
        self.is_fairlead = False
        self.has_answered = False
        self._node_id = node_id
        self._upstream = upstream
        self._requests_models = requests_models
        self._own_instance = own_instance
        self._path = "/health"

    async def probe(self, *, was_up: bool) -> ServerReport | None:
        """Return the server's report; None if it is not healthy. Raises `UpstreamFailed`.

        A server that was down may be another program now, so the probe checks again whether it is a Fairlead.
        """
        self._upstream.close_stale()
        self.has_answered = False
        if not await self._is_healthy():
            return None
        load = models = None
        if self.is_fairlead or not was_up:
            load = load_of(await self._get("/running"))
        self.is_fairlead = load is not None
        if self._requests_models:
            models = models_of(await self._get("/v1/models"))
        return ServerReport(load, models)

    async def _is_healthy(self) -> bool:
        answer = await self._get(self._path)
        if answer.status in NO_SUCH_PATH:
            self._path = "/v1/models" if self._path == "/health" else "/health"
            answer = await self._get(self._path)
        instance = instance_of(answer)
        is_this_server = instance is not None and instance == self._own_instance
        if is_this_server and not self.is_this_server:
            logger.error("node refused", node=self._node_id, reason=THIS_SERVER)
        self.is_this_server = is_this_server
        return HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES and not is_this_server

    async def _get(self, path: str) -> ProbeAnswer:
        async with self._upstream.exchange("GET", path) as response:
            self.has_answered = True
            max_bytes = HEALTH_BYTES if path == "/health" else LISTING_BYTES
            return ProbeAnswer(response.head.status, await response.read_all(max_bytes))


_decode_health = msgspec.json.Decoder(_Health).decode
_decode_listing = msgspec.json.Decoder(_Listing).decode
_decode_running = msgspec.json.Decoder(list[_Running]).decode


def instance_of(answer: ProbeAnswer) -> str | None:
    """Return the instance in the response of `GET /health`; None if there is none."""
    health = decoded(_decode_health, answer.body) if answer.status == HTTPStatus.OK else None
    return None if health is None else health.instance


def models_of(answer: ProbeAnswer) -> frozenset[str] | None:
    """Return the first `MODELS_AT_MOST` models of `GET /v1/models`; None if the response is not a list.

    Names that are too long or not printable are left out.
    """
    listing = decoded(_decode_listing, answer.body) if answer.status == HTTPStatus.OK else None
    if listing is None:
        return None
    names = (listed.id for listed in listing.data)
    usable = (name for name in names if 0 < len(name) <= LONGEST_NAME and name.isprintable())
    return frozenset(islice(usable, MODELS_AT_MOST))


def load_of(answer: ProbeAnswer) -> ReportedLoad | None:
    """Return the load from a Fairlead's `GET /running`; None if the response is malformed or impossible."""
    running = decoded(_decode_running, answer.body) if answer.status == HTTPStatus.OK else None
    if not running:
        return None if running is None else ReportedLoad(0, 0.0)
    seats = max(1, sum(entry.seats for entry in running))
    taken = sum(entry.sequences + entry.waiting for entry in running)
    return ReportedLoad(min(seats, SEATS_AT_MOST), taken / seats)
