"""The fields of Ollama's requests, with their ranges, and what they mean for a generation request."""

import re
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.fields import Envelope, Penalty, SamplingParameters, StopString, TopLogprobs
from fairlead.dialects.openai.common import MAX_STOP_STRINGS
from fairlead.dialects.openai.messages import Function, Tool, Tools
from fairlead.dialects.openai.structured import answer_spec
from fairlead.dialects.unread import known_fields, unread_fields
from fairlead.dialects.unserved import Fields, Unserved, capturing, refuse_unserved
from fairlead.language.structured.grammar import JsonAnswer
from fairlead.language.structured.request import AnswerSpec

# Above this, a model stays loaded without a limit.
LONGEST_KEEP_ALIVE_S = 100 * 365 * 86_400.0

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([-+]?)((?:{_PART})+)", re.ASCII)
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?", re.ASCII)
_EMPTY = re.compile(rb'(?:null|""|\[[ \t\n\r]*\])?')

# Options that the engine does not have. `num_ctx` and others that concern memory and threads are ignored.
OPTIONS: Fields = {
    "mirostat": Unserved((0,)),
    "tfs_z": Unserved((1,)),
    "typical_p": Unserved((1,)),
    "penalize_newline": Unserved((True,)),
}
_AT_OPTIONS = {f"options.{name}": field for name, field in OPTIONS.items()}
_IMAGES = Unserved(([],))
GENERATE: Fields = {"images": _IMAGES}
# They concern memory, threads and the length of the context, which the configuration says.
_IGNORED = (
    "num_ctx num_batch num_keep num_gpu main_gpu num_gqa num_thread low_vram f16_kv logits_all vocab_only"
    " use_mmap use_mlock embedding_only numa mirostat_tau mirostat_eta"
)
IGNORED_OPTIONS = frozenset(_IGNORED.split())
# The names of all fields that a route refuses, for the documents.
DOCUMENTED_CHAT: Fields = {"messages.images": _IMAGES, **_AT_OPTIONS}
DOCUMENTED_GENERATE: Fields = {**GENERATE, **_AT_OPTIONS}

KeepAlive = float | Annotated[str, Meta(max_length=64)]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, Any]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Request = TypeVar("Request", bound="OllamaRequest")


class RelayedOptions(msgspec.Struct, frozen=True):
    """The options that are read of every request, also of one for another server."""

    num_predict: int | None = None
    temperature: float | None = None
    seed: int | None = None


class OllamaEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body. A request without content loads or unloads the model.

    options: The options that are read of relayed requests, too.
    keep_alive: How long the model stays loaded after the request.
    messages: The content of chats.
    prompt: The content of generated texts.
    suffix: The same, after the answer.
    input: The content of requests for embeddings.
    """

    options: RelayedOptions | None = None
    keep_alive: KeepAlive | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def wants_stream(self) -> bool:
        """See `Envelope`. In this dialect, streams are the default."""
        return self.stream is not False

    @property
    def token_limit(self) -> int | None:
        """The longest answer that the client accepts; None: it sets no limit, as with -1 in llama.cpp."""
        limit = self.options.num_predict if self.options is not None else None
        return limit if limit is not None and limit > 0 else None

    @property
    def is_empty(self) -> bool:
        """Whether the request has no content."""
        return all(map(_EMPTY.fullmatch, (self.messages, self.prompt, self.suffix, self.input)))


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer. None is the model's default.

    temperature: Higher values make unlikely tokens likelier; 0: always the likeliest token.
    top_p: Choose among the likeliest tokens that have this probability together.
    top_k: Choose among this many likeliest tokens; 0 or -1: among all.
    min_p: Leave out tokens that are less likely than this part of the likeliest one's probability.
    seed: The same seed gives the same answer; -1: none.
    num_predict: The most tokens of the answer; below 1: no limit but the model's.
    stop: Strings that end the answer.
    repeat_penalty: Divides the logits of tokens that prompt or answer have; 1: none.
    repeat_last_n: The three penalties consider only the last so many tokens of prompt and answer; -1: all,
        the default, 0: none.
    presence_penalty: Subtracted from the logits of tokens that the answer has.
    frequency_penalty: The same for each time that the answer has them.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    stop: Stop | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def max_tokens(self) -> int | None:
        """The longest answer; None: no limit but the model's."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, from either form."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> SamplingParameters:
        """Return the parameters in the terms of no dialect."""
        return SamplingParameters(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed == -1 else self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
        )


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chats and generated texts share.

    model: The model.
    stream: Send the answer as it is generated, which is the default.
    format: `json`, or a JSON schema that the answer follows.
    think: Whether the model reasons, or how much.
    options: How tokens are chosen, and what ends the answer.
    keep_alive: Seconds, or a duration such as "5m", for which the model stays loaded without a request;
        negative: without limit.
    logprobs: List the tokens of the answer with their log-probabilities.
    top_logprobs: How many of the likeliest tokens are listed beside each.
    truncate: Has no effect: too long a prompt is refused.
    shift: Has no effect: nothing is cut.
    """

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def given_options(self) -> OllamaOptions:
        """The options, all absent if there are none."""
        return self.options or OllamaOptions()

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """The variables of the chat template that switch reasoning."""
        if self.think is None:
            return None
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": self.think is not False, **level}

    @property
    def listed_logprobs(self) -> int | None:
        """How many alternatives of each token are listed; None: log-probabilities are not."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer(self, tools: Tools | None = None) -> AnswerSpec | None:
        """Return the form of the answer, None if it is any text. Raises `InvalidRequest`."""
        spec = answer_spec(None, None, tools)
        if self.format is None or self.format == "":
            return spec
        schema = {"type": "object"} if self.format == "json" else self.format
        assert isinstance(schema, dict)
        return msgspec.structs.replace(spec or AnswerSpec(), answer=JsonAnswer(schema), answer_field="format")


class OllamaTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    function: Function
    type: str = "function"


OllamaTools = Annotated[list[OllamaTool], Meta(max_length=2048)]


def tools_of(tools: list[OllamaTool] | None) -> list[Tool]:
    """Return the tools as in OpenAI's dialect."""
    return [Tool(tool.type, tool.function) for tool in tools or ()]


def parser_of(request: type[Request], refused: Fields) -> BodyParser[Request]:
    """Return the parser of bodies of this type, for `check_served`."""
    options = capturing(OllamaOptions, OPTIONS)
    kind = msgspec.defstruct(
        request.__name__, [("options", options | None, None)], bases=(request,), frozen=True, kw_only=True
    )
    return BodyParser(cast("type[Request]", capturing(kind, refused) if refused else kind))


def check_served(request: OllamaRequest, refused: Fields) -> None:
    """Raise `InvalidRequest` for fields and options that are not served."""
    if refused:
        refuse_unserved(request, refused)
    if request.options is not None:
        refuse_unserved(request.options, OPTIONS, within="options.")
    if request.top_logprobs and not request.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs: true")


def unread_options(body: bytes) -> tuple[str, ...]:
    """Return the paths of the options of a decoded body that nothing reads."""
    return unread_fields(_decode_options(body).options, _KNOWN_OPTIONS, within="options.")


class _Options(msgspec.Struct):
    options: msgspec.Raw = msgspec.Raw(b"{}")


_decode_options = msgspec.json.Decoder(_Options).decode
_KNOWN_OPTIONS = known_fields(OllamaOptions, OPTIONS, IGNORED_OPTIONS)


def keep_alive_s(value: float | str | None) -> float | None:
    """Return the seconds of a `keep_alive`, infinite for no limit; None if it is absent.

    Text is a duration as in Go, or a number of seconds. Raises `InvalidRequest`.
    """
    if value is None:
        return None
    seconds = value if isinstance(value, int | float) else _duration_s(value)
    if seconds is None:
        raise invalid_field("keep_alive", 'must be a number of seconds or a duration such as "5m"')
    return float("inf") if seconds < 0 or seconds > LONGEST_KEEP_ALIVE_S else float(seconds)


def _duration_s(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, found[2], re.ASCII))
    return -seconds if found[1] == "-" else seconds
