"""The totals of a server's queue and tokens. A module of its own, so that commands can import it fast."""

import msgspec


class QueueTotals(msgspec.Struct, frozen=True):
    """The queue: waiting and running jobs, the limits of both, and means over the last 100 jobs."""

    waiting: int = 0
    running: int = 0
    capacity: int = 0
    seats: int = 0
    mean_wait_s: float = 0.0
    mean_service_s: float = 0.0


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens since the server started, also those of running jobs, and tokens per second now.

    A prompt's tokens are counted when its answer begins; they are an estimate if the prompt was only relayed.
    """

    prompt: int = 0
    generated: int = 0
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0
