"""Explains errors that no fault explains: by load, by limits, and by what clients did."""

from collections.abc import Callable, Iterator, Mapping

from simulation.deployment import Deployment
from simulation.drawer import Drawer
from simulation.exchanges import NEVER_S, Exchange
from simulation.injected_faults import RECOVERY_S, InjectedFault
from simulation.ledger import Ledger
from simulation.parent import text
from simulation.words import pieces_of

# Between a deadline and the arrival of the error: latency, and the virtual time of threads.
SLACK_S = 1.0
# The longest times that a job holds a seat, and that a model takes to load, without a fault.
SERVICE_S = 8.0
LOAD_S = 12.0
WINDOW_S = 60.0


class Explanations:
    """Decides from all requests of a run whether an error was to be expected."""

    def __init__(
        self, deployment: Deployment, drawer: Drawer, ledger: Ledger, faults: list[InjectedFault]
    ) -> None:
        self._deployment = deployment
        self._drawer = drawer
        self._exchanges = drawer.exchanges
        self._ledger = ledger
        self._faults = faults
        self.stopped_s = NEVER_S

    def explain(self, error: str, exchange: Exchange) -> bool:
        """Return whether something explains that a request ended with this error."""
        explanation = _BY_ERROR.get(error)
        return explanation is not None and explanation(self, exchange)

    def check_quota(self, exchange: Exchange) -> Iterator[str]:
        """Compare the tokens that a key has left with what its requests cost, whatever usage nodes report."""
        assert exchange.answer is not None
        remaining = exchange.answer.headers.get("x-ratelimit-remaining-tokens")
        limit = exchange.person.tokens_per_minute
        if remaining is None or limit is None:
            return
        recent = self._recent(exchange)
        least = limit - sum(map(self._cost, [exchange, *recent]))
        certainly_charged = [other for other in recent if self._is_certain(other, exchange)]
        most = limit - sum(map(streamed_tokens, certainly_charged))
        if not least <= int(remaining) <= max(0, most):
            yield f"its key has {remaining} tokens left of {limit}, not between {least} and {most}"

    # Load --------------------------------------------------------------------------------------------

    def _may_be_refused_by_load(self, exchange: Exchange) -> bool:
        """Return whether the queue may have been full, or the estimated wait too long."""
        queue = self._deployment.document["queue"]
        others = self._overlapping_jobs(exchange)
        return others >= queue["capacity"] or bool(queue["maxEstimatedWait"] and others)

    def _waited_long_enough(self, exchange: Exchange) -> bool:
        """Return whether it waited exactly as long as the queue allows, with enough work before it."""
        patience_s = self._deployment.queue_timeout_s
        waited_s = exchange.ended_s - exchange.began_s
        # A slow reader gets the error late.
        longest_s = NEVER_S if exchange.reads_slowly else patience_s + SLACK_S
        if not patience_s - 1e-6 <= waited_s <= longest_s:
            return False
        swaps = (
            0
            if self._deployment.document["routing"]["router"]["use"] == "keep"
            else len(self._deployment.models)
        )
        work_s = self._overlapping_jobs(exchange) * SERVICE_S + LOAD_S * (1 + swaps)
        return work_s >= patience_s / 2 or self._drawer.may_have_lacked_node(exchange)

    def _overlapping_jobs(self, exchange: Exchange) -> int:
        """Return how many other jobs overlapped with this one."""
        return sum(
            1
            for other in self._exchanges
            if other is not exchange
            and other.generates
            and other.began_s <= exchange.ended_s
            and exchange.began_s <= other.ended_s
        )

    # Limits ------------------------------------------------------------------------------------------

    def _is_limited(self, exchange: Exchange) -> bool:
        """Return whether the key's requests, at their highest possible cost, can have used up a limit."""
        person = exchange.person
        recent = self._recent(exchange)
        sent_before = sum(other.times_sent for other in recent) + exchange.times_sent - 1
        if person.requests_per_minute is not None and sent_before >= person.requests_per_minute:
            return True
        running = sum(1 for other in recent if other.ended_s >= exchange.began_s - SLACK_S)
        if person.concurrent is not None and running >= person.concurrent:
            return True
        if person.tokens_per_minute is None:
            return False
        return sum(map(self._cost, recent)) + _prompt_bytes(exchange) > person.tokens_per_minute

    def _recent(self, exchange: Exchange) -> list[Exchange]:
        """Return the requests with the same key that may count against its limits now."""
        return [
            other
            for other in self._exchanges
            if other.person.key == exchange.person.key
            and other is not exchange
            and (other.generates or other.kind == "tokenize")
            and other.began_s <= exchange.ended_s
            and exchange.began_s - other.ended_s <= WINDOW_S + SLACK_S
        ]

    def _cost(self, exchange: Exchange) -> int:
        """Return the highest number of tokens that a request can have been charged."""
        return self._ledger.of(exchange.ticket) + _prompt_bytes(exchange)

    def _is_certain(self, other: Exchange, exchange: Exchange) -> bool:
        """Return whether the tokens of another request must be charged when this one is answered."""
        is_recent = exchange.ended_s - other.began_s < WINDOW_S - SLACK_S
        key = exchange.person.key
        may_be_forgotten = any(
            fault.may_reset_limit(key, other.began_s, exchange.ended_s) for fault in self._faults
        )
        return is_recent and other.ended_s < exchange.began_s and not may_be_forgotten

    def _prompt_is_too_long(self, exchange: Exchange) -> bool:
        limit = exchange.person.tokens_per_minute
        return limit is not None and _prompt_bytes(exchange) > limit

    # What clients did --------------------------------------------------------------------------------

    def _model_was_changed(self, exchange: Exchange) -> bool:
        """Return whether, shortly before or during it, the model was unloaded or a node with it removed."""
        nodes = self._deployment.holders(exchange.model)
        return any(
            other.kind == "change"
            and (other.model == exchange.model or other.node in nodes)
            and other.began_s <= exchange.ended_s
            and exchange.began_s <= other.ended_s + RECOVERY_S
            for other in self._exchanges
        )

    def _has_no_node(self, exchange: Exchange) -> bool:
        """Return whether all nodes with the model may have been drained or removed at any earlier time."""
        return self._drawer.may_have_lacked_node(exchange) or self._model_was_changed(exchange)

    def _is_unknown(self, exchange: Exchange) -> bool:
        return self._drawer.may_have_lacked_node(exchange) or exchange.kind in ("change", "read")

    def _is_refused(self, exchange: Exchange) -> bool:
        """Return whether it requests what an engine cannot do, or a change that is not possible."""
        is_engine = "path" in self._deployment.document["models"].get(exchange.model, {})
        is_unsupported = exchange.kind == "embeddings" and is_engine
        return is_unsupported or exchange.kind in ("tokenize", "change") or self._prompt_is_too_long(exchange)


def streamed_tokens(exchange: Exchange) -> int:
    """Return the lower bound of a request's charge: the tokens of a complete, streamed text."""
    answer = exchange.answer
    if (
        answer is None
        or not (exchange.has_text and answer.is_stream and answer.is_whole)
        or answer.error is not None
    ):
        return 0
    return exchange.n * len(
        pieces_of(text().tokenizer, exchange.model, exchange.ticket)[: exchange.max_tokens]
    )


def _prompt_bytes(exchange: Exchange) -> int:
    """Return the most tokens that its prompt can have: one per byte."""
    return len(str(exchange.body).encode())


_BY_ERROR: Mapping[str, Callable[[Explanations, Exchange], bool]] = {
    "queue_full": Explanations._may_be_refused_by_load,
    "displaced": Explanations._may_be_refused_by_load,
    "queue_timeout": Explanations._waited_long_enough,
    "no_queue": lambda _, exchange: "X-No-Queue" in exchange.headers,
    "rate_limited": Explanations._is_limited,
    "cancelled": lambda _, exchange: exchange.was_cancelled,
    "model_loading": lambda known, _: known._deployment.document["whileLoading"] == "reject",
    "draining": lambda known, exchange: exchange.ended_s >= known.stopped_s,
    "forbidden": lambda _, exchange: "X-Priority" in exchange.headers or exchange.kind == "change",
    "invalid_request": Explanations._is_refused,
    "not_found": lambda _, exchange: exchange.kind in ("cancel", "change", "read"),
    "model_not_found": Explanations._is_unknown,
    "no_node": Explanations._has_no_node,
    "node_failed": Explanations._model_was_changed,
    "unloaded": Explanations._model_was_changed,
    "load_failed": Explanations._model_was_changed,
}
