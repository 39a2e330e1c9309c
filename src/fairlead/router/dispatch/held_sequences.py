"""Which sequences of a job hold seats, as its owner tells a new scheduler. A value that crosses processes."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fairlead.base.grant import Seats

Index = Annotated[int, Meta(ge=0, lt=2**20)]


class HeldSequences(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of a job at its node.

    seats: how many each of those that run holds.
    running: the indexes of those that run.
    begun: how many have begun, also those that have ended; None: all, at once.
    suspended: the indexes of those that are suspended.
    """

    seats: Seats = 1
    running: tuple[Index, ...] = (0,)
    begun: Index | None = None
    suspended: tuple[Index, ...] = ()


ALL_AT_ONCE = HeldSequences()
