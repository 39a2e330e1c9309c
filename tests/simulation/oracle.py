"""Checks the requests of a run: each has one answer, in time, which is correct or an explained error."""

from collections.abc import Iterator
from itertools import chain

from simulation import words
from simulation.deployment import Deployment
from simulation.drawer import Drawer
from simulation.exchanges import NEVER_S, Exchange, texts_of
from simulation.explanations import SLACK_S, Explanations
from simulation.injected_faults import CUT, GARBLED, LATE, InjectedFault
from simulation.ledger import Ledger
from simulation.parent import text

# Error codes that a client may get. An internal error is not among them.
DOCUMENTED = frozenset(
    {
        "bodies_full",
        "body_timeout",
        "body_too_large",
        "cancelled",
        "context_length_exceeded",
        "displaced",
        "draining",
        "engine_failed",
        "expectation_failed",
        "forbidden",
        "header_timeout",
        "http_version_not_supported",
        "insufficient_role",
        "invalid_api_key",
        "invalid_request",
        "load_failed",
        "method_not_allowed",
        "model_loading",
        "model_not_found",
        "no_node",
        "no_queue",
        "node_failed",
        "not_found",
        "queue_full",
        "queue_timeout",
        "rate_limited",
        "refused",
        "request_timeout",
        "too_many_connections",
        "unloaded",
    }
)
# Paths with answers that may have a status above 499 without an error.
STATES = ("/health", "/ready")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


class Oracle:
    """Checks all requests of a run when it is over. `stopped_s`: when the server was sent SIGTERM."""

    def __init__(
        self, deployment: Deployment, drawer: Drawer, faults: list[InjectedFault], ledger: Ledger
    ) -> None:
        self._deployment = deployment
        self._exchanges = drawer.exchanges
        self._faults = faults
        self._explanations = Explanations(deployment, drawer, ledger, faults)
        self.stopped_s = NEVER_S

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each problem."""
        self._explanations.stopped_s = self.stopped_s
        for exchange in self._exchanges:
            for problem in self._judge(exchange):
                yield f"{problem}: {exchange}"

    def _judge(self, exchange: Exchange) -> Iterator[str]:
        answer = exchange.answer
        if exchange.ended_s == NEVER_S:
            yield "it never ended"
        elif exchange.has_left:
            if answer is not None and answer.is_stream and exchange.has_text:
                yield from self._check_beginning(exchange)
        elif exchange.kind == "malformed":
            error = None if answer is None else answer.error
            if error is not None and error not in DOCUMENTED and not self._is_allowed(error, exchange):
                yield "junk made the server fail"
        elif answer is None or not (answer.is_whole or answer.is_stream):
            if not self._may_be_cut(exchange):
                yield "its connection was cut"
        else:
            error = None if exchange.path in STATES else answer.error
            found = self._check_success(exchange) if error is None else self._check_error(exchange, error)
            yield from chain(found, self._check_time(exchange), self._explanations.check_quota(exchange))

    # Answers -----------------------------------------------------------------------------------------

    def _check_success(self, exchange: Exchange) -> Iterator[str]:
        answer = exchange.answer
        assert answer is not None
        if answer.status >= 500 and exchange.path not in STATES:
            yield f"status {answer.status} without an error"
        if not answer.is_whole and exchange.path != "/events" and not self._may_be_cut(exchange):
            yield "its answer ends early, without an error"
        if answer.is_whole and exchange.kind == "embeddings":
            if (answer.document or {}).get("embedded") != f"{exchange.model} {exchange.ticket}":
                yield f"its vector belongs to another request: {answer.body[:100]!r}"
        elif answer.is_whole and exchange.has_text:
            yield from self._check_text(exchange)

    def _check_text(self, exchange: Exchange) -> Iterator[str]:
        answer = exchange.answer
        assert answer is not None
        if answer.is_stream != exchange.stream:
            yield f"its content type is {answer.headers.get('content-type')}"
            return
        if answer.is_stream and answer.events[-1:] != ["[DONE]"]:
            yield "a complete stream without [DONE]"
        try:
            texts = texts_of(exchange)
        except _UNREADABLE as error:
            if not self._is_allowed(GARBLED, exchange):
                yield f"its answer cannot be read ({error!r}): {answer.body[:200]!r}"
            return
        expected = dict.fromkeys(range(exchange.n), self._expected(exchange))
        if texts != expected:
            yield f"its text is {texts}, not {expected}; its body: {answer.body[:100]!r}"

    def _check_beginning(self, exchange: Exchange) -> Iterator[str]:
        """Check that a partial answer is the beginning of the complete one."""
        try:
            texts = texts_of(exchange)
        except _UNREADABLE:
            return  # the last event is incomplete
        for piece in texts.values():
            if not self._expected(exchange).startswith(piece):
                yield f"its text begins with {piece!r}, not as {self._expected(exchange)!r}"

    def _expected(self, exchange: Exchange) -> str:
        tokenizer = text().tokenizer
        tokens = words.pieces_of(tokenizer, exchange.model, exchange.ticket)[: exchange.max_tokens]
        return words.text_of(tokenizer, tokens)

    # Errors ------------------------------------------------------------------------------------------

    def _check_error(self, exchange: Exchange, error: str) -> Iterator[str]:
        answer = exchange.answer
        assert answer is not None
        if answer.is_stream:
            yield from self._check_beginning(exchange)
            if answer.is_whole or "[DONE]" in answer.events:
                yield f"a stream that failed ({error}) ends like a complete one"
        if self._is_allowed(error, exchange):
            return
        if error not in DOCUMENTED:
            yield f"an undocumented error {error!r}: {answer.body[:300]!r}"
        elif not self._explanations.explain(error, exchange):
            yield f"nothing explains the error {error!r}: {answer.body[:300]!r}"

    def _check_time(self, exchange: Exchange) -> Iterator[str]:
        took_s = exchange.ended_s - exchange.began_s
        longest_s = self._deployment.queue_timeout_s + self._deployment.request_timeout_s + 20 * SLACK_S
        is_patient = exchange.generates and not exchange.reads_slowly
        if took_s > longest_s and is_patient and not self._is_allowed(LATE, exchange):
            yield f"it took {took_s:.1f} s, more than {longest_s:g} s"

    def _may_be_cut(self, exchange: Exchange) -> bool:
        return self._is_allowed(CUT, exchange) or exchange.ended_s >= self.stopped_s

    def _is_allowed(self, effect: str, exchange: Exchange) -> bool:
        return any(
            fault.may_cause(effect, exchange.model, exchange.began_s, exchange.ended_s)
            for fault in self._faults
        )
