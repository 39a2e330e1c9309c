"""Explains errors that no fault explains: by load, by limits, and by what clients did."""

from collections.abc import Callable, Iterator, Mapping

from simulation.drawer import Drawer
from simulation.ledger import Ledger
from simulation.parent import text
from simulation.troubles import RECOVERY_S, Trouble
from simulation.visits import NEVER_S, Visit
from simulation.words import pieces_of
from simulation.world import World

# Between a deadline and the arrival of the error: latency, and the virtual time of threads.
SLACK_S = 1.0
# The longest times that a job holds a seat, and that a model takes to load, without a fault.
SERVICE_S = 8.0
LOAD_S = 12.0
WINDOW_S = 60.0


class Explanations:
    """Decides from all requests of a run whether an error was to be expected."""

    def __init__(self, world: World, drawer: Drawer, ledger: Ledger, troubles: list[Trouble]) -> None:
        self._world = world
        self._drawer = drawer
        self._visits = drawer.visits
        self._ledger = ledger
        self._troubles = troubles
        self.stopped_s = NEVER_S

    def explain(self, error: str, visit: Visit) -> bool:
        """Return whether something explains that a request ended with this error."""
        explanation = _BY_ERROR.get(error)
        return explanation is not None and explanation(self, visit)

    def check_quota(self, visit: Visit) -> Iterator[str]:
        """Compare the tokens that a key has left with what its requests cost, whatever usage nodes report."""
        assert visit.answer is not None
        told = visit.answer.headers.get("x-ratelimit-remaining-tokens")
        limit = visit.person.tokens_per_minute
        if told is None or limit is None:
            return
        recent = self._recent(visit)
        least = limit - sum(map(self._cost, [visit, *recent]))
        certain = [other for other in recent if self._is_certain(other, visit)]
        most = limit - sum(map(streamed_tokens, certain))
        if not least <= int(told) <= max(0, most):
            yield f"its key has {told} tokens left of {limit}, not between {least} and {most}"

    # Load --------------------------------------------------------------------------------------------

    def _is_crowded(self, visit: Visit) -> bool:
        """Return whether the queue may have been full, or the estimated wait too long."""
        queue = self._world.document["queue"]
        others = self._beside(visit)
        return others >= queue["capacity"] or bool(queue["maxEstimatedWait"] and others)

    def _waited_long_enough(self, visit: Visit) -> bool:
        """Return whether it waited exactly as long as the queue allows, with enough work before it."""
        patience_s = self._world.queue_timeout_s
        waited_s = visit.ended_s - visit.began_s
        # A slow reader gets the error late.
        longest_s = NEVER_S if visit.reads_slowly else patience_s + SLACK_S
        if not patience_s - 1e-6 <= waited_s <= longest_s:
            return False
        swaps = 0 if self._world.document["routing"]["router"]["use"] == "keep" else len(self._world.models)
        work_s = self._beside(visit) * SERVICE_S + LOAD_S * (1 + swaps)
        return work_s >= patience_s / 2 or self._drawer.was_nowhere(visit)

    def _beside(self, visit: Visit) -> int:
        """Return how many other jobs overlapped with this one."""
        return sum(
            1
            for other in self._visits
            if other is not visit
            and other.generates
            and other.began_s <= visit.ended_s
            and visit.began_s <= other.ended_s
        )

    # Limits ------------------------------------------------------------------------------------------

    def _is_limited(self, visit: Visit) -> bool:
        """Return whether the key's requests, at their highest possible cost, can have used up a limit."""
        person = visit.person
        recent = self._recent(visit)
        sent_before = sum(other.times_sent for other in recent) + visit.times_sent - 1
        if person.requests_per_minute is not None and sent_before >= person.requests_per_minute:
            return True
        running = sum(1 for other in recent if other.ended_s >= visit.began_s - SLACK_S)
        if person.concurrent is not None and running >= person.concurrent:
            return True
        if person.tokens_per_minute is None:
            return False
        return sum(map(self._cost, recent)) + _prompt_bytes(visit) > person.tokens_per_minute

    def _recent(self, visit: Visit) -> list[Visit]:
        """Return the requests with the same key that may count against its limits now."""
        return [
            other
            for other in self._visits
            if other.person.key == visit.person.key
            and other is not visit
            and (other.generates or other.kind == "tokenize")
            and other.began_s <= visit.ended_s
            and visit.began_s - other.ended_s <= WINDOW_S + SLACK_S
        ]

    def _cost(self, visit: Visit) -> int:
        """Return the highest number of tokens that a request can have been charged."""
        return self._ledger.of(visit.ticket) + _prompt_bytes(visit)

    def _is_certain(self, other: Visit, visit: Visit) -> bool:
        """Return whether the tokens of another request must be charged when this one is answered."""
        is_recent = visit.ended_s - other.began_s < WINDOW_S - SLACK_S
        key = visit.person.key
        may_be_forgotten = any(
            trouble.may_forget(key, other.began_s, visit.ended_s) for trouble in self._troubles
        )
        return is_recent and other.ended_s < visit.began_s and not may_be_forgotten

    def _prompt_is_too_long(self, visit: Visit) -> bool:
        limit = visit.person.tokens_per_minute
        return limit is not None and _prompt_bytes(visit) > limit

    # What clients did --------------------------------------------------------------------------------

    def _was_changed(self, visit: Visit) -> bool:
        """Return whether, shortly before or during it, the model was unloaded or a node with it removed."""
        nodes = self._world.holders(visit.model)
        return any(
            other.kind == "change"
            and (other.model == visit.model or other.node in nodes)
            and other.began_s <= visit.ended_s
            and visit.began_s <= other.ended_s + RECOVERY_S
            for other in self._visits
        )

    def _has_no_node(self, visit: Visit) -> bool:
        """Return whether all nodes with the model may have been drained or removed at any earlier time."""
        return self._drawer.was_nowhere(visit) or self._was_changed(visit)

    def _is_unknown(self, visit: Visit) -> bool:
        return self._drawer.was_nowhere(visit) or visit.kind in ("change", "look")

    def _is_refused(self, visit: Visit) -> bool:
        """Return whether it requests what an engine cannot do, or a change that is not possible."""
        is_engine = "path" in self._world.document["models"].get(visit.model, {})
        cannot = visit.kind == "embeddings" and is_engine
        return cannot or visit.kind in ("tokenize", "change") or self._prompt_is_too_long(visit)


def streamed_tokens(visit: Visit) -> int:
    """Return the lower bound of a request's charge: the tokens of a complete, streamed text."""
    answer = visit.answer
    if (
        answer is None
        or not (visit.has_text and answer.is_stream and answer.is_whole)
        or answer.error is not None
    ):
        return 0
    return visit.n * len(pieces_of(text().tokenizer, visit.model, visit.ticket)[: visit.max_tokens])


def _prompt_bytes(visit: Visit) -> int:
    """Return the most tokens that its prompt can have: one per byte."""
    return len(str(visit.body))


_BY_ERROR: Mapping[str, Callable[[Explanations, Visit], bool]] = {
    "queue_full": Explanations._is_crowded,
    "displaced": Explanations._is_crowded,
    "queue_timeout": Explanations._waited_long_enough,
    "no_queue": lambda _, visit: "X-No-Queue" in visit.headers,
    "rate_limited": Explanations._is_limited,
    "cancelled": lambda _, visit: visit.was_cancelled,
    "model_loading": lambda known, _: known._world.document["whileLoading"] == "reject",
    "draining": lambda known, visit: visit.ended_s >= known.stopped_s,
    "forbidden": lambda _, visit: "X-Priority" in visit.headers or visit.kind == "change",
    "invalid_request": Explanations._is_refused,
    "not_found": lambda _, visit: visit.kind in ("cancel", "change", "look"),
    "model_not_found": Explanations._is_unknown,
    "no_node": Explanations._has_no_node,
    "node_failed": Explanations._was_changed,
    "unloaded": Explanations._was_changed,
    "load_failed": Explanations._was_changed,
}
