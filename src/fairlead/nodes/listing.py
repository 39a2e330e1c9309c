"""What a remote server reports about itself, and the status that we show of it. Fairlead reports the most.

Its numbers and names are checked: the queue relies on its seats, and people are shown its names.
"""

from http import HTTPStatus
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from fairlead.answer.reported import decoded
from fairlead.http.client import UpstreamStatistics

# Largest bodies of `/health`, and of `/v1/models` and `/running`.
HEALTH_BYTES = 64 * 1024
LISTING_BYTES = 2 * 1024 * 1024
MODELS_AT_MOST = 1000
LONGEST_NAME = 256
SEATS_AT_MOST = 4096
JOBS_AT_MOST = 1_000_000

# A response to a probe: its status and its body.
Answered = tuple[int, bytes]


class RemoteStatus(msgspec.Struct, frozen=True):
    """The status of a remote node. `load` is the load that it reports, 0 or more; None if it reports none.

    `ups` and `downs` count how often it came up and went down; `problem` is why it is not up, if it is not.
    """

    id: str
    is_up: bool
    is_fairlead: bool
    models: tuple[str, ...]
    seats: int
    busy: int
    load: float | None
    connections: UpstreamStatistics
    ups: int
    downs: int
    problem: str | None = None


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


_decode_health = msgspec.json.Decoder(_Health).decode
_decode_listing = msgspec.json.Decoder(_Listing).decode
_decode_running = msgspec.json.Decoder(list[_Running]).decode


def instance_of(answer: Answered) -> str | None:
    """Return the instance in the response of `GET /health`; None if there is none."""
    health = decoded(_decode_health, answer[1]) if answer[0] == HTTPStatus.OK else None
    return None if health is None else health.instance


def models_of(answer: Answered) -> frozenset[str] | None:
    """Return the first `MODELS_AT_MOST` models of `GET /v1/models`; None if the response is not a list.

    Names that are too long or not printable are left out.
    """
    listing = decoded(_decode_listing, answer[1]) if answer[0] == HTTPStatus.OK else None
    if listing is None:
        return None
    names = (listed.id for listed in listing.data)
    usable = (name for name in names if 0 < len(name) <= LONGEST_NAME and name.isprintable())
    return frozenset(islice(usable, MODELS_AT_MOST))


def load_of(answer: Answered) -> ReportedLoad | None:
    """Return the load from a Fairlead's `GET /running`; None if the response is malformed or impossible."""
    running = decoded(_decode_running, answer[1]) if answer[0] == HTTPStatus.OK else None
    if not running:
        return None if running is None else ReportedLoad(0, 0.0)
    seats = max(1, sum(entry.seats for entry in running))
    taken = sum(entry.sequences + entry.waiting for entry in running)
    return ReportedLoad(min(seats, SEATS_AT_MOST), taken / seats)
