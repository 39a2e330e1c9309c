"""Measure what a schema costs: the same requests with and without one, side by side.

    python bench/structured.py [--rounds 3] [--schemas 10000] [--out bench/results/structured.json]

A server runs a model with the shape and the vocabulary (151,936 tokens) of Qwen2.5-0.5B and random weights,
so every text is arbitrary, and only its grammar makes it JSON. It measures, in alternating rounds:

- tokens/s of 32 streams, all under a schema of medium size, and without one;
- the time to the first token of a single request: without a schema, with one that was used before, and with
  a new one;
- the longest pause of a stream of the demonstration model, beside nothing, beside other requests, and beside
  the same with large schemas to compile;
- in this process: the time of a mask, and of a compilation; and what the tools of an agent take, whose
  arguments follow their schemas: in each request, in the first one, in the engine, and for a mask in a call;
- the memory of the demonstration model's server after 1,000, 2,000, 5,000 and all different schemas.
"""

import argparse
import json
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio
from llguidance import LLTokenizer

from fairlead.base.wire_formats.formats import configured
from fairlead.language.structured.compiler import GrammarCompiler, compile_grammar
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.request import AnswerSpec, ToolSpec
from fairlead.language.structured.trials import GrammarTrials
from fairlead.language.structured.vocabulary import token_vocabulary
from fairlead.language.text.tokenizer import Tokenizer
from random_model import make

STREAMS = 32
TOKENS = 48
CANARY_TOKENS = 400
TOOL_ROUNDS = 15
# The beginnings of calls, by wire format.
CALLS = {
    "hermes": '<tool_call>\n{"name": "tool_0", "arguments": {"file_path": "/a/b.py", "offset": 12',
    "qwen-xml": "<tool_call>\n<function=tool_0>\n<parameter=file_path>\n/a/b.py\n</parameter>\n",
}
PORTS = iter(range(18_400, 18_500))
START_S = 600


def medium_schema(marker: str = "") -> dict[str, Any]:
    """Return a schema of medium size; another `marker` makes it another schema."""
    address = {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
    properties = {
        "name": {"type": "string", "minLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {"type": "object", "properties": address, "required": ["street", "zip"]},
        f"note{marker}": {"type": "string"},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def large_schema(number: int) -> dict[str, Any]:
    """Return a schema that takes long to compile."""
    branches = [
        {"type": "object", "properties": {f"p{number}_{i}": {"const": i}}, "required": [f"p{number}_{i}"]}
        for i in range(500)
    ]
    return {"anyOf": branches}


def body(schema: dict[str, Any] | None, *, seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"describe person {seed}"}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is not None:
        form = {"name": "answer", "strict": True, "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


@contextmanager
def served(*model: str) -> Iterator[tuple[str, int]]:
    """Serve a model; yield the URL and the id of the process."""
    port = next(PORTS)
    options = ["--port", str(port), "--slots", str(STREAMS)]
    command = [sys.executable, "-m", "fairlead", "serve", *model, *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            give_up = time.monotonic() + START_S
            while time.monotonic() < give_up:
                if process.poll() is not None:
                    raise RuntimeError("the server ended")
                try:
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


async def stream(client: httpx.AsyncClient, url: str, fields: dict[str, Any]) -> tuple[list[float], int]:
    """Run one request; return the times of its events with text, and the tokens of its answer."""
    times, tokens = [time.perf_counter()], 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=fields) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                times.append(time.perf_counter())
    return times, tokens


async def throughput(client: httpx.AsyncClient, url: str, schema: dict[str, Any] | None, seed: int) -> float:
    """Return tokens/s of all streams together."""
    counted: list[int] = []

    async def run(number: int) -> None:
        counted.append((await stream(client, url, body(schema, seed=seed + number)))[1])

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(run, number)
    return sum(counted) / (time.perf_counter() - began)


async def first_token_ms(
    client: httpx.AsyncClient, url: str, schema: dict[str, Any] | None, seed: int
) -> float:
    times, _ = await stream(client, url, body(schema, seed=seed, tokens=2))
    return 1000 * (times[1] - times[0])


async def longest_pause_ms(client: httpx.AsyncClient, url: str, beside: list[dict[str, Any]]) -> float:
    """Return the longest pause of one stream, in milliseconds, while these requests are served."""
    found: list[float] = []

    async def canary() -> None:
        fields = body(None, seed=1, tokens=CANARY_TOKENS) | {"ignore_eos": True}
        times, _ = await stream(client, url, fields)
        found.extend(after - before for before, after in pairwise(times[1:]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(canary)
        await trio.sleep(0.1)  # it has begun
        for fields in beside:
            nursery.start_soon(stream, client, url, fields)
    return 1000 * max(found)


async def measure_pauses(url: str, rounds: int) -> dict[str, Any]:
    """Return the median of the longest pauses, beside nothing, plain requests, and compilations."""
    found: dict[str, list[float]] = {"alone": [], "beside plain requests": [], "beside compilations": []}
    async with httpx.AsyncClient(timeout=600) as client:
        for number in range(5 * rounds):
            plain = [body(None, seed=other, tokens=1) for other in range(4)]
            large = [body(large_schema(4 * number + other), seed=other, tokens=1) for other in range(4)]
            for name, beside in zip(found, ([], plain, large), strict=True):
                found[name].append(await longest_pause_ms(client, url, beside))
    return {
        name: {"p50": quantile(values, 0.5), "max": quantile(values, 1)} for name, values in found.items()
    }


async def measure_server(url: str, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"schema": [], "plain": []}
    firsts: dict[str, list[float]] = {"plain": [], "seen": [], "new": []}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=STREAMS + 8)) as client:
        for schema in (None, medium_schema()):
            await throughput(client, url, schema, 0)
        for round_ in range(rounds):
            rates["plain"].append(await throughput(client, url, None, 1000 * round_))
            rates["schema"].append(await throughput(client, url, medium_schema(), 1000 * round_))
            for number in range(7):
                seed = 100 * round_ + number
                firsts["plain"].append(await first_token_ms(client, url, None, seed))
                firsts["seen"].append(await first_token_ms(client, url, medium_schema(), seed))
                firsts["new"].append(await first_token_ms(client, url, medium_schema(f"{seed}"), seed))
    medians = {name: round(statistics.median(values), 2) for name, values in rates.items()}
    return {
        "tokens_per_s": {**medians, "ratio": round(medians["schema"] / medians["plain"], 3)},
        "first_token_p50_ms": {name: round(statistics.median(values), 2) for name, values in firsts.items()},
    }


def described(**more: Any) -> dict[str, Any]:
    """Return the schema of a string with a description, as arguments have one."""
    return {"type": "string", "description": "What this argument is for, in a sentence.", **more}


def agent_tools(count: int) -> list[ToolSpec]:
    """Return tools as coding agents have them: to read, search, edit and run, and lists of objects."""
    edit = {
        "old_string": described(),
        "new_string": described(),
        "replace_all": {"type": "boolean", "default": False},
    }
    todo = {"content": described(minLength=1), "status": {"enum": ["pending", "in_progress", "completed"]}}
    number = {"type": "integer", "minimum": 0}
    shapes: list[tuple[dict[str, Any], list[str]]] = [
        ({"file_path": described(), "offset": number, "limit": number}, ["file_path"]),
        ({"command": described(), "timeout": {"type": "number", "maximum": 600_000}}, ["command"]),
        (
            {
                **{name: described() for name in ("pattern", "path", "glob", "type")},
                "output_mode": {"enum": ["content", "files_with_matches", "count"]},
                **{name: {"type": "number"} for name in ("-A", "-B", "-C", "head_limit")},
                **{name: {"type": "boolean"} for name in ("-n", "-i", "multiline")},
            },
            ["pattern"],
        ),
        ({"todos": {"type": "array", "items": objects(todo)}}, ["todos"]),
        (
            {"file_path": described(), "edits": {"type": "array", "items": objects(edit)}},
            ["file_path", "edits"],
        ),
        ({"query": described(minLength=2), "domains": {"type": "array", "items": described()}}, ["query"]),
    ]
    return [
        ToolSpec(f"tool_{index}", {**objects(properties, required), "title": f"Tool {index}"}, False, "tools")
        for index, (properties, required) in zip(range(count), cycle(shapes), strict=False)
    ]


def objects(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """Return the schema of objects with these properties."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def measure_tools(tokenizer: Tokenizer, vocabulary: LLTokenizer, rounds: int) -> dict[str, Any]:
    """Return what the tools of an agent take, by wire format and number of tools.

    `check_ms`: checking the schemas and writing the grammar, in every request. `trial_ms`: in the first
    request of a tenant with these tools. `compile_ms`: in the engine, for that request. `mask_us`: in a call.
    """
    trials = GrammarTrials()
    trials.run(answer_grammar(JsonAnswer({})))  # starts its process
    found: dict[str, Any] = {}
    for (name, call), count in product(CALLS.items(), (1, 30, 100)):
        tools = tuple(agent_tools(count))
        times: dict[str, list[float]] = {"check_ms": [], "trial_ms": [], "compile_ms": [], "mask_us": []}
        for _ in range(rounds):
            marks = [time.perf_counter()]
            grammar = AnswerSpec(tools=tools).check().grammar(configured(name))
            assert grammar is not None
            marks.append(time.perf_counter())
            assert trials.run(grammar).fault is None
            marks.append(time.perf_counter())
            constraint = Constraint(compile_grammar(vocabulary, grammar)[0])
            marks.append(time.perf_counter())
            for key, (before, after) in zip(times, pairwise(marks), strict=False):
                times[key].append(1000 * (after - before))
            mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
            for token in tokenizer.encode(call):
                constraint.consume([token])
                began = time.perf_counter()
                constraint.fill(mask)
                times["mask_us"].append(1e6 * (time.perf_counter() - began))
            assert constraint.error is None, constraint.error
        found[f"{name}, {count} tools"] = {key: quantile(values, 0.5) for key, values in times.items()}
    trials.close()
    return found


def measure_masks(folder: Path) -> dict[str, Any]:
    """Walk through answers at random; return the times of masks, tokens and compilations in microseconds."""
    tokenizer = Tokenizer.load(folder)
    size = tokenizer.vocab_size
    began = time.perf_counter()
    vocabulary = token_vocabulary(
        tokenizer.token_bytes, vocab_size=size, special_ids=tokenizer.special_ids, eos_token_ids=[0]
    )
    built_s = time.perf_counter() - began
    compiler = GrammarCompiler(vocabulary)
    chance = random.Random(1)
    mask = np.zeros(-(-size // 32), np.uint32)
    masks, consumed, compiled = [], [], []
    for walk in range(20):
        began = time.perf_counter()
        compiler.submit(walk, answer_grammar(JsonAnswer(medium_schema(str(walk)))))
        while not (ready := compiler.take_ready()):
            time.sleep(0.0001)
        compiled.append(time.perf_counter() - began)
        constraint = Constraint(ready[0][1])  # type: ignore[arg-type]  # it compiles
        for _ in range(150):
            began = time.perf_counter()
            constraint.fill(mask)
            masks.append(time.perf_counter() - began)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(chance.choice(allowed))
            if token == 0:
                break
            began = time.perf_counter()
            constraint.consume([token])
            consumed.append(time.perf_counter() - began)
    compiler.close()
    return {
        "vocabulary": size,
        "vocabulary_built_s": round(built_s, 2),
        "mask_us": quantiles(masks),
        "consume_us": quantiles(consumed),
        "compile_us": quantiles(compiled),
        "tools": measure_tools(tokenizer, vocabulary, TOOL_ROUNDS),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return quantiles in microseconds."""
    scaled = [1e6 * value for value in seconds]
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: quantile(scaled, share) for name, share in shares.items()}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process and its children, in MB: the system evicts other pages."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    # A child belongs to the thread that started it.
    children = [
        one for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()
    ]
    return round(kilobytes / 1000 + sum(anonymous_mb(int(child)) for child in children), 1)


async def measure_memory(url: str, pid: int, schemas: int) -> dict[str, float]:
    """Use many different schemas; return the memory of all processes on the way."""
    found: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=600) as client:
        for first in range(0, schemas, 8):
            async with trio.open_nursery() as nursery:
                for number in range(first, min(first + 8, schemas)):
                    fields = body(medium_schema(f"m{number}"), seed=number, tokens=1)
                    nursery.start_soon(stream, client, url, fields)
            if first + 8 in (1000, 2000, 5000, schemas):
                found[f"after {first + 8} schemas, MB"] = anonymous_mb(pid)
    return found


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts")
    parser.add_argument("--schemas", type=int, default=10_000, help="different schemas for the memory")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"question": "what a schema costs", "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        make("Qwen2.5-0.5B", folder)
        result["masks"] = measure_masks(folder)
        with served(str(folder)) as (url, _):
            result["served"] = trio.run(measure_server, url, arguments.rounds)
    with served() as (url, pid):
        result["longest_pause_ms"] = trio.run(measure_pauses, url, arguments.rounds)
        result["memory"] = trio.run(measure_memory, url, pid, arguments.schemas)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
