"""Fields of request bodies that several dialects share, with their ranges.

Every optional field may also be null, which means absent. Unlisted fields are ignored, because clients send
more of them every month.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_ALLOWED_TOKENS = 16_384

Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INT32)]
# -1: no limit, as in llama.cpp and vLLM's older clients. `token_limit` refuses 0.
TokenLimit = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
UserName = Annotated[str, Meta(max_length=64 * 1024)]
VllmPriority = Annotated[int, Meta(ge=-(2**31), le=MAX_INT32)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
# vLLM's `truncate_prompt_tokens`: -1 is as many as the model takes. `truncation_of` refuses 0.
TruncatedTokens = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=1024)]
# Declared for `/openapi.json` only; checked elsewhere, with messages of our own.
NonEmpty = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Texts = list[NonEmpty | TokenId | TokenIds]
TEXT_OR_TEXTS = ["string", "array"]
OF_ONE_KIND = {"anyOf": [{"items": {"type": kind}} for kind in ("string", "integer", "array")]}


def describe_alternatives(body: Any, *alternatives: Mapping[str, str | list[str]]) -> Any:
    """Return the type of a body for `/openapi.json`: it has all fields of one of the alternatives.

    Each of these maps names of fields to their types in JSON.
    """
    schemas = [
        {"required": list(fields), "properties": {name: {"type": kind} for name, kind in fields.items()}}
        for fields in alternatives
    ]
    return Annotated[body, Meta(extra_json_schema={"anyOf": schemas})]


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the server itself reads, even of relayed requests.

    model: The model, an alias or a selector; None: the only model that the key may use.
    stream: Send the answer as it is generated.
    user: The user for whom the client asks. A trusted key's users are tenants of their own.
    safety_identifier: OpenAI's newer name for the user.
    priority: The name of a class, or vLLM's number: 0 is the default class, and each step below or above it
        is one class earlier or later.
    """

    model: str | None = None
    stream: bool | None = None
    user: UserName | None = None
    safety_identifier: UserName | None = None
    priority: str | VllmPriority | None = None


class Envelope(CommonFields, frozen=True, kw_only=True):
    """The fields that are read of any body before it is known which server will answer.

    If another server does, it checks most ranges, and all other fields.

    n: Answers of one prompt.
    max_tokens: The most tokens of an answer.
    max_completion_tokens: The same in newer chats.
    max_output_tokens: The same in responses.
    temperature: The temperature of sampling; 0 makes an answer repeatable.
    seed: The seed of sampling, which makes an answer repeatable.
    """

    n: PositiveCount | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    @property
    def wants_stream(self) -> bool:
        """Whether the client requests a stream."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """The number of choices in the answer, as far as it distinguishes them."""
        return 1

    @property
    def token_limit(self) -> int | None:
        """The longest answer that the client accepts; None: it sets no limit, as with -1 in llama.cpp."""
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        return next((limit for limit in limits if limit is not None and limit > 0), None)


class SamplingParameters(CommonFields, frozen=True, kw_only=True):
    """How an answer is sampled: the fields of `job.Sampling` that a client may set, under the same names.

    This is their only declaration in the API: `sampling.sampling_of` converts them by name. None is the
    model's default.

    min_tokens: Nothing ends the answer before it has this many tokens.
    temperature: Higher values make unlikely tokens likelier; 0: always the likeliest token.
    top_p: Choose among the likeliest tokens that have this probability together.
    top_k: Choose among this many likeliest tokens; 0 or -1: among all.
    min_p: Leave out tokens that are less likely than this part of the likeliest one's probability.
    seed: The same seed gives the same answer.
    presence_penalty: Subtracted from the logits of tokens that the answer has.
    frequency_penalty: The same for each time that the answer has them.
    repetition_penalty: Divides the logits of tokens that prompt or answer have; 1: none.
    repeat_last_n: The three penalties consider only the last so many tokens of prompt and answer; -1: all,
        0: none.
    logit_bias: Added to logits, by token id.
    allowed_token_ids: Only these tokens are chosen. The model's own end is, too, only if it is among them.
    stop_token_ids: Further tokens that end the answer.
    ignore_eos: Go on after the model's own end.
    prompt_logprobs: From vLLM: list each token of the prompt, and this number of the likeliest ones.
    """

    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Beyond these bounds, float32 logits overflow and the sequence would fail in the engine.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: (
        Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
