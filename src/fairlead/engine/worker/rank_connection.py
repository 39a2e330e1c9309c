"""The messages between rank 0 of a model and another rank while it loads, over a `FrameSocket`."""

import msgspec

from fairlead.base import messages


class StartRank(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Load the part of rank `rank` of the model. The ranks find each other in the file `store`."""

    spec: messages.WorkerSpec
    rank: int
    store: str


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The weights of this rank are loaded. It waits for the others in the store."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """This rank cannot load its part, for the reason in `message`."""

    message: str


FromRank = RankLoaded | RankFailed
