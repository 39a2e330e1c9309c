"""The load generator of `bench/peers.py`: the same requests for every server, from several clients at once.

    python bench/peer_load.py http://127.0.0.1:8000 /some/folder --streams 8 --requests 24 --json level.json

`fairlead bench` sends the same fields to every server and lets the server count tokens. Some peers do not
count tokens on request, and some refuse unknown fields. Therefore this script cuts the prompts to length with
the model's tokenizer, and applies a patch for each server to the request's body. A response counts only if
the server reports exactly the requested numbers of prompt and output tokens. The number of requests and the
time of each are bounded.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import trio

from fairlead.server.load.client import LoadConnection, TimedAnswer, time_request
from fairlead.server.load.generator import CONTROL_TIMEOUT_S, WORDS
from fairlead.server.load.report import Level, summarize

BODY: dict[str, Any] = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def main() -> None:
    """Measure one server with one number of streams, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="the server's URL, without /v1")
    parser.add_argument("model", type=Path, help="folder with the model's tokenizer.json")
    parser.add_argument("--streams", type=int, default=1, help="concurrent clients")
    parser.add_argument(
        "--requests", type=int, default=3, help="requests, after one warm-up request a stream"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument(
        "--body", type=patch, default={}, help="JSON object: fields to replace; null removes one"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for each response")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    level = trio.run(measure, arguments)
    written = msgspec.json.format(msgspec.json.encode(level), indent=1)
    if arguments.json is None:
        print(written.decode())
    else:
        arguments.json.write_bytes(written)


async def measure(arguments: argparse.Namespace) -> Level:
    """Send one warm-up request for each stream, then measure."""
    tokens = (arguments.prompt_tokens, arguments.output_tokens)
    prompts = make_prompts(
        arguments.model,
        arguments.streams + arguments.requests,
        tokens=arguments.prompt_tokens,
        seed=f"{arguments.seed} {arguments.streams}",
    )
    name = await first_model(LoadConnection(arguments.url))
    bodies = [body(name, prompt, arguments.output_tokens, arguments.body) for prompt in prompts]

    async def load(bodies: Sequence[object]) -> list[TimedAnswer]:
        return await send_all(
            arguments.url, bodies, streams=arguments.streams, tokens=tokens, timeout_s=arguments.timeout_s
        )

    await load(bodies[: arguments.streams])
    cpu_before_s = time.process_time()
    answers = await load(bodies[arguments.streams :])
    return summarize(arguments.streams, answers, cpu_s=time.process_time() - cpu_before_s)


async def send_all(
    url: str, bodies: Sequence[object], *, streams: int, tokens: tuple[int, int], timeout_s: float
) -> list[TimedAnswer]:
    """Send all requests, `streams` at a time. Check the prompt and output tokens of each answer."""
    answers: list[TimedAnswer] = []
    remaining: Iterator[object] = iter(bodies)

    async def client() -> None:
        connection = LoadConnection(url)
        for each in remaining:
            answer = await time_request(connection, "/v1/completions", each, timeout_s=timeout_s)
            answers.append(checked(answer, tokens))

    async with trio.open_nursery() as nursery:
        for _ in range(min(streams, len(bodies))):
            nursery.start_soon(client)
    return answers


def checked(answer: TimedAnswer, tokens: tuple[int, int]) -> TimedAnswer:
    """Return the answer, with an error if the server did not report exactly these token counts."""
    if answer.error is None:
        usage = answer.usage
        counted = usage and (usage.prompt_tokens, usage.completion_tokens)
        if counted != tokens:
            answer.error = f"{counted} tokens in and out"
    return answer


async def first_model(connection: LoadConnection) -> str | None:
    """Return the first model that the server lists; None if it lists none."""

    class Model(msgspec.Struct):
        id: str

    class Models(msgspec.Struct):
        data: list[Model]

    with trio.fail_after(CONTROL_TIMEOUT_S):
        listed = msgspec.json.decode(await connection.request("GET", "/v1/models"), type=Models).data
    return listed[0].id if listed else None


def body(model: str | None, prompt: str, output_tokens: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a request's body with a server's changes. Fields with the value None are removed."""
    whole = BODY | {"model": model, "prompt": prompt, "max_tokens": output_tokens} | changes
    return {field: value for field, value in whole.items() if value is not None}


def patch(text: str) -> dict[str, Any]:
    """Parse a server's changes to the body, a JSON object. Raises `ValueError` or `TypeError`."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    return fields


def make_prompts(model: Path, count: int, *, tokens: int, seed: str) -> list[str]:
    """Return prompts of exactly `tokens` tokens without common prefixes, determined by the seed."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(seed)
    return [make_prompt(tokenizer, tokens, rng) for _ in range(count)]


def make_prompt(tokenizer: tokenizers.Tokenizer, tokens: int, rng: random.Random) -> str:
    """Return words cut after `tokens` tokens. Raises `RuntimeError` if the result has another number."""
    text = " ".join(rng.choices(WORDS, k=tokens))
    text = text[: tokenizer.encode(text).offsets[tokens - 1][1]]
    if len(tokenizer.encode(text).ids) != tokens:
        raise RuntimeError(f"the tokenizer does not count {tokens} tokens where it has cut them: {text}")
    return text


if __name__ == "__main__":
    main()
