"""The totals of a server's queue and tokens. A module of its own, so that commands can import it fast."""

import msgspec


class QueueTotals(msgspec.Struct, frozen=True):
    """The queue.

    waiting: jobs that wait.
    running: jobs that run.
    capacity: how many may wait.
    seats: how many may run.
    mean_wait_s: the mean wait of the last 100 jobs.
    mean_service_s: the mean time for which the last 100 jobs had a seat.
    oldest_wait_s: how long the job waits that waits longest; 0: none does.
    """

    waiting: int = 0
    running: int = 0
    capacity: int = 0
    seats: int = 0
    mean_wait_s: float = 0.0
    mean_service_s: float = 0.0
    oldest_wait_s: float = 0.0


class TokenTotals(msgspec.Struct, frozen=True):
    """Tokens since the server started, also those of running jobs.

    prompt: tokens of prompts, counted when their answers begin; an estimate if a prompt was only relayed.
    generated: tokens of answers.
    prompt_per_s: the present rate of the former.
    generated_per_s: the present rate of the latter.
    """

    prompt: int = 0
    generated: int = 0
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0
