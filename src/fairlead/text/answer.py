"""Converts one choice's tokens to deltas of text. Independent of other choices and of the transport."""

from collections.abc import Sequence

from fairlead.job import Delta, FinishReason, TokenLogprob
from fairlead.messages import Output
from fairlead.text.detokenizer import Detokenizer
from fairlead.text.stops import StopStrings
from fairlead.text.tokenizer import Tokenizer


class ChoiceText:
    """Converts the outputs of one sequence to the deltas of choice `index`.

    `eos_token_ids` are the model's own; only other stop tokens are reported as `stop_reason`. `context` has
    the ids that the text continues, as in `Detokenizer`.
    """

    __slots__ = ("_detokenizer", "_ended", "_eos_token_ids", "_index", "_prompt_logprobs", "_stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        index: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context=context)
        self._stops = StopStrings(stops)
        self._index = index
        self._eos_token_ids = eos_token_ids
        self._ended = False
        self._prompt_logprobs: list[TokenLogprob] = []

    @property
    def ended(self) -> bool:
        """Whether the last delta was returned. After a stop string, the engine still runs the sequence."""
        return self._ended

    def push(self, output: Output) -> Delta | None:
        """Return the output's delta of the answer, None if it adds nothing. The caller handles its `error`.

        The token that ended the sequence is in `token_ids` but never in the text, special or not.
        Log-probabilities of the prompt are kept for the first delta.
        """
        self._prompt_logprobs += output.prompt_logprobs
        if self._ended or not (output.token_ids or output.finish_reason):
            return None
        shown = output.token_ids if output.stop_token is None else output.token_ids[:-1]
        text = self._detokenizer.push(shown)
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        text, hit = self._stops.push(text)
        # Copies: deltas are merged in place.
        delta = Delta(
            self._index,
            text,
            [*output.token_ids],
            [*output.logprobs],
            vector=output.vector,
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=output.cached_tokens,
        )
        self._prompt_logprobs = []
        if hit is not None:
            self._end(delta, "stop", hit)
        elif output.finish_reason is not None:
            delta.text += self._stops.flush()
            self._end(delta, output.finish_reason, self._stop_reason(output.stop_token))
        return delta

    def push_token(self, token_id: int) -> Delta | None:
        """Return the delta of an output that is a single token: a fast path for the usual case."""
        if self._ended:
            return None
        text, hit = self._stops.push(self._detokenizer.push((token_id,)))
        delta = Delta(self._index, text, [token_id])
        if hit is not None:
            self._end(delta, "stop", hit)
        return delta

    def _end(self, delta: Delta, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        delta.finish_reason = finish_reason
        delta.stop_reason = stop_reason
        self._ended = True

    def _stop_reason(self, stop_token: int | None) -> int | None:
        return None if stop_token in self._eos_token_ids else stop_token
