"""Estimates of waits, from the durations of past jobs. Pure, without a clock or a queue."""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from random import Random

import msgspec

from fairlead.router.dispatch.wait_survey import ModelWaits, SeatWaits
from fairlead.router.dispatch.window import SlidingWindow

KEPT_JOBS = 100
MOST_MODELS = 64  # remote nodes may change their models
KEPT_ERRORS = 2000  # errors of one busy hour are correlated: fewer would cover only that hour
ENOUGH_ERRORS = 30
NEGLIGIBLE_S = 0.25  # added to both waits of a ratio: 40 ms instead of 10 ms is a small error


class WaitEstimate(msgspec.Struct, frozen=True):
    """A waiting job's position (1 is next) and wait in whole seconds. Only `quantile` has a P90.

    Both waits are None while no server has a seat for the model: nothing is known then.
    """

    position: int
    estimated_wait_s: int | None
    estimated_wait_p90_s: int | None = None


class MeanEstimate:
    """`queue.estimate: mean`: mean service time × jobs ahead ÷ seats."""

    def __init__(self) -> None:
        self._service_s: deque[float] = deque(maxlen=KEPT_JOBS)
        self._wait_s: deque[float] = deque(maxlen=KEPT_JOBS)

    def granted(self, wait_s: float) -> None:
        """Record how long a job waited for its seat."""
        self._wait_s.append(wait_s)

    def finished(self, service_s: float) -> None:
        """Record how long a job held its seat."""
        self._service_s.append(service_s)

    @property
    def mean_wait_s(self) -> float:
        """Mean over the last 100 grants; 0 when there were none."""
        return _mean(self._wait_s)

    @property
    def mean_service_s(self) -> float:
        """Mean over the last 100 jobs; 0 when there were none."""
        return _mean(self._service_s)

    def wait_s(self, *, ahead: int, seats: int, running_s: Sequence[float]) -> int:
        """Return whole seconds until a job that needs one seat, behind `ahead` others, gets it.

        A job that needs k seats counts as k jobs. `running_s`: for each seat that is taken, how long its job
        has held it, the longest first. Example: three jobs ahead, 10 s each, one seat: 30. Never less than
        the remaining time of the running job that holds the seat for this one. Before any job has finished,
        the age of the oldest running job replaces the mean: service takes at least that long.
        """
        service_s = self.mean_service_s if self._service_s else max(running_s, default=0.0)
        queued_s = service_s * ahead / max(seats, 1)
        is_waiting_for_running = ahead + len(running_s) >= seats
        turn = min(ahead, len(running_s) - 1)
        rest_s = self.rest_s(running_s[turn]) if running_s and is_waiting_for_running else 0.0
        return math.ceil(max(queued_s, rest_s))

    def rest_s(self, running_s: float) -> float:
        """Return how much longer a job that has run for `running_s` will probably run.

        It is one of the jobs that ran even longer. If none did, only its age is known. A duration of unknown
        scale, seen at any moment, is as likely as not to be more than half over: it takes as long again.
        """
        longer = [service_s for service_s in self._service_s if service_s > running_s]
        return _mean(longer) - running_s if longer else running_s


class JobSize(msgspec.Struct, frozen=True):
    """What determines how long a job holds its seats, and how many.

    prompt_tokens: the tokens of its prompt.
    output_tokens: predicted, of the sequences that run one after another in one of its `seats`; in general
        that is one sequence.
    seats: how many it needs.
    without_tokens: the model of a job that has no tokens, or whose node reports none; it takes as long as
        others like it. None: it has some.
    """

    prompt_tokens: int
    output_tokens: float
    seats: int = 1
    without_tokens: str | None = None


class RunningJob(msgspec.Struct, frozen=True):
    """A job that has held its seat for `running_s`, with `tokens_so_far` of `size.output_tokens`.

    `size.output_tokens` should be predicted now, given `tokens_so_far`.
    """

    size: JobSize
    running_s: float
    tokens_so_far: int = 0


class QuantilePrediction(msgspec.Struct, frozen=True):
    """The prediction of a wait, and what is needed to learn from its actual length.

    wait_s: the median.
    p90_s: the 90 % quantile.
    work_s: the wait if all predicted lengths were exact, before the correction by past errors; None if a seat
        was free.
    rounds: selects the past errors that are like its own.
    """

    wait_s: float
    p90_s: float
    work_s: float | None
    rounds: int


class QuantileEstimate:
    """`queue.estimate: quantile`: a simulation of the work ahead, corrected by the errors of past ones.

    Each running job keeps its seat for its remaining time. Then the jobs ahead take the seats in the order in
    which they leave the queue, each for its predicted duration. The result is scaled by the quantiles of
    actual ÷ predicted over past waits of about the same number of rounds of the seats. The error for the next
    job in turn has little in common with that for the sum of a hundred jobs. Between two classes of rounds
    the scale goes over from one to the other.

    Predictions are at least 0, are 0 when a seat is free, and never fall with the position.
    """

    def __init__(self) -> None:
        self._rates = _Rates()
        self._errors = _Errors()

    def granted(self, prediction: QuantilePrediction, waited_s: float) -> None:
        """Learn from a wait that is over: its prediction at arrival, and its length."""
        if prediction.work_s is not None:
            self._errors.add(prediction.rounds, prediction.work_s, waited_s)

    def finished(self, size: JobSize, service_s: float) -> None:
        """Learn from a job that held its seat this long; `size.output_tokens` is what it sent."""
        self._rates.add(size, service_s)

    def predict(
        self, *, ahead: Sequence[JobSize], running: Sequence[RunningJob], seats: int, needed: int = 1
    ) -> QuantilePrediction:
        """Predict the wait of a job behind all of `ahead`, which leave in that order.

        `running` has an entry for each seat that is taken. The job needs `needed` seats. Takes time in
        proportion to the seats, and to those of the jobs ahead × log seats.
        """
        seats = max(seats, 1)
        each = [min(job.seats, seats) for job in ahead] + [min(needed, seats)]
        position = sum(each)
        seats_free = max(seats - len(running), 0)
        if position <= seats_free:
            return QuantilePrediction(0.0, 0.0, None, 0)
        # After a node went down, more jobs may run than there are seats: the first ones to end free no seat.
        taken_s = self._remaining_s(running)[-seats:]
        free_after_s = [0.0] * seats_free + taken_s
        heapify(free_after_s)
        oldest_s = max((job.running_s for job in running), default=0.0)
        # The correction must not estimate a seat before a running job gives one back. This job may get one
        # before the other running jobs end, if the jobs ahead are short.
        wait_s = p90_s = taken_s[0] if taken_s else 0.0
        scales = _Scales(self._errors)
        index = 0  # the number of the seat, in the order in which they are given
        for number, taken in enumerate(each):
            for _ in range(taken - 1):  # a job begins when its last seat is free
                heappop(free_after_s)
            work_s = free_after_s[0]
            index += taken
            # The scale changes with the position. So that no prediction falls with it, all before count.
            if index > seats_free:
                median_s, bound_s = scales.corrected(index - 1, seats, work_s)
                wait_s = max(wait_s, median_s)
                p90_s = max(p90_s, wait_s, bound_s)
            if index < position:
                ends_s = work_s + self._rates.service_s(ahead[number], unknown_s=oldest_s)
                heapreplace(free_after_s, ends_s)
                for _ in range(taken - 1):
                    heappush(free_after_s, ends_s)
        return QuantilePrediction(wait_s, p90_s, work_s, _rounds(position - 1, seats))

    def predict_from(self, waits: ModelWaits, index: int, needed: int = 1) -> QuantilePrediction:
        """Predict the wait of a job with `index` others before it in a surveyed queue; see `predict`.

        Takes the same time however many jobs there are, because the survey has added up their work. Of the
        positions before, only the last of each class of rounds counts: a prediction may fall a little.
        """
        seats = waits.seats
        ahead, service_s = waits.ahead_of(index)
        ahead += needed - 1
        if ahead < seats.seats_free:
            return QuantilePrediction(0.0, 0.0, None, 0)
        rounds = _rounds(ahead, seats.seats)
        known = waits.longest_before
        scales = _Scales(self._errors)
        while len(known) < rounds:
            last = seats.seats * (2 ** len(known) - 1) - 1
            longest = known[-1] if known else (0.0, 0.0)
            if last >= seats.seats_free:
                _, before_s = waits.ahead_of(waits.index_of(last))
                before = _corrected(scales, seats, last, seats.work_s(last, before_s))
                longest = max(longest[0], before[0]), max(longest[1], before[1])
            known.append(longest)
        work_s = seats.work_s(ahead, service_s)
        wait_s, p90_s = _corrected(scales, seats, ahead, work_s)
        before_s, before_p90_s = known[rounds - 1]
        wait_s = max(wait_s, before_s)
        return QuantilePrediction(wait_s, max(p90_s, before_p90_s, wait_s), work_s, rounds)

    def service_s(self, size: JobSize, *, unknown_s: float) -> float:
        """Return how long a job will hold its seat; `unknown_s` before any job has finished."""
        return self._rates.service_s(size, unknown_s=unknown_s)

    def remaining_s(self, job: RunningJob) -> float:
        """Return how long a job will still hold its seat."""
        return self._rates.remaining_s(job)

    def _remaining_s(self, running: Sequence[RunningJob]) -> list[float]:
        return sorted(self._rates.remaining_s(job) for job in running)


class _Rates:
    """Seconds per prompt token and per output token, fitted to the last jobs; and per job without any.

    They are fitted when they are needed next: jobs that find free seats need no predictions.
    """

    def __init__(self) -> None:
        self._speeds: deque[tuple[float, float]] = deque(maxlen=KEPT_JOBS)  # tokens per second of each job
        self._without_tokens: dict[str, MeanEstimate] = {}  # by model
        self._is_fitted = True
        self._prompt_s = 0.0
        self._output_s = 0.0

    def add(self, size: JobSize, service_s: float) -> None:
        if size.without_tokens is not None:
            if size.without_tokens not in self._without_tokens and len(self._without_tokens) >= MOST_MODELS:
                del self._without_tokens[next(iter(self._without_tokens))]
            self._without_tokens.setdefault(size.without_tokens, MeanEstimate()).finished(service_s)
            return
        service_s = max(service_s, 0.001)
        self._speeds.append((size.prompt_tokens / service_s, size.output_tokens / service_s))
        self._is_fitted = False

    def service_s(self, size: JobSize, *, unknown_s: float) -> float:
        """Return how long it will hold its seat; `unknown_s` before any job has finished."""
        if size.without_tokens is not None:
            known = self._without_tokens.get(size.without_tokens)
            return unknown_s if known is None else known.mean_service_s
        if not self._speeds:
            return unknown_s
        self._fit()
        return self._prompt_s * size.prompt_tokens + self._output_s * size.output_tokens

    def remaining_s(self, job: RunningJob) -> float:
        """Return how long it will still hold its seat; before any job has finished, as long again."""
        if job.size.without_tokens is not None:
            known = self._without_tokens.get(job.size.without_tokens)
            return job.running_s if known is None else known.rest_s(job.running_s)
        if not self._speeds:
            return job.running_s
        self._fit()
        tokens = max(job.size.output_tokens - job.tokens_so_far, 0.0)
        if job.tokens_so_far:
            return self._output_s * tokens
        # Without a token after the time for all of them, only its age tells how late it is: as late again.
        late_s = job.running_s - self._prompt_s * job.size.prompt_tokens
        return max(-late_s, 0.0) + max(self._output_s * tokens, late_s)

    def _fit(self) -> None:
        """Fit by least squares of the relative errors, so that one giant job does not outweigh all others."""
        if self._is_fitted:
            return
        self._is_fitted = True
        pp = po = oo = p1 = o1 = 0.0
        for p, o in self._speeds:
            pp, po, oo, p1, o1 = pp + p * p, po + p * o, oo + o * o, p1 + p, o1 + o
        determinant = pp * oo - po * po
        if determinant > 1e-6 * pp * oo:
            self._prompt_s = (p1 * oo - o1 * po) / determinant
            self._output_s = (o1 * pp - p1 * po) / determinant
            if self._prompt_s >= 0.0 and self._output_s >= 0.0:
                return
        # Collinear lengths, or a negative rate: then output alone explains the time.
        self._prompt_s, self._output_s = (0.0, o1 / oo) if oo else (p1 / pp if pp else 0.0, 0.0)


class _Errors:
    """log(actual ÷ predicted) of past waits, by the number of rounds of the seats ahead."""

    def __init__(self) -> None:
        self._all = SlidingWindow(kept=KEPT_ERRORS)
        self._by_rounds: defaultdict[int, SlidingWindow] = defaultdict(
            lambda: SlidingWindow(kept=KEPT_ERRORS)
        )

    def add(self, rounds: int, work_s: float, waited_s: float) -> None:
        error = math.log((waited_s + NEGLIGIBLE_S) / (work_s + NEGLIGIBLE_S))
        self._all.add(error)
        self._by_rounds[rounds].add(error)

    def quantiles(self, rounds: int) -> tuple[float, float] | None:
        """Return the median and the 90 % quantile; None if there are too few errors."""
        return _quantiles(self._by_rounds[rounds]) if rounds in self._by_rounds else None

    def all_quantiles(self) -> tuple[float, float]:
        """Return those of all errors; of too few, assume that one wait in ten takes twice as long."""
        return _quantiles(self._all) or (0.0, math.log(2.0))


class _Scales:
    """What the waits of one moment are scaled by. The errors of a class are looked up once.

    A class counts fully in the middle of its rounds. From there to the middle of the next one, its part falls
    with the logarithm of the rounds. With steps instead, the positions around each would all be wrong.
    """

    def __init__(self, errors: _Errors) -> None:
        self._errors = errors
        self._known: dict[int, tuple[float, float] | None] = {}
        self._all: tuple[float, float] | None = None

    def corrected(self, ahead: int, seats: int, work_s: float) -> tuple[float, float]:
        """Return the median and the 90 % bound of an actual wait behind so many, of predicted `work_s`."""
        place = math.log2(ahead / seats + 1) + 0.5
        rounds = int(place)
        first, second = self._of(rounds), self._of(rounds + 1)
        if first is None or second is None:
            first = second = first or second or self._of_all()
        part = place - rounds
        work_s += NEGLIGIBLE_S
        wait_s, bound_s = (
            max(work_s * math.exp(one + part * (other - one)) - NEGLIGIBLE_S, 0.0)
            for one, other in zip(first, second, strict=True)
        )
        return wait_s, bound_s

    def _of(self, rounds: int) -> tuple[float, float] | None:
        if rounds not in self._known:
            self._known[rounds] = self._errors.quantiles(rounds)
        return self._known[rounds]

    def _of_all(self) -> tuple[float, float]:
        if self._all is None:
            self._all = self._errors.all_quantiles()
        return self._all


def _quantiles(errors: SlidingWindow) -> tuple[float, float] | None:
    return (errors.quantile(0.5), errors.quantile(0.9)) if len(errors) >= ENOUGH_ERRORS else None


def _corrected(scales: _Scales, seats: SeatWaits, ahead: int, work_s: float) -> tuple[float, float]:
    wait_s, bound_s = scales.corrected(ahead, seats.seats, work_s)
    wait_s = max(wait_s, seats.least_s(seats.seats_free))
    return wait_s, max(wait_s, bound_s)


def _rounds(ahead: int, seats: int) -> int:
    """Return how often all seats are granted again before, in classes: 0, 1, 2…3, 4…7, and so on."""
    return (ahead // seats + 1).bit_length()


def retry_after_s(estimated_wait_s: int, random: Random) -> int:
    """Return when to retry, in seconds, 1…60: about the estimate, with jitter so that clients spread out."""
    return min(60, max(1, math.ceil(estimated_wait_s / 2 * (1 + random.random()))))


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
