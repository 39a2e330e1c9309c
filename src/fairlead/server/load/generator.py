"""The load generator: concurrent clients, each of which sends its next request after an answer.

Prompts share no prefix, and the same seed gives the same words. The number of requests, the duration and the
time of each answer are bounded. Independent of the terminal.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Literal

import msgspec
import trio

from fairlead.server.load.client import LoadConnection, RequestFailedError, TimedAnswer, time_request
from fairlead.server.load.report import Level, summarize

TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name"
)
WORDS = TEXT.split()
TOKENS_PER_WORD = 1.3  # an estimate, for servers without /tokenize
FITTING_TRIES = 5
CONTROL_TIMEOUT_S = 60.0

OnAnswer = Callable[[], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The load. `with_model` fills in an empty `model`.

    url: the server.
    model: its model.
    endpoint: the kind of requests.
    streams: the levels: numbers of concurrent streams, one level after the other.
    requests: how many a level has; None: four per stream.
    warmup: how many before each level are not measured; None: one per stream.
    prompt_tokens: the length of prompts.
    output_tokens: the length of answers.
    ignore_eos: whether answers do not end early.
    tenants: how many `user` names send them; 0: they have none.
    duration_s: the time after which a level starts no more requests.
    timeout_s: how long an answer may take.
    seed: of the random prompts.
    """

    url: str
    model: str
    endpoint: Literal["chat", "completions"]
    streams: tuple[int, ...]
    requests: int | None
    warmup: int | None
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool
    tenants: int
    duration_s: float
    timeout_s: float
    seed: int

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def requests_of(self, streams: int) -> int:
        """Return the number of requests of a level."""
        return self.requests or 4 * streams

    def warmup_of(self, streams: int) -> int:
        """Return the number of warm-up requests before it."""
        return streams if self.warmup is None else self.warmup

    def prompt(self, text: str) -> dict[str, object]:
        """Return the fields of a request's body for a prompt."""
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def body(self, text: str, *, tenant: int) -> dict[str, object]:
        """Return the whole body of a request."""
        return {
            "model": self.model,
            **self.prompt(text),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"user": f"tenant-{tenant}"} if self.tenants else {}),
        }


def with_model(options: Options, *, api_key: str | None = None) -> Options:
    """Return the options with a model: the server's first one, if none is named.

    Raises `RequestFailedError` if the server has none or does not answer, `ValueError` for an invalid URL.
    """
    connection = LoadConnection(options.url, api_key=api_key)
    if options.model:
        return options
    return msgspec.structs.replace(options, model=trio.run(_first_model, connection))


def measure(
    options: Options, *, api_key: str | None = None, on_answer: OnAnswer = lambda: None
) -> list[tuple[Level, list[TimedAnswer]]]:
    """Run every level; return the results and the answers of each. `on_answer` is called after each answer.

    Raises `RequestFailedError` if the server does not answer at all, and for the first refusal that every
    other request would get, too. Any other failed answer is only recorded.
    """
    connect = partial(LoadConnection, options.url, api_key=api_key)
    return [trio.run(_run_level, options, connect, streams, on_answer) for streams in options.streams]


async def _run_level(
    options: Options, connect: partial[LoadConnection], streams: int, on_answer: OnAnswer
) -> tuple[Level, list[TimedAnswer]]:
    """Warm up, then measure one number of streams."""
    warmup, requests = options.warmup_of(streams), options.requests_of(streams)
    rng = random.Random(f"{options.seed} {streams}")  # noqa: S311 - words, not secrets
    prompts = await _make_prompts(options, connect(), warmup + requests, rng)

    await _load(options, connect, streams, prompts[:warmup], on_answer)
    cpu_before_s = time.process_time()
    answers = await _load(options, connect, streams, prompts[warmup:], on_answer)
    return summarize(streams, answers, cpu_s=time.process_time() - cpu_before_s), answers


async def _load(
    options: Options,
    connect: partial[LoadConnection],
    streams: int,
    prompts: Sequence[str],
    on_answer: OnAnswer,
) -> list[TimedAnswer]:
    """Send all prompts, `streams` at a time, until none is left or the time is up."""
    answers: list[TimedAnswer] = []
    remaining: Iterator[tuple[int, str]] = iter(enumerate(prompts))
    last_start_s = trio.current_time() + options.duration_s
    refusals: list[RequestFailedError] = []

    async def client() -> None:
        connection = connect()
        for number, prompt in remaining:
            body = options.body(prompt, tenant=number % max(1, options.tenants))
            try:
                answer = await time_request(connection, options.path, body, timeout_s=options.timeout_s)
            except RequestFailedError as error:
                refusals.append(error)
                nursery.cancel_scope.cancel()
                return
            answers.append(answer)
            on_answer()
            if trio.current_time() > last_start_s:
                break

    async with trio.open_nursery() as nursery:
        for _ in range(min(streams, len(prompts))):
            nursery.start_soon(client)
    if refusals:
        raise refusals[0]
    return answers


async def _first_model(connection: LoadConnection) -> str:
    class ListedModel(msgspec.Struct):
        id: str

    class Listing(msgspec.Struct):
        data: list[ListedModel]

    with trio.fail_after(CONTROL_TIMEOUT_S):
        models = msgspec.json.decode(await connection.request("GET", "/v1/models"), type=Listing).data
    if not models:
        raise RequestFailedError("models", "the server has none")
    return models[0].id


async def _make_prompts(
    options: Options, connection: LoadConnection, count: int, rng: random.Random
) -> list[str]:
    """Return prompts of the requested length. The first guess for each is the last one's number of words."""
    prompts = []
    words = max(1, round(options.prompt_tokens / TOKENS_PER_WORD))
    counts = True
    for _ in range(count):
        vocabulary = rng.choices(WORDS, k=4 * options.prompt_tokens)
        if counts:
            fitted = await _fit(options, connection, vocabulary, words)
            counts = fitted is not None
            words = fitted or words
        prompts.append(" ".join(vocabulary[:words]))
    return prompts


async def _fit(
    options: Options, connection: LoadConnection, words: Sequence[str], first_guess: int
) -> int | None:
    """Return the number of words closest to the requested length; None if the server cannot count tokens."""
    guess = first_guess
    tried: dict[int, int] = {}  # number of words: how many tokens are missing
    for _ in range(FITTING_TRIES):
        tokens = await _count_tokens(options, connection, " ".join(words[:guess]))
        if not tokens:  # not reported, or in another format
            return None
        tried[guess] = missing = options.prompt_tokens - tokens
        step = round(missing * guess / tokens)
        guess = min(max(1, guess + step), len(words))
        if guess in tried:
            break
    return min(tried, key=lambda count: abs(tried[count]))


async def _count_tokens(options: Options, connection: LoadConnection, text: str) -> int | None:
    class TokenList(msgspec.Struct):
        tokens: list[int]

    try:
        with trio.fail_after(CONTROL_TIMEOUT_S):
            body = {"model": options.model, **options.prompt(text)}
            return len(
                msgspec.json.decode(
                    await connection.request("POST", "/tokenize", body), type=TokenList
                ).tokens
            )
    except RequestFailedError as error:
        if error.kind == "connection" or error.kind == str(HTTPStatus.UNAUTHORIZED):
            raise
        return None
    except msgspec.MsgspecError:
        return None
