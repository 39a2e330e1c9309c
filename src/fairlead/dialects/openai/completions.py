"""OpenAI's completions of texts: `POST /v1/completions`."""

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from fairlead.base.config import Limits, SpecialTokens
from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta
from fairlead.dialects import shapes
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, GenerationRequest, Prompt, StreamingDialect
from fairlead.dialects.fields import (
    OF_ONE_KIND,
    Envelope,
    NonEmpty,
    PositiveCount,
    Texts,
    TopLogprobs,
    TruncatedTokens,
)
from fairlead.dialects.openai.chunks import ChunkOptions, Chunks
from fairlead.dialects.openai.common import (
    Generation,
    OpenAIErrors,
    StreamOptions,
    check_generation,
    encode,
    encode_member,
    prompts_of,
    stop_strings,
    truncation_of,
    usage_of,
)
from fairlead.dialects.openai.events import ChunkReader
from fairlead.dialects.openai.logprobs import Scored, completion_logprobs, prompt_logprobs
from fairlead.dialects.openai.structured import answer_spec
from fairlead.dialects.unserved import COMPLETION, capturing, refuse_unserved
from fairlead.language.text.truncation import Side

_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\n\r]*["[]')


class CompletionEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body. Each prompt has `n` choices."""

    prompt: msgspec.Raw = msgspec.Raw()

    @property
    def choices(self) -> int:
        """See `Envelope`. Of the prompts, only a list of texts or lists has several."""
        prompts = 1
        if _LIST_OF_PROMPTS.match(self.prompt) is not None:
            try:
                prompts = len(_decode_list(self.prompt))
            except msgspec.MsgspecError:
                prompts = 1
        return (self.n or 1) * prompts


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/completions`.

    prompt: A text, token ids, or a list of either (all of one kind). With a `suffix` it must be a text, which
        may be empty.
    max_tokens: The most tokens of an answer. With `echo` it may be 0.
    special_tokens: Whether control tokens in a text are parsed (the default) or stay text (the default with a
        `suffix`).
    suffix: The answer is the text between the prompt and this, for models with tokens for that.
    echo: The answer begins with the prompt, also in `logprobs`.
    best_of: Must equal `n`.
    logprobs: How many of the likeliest tokens are listed beside each token of the answer; None: none is
        listed.
    truncate_prompt_tokens: From vLLM: cut each prompt to so many tokens; -1: to as many as leave room for
        the answer.
    truncation_side: Which end is cut; None: the left one.
    """

    prompt: NonEmpty | Annotated[Texts, Meta(extra_json_schema={"minItems": 1, **OF_ONE_KIND})]
    special_tokens: SpecialTokens | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: PositiveCount | None = None
    logprobs: TopLogprobs | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None


class CompletionOptions(NamedTuple):
    """How a completion is written.

    stream: What the client requested of streams.
    lists_prompt: With `prompt_logprobs`.
    echo_only: The prompt alone.
    token_ids: With the ids of the tokens.
    """

    stream: StreamOptions | None
    lists_prompt: bool
    echo_only: bool
    token_ids: bool = False

    def shown(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas to show: with `echo_only`, without the generated tokens."""
        return list(map(_without_answer, deltas)) if self.echo_only else deltas


_parse = BodyParser(capturing(CompletionRequest, COMPLETION))


class CompletionDialect(OpenAIErrors, StreamingDialect):
    """Completions."""

    path = "/v1/completions"
    body_type = CompletionRequest
    answer_type = shapes.TextCompletion
    refused_fields = COMPLETION
    job_prefix = "cmpl"
    read_envelope = BodyParser(CompletionEnvelope)
    reader = ChunkReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, COMPLETION)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise invalid_field("best_of", "must equal n")
        echo = bool(request.echo)
        if request.max_tokens == 0 and not echo:
            raise invalid_field("max_tokens", "must be at least 1, unless echo is true, or -1 for no limit")
        if request.suffix:
            prompts = _infill_prompts(request)
        else:
            prompts = prompts_of("prompt", request.prompt, empty="is empty")
        check_generation(request)
        truncation = truncation_of(request.truncate_prompt_tokens, request.truncation_side or "left")
        if truncation is not None and request.suffix:
            raise invalid_field("truncate_prompt_tokens", "cannot be combined with suffix")
        constraints, within = request.constraints()
        # `echo` lists as many tokens of the prompt as `logprobs` does of the answer.
        listed = [request.prompt_logprobs, request.logprobs if echo else None]
        return GenerationRequest(
            prompts=prompts,
            special_tokens=request.special_tokens or ("text" if request.suffix else "parse"),
            suffix=request.suffix or "",
            sampling=request,
            truncation=truncation,
            max_tokens=None if request.max_tokens == -1 else request.max_tokens,
            stop=stop_strings(request.stop),
            n=request.n or 1,
            logprobs=request.logprobs,
            prompt_logprobs=max((count for count in listed if count is not None), default=None),
            echo=echo,
            answer=answer_spec(request.response_format, constraints, within=within),
            options=CompletionOptions(
                request.stream_options,
                lists_prompt=request.prompt_logprobs is not None,
                echo_only=echo and request.max_tokens == 0,
                token_ids=bool(request.return_token_ids),
            ),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        job, tokenizer, texts = context.job, context.own_model.tokenizer, context.prompt_texts
        has_logprobs = job.sampling.logprobs is not None
        deltas = context.options.shown(deltas)
        choices = []
        for delta in deltas:
            logprobs: Any = None
            listed: Any = None
            prompt_ids: Any = UNSET
            if has_logprobs:
                lists, _ = completion_logprobs(tokenizer, _scored(context, delta), offset=0)
                logprobs = encode_member(lists)
            if context.options.lists_prompt:
                listed = encode_member(prompt_logprobs(tokenizer, delta.prompt_logprobs))
            if context.options.token_ids:
                prompt_ids = encode_member(list(job.prompts[delta.index // job.n]))
            text = (texts[delta.index // job.n] if texts else "") + delta.text
            choices.append(
                shapes.TextChoice(
                    delta.index,
                    text,
                    logprobs,
                    delta.finish_reason,
                    delta.stop_reason,
                    listed,
                    delta.token_ids if context.options.token_ids else UNSET,
                    prompt_ids,
                )
            )
        return encode(
            shapes.TextCompletion(
                id=job.id,
                object="text_completion",
                created=context.created,
                model=job.model,
                system_fingerprint=None,
                choices=choices,
                usage=usage_of(job, deltas),
            )
        )

    def stream_writer(self, context: AnswerContext) -> "CompletionChunks":
        """Return the writer of a streamed response."""
        return CompletionChunks(context, self.error_event)


class CompletionChunks(Chunks):
    """The chunks of a completion. With `echo`, the first of a choice has the prompt's text."""

    kind = "text_completion"
    opening = b'"text":'
    closing = b""

    def __init__(self, context: AnswerContext, fail: Callable[[FairleadError], bytes]) -> None:
        options = ChunkOptions(context.options.stream, context.options.token_ids)
        super().__init__(context._replace(options=options), fail)
        self._context = context
        self._offsets = [0] * context.job.sequences

    def write(self, deltas: list[Delta]) -> bytes:
        return super().write(self._context.options.shown(deltas))

    def _beginning(self, delta: Delta) -> bytes:
        texts, job = self._context.prompt_texts, self._context.job
        if not texts and not self._returns_ids:
            return b""
        head = self._heads[delta.index] + encode(texts[delta.index // job.n] if texts else "")
        listed: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if texts and job.sampling.logprobs is not None:
            prompt, _ = _scored(self._context, delta)
            listed["logprobs"] = self._list(delta.index, prompt)
        if self._returns_ids:
            listed["prompt_token_ids"] = list(job.prompts[delta.index // job.n])
        return head + b"," + encode(listed)[1:] + b"]" + self._usage_member() + b"}\n\n"

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return self._list(delta.index, Scored(delta.logprobs))

    def _list(self, index: int, part: Scored) -> dict[str, Any]:
        written, self._offsets[index] = completion_logprobs(
            self._tokenizer, [part], offset=self._offsets[index]
        )
        return written


def _infill_prompts(request: CompletionRequest) -> list[Prompt]:
    """Return the texts before the suffix. Raises `InvalidRequest` for what makes no sense with a suffix."""
    if request.echo:
        raise invalid_field("echo", "cannot be combined with suffix")
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts: list[Prompt] = [prompt for prompt in given if isinstance(prompt, str)]
    if not given or len(texts) < len(given):
        raise invalid_field("prompt", "with a suffix, it must be a text or a list of texts")
    return texts


def _scored(context: AnswerContext, delta: Delta) -> list[Scored]:
    """Return the tokens for `logprobs`: the prompt's, if its text is shown, and the answer's own."""
    answer, job = Scored(delta.logprobs), context.job
    if not context.prompt_texts:
        return [answer]
    prompt = delta.index // job.n
    first, top = job.prompts[prompt][0], job.sampling.logprobs
    return [Scored(delta.prompt_logprobs, first, context.prompt_texts[prompt], top), answer]


def _without_answer(delta: Delta) -> Delta:
    return Delta(
        delta.index,
        finish_reason="length" if delta.finish_reason is not None else None,
        prompt_logprobs=delta.prompt_logprobs,
        cached_tokens=delta.cached_tokens,
    )
