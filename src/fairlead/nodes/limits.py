"""The limits of a node. A value of its own module, so that the scheduler imports no node."""

import msgspec


class NodeLimits(msgspec.Struct, frozen=True):
    """What fits a node. `seats` 0: it gets no jobs for now, but keeps those that it has. `max_model_len`:
    prompt + output tokens of one sequence; `cache_tokens`: those of all running sequences, None if the node
    does not report it.

    `load` is the load that a remote node reports, 0 or more, because it may have other clients; None if it
    reports none. `evictable`: it is local, and can be stopped to make room for another model. `needs_relay`:
    it takes requests only as clients write them, in `Job.relay`. `by_sequence`: it starts the sequences of a
    job one by one, as they get seats; otherwise all at once.
    """

    seats: int
    max_model_len: int
    cache_tokens: int | None = None
    load: float | None = None
    evictable: bool = True
    needs_relay: bool = False
    by_sequence: bool = False
