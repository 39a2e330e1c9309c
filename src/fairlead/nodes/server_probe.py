"""Probes a remote server: whether it answers, and what it reports about itself.

A server that is itself Fairlead reports its seats and load. Numbers and names are checked, because the queue
relies on the seats, and people are shown the names.
"""

from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
import structlog
from msgspec import Meta

from fairlead.base.formats.server_sent_events import BYTE_ORDER_MARK
from fairlead.base.reported import decoded, excerpt
from fairlead.nodes.http.client import Upstream, UpstreamFailed

# Largest bodies of `/health`, and of `/v1/models` and `/running`.
HEALTH_BYTES = 64 * 1024
LISTING_BYTES = 2 * 1024 * 1024
MODELS_AT_MOST = 1000
LONGEST_NAME = 256
SEATS_AT_MOST = 4096
JOBS_AT_MOST = 1_000_000

MODELS, HEALTH = "/v1/models", "/health"
NO_SUCH_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
THIS_SERVER = "it is this server itself"

logger = structlog.get_logger("fairlead.node")


class ProbeAnswer(NamedTuple):
    """The response to a request of a probe. `location`: where it redirects to."""

    status: int
    body: bytes
    location: str = ""

    @property
    def is_success(self) -> bool:
        """Whether it has a status of success."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES


class ReportedLoad(msgspec.Struct, frozen=True):
    """The load of a Fairlead: its seats in total, 0 if no model runs, and its jobs per seat, 0 or more."""

    seats: int
    load: float


class _Health(msgspec.Struct):
    """The response of Fairlead's `GET /health`. `instance` is different for each server and each start."""

    instance: str | None = None


class _Running(msgspec.Struct):
    """One model in the response of Fairlead's `GET /running`."""

    model: str
    seats: Annotated[int, Meta(ge=0, le=SEATS_AT_MOST)]
    sequences: Annotated[int, Meta(ge=0, le=JOBS_AT_MOST)] = 0
    waiting: Annotated[int, Meta(ge=0, le=JOBS_AT_MOST)] = 0


class ServerReport(NamedTuple):
    """What a server that answers reports.

    load: The load of a Fairlead; None if it is none.
    models: Its models; None if it has not listed them.
    problem: Why its list of models cannot be used; None if it can, or is not needed.
    """

    load: ReportedLoad | None
    models: frozenset[str] | None
    problem: str | None = None


class ServerProbe:
    """Probes the server at `upstream`, which is the node `node_id`, by requests that cost it nothing.

    A stranger is asked for its list of models, and for its `/health` only if it has no list: some servers try
    all of their models for that, such as LiteLLM's proxy. A Fairlead, which its list names, is asked for its
    `/health` and its load. Where that shows `own_instance`, it is this server, by whatever address. Then it
    counts as down, because its jobs would return to us forever.

    requests_models: Whether its models are used as it lists them.
    check_endpoint: The path to ask for instead; "none": nothing is asked, and it counts as healthy.
    has_answered: Whether the latest probe got a response, even of an error.
    problem: Why the latest probe has failed; None if it has succeeded.
    """

    def __init__(
        self,
        node_id: str,
        upstream: Upstream,
        *,
        requests_models: bool,
        own_instance: str | None,
        check_endpoint: str | None = None,
    ) -> None:
        self.is_this_server = False
        self.is_fairlead = False
        self.has_answered = False
        self.problem: str | None = None
        self._node_id = node_id
        self._upstream = upstream
        self._requests_models = requests_models
        self._own_instance = own_instance
        self.use(check_endpoint)

    def use(self, check_endpoint: str | None) -> None:
        """Ask for another path from now on."""
        self._check_endpoint = check_endpoint
        self._path = MODELS if check_endpoint is None else check_endpoint

    async def probe(self) -> ServerReport | None:
        """Return the server's report; None if it is not healthy, for the reason `problem`.

        Raises `LocalShortage`, and `UpstreamFailed` if it does not answer.
        """
        self._upstream.close_stale()
        self.has_answered = False
        self.problem = "it does not answer its probes in time"  # if this is cancelled
        try:
            report = await self._probe()
        except UpstreamFailed as error:
            self.problem = error.message.removeprefix(f"{self._upstream.name} ")
            raise
        if report is not None:
            self.problem = None
        return report

    async def _probe(self) -> ServerReport | None:
        if self._check_endpoint == "none":
            return ServerReport(None, None)
        answer = await self._get(self._path)
        if answer.status in NO_SUCH_PATH and self._check_endpoint is None:
            self._path = HEALTH if self._path == MODELS else MODELS
            answer = await self._get(self._path)
        if not answer.is_success:
            self.problem = _refused(self._path, answer)
            return None
        listed = answer if self._path == MODELS else None
        if listed is None and self._requests_models:
            listed = await self._get(MODELS)
        load = await self._load() if listed is not None and may_be_fairlead(listed) else None
        self.is_fairlead = load is not None
        if self.is_this_server:
            self.problem = THIS_SERVER
            return None
        if listed is None or not self._requests_models:
            return ServerReport(load, None)
        found = models_of(listed)
        if isinstance(found, str):
            return ServerReport(load, None, f"its list of models {found}")
        return ServerReport(load, found, None if found else "its list of models has none that can be used")

    async def _load(self) -> ReportedLoad | None:
        """Return the load of a Fairlead, and find out whether it is this server."""
        instance = instance_of(await self._get(HEALTH))
        is_this_server = instance is not None and instance == self._own_instance
        if is_this_server and not self.is_this_server:
            logger.error("node refused", node=self._node_id, reason=THIS_SERVER)
        self.is_this_server = is_this_server
        return None if is_this_server else load_of(await self._get("/running"))

    async def _get(self, path: str) -> ProbeAnswer:
        async with self._upstream.exchange("GET", path) as response:
            self.has_answered = True
            response.decode()
            max_bytes = HEALTH_BYTES if path == HEALTH else LISTING_BYTES
            body = await response.read_all(max_bytes)
            location = response.head.headers.get("location", "")
            return ProbeAnswer(response.head.status, body.removeprefix(BYTE_ORDER_MARK), location)


def _refused(path: str, answer: ProbeAnswer) -> str:
    """Return in words why a probe's answer is no success."""
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
        return f"it rejects our API key (GET {path} gave {answer.status})"
    if answer.location:
        return f"it redirects GET {path} to {excerpt(answer.location)}"
    return f"it answers GET {path} with {answer.status}"


_decode_health = msgspec.json.Decoder(_Health).decode
_decode_any = msgspec.json.Decoder().decode
_decode_running = msgspec.json.Decoder(list[_Running]).decode


def instance_of(answer: ProbeAnswer) -> str | None:
    """Return the instance in the response of `GET /health`; None if there is none."""
    health = decoded(_decode_health, answer.body) if answer.status == HTTPStatus.OK else None
    return None if health is None else health.instance


def may_be_fairlead(answer: ProbeAnswer) -> bool:
    """Return whether a list of models is one of a Fairlead, or empty: then a probe can try no model."""
    entries = _entries(decoded(_decode_any, answer.body))
    owners = [entry.get("owned_by") for entry in entries or () if isinstance(entry, dict)]
    return "fairlead" in owners or entries == []


def models_of(answer: ProbeAnswer) -> frozenset[str] | str:
    """Return the first `MODELS_AT_MOST` models of a list, or why there is no list, in words that follow it.

    Entries are read one by one: those without a name, or with one that is too long or not printable, are left
    out. The list is OpenAI's (`data`), Ollama's (`models`), llama.cpp's (both), or bare, as Together's.
    """
    if not answer.is_success:
        return f"cannot be had: {answer.status}"
    listing = decoded(_decode_any, answer.body)
    entries = _entries(listing)
    if entries is None:
        return "cannot be read: it is not JSON" if listing is None else "cannot be read: it is no list"
    names = (name for entry in entries if (name := _name_of(entry)) is not None)
    usable = (name for name in names if 0 < len(name) <= LONGEST_NAME and name.isprintable())
    return frozenset(islice(usable, MODELS_AT_MOST))


def _entries(listing: Any) -> list[Any] | None:
    """Return the entries of a list of models in any form; None if it is none."""
    if isinstance(listing, list):
        return listing
    if not isinstance(listing, dict):
        return None
    found = [listing[name] for name in ("data", "models") if name in listing]
    lists = [each for each in found if isinstance(each, list)]
    if not lists:
        return [] if None in found else None
    return next((each for each in lists if each), [])


def _name_of(entry: Any) -> str | None:
    """Return the name of an entry: a text, or OpenAI's `id`, or Ollama's `model` and `name`."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        return None
    names = [entry["id"]] if "id" in entry else [entry.get("model"), entry.get("name")]
    return next((name for name in names if isinstance(name, str)), None)


def load_of(answer: ProbeAnswer) -> ReportedLoad | None:
    """Return the load from a Fairlead's `GET /running`; None if the response is malformed or impossible."""
    running = decoded(_decode_running, answer.body) if answer.status == HTTPStatus.OK else None
    if not running:
        return None if running is None else ReportedLoad(0, 0.0)
    seats = max(1, sum(entry.seats for entry in running))
    taken = sum(entry.sequences + entry.waiting for entry in running)
    return ReportedLoad(min(seats, SEATS_AT_MOST), taken / seats)
