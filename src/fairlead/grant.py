"""A dispatcher's permission to run one job on one node. A value that crosses processes."""

import msgspec


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The `number` is unique within its `epoch`. Each new leader among the dispatchers has a higher epoch."""

    epoch: int
    number: int


FIRST_GRANT = Grant(0, 0)
