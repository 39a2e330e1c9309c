"""llama.cpp's native completions: `POST /completion`."""

import re
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from fairlead.base.config import Limits
from fairlead.base.errors import FairleadError, quoted
from fairlead.base.formats.server_sent_events import encode_event
from fairlead.base.job import Delta, Job, Sampling
from fairlead.base.reported import decoded, is_given, token_count
from fairlead.base.upstream_events import UpstreamAnswer, UpstreamEvent
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, AnswerTimes, GenerationRequest, StreamingDialect
from fairlead.dialects.event_reader import ABSENT, EventReader, EventShape, text_members
from fairlead.dialects.fields import (
    MAX_INT32,
    OF_ONE_KIND,
    CommonFields,
    NonEmpty,
    Penalty,
    SamplingParameters,
    Texts,
    TopLogprobs,
)
from fairlead.dialects.llama_cpp.shapes import GenerationSettings, NativeCompletion, StopType, Timings
from fairlead.dialects.openai.common import OpenAIErrors, StopStringList, encode, prompts_of, stop_strings
from fairlead.dialects.openai.completions import CompletionEnvelope
from fairlead.dialects.openai.logprobs import MIN_LOGPROB
from fairlead.dialects.openai.structured import Pattern, Schema, lark_of, object_schema
from fairlead.dialects.unserved import COMPLETION, Fields, Unserved, capturing, refuse_unserved
from fairlead.language.structured.grammar import JsonAnswer, LarkAnswer
from fairlead.language.structured.request import AnswerSpec
from fairlead.language.text.tokenizer import Tokenizer

RANDOM_SEED = 2**32 - 1
Bias = float | bool
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
BiasPair = Annotated[list[float | bool], Meta(min_length=2, max_length=2)]


class NativeEnvelope(CompletionEnvelope, frozen=True, kw_only=True):
    """What is read of every body."""

    n_predict: int | None = None

    @property
    def token_limit(self) -> int | None:
        """The longest answer that the client accepts; None: it sets no limit."""
        return self.n_predict if self.n_predict is not None and self.n_predict > 0 else None


class NativeCompletionRequest(CommonFields, frozen=True, kw_only=True):
    """`POST /completion`. Parameters that are absent are the model's own, not llama.cpp's.

    prompt: A text, token ids, or a list of either (all of one kind).
    n_predict: The most tokens of an answer; below 0: no limit but the model's; 0: only the prompt is
        computed.
    stop: Strings that end an answer.
    temperature: Higher values make unlikely tokens likelier; 0: always the likeliest token.
    top_k: Choose among this many likeliest tokens; 0 or -1: among all.
    top_p: Choose among the likeliest tokens that have this probability together.
    min_p: Leave out tokens that are less likely than this part of the likeliest one's probability.
    seed: The same seed gives the same answer; -1: none.
    repeat_penalty: Divides the logits of tokens that prompt or answer have; 1: none.
    repeat_last_n: The three penalties consider only the last so many tokens of prompt and answer; -1: all,
        the default, 0: none.
    presence_penalty: Subtracted from the logits of tokens that the answer has.
    frequency_penalty: The same for each time that the answer has them.
    ignore_eos: Go on after the model's own end.
    logit_bias: Pairs of a token id and what is added to its logits, or an object; false: never this token.
    n_probs: How many of the likeliest tokens are listed beside each; 0: none is listed.
    grammar: A grammar of the answer, in GBNF or Lark.
    json_schema: A JSON schema of the answer.
    return_tokens: Return the ids of the answer's tokens. A stream has them always.
    """

    prompt: NonEmpty | Annotated[Texts, Meta(extra_json_schema={"minItems": 1, **OF_ONE_KIND})]
    n_predict: Annotated[int, Meta(ge=-2, le=MAX_INT32)] | None = None
    stop: StopStringList | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        bool
        | Annotated[list[BiasPair], Meta(max_length=1024)]
        | Annotated[dict[str, Bias], Meta(max_length=1024)]
        | None
    ) = None
    n_probs: TopLogprobs | None = None
    grammar: Pattern | None = None
    json_schema: Schema | None = None
    return_tokens: bool | None = None

    def sampling(self) -> SamplingParameters:
        """Return the parameters in the terms of no dialect. Raises `InvalidRequest`."""
        return SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed in (-1, RANDOM_SEED) else self.seed,
            repetition_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            ignore_eos=self.ignore_eos,
            logit_bias=self._biases(),
        )

    def _biases(self) -> dict[int, float] | None:
        given = self.logit_bias
        if given is None or given is False:
            return None
        if given is True:
            raise invalid_field("logit_bias", "must be a list of pairs, an object or false")
        biases: dict[int, Bias] = {}
        for token_id, bias in given.items() if isinstance(given, dict) else given:
            if isinstance(token_id, str):
                if not _TOKEN_ID.fullmatch(token_id):
                    raise invalid_field("logit_bias", f"{quoted(token_id)} is not the id of a token")
            elif isinstance(token_id, bool) or token_id != int(token_id) or token_id < 0:
                raise invalid_field("logit_bias", f"{token_id} is not the id of a token")
            biases[int(token_id)] = bias
        for token_id, bias in biases.items():
            if bias is True or not (bias is False or -100 <= bias <= 100):
                raise invalid_field("logit_bias", f"that of {token_id} must be -100 to 100, or false")
        return {token_id: float("-inf") if bias is False else bias for token_id, bias in biases.items()}


_SERVED = NativeCompletionRequest.__struct_fields__
REFUSED: Fields = {name: field for name, field in COMPLETION.items() if name not in _SERVED} | {
    "n": Unserved((1,)),
    "logprobs": Unserved((), "n_probs"),
    "max_tokens": Unserved((-1,), "n_predict"),
    "messages": Unserved((), "prompt, made by /apply-template"),
    "repetition_penalty": Unserved((1,), "repeat_penalty"),
    "response_format": Unserved((), "json_schema"),
    "image_data": Unserved(([],)),
    "multimodal_data": Unserved(([],)),
}
_parse = BodyParser(capturing(NativeCompletionRequest, REFUSED))


def _answer(request: NativeCompletionRequest) -> AnswerSpec | None:
    """Return the form of the answer; None: any text. Raises `InvalidRequest`."""
    if request.json_schema is not None:
        if request.grammar:
            raise invalid_field("grammar", "cannot be combined with json_schema")
        schema = object_schema(request.json_schema, "json_schema")
        return AnswerSpec(answer=JsonAnswer(schema), answer_field="json_schema")
    if not request.grammar:
        return None
    return AnswerSpec(answer=LarkAnswer(lark_of(request.grammar, "grammar")), answer_field="grammar")


class NativeOptions(NamedTuple):
    """How a completion is written.

    n_predict: As requested.
    stop: The stop strings.
    n_probs: How many alternatives are listed; 0: no log-probabilities.
    tokens: A whole response has the ids of the tokens.
    seed: As requested; None: a random one.
    """

    n_predict: int
    stop: tuple[str, ...]
    n_probs: int
    tokens: bool
    seed: int | None


class NativeShape(EventShape, gc=False):
    """An event of a stream, or a whole response."""

    index: int | None = None
    content: str | None = None
    stop: bool | None = None
    stop_type: str | None = None
    tokens_predicted: msgspec.Raw = ABSENT


_decode_shapes = msgspec.json.Decoder(NativeShape | list[NativeShape]).decode


class NativeReader(EventReader[NativeShape]):
    """The reader of other servers' completions."""

    shape = NativeShape
    contents = ("content", "stop", "error")

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """Return the content of a whole response. Raises `ValueError` if it has another form."""
        shapes = decoded(_decode_shapes, body)
        if isinstance(shapes, list):
            counts = [token_count(shape.tokens_predicted) for shape in shapes]
            known = [count for count in counts if count is not None]
            size = sum(len(shape.content or "") for shape in shapes)
            return UpstreamAnswer(sum(known) if known else None, size)
        if shapes is None or is_given(shapes.error):
            return super().read_response(body)
        return UpstreamAnswer(token_count(shapes.tokens_predicted), len(shapes.content or ""))

    def _is_noise(self, shape: NativeShape) -> bool:
        return shape.content is None and not shape.stop

    def _event(self, shape: NativeShape) -> UpstreamEvent:
        text, index = shape.content or "", shape.index or 0
        if not shape.stop:
            return UpstreamEvent(index, text, is_beginning=not text)
        finished = "length" if shape.stop_type == "limit" else "stop"
        return UpstreamEvent(index, text, finished, generated=token_count(shape.tokens_predicted))

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document, ("content",))


class NativeCompletionDialect(OpenAIErrors, StreamingDialect):
    """Native completions. Their `options` are `NativeOptions`."""

    path = "/completion"
    body_type = NativeCompletionRequest
    answer_type = NativeCompletion
    refused_fields = REFUSED
    job_prefix = "cmpl"
    read_envelope = BodyParser(NativeEnvelope)
    reader = NativeReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, REFUSED)
        n_predict = -1 if request.n_predict is None else request.n_predict
        sampling, stop = request.sampling(), stop_strings(request.stop)
        return GenerationRequest(
            prompts=prompts_of("prompt", request.prompt, empty="is empty"),
            sampling=sampling,
            max_tokens=None if n_predict < 0 else n_predict,
            stop=stop,
            logprobs=request.n_probs or None,
            echo=True,
            answer=_answer(request),
            options=NativeOptions(
                n_predict, stop, request.n_probs or 0, bool(request.return_tokens), sampling.seed
            ),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        writer = NativeAnswer(context, self)
        written = [writer.whole(delta) for delta in deltas]
        return encode(written if len(written) > 1 else written[0])

    def stream_writer(self, context: AnswerContext) -> "NativeAnswer":
        """Return the writer of a streamed response."""
        return NativeAnswer(context, self)


class NativeAnswer:
    """The writer of one answer, as events or as a whole. An event ends each choice; no mark follows."""

    def __init__(self, context: AnswerContext, dialect: NativeCompletionDialect) -> None:
        self._context = context
        self._dialect = dialect
        self._options: NativeOptions = context.options
        choices = context.job.sequences
        self._predicted, self._cached, self._broken = [0] * choices, [0] * choices, [False] * choices

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; none for a delta without tokens, unless it ends a choice."""
        events = []
        for delta in map(self._shown, deltas):
            self._count(delta)
            if delta.text or delta.token_ids:
                events.append(encode_event(encode(self._piece(delta))))
            if delta.finish_reason is not None:
                events.append(encode_event(encode(self._end(delta, content="", tokens=[]))))
        return b"".join(events)

    def end(self) -> bytes:
        """See `StreamWriter`: the last event of the last choice is the end."""
        return b""

    def fail(self, error: FairleadError) -> bytes:
        """Return the event of an error that ends the stream."""
        return self._dialect.error_event(error)

    def skip_beginnings(self) -> None:
        """See `AnswerWriter`: an answer has no beginning."""

    def whole(self, delta: Delta) -> NativeCompletion:
        """Return the completion of a choice."""
        delta = self._shown(delta)
        self._count(delta)
        tokens = delta.token_ids if self._options.tokens else []
        return self._end(delta, content=delta.text, tokens=tokens)

    def _shown(self, delta: Delta) -> Delta:
        """Return what is shown of a delta: nothing of the answer, if only the prompt was to be computed."""
        if self._options.n_predict != 0:
            return delta
        ended = None if delta.finish_reason is None else "length"
        return Delta(delta.index, finish_reason=ended, cached_tokens=delta.cached_tokens)  # type: ignore[arg-type]

    def _count(self, delta: Delta) -> None:
        self._predicted[delta.index] += len(delta.token_ids)
        self._cached[delta.index] += delta.cached_tokens
        self._broken[delta.index] |= "\n" in delta.text

    def _piece(self, delta: Delta) -> dict[str, Any]:
        piece = {
            "index": delta.index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._predicted[delta.index],
            "tokens_evaluated": len(self._context.job.prompts[delta.index]),
        }
        if delta.logprobs:
            piece["completion_probabilities"] = self._probabilities(delta)
        return piece

    def _end(self, delta: Delta, *, content: str, tokens: list[int]) -> NativeCompletion:
        context, job, index = self._context, self._context.job, delta.index
        predicted, prompt = self._predicted[index], len(job.prompts[index])
        is_word = isinstance(delta.stop_reason, str)
        kinds: dict[str | None, StopType] = {"length": "limit", "stop": "word" if is_word else "eos"}
        listed: Any = UNSET
        if self._options.n_probs and not job.stream:
            listed = self._probabilities(delta)
        return NativeCompletion(
            index=index,
            content=content,
            tokens=tokens,
            stop=True,
            model=job.model,
            tokens_predicted=predicted,
            tokens_evaluated=prompt,
            generation_settings=self._settings(job),
            prompt=context.prompt_texts[index] if context.prompt_texts else "",
            has_new_line=self._broken[index],
            stop_type=kinds.get(delta.finish_reason, "none"),
            stopping_word=delta.stop_reason if isinstance(delta.stop_reason, str) else "",
            tokens_cached=self._cached[index],
            timings=_timings(context.times or AnswerTimes(), prompt, self._cached[index], predicted),
            completion_probabilities=listed,
        )

    def _settings(self, job: Job) -> GenerationSettings:
        options = self._options
        return settings_of(
            job.sampling,
            n_predict=options.n_predict,
            seed=RANDOM_SEED if options.seed is None else options.seed,
            stop=list(options.stop),
            n_probs=options.n_probs,
            stream=job.stream,
        )

    def _probabilities(self, delta: Delta) -> list[dict[str, Any]]:
        tokenizer = self._context.own_model.tokenizer
        return [
            {
                **_probability(tokenizer, one.token_id, one.logprob),
                "top_logprobs": [_probability(tokenizer, *other) for other in one.top],
            }
            for one in delta.logprobs
        ]


def settings_of(
    sampling: Sampling,
    *,
    n_predict: int = -1,
    seed: int = RANDOM_SEED,
    stop: list[str] | None = None,
    n_probs: int = 0,
    stream: bool = False,
) -> GenerationSettings:
    """Return the settings of an answer.

    sampling: How it is sampled.
    n_predict: As requested; -1: no limit.
    seed: As requested; `RANDOM_SEED`: a random one.
    stop: The stop strings; None: none.
    n_probs: How many alternatives are listed.
    stream: Whether it is streamed.
    """
    return GenerationSettings(
        n_predict=n_predict,
        seed=seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_last_n=sampling.repeat_last_n,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        ignore_eos=sampling.ignore_eos,
        stop=stop or [],
        n_probs=n_probs,
        stream=stream,
    )


def _probability(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": tokenizer.token(token_id),
        "bytes": list(tokenizer.token_bytes(token_id)),
        "logprob": max(logprob, MIN_LOGPROB),
    }


def _timings(times: AnswerTimes, prompt: int, cached: int, predicted: int) -> Timings:
    """Return the durations. `prompt`, `cached`, `predicted`: tokens of the prompt, and of the answer."""
    computed = prompt - cached
    prompt_ms = max(0, times.begun_ns - times.requested_ns - times.waited_ns) / 1e6
    predicted_ms = (time.perf_counter_ns() - times.begun_ns) / 1e6
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, computed),
        prompt_per_second=_ratio(1000 * computed, prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, predicted),
        predicted_per_second=_ratio(1000 * predicted, predicted_ms),
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
