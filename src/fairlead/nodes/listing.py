"""What a server says of itself, and what we say of it. Fairlead tells more than others."""

from http import HTTPStatus
from typing import TypeVar

import msgspec

from fairlead.nodes.upstream import UpstreamStatistics

Shape = TypeVar("Shape")


class RemoteStatus(msgspec.Struct, frozen=True):
    """A picture of the node. `load` is what it says of itself, 0…; None if it says nothing.

    `ups` and `downs` count how often it came and went; `problem` is why it is not up, if it is not.
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


class Health(msgspec.Struct):
    """The answer of Fairlead's `GET /health`: `instance` is another for every server, at every start."""

    instance: str | None = None


class Listed(msgspec.Struct):
    """A model."""

    id: str


class Listing(msgspec.Struct):
    """The answer of `GET /v1/models`."""

    data: list[Listed]


class Running(msgspec.Struct):
    """A line of Fairlead's `GET /running`."""

    model: str
    seats: int
    sequences: int = 0
    waiting: int = 0


HEALTH = msgspec.json.Decoder(Health)
LISTING = msgspec.json.Decoder(Listing)
RUNNING = msgspec.json.Decoder(list[Running])


def decoded(answer: tuple[int, bytes], decoder: "msgspec.json.Decoder[Shape]") -> Shape | None:
    """Return what the answer says; None if that is something else."""
    status, body = answer
    if status != HTTPStatus.OK:
        return None
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError:
        return None
