"""The load that `bench/peers.py` puts on a server: so many clients at once, every server asked the same.

    python bench/peer_load.py http://127.0.0.1:8000 /some/folder --streams 8 --requests 24 --json level.json

`fairlead bench` has the server count tokens for it, and asks every server in one way. Peers differ: not all
count for their clients, and some refuse a field they do not know. So here prompts are cut to length by the
model's own tokenizer, a server's way is a patch of the request's body, and an answer counts only when it has
exactly the wished number of tokens, in and out, by the server's own count: nobody is fast by saying less.
Everything is bounded: requests, and the time for each answer. Does not know how servers are started.
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

from fairlead.load.client import Answer, Connection, ask
from fairlead.load.generator import CONTROL_TIMEOUT_S, WORDS
from fairlead.load.report import Level, summarize

BODY: dict[str, Any] = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def main() -> None:
    """Load one server at one number of streams, and write what its answers amount to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("model", type=Path, help="the folder whose tokenizer.json cuts the prompts")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3, help="that count; as many as streams come before")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="another one has other prompts")
    parser.add_argument("--body", type=patch, default={}, help="fields over ours; null takes one out")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    level = trio.run(measure, arguments)
    written = msgspec.json.format(msgspec.json.encode(level), indent=1)
    if arguments.json is None:
        print(written.decode())
    else:
        arguments.json.write_bytes(written)


async def measure(arguments: argparse.Namespace) -> Level:
    """Warm the server up with one request a stream, then measure it."""
    tokens = (arguments.prompt_tokens, arguments.output_tokens)
    prompts = make_prompts(
        arguments.model,
        arguments.streams + arguments.requests,
        tokens=arguments.prompt_tokens,
        seed=f"{arguments.seed} {arguments.streams}",
    )
    name = await first_model(Connection(arguments.url))
    bodies = [body(name, prompt, arguments.output_tokens, arguments.body) for prompt in prompts]

    async def load(bodies: Sequence[object]) -> list[Answer]:
        return await answers_of(
            arguments.url, bodies, streams=arguments.streams, tokens=tokens, timeout_s=arguments.timeout_s
        )

    await load(bodies[: arguments.streams])
    cpu_before_s = time.process_time()
    answers = await load(bodies[arguments.streams :])
    return summarize(arguments.streams, answers, cpu_s=time.process_time() - cpu_before_s)


async def answers_of(
    url: str, bodies: Sequence[object], *, streams: int, tokens: tuple[int, int], timeout_s: float
) -> list[Answer]:
    """Ask everything, `streams` at a time, and check each answer's `tokens`: those in, those out."""
    answers: list[Answer] = []
    remaining: Iterator[object] = iter(bodies)

    async def client() -> None:
        connection = Connection(url)
        for each in remaining:
            answer = await ask(connection, "/v1/completions", each, timeout_s=timeout_s)
            answers.append(checked(answer, tokens))

    async with trio.open_nursery() as nursery:
        for _ in range(min(streams, len(bodies))):
            nursery.start_soon(client)
    return answers


def checked(answer: Answer, tokens: tuple[int, int]) -> Answer:
    """Return the answer, an error if its server did not count exactly these tokens in and out."""
    if answer.error is None:
        usage = answer.usage
        counted = usage and (usage.prompt_tokens, usage.completion_tokens)
        if counted != tokens:
            answer.error = f"{counted} tokens in and out"
    return answer


async def first_model(connection: Connection) -> str | None:
    """Return the first model that the server lists; None where it serves one and lists none."""

    class Model(msgspec.Struct):
        id: str

    class Models(msgspec.Struct):
        data: list[Model]

    with trio.fail_after(CONTROL_TIMEOUT_S):
        listed = msgspec.json.decode(await connection.request("GET", "/v1/models"), type=Models).data
    return listed[0].id if listed else None


def body(model: str | None, prompt: str, output_tokens: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a request's body with a server's changes over it. A field that is None is left out."""
    whole = BODY | {"model": model, "prompt": prompt, "max_tokens": output_tokens} | changes
    return {field: value for field, value in whole.items() if value is not None}


def patch(text: str) -> dict[str, Any]:
    """Read the fields that a server wants otherwise: a JSON object. Raises `ValueError` or `TypeError`."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    return fields


def make_prompts(model: Path, count: int, *, tokens: int, seed: str) -> list[str]:
    """Write prompts of exactly so many tokens, which share no beginning; the same seed writes the same."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    randomness = random.Random(seed)
    return [make_prompt(tokenizer, tokens, randomness) for _ in range(count)]


def make_prompt(tokenizer: tokenizers.Tokenizer, tokens: int, randomness: random.Random) -> str:
    """Cut a row of words where its tokens are enough. Raises `RuntimeError` if the rest counts otherwise."""
    text = " ".join(randomness.choices(WORDS, k=tokens))
    text = text[: tokenizer.encode(text).offsets[tokens - 1][1]]
    if len(tokenizer.encode(text).ids) != tokens:
        raise RuntimeError(f"the tokenizer does not count {tokens} tokens where it has cut them: {text}")
    return text


if __name__ == "__main__":
    main()
