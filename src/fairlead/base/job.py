"""The values that modules exchange: jobs from clients and the deltas of their answers. Only data."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]

_IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})

CHAT_PATH = "/v1/chat/completions"

CHAT_DIALECT = "openai"
"""The dialect that others are translated to, by its name in the configuration."""

PORTION_TOKENS = 512
PORTION_TEXTS = 32
"""The most tokens and texts of one job that are embedded in one turn, about what a step computes."""


class ReasoningLimit(msgspec.Struct, frozen=True, array_like=True):
    """A bound on the reasoning.

    max_tokens: the number of its tokens after which the model has to write its `end`.
    begin: the ids of the mark before it.
    end: the ids of the mark after it.
    is_open: whether the prompt has opened it.
    """

    max_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence samples its tokens. The API checks the ranges (`dialects/fields.py`).

    max_tokens: the most tokens of the answer.
    temperature: 0 is greedy.
    top_p: the least sum of probabilities of the tokens that are kept; 1 is off.
    top_k: how many tokens are kept; 0 is off.
    min_p: the least probability of those that are kept, as a fraction of the highest; 0 is off.
    seed: None: a random one is drawn when the sequence is submitted.
    stop_token_ids: tokens that end the answer, as the model's end-of-sequence ids do.
    ignore_eos: whether those of the model do not.
    min_tokens: no end is accepted before so many tokens.
    presence_penalty: subtracted from the logit of each token that the answer has.
    frequency_penalty: subtracted as often as the answer has the token.
    repetition_penalty: divides the logits of tokens that the prompt or the answer has; 1 is off.
    logit_bias: what is added to the logits of token ids.
    logprobs: k: report the chosen token's and the k likeliest; None: none.
    prompt_logprobs: the same for each token of the prompt but the first.
    grammar: the whole output has to match this grammar of llguidance; None: any output.
    grammar_bytes: about how much memory it takes when it is compiled.
    reasoning_limit: a bound on the reasoning.
    close_at_limit: an answer with a grammar that nears `max_tokens` is closed.
    repeat_last_n: the three penalties consider only the last so many tokens; -1: all.
    allowed_token_ids: no other tokens are chosen, not even the model's end; None: all may be.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    grammar_bytes: int = 0
    reasoning_limit: ReasoningLimit | None = None
    close_at_limit: bool = False
    repeat_last_n: int = -1
    allowed_token_ids: tuple[int, ...] | None = None


class Passthrough(msgspec.Struct, frozen=True):
    """A request of any kind for a command's own server: its method and headers."""

    method: str
    headers: tuple[tuple[str, str], ...]


class FormPart(msgspec.Struct, frozen=True):
    """A part of a form. `start` and `size`: where its content is among those of all parts.

    `filename` None: it is a field, not a file. `content_type`: empty if it has none.
    """

    name: str
    filename: str | None
    content_type: str
    start: int
    size: int


class FormContents(Protocol):
    """The contents of a form's parts, joined, as long as its request lasts."""

    async def read(self, start: int, size: int) -> bytes:
        """Return some of them. Raises `UploadFailed`."""
        ...


class Form(msgspec.Struct, frozen=True):
    """A form, which a node gets with its own name of the model as the field `model`."""

    parts: tuple[FormPart, ...]
    contents: FormContents


class Media(msgspec.Struct, frozen=True):
    """A request whose answer is relayed as it arrives, whatever its type: sound, an image, JSON or events.

    method: POST, or GET, which names the model in its query and has no body.
    accept: the client's header of that name.
    form: the body; None: it is JSON, as in other requests.
    requested: the model's name in the form.
    """

    method: str = "POST"
    accept: str = ""
    form: Form | None = None
    requested: str = ""


class ChatRelay(msgspec.Struct, frozen=True):
    """A request as a chat completion of OpenAI, for nodes that speak no other dialect.

    The node's answer is translated to the client's dialect.
    """

    body: bytes
    path: str = CHAT_PATH


class Relay(msgspec.Struct, frozen=True):
    """What a client sent, for a node that understands it.

    path: the route's path; with a `passthrough` the target with its query.
    body: a JSON object. Only its `model` is changed on the way, unless the node has filters. With a
        `passthrough` nothing is changed, and it may be anything.
    stream: whether the client wants a stream.
    passthrough: the request of a route below `/upstream`; None: it is of another route.
    dialect: the API that the client speaks. The node's response is read by the reader of the route in it.
    chat: what a node gets which does not speak `dialect`; None: it cannot be translated, or need not be.
    only_chat: even nodes that speak `dialect` get `chat`, because only `chat` has the whole request.
    headers: those of the client's that belong to the dialect. They go with `body` only.
    media: set if the answer may be of any type.
    """

    path: str
    body: bytes
    stream: bool = False
    passthrough: Passthrough | None = None
    dialect: str = CHAT_DIALECT
    chat: ChatRelay | None = None
    only_chat: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    media: Media | None = None

    @property
    def size(self) -> int:
        """The bytes of the request in memory, in both forms. A form is in a file."""
        return len(self.body) + (0 if self.chat is None else len(self.chat.body))


class AnswerParts(msgspec.Struct, frozen=True):
    """Which parts the text of an answer is divided into: reasoning, content and tool calls.

    `tools`: the schemas of the functions' arguments; None: calls are not parsed. `in_reasoning`: the prompt
    has opened the reasoning. `is_named`: the request named the function to call, so a call is a normal end.
    """

    tools: dict[str, Any] | None = None
    in_reasoning: bool = False
    is_named: bool = False


class Job(msgspec.Struct, frozen=True):
    """One parsed request, with its tenant.

    id: the server's id for it.
    tenant: whose turn it takes.
    model: the canonical name (aliases are resolved).
    prompts: token ids. The n sequences of prompt p are choices p·n … p·n+n−1. A job that only nodes can run
        may have none.
    sampling: how its sequences sample.
    n: the sequences of a prompt; without prompts, all choices.
    stop: strings that end a sequence and are not part of its text.
    stream: whether the client wants a stream.
    request_id: the client's id for it; no two jobs in flight share one.
    owner: identifies its API key without revealing it; empty where there are no keys. Only the owner may
        cancel the job.
    priority: an index into `queue.classes`; 0 is served first.
    no_queue: refuse it rather than queue it.
    wait_limit_s: how long it may wait, if that is less than `queue.timeout`.
    relay: the request, for nodes that take it as the client wrote it.
    prompt_estimate: without prompts, its estimated prompt tokens.
    traceparent: the client's header of that name (W3C Trace Context), unchanged.
    embed: whether the result for each prompt is its vector, not a continuation.
    path: the route's, for the log.
    client: the client's address, for the log.
    parts: how the text is divided into parts; None: all of it is content.
    grammar_field: the field of the request from which the grammar of `sampling` was made, for errors.
    cache_owner: it uses only cached prefixes of jobs with the same one; empty: those that tenants share.
    when_idle: it gets only seats that no other job waits for, and is stopped when one does.
    team: the team whose turn it takes, of which its tenant has a part; empty: none.
    team_weight: what its team gets of the service, against a team with weight 1.
    """

    id: str
    tenant: str
    model: str
    prompts: tuple[ReadOnlySequence[int], ...]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    request_id: str = ""
    owner: str = ""
    priority: int = 1
    no_queue: bool = False
    wait_limit_s: float | None = None
    relay: Relay | None = None
    prompt_estimate: int = 0
    traceparent: str = ""
    embed: bool = False
    path: str = ""
    client: str | None = None
    parts: AnswerParts | None = None
    grammar_field: str = ""
    cache_owner: str = ""
    when_idle: bool = False
    team: str = ""
    team_weight: float = 1.0

    @property
    def needs_own_node(self) -> bool:
        """Whether no remote server may run it, because it is for a command's own server."""
        return self.relay is not None and self.relay.passthrough is not None

    @property
    def method(self) -> str:
        """The HTTP method of its request, which is POST for most routes that make jobs."""
        if self.relay is None:
            return "POST"
        request = self.relay.passthrough or self.relay.media
        return "POST" if request is None else request.method

    @property
    def has_no_tokens(self) -> bool:
        """Whether prompt and answer have no tokens: the request itself is charged."""
        return self.relay is not None and self.relay.media is not None

    @property
    def may_be_repeated(self) -> bool:
        """Whether it may be run again after a node failed: a passthrough, if idempotent (RFC 9110, 9.2.2)."""
        if self.relay is None or self.relay.passthrough is None:
            return True
        return self.relay.passthrough.method in _IDEMPOTENT

    @property
    def sequences(self) -> int:
        """How many choices the answer has; in the engine, each is a sequence."""
        return max(1, len(self.prompts)) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts, each counted once; an estimate if the prompts are not known here."""
        return sum(map(len, self.prompts)) if self.prompts else self.prompt_estimate

    @property
    def prompt_tokens_at_once(self) -> int:
        """Prompt tokens that a node holds at most at a time: each prompt once per sequence."""
        return self.prompt_tokens * self.n


def portions_of(texts: ReadOnlySequence[ReadOnlySequence[int]]) -> list[range]:
    """Divide texts that are embedded into portions, and return the indexes of each.

    A text longer than a portion is one of its own. Without texts, there is one empty portion.
    """
    portions, first, tokens = [], 0, 0
    for index, text in enumerate(texts):
        tokens += len(text)
        if index > first and (tokens > PORTION_TOKENS or index - first == PORTION_TEXTS):
            portions.append(range(first, index))
            first, tokens = index, len(text)
    return [*portions, range(first, len(texts))]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A chosen token's log-probability and the likeliest alternatives.

    token_id: the token.
    logprob: its log-probability.
    top: the likeliest tokens, best first: (token id, logprob).
    rank: of a prompt's token: how many tokens are as likely as it or likelier; 0: not counted.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class CallPiece(msgspec.Struct, gc=False):
    """A piece of a tool call. The first one has the function's `name`; the others add to its `arguments`."""

    number: int
    name: str | None = None
    arguments: str = ""


class Translation(msgspec.Struct, frozen=True):
    """The dialect that a piece was translated from, and its server's count of the prompt's tokens, if any."""

    dialect: str
    prompt_tokens: int | None = None


class Delta(msgspec.Struct):
    """A piece of one choice's answer. `merge` combines those of one choice.

    index: the choice. Events at the end that belong to no choice have an index after those of the choices.
    text: content, which `reasoning` precedes and `calls` follow. It may lag behind `token_ids`: bytes of an
        incomplete character and the possible beginning of a stop string are held back until later tokens
        decide them. A piece from another server has all of its text here, reasoning and tool calls too.
    token_ids: the tokens.
    logprobs: those of the tokens, if requested.
    finish_reason: set in the last piece of a choice only.
    stop_reason: the string or the token that ended it, if one did.
    raw: the bytes of a piece from another server, to be passed on unchanged: whole events, or a JSON body.
    relayed_tokens: how many tokens `raw` or `translation` has: one per event, and at the end the difference
        to the server's own count, which may be negative.
    vector: the prompt's embedding, float32, little-endian, in the only piece of a choice.
    prompt_logprobs: in the first piece, if requested: those of the prompt, from its second token on.
    cached_tokens: in the first piece: how many tokens of the prompt were cached.
    reasoning: text before the content.
    reasoning_tokens: how many of `token_ids` or of `relayed_tokens` are of the reasoning.
    calls: pieces of tool calls.
    translation: a piece that was translated from another dialect, instead of `raw`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    raw: list[bytes] = []
    relayed_tokens: int = 0
    vector: bytes = b""
    prompt_logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: list[CallPiece] = []
    translation: Translation | None = None

    def merge(self, later: "Delta") -> None:
        """Append a later delta of the same choice, in place."""
        assert self.index == later.index
        assert self.finish_reason is None
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.raw += later.raw
        self.relayed_tokens += later.relayed_tokens
        self.vector += later.vector
        self.prompt_logprobs += later.prompt_logprobs
        self.cached_tokens += later.cached_tokens
        self.reasoning += later.reasoning
        self.reasoning_tokens += later.reasoning_tokens
        self.translation = later.translation or self.translation
        for piece in later.calls:
            add_piece(self.calls, piece)


def add_piece(calls: list[CallPiece], piece: CallPiece) -> None:
    """Append a piece of a call, joined with the last one if that is of the same call."""
    if calls and calls[-1].number == piece.number:
        calls[-1].arguments += piece.arguments
    else:
        calls.append(CallPiece(piece.number, piece.name, piece.arguments))
