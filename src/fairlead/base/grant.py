"""A dispatcher's permission to run one job on one node. A value that crosses processes."""

from typing import Annotated

import msgspec
from msgspec import Meta

# A bound for messages of other processes.
Seats = Annotated[int, Meta(ge=1, le=2**20)]


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The `number` is unique within its `epoch`. Each new leader among the dispatchers has a higher epoch.

    `seats`: how many of the node's seats the job holds.
    """

    epoch: int
    number: int
    seats: Seats = 1


FIRST_GRANT = Grant(0, 0)
