"""Converts one choice's tokens to deltas of text. Independent of other choices and of the transport."""

from collections.abc import Sequence

from fairlead.base.job import CallPiece, Delta, FinishReason, TokenLogprob, add_piece
from fairlead.base.messages import Output
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from fairlead.language.text.detokenizer import Detokenizer
from fairlead.language.text.stops import StopStrings
from fairlead.language.text.tokenizer import Tokenizer


class ChoiceText:
    """Converts the outputs of one sequence to deltas of a choice.

    tokenizer: decodes the tokens.
    stops: strings that end the text.
    index: the choice.
    eos_token_ids: the model's own; only other stop tokens are reported as `stop_reason`.
    context: the ids that the text continues, as in `Detokenizer`.
    parser: divides the text into its parts; None: all of it is content.
    shown_ids: special tokens that may be the marks of parts.
    is_named: whether a call is reported as a normal end.
    """

    __slots__ = (
        "_detokenizer",
        "_ended",
        "_eos_token_ids",
        "_index",
        "_is_named",
        "_parser",
        "_prompt_logprobs",
        "_stops",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        index: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
        parser: AnswerParser | None = None,
        shown_ids: frozenset[int] = frozenset(),
        is_named: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context=context, shown_ids=shown_ids)
        self._stops = StopStrings(stops)
        self._index = index
        self._eos_token_ids = eos_token_ids
        self._ended = False
        self._prompt_logprobs: list[TokenLogprob] = []
        self._parser = parser
        self._is_named = is_named

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
        is_last = output.finish_reason is not None
        if is_last:
            text += self._detokenizer.flush()
        # Copies: deltas are merged in place.
        delta = Delta(
            self._index,
            "",
            [*output.token_ids],
            [*output.logprobs],
            vector=output.vector,
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=output.cached_tokens,
        )
        self._prompt_logprobs = []
        hit = self._add(delta, text, is_last=is_last)
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
        delta = Delta(self._index, "", [token_id])
        hit = self._add(delta, self._detokenizer.push((token_id,)), is_last=False)
        if hit is not None:
            self._end(delta, "stop", hit)
        return delta

    def _add(self, delta: Delta, text: str, *, is_last: bool) -> str | None:
        """Add a text to its parts of the delta; return the stop string that ends the answer, if one does."""
        parser = self._parser
        if parser is None:
            delta.text, hit = self._stops.push(text)
            return hit
        pieces = parser.push(text)
        if is_last:
            pieces += parser.finish()
        if parser.is_reasoning or any(isinstance(piece, Reasoning) for piece in pieces):
            delta.reasoning_tokens = len(delta.token_ids)
        return self._add_pieces(delta, pieces)

    def _add_pieces(self, delta: Delta, pieces: list[Piece]) -> str | None:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    delta.reasoning += text
                case Content(text):
                    # Content before a call is complete: no stop string can continue in it.
                    shown, hit = self._stops.push(text)
                    delta.text += shown
                    if hit is not None:
                        return hit
                case CallBegin(number, name):
                    delta.text += self._stops.flush()
                    add_piece(delta.calls, CallPiece(number, name))
                case CallArguments(number, text):
                    add_piece(delta.calls, CallPiece(number, None, text))
        return None

    def _end(self, delta: Delta, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        if finish_reason == "stop" and self._parser is not None and self._parser.calls and not self._is_named:
            finish_reason = "tool_calls"
        delta.finish_reason = finish_reason
        delta.stop_reason = stop_reason
        self._ended = True

    def _stop_reason(self, stop_token: int | None) -> int | None:
        return None if stop_token in self._eos_token_ids else stop_token
