"""The timeline of one job in the gateway. Has no clock: its owner sets the times."""

from fairlead.base.job import FinishReason, Job

# Outcomes of a job besides the codes of errors.
SUCCESS = "success"
LEFT = "client_left"


class RequestTimeline:
    """Times in seconds of its owner's clock, None for what has not happened; `began_at_ns` is since 1970.

    `arrived_s`, then a seat (`granted_s`, the first one), the first delta, and the end. `node` is the id of
    the current node. `tokens` are those of the answer, all choices together; `cached_tokens` of the prompt's
    were cached. `outcome` is `SUCCESS`, `LEFT`
    or an error's code; until the end it is what it would be if the client disconnected now. `problem` is the
    message of that error, as the client got it.
    """

    __slots__ = (
        "arrived_s",
        "attempts",
        "began_at_ns",
        "cached_tokens",
        "ended_s",
        "finish_reasons",
        "first_delta_s",
        "granted_s",
        "job",
        "node",
        "outcome",
        "problem",
        "prompt_tokens",
        "tokens",
    )

    def __init__(self, job: Job, *, arrived_s: float, began_at_ns: int) -> None:
        self.job = job
        self.began_at_ns = began_at_ns
        self.arrived_s = arrived_s
        self.granted_s: float | None = None
        self.first_delta_s: float | None = None
        self.ended_s: float | None = None
        self.node: str | None = None
        self.attempts = 0
        self.prompt_tokens = job.prompt_tokens
        self.tokens = 0
        self.cached_tokens = 0
        self.finish_reasons: tuple[FinishReason, ...] = ()
        self.outcome = LEFT
        self.problem = ""

    @property
    def waited_s(self) -> float:
        """How long it waited for its first seat; its whole duration if it never had one."""
        until_s = self.granted_s if self.granted_s is not None else self.ended_s
        return 0.0 if until_s is None else until_s - self.arrived_s

    @property
    def computed_prompt_tokens(self) -> int:
        """The prompt's tokens, which are computed once the answer has begun; 0 before."""
        return self.prompt_tokens if self.first_delta_s is not None else 0

    @property
    def token_gaps(self) -> int:
        """How many times a choice waited for its next token."""
        return max(0, self.tokens - self.job.sequences)

    @property
    def token_gap_s(self) -> float:
        """The mean of those waits, where all choices are generated in parallel."""
        if not self.token_gaps or self.first_delta_s is None or self.ended_s is None:
            return 0.0
        return (self.ended_s - self.first_delta_s) * self.job.sequences / self.token_gaps
