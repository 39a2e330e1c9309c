"""The totals of a server: its queue and its tokens. Commands that show a snapshot read them, too."""

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

    A prompt's tokens count when its answer begins; they are a guess if only a remote server has read the
    prompt.
    """

    prompt: int = 0
    generated: int = 0
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0
