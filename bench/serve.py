"""How fast does a server answer, and how evenly? A load generator for any OpenAI-compatible URL.

For each number of streams: that many clients, each asking again as soon as it has its answer, with prompts
that share no beginning. Everything it does is bounded: requests, duration, time for each answer.

    python bench/serve.py --url http://127.0.0.1:8000 --streams 1,8,32 --json result.json --plot result.png
"""

import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import trio
from cyclopts import App, Parameter, validators

from serve_client import Answer, Connection, RequestFailedError, ask
from serve_report import Level, draw, format_table, summarize

TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name"
)
WORDS = TEXT.split()
TOKENS_PER_WORD = 1.3  # a guess, for servers that do not tokenize for us
FITTING_TRIES = 5
CONTROL_TIMEOUT_S = 60.0

Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask, how often, and how many at once."""

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
        """Where the endpoint is."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def prompt(self, text: str) -> dict[str, object]:
        """Return the part of a body that asks `text`."""
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


app = App("serve", help=__doc__, version_flags=[])


@app.default
def main(
    *,
    url: str = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, Parameter(env_var="FAIRLEAD_API_KEY")] = None,
    model: str | None = None,
    endpoint: Literal["chat", "completions"] = "chat",
    streams: str = "1,8,32",
    requests: Positive | None = None,
    warmup: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    prompt_tokens: Positive = 128,
    output_tokens: Positive = 64,
    ignore_eos: bool = True,
    tenants: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    duration: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 120.0,
    timeout: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 600.0,
    seed: int = 0,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Load a server, and report throughput, latencies and errors.

    Parameters
    ----------
    url
        The server's root, or its /v1.
    api_key
        The key to send.
    model
        Default: the first of /v1/models.
    endpoint
        What to ask.
    streams
        How many clients at once; a comma-separated list is run one after the other.
    requests
        Requests at each level. Default: four a stream.
    warmup
        Requests before each level that do not count. Default: one a stream.
    prompt_tokens
        Length of the prompts; the server's /tokenize is asked to hit it.
    output_tokens
        Length of the answers.
    ignore_eos
        Ask for answers that do not end early.
    tenants
        Spread the requests over this many `user` names; 0 names none.
    duration
        Seconds after which a level starts no more requests.
    timeout
        Seconds one answer may take.
    seed
        Of the prompts.
    json
        Write everything measured to this file.
    plot
        Draw the distributions into this PNG.
    """
    try:
        levels = tuple(int(level) for level in streams.split(","))
    except ValueError:
        levels = (0,)
    if min(levels) < 1:
        print(f"--streams: must be numbers from 1 on, separated by commas, not {streams!r}", file=sys.stderr)
        return 2
    connect = partial(Connection, url, api_key=api_key)
    try:
        options = Options(
            url=url,
            model=model or trio.run(_first_model, connect()),
            endpoint=endpoint,
            streams=levels,
            requests=requests,
            warmup=warmup,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            ignore_eos=ignore_eos,
            tenants=tenants,
            duration_s=duration,
            timeout_s=timeout,
            seed=seed,
        )
        results = [trio.run(_run_level, options, connect, count) for count in levels]
    except (RequestFailedError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    report(options, results, json=json, plot_file=plot)
    return 0 if all(level.output_tokens for level, _ in results) else 1


def report(
    options: Options,
    results: Sequence[tuple[Level, Sequence[Answer]]],
    *,
    json: Path | None,
    plot_file: Path | None,
) -> None:
    """Print the table and write the files that were asked for."""
    print(
        f"{options.model} at {options.url}, {options.endpoint}, asked for {options.prompt_tokens} tokens in"
    )
    print(f"and {options.output_tokens} out\n")
    print(format_table([level for level, _ in results]))
    if json is not None:
        document = {
            "options": options,
            "levels": [level for level, _ in results],
            "answers": [answers for _, answers in results],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "trio": metadata.version("trio"),
        }
        json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    if plot_file is not None:
        draw(plot_file, f"{options.model}, {options.prompt_tokens} in, {options.output_tokens} out", results)


async def _run_level(
    options: Options, connect: partial[Connection], streams: int
) -> tuple[Level, list[Answer]]:
    """Warm up, then measure one number of streams."""
    warmup = streams if options.warmup is None else options.warmup
    requests = options.requests or 4 * streams
    randomness = random.Random(f"{options.seed} {streams}")
    prompts = await _make_prompts(options, connect(), warmup + requests, randomness)

    await _load(options, connect, streams, prompts[:warmup])
    cpu_before_s = time.process_time()
    answers = await _load(options, connect, streams, prompts[warmup:])
    return summarize(streams, answers, cpu_s=time.process_time() - cpu_before_s), answers


async def _load(
    options: Options, connect: partial[Connection], streams: int, prompts: Sequence[str]
) -> list[Answer]:
    """Ask all prompts, `streams` at a time, until they or the time are used up."""
    answers: list[Answer] = []
    remaining: Iterator[tuple[int, str]] = iter(enumerate(prompts))
    last_start_s = trio.current_time() + options.duration_s

    async def client() -> None:
        connection = connect()
        for number, prompt in remaining:
            body = options.body(prompt, tenant=number % max(1, options.tenants))
            answers.append(await ask(connection, options.path, body, timeout_s=options.timeout_s))
            if trio.current_time() > last_start_s:
                break

    async with trio.open_nursery() as nursery:
        for _ in range(min(streams, len(prompts))):
            nursery.start_soon(client)
    return answers


async def _first_model(connection: Connection) -> str:
    class Model(msgspec.Struct):
        id: str

    class Models(msgspec.Struct):
        data: list[Model]

    with trio.fail_after(CONTROL_TIMEOUT_S):
        models = msgspec.json.decode(await connection.request("GET", "/v1/models"), type=Models).data
    if not models:
        raise RequestFailedError("models", "the server has none")
    return models[0].id


async def _make_prompts(
    options: Options, connection: Connection, count: int, randomness: random.Random
) -> list[str]:
    """Write prompts of the wished length; each needs about as many words as the one before it."""
    prompts = []
    words = max(1, round(options.prompt_tokens / TOKENS_PER_WORD))
    counts = True
    for _ in range(count):
        vocabulary = randomness.choices(WORDS, k=4 * options.prompt_tokens)
        if counts:
            fitted = await _fit(options, connection, vocabulary, words)
            counts = fitted is not None
            words = fitted or words
        prompts.append(" ".join(vocabulary[:words]))
    return prompts


async def _fit(
    options: Options, connection: Connection, words: Sequence[str], first_guess: int
) -> int | None:
    """Return how many of the words come closest to the wished length; None if the server cannot say."""
    guess = first_guess
    tried: dict[int, int] = {}  # words: how many tokens they miss the length by
    for _ in range(FITTING_TRIES):
        tokens = await _count_tokens(options, connection, " ".join(words[:guess]))
        if tokens is None:
            return None
        tried[guess] = missing = options.prompt_tokens - tokens
        step = round(missing * guess / tokens)
        guess = min(max(1, guess + step), len(words))
        if guess in tried:
            break
    return min(tried, key=lambda count: abs(tried[count]))


async def _count_tokens(options: Options, connection: Connection, text: str) -> int | None:
    class Tokens(msgspec.Struct):
        tokens: list[int]

    try:
        with trio.fail_after(CONTROL_TIMEOUT_S):
            body = {"model": options.model, **options.prompt(text)}
            return len(
                msgspec.json.decode(await connection.request("POST", "/tokenize", body), type=Tokens).tokens
            )
    except RequestFailedError as error:
        if error.kind == "connection" or error.kind == str(HTTPStatus.UNAUTHORIZED):
            raise
        return None
    except msgspec.MsgspecError:
        return None


if __name__ == "__main__":
    sys.exit(app())
