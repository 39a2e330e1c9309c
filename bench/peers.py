"""Compare Fairlead with other servers: the same weights and load, in one run.

    python bench/random_model.py SmolLM2-135M /some/folder
    python bench/peers.py /some/folder --json bench/results/peers_smollm2_135m.json --rounds 3 \\
        --peer 'vllm=vllm serve {model} --port {port} --served-model-name bench' \\
        --peer 'llama.cpp=llama-server -m {model}.gguf --port {port} -np 32 -c 8192 -ub 2048 -t 2' \\
        --peer 'transformers=transformers serve {model} --port {port} --continuous-batching' \\
        --body 'transformers={"ignore_eos": null, "generation_config": "{}"}'

All servers are started first and get one request each. In each round, `bench/peer_load.py` measures every
server with 1, 8 and 32 streams (128 prompt tokens, 64 output tokens, greedy, no early end), so that changes
of the machine affect all servers. The medians of the rounds are compared. The result also contains, for each
round, how many cores were busy while all servers were idle. A peer is given as `name=command`, where {model}
and {port} are replaced; the result contains the command (those in bench/results were the best of short
trials). A peer that needs other fields gets a patch of the body, which the result contains as well. A server
that is not ready in time, stops, or reports other token counts than requested is listed as a problem.

Requirements of the peers: llama.cpp needs the weights as a bfloat16 GGUF file beside the folder. Its
converter does not support the made-up tokenizer, which splits like GPT-2's (`tokenizer.ggml.pre` = gpt-2).
`transformers serve` refuses `ignore_eos` and stops at the tokens of its generation configuration; an empty
configuration has none.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

LOAD = Path(__file__).with_name("peer_load.py")
OURS = "fairlead serve {model} --port {port} --dtype bfloat16 --slots 32 --max-batch 32"
STREAMS = (1, 8, 32)
LEVEL_S = 1800.0
FAILURES = (RuntimeError, OSError, subprocess.SubprocessError)
FIGURES = (
    "output_tokens_per_s",
    "ttft_p50_ms",
    "inter_token_p50_ms",
    "inter_token_p99_ms",
    "per_token_p50_ms",
)


def main() -> int:
    """Run the benchmark."""
    arguments = command_line()
    commands = {"fairlead": arguments.ours} | dict(arguments.peer)
    bodies = dict(arguments.body)
    measurements = {
        name: partial(
            load, model=arguments.model, body=bodies.get(name, "{}"), requests_each=arguments.requests
        )
        for name in commands
    }
    found: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in commands}
    problems: dict[str, str] = {}
    idle = []
    with ExitStack() as started:
        urls: dict[str, str] = {}
        for name, command in commands.items():
            print(f"starting {name}", flush=True)
            try:
                url = started.enter_context(server(command, arguments.model, ready_s=arguments.ready_s))
                measurements[name](url, streams=1, seed=-1)  # lazy initialization happens now
                urls[name] = url
            except FAILURES as error:
                problems[name] = str(error)
        if arguments.wait:
            input("All servers are ready. Press Enter to start the rounds.\n")
        for number in range(arguments.rounds):
            idle.append(busy_cores(over_s=5.0))
            for name, url in urls.items():
                print(f"round {number + 1}: {name}", flush=True)
                try:
                    levels = {
                        streams: measurements[name](url, streams=streams, seed=number) for streams in STREAMS
                    }
                    found[name].append({streams: figures(level) for streams, level in levels.items()})
                except FAILURES as error:
                    problems[name] = str(error)
    medians = {name: summarize(rounds) for name, rounds in found.items() if rounds}
    print(table(medians))
    for name, problem in problems.items():
        print(f"{name}: {problem}", file=sys.stderr)
    if arguments.json is not None:
        document = {
            "model": arguments.model.name,
            "commands": commands,
            "bodies": bodies,
            "medians": medians,
            "rounds": found,
            "problems": problems,
            "cores_busy_while_all_are_idle": idle,
            "cpu": processor(),
            "python": platform.python_version(),
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if problems else 0


def command_line() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--peer", type=name_and_value, action="append", default=[], metavar="NAME=COMMAND", help="a server"
    )
    parser.add_argument(
        "--body",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a server's changes to the body",
    )
    parser.add_argument("--ours", default=OURS, help="command that starts Fairlead")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts")
    parser.add_argument("--requests", type=int, default=3, help="requests a stream")
    parser.add_argument("--ready-s", type=float, default=600.0, help="seconds a server may take to start")
    parser.add_argument("--wait", action="store_true", help="wait for Enter before the rounds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if unknown := dict(arguments.body).keys() - {"fairlead", *dict(arguments.peer)}:
        parser.error(f"--body: no server is called {', '.join(sorted(unknown))}")
    return arguments


def name_and_value(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, separator, rest = text.partition("=")
    if not (name and separator and rest):
        raise argparse.ArgumentTypeError(f"not NAME=…: {text}")
    return name, rest


def load(url: str, *, model: Path, body: str, requests_each: int, streams: int, seed: int) -> dict[str, Any]:
    """Measure a server with one number of streams in a new process; return the figures.

    The seed determines the prompts; a new one avoids prefix caches. Raises `RuntimeError` if a request fails.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        options = {"streams": streams, "requests": requests_each * streams, "seed": seed, "body": body}
        words = [f"--{name}={value}" for name, value in options.items()]
        ran = subprocess.run(
            [sys.executable, str(LOAD), url, str(model), *words, "--json", output.name],
            check=False,
            capture_output=True,
            text=True,
            timeout=LEVEL_S,
        )
        if ran.returncode:
            raise RuntimeError(f"the load generator ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        level: dict[str, Any] = json.loads(Path(output.name).read_text())
    if level["errors"]:
        raise RuntimeError(f"errors at {streams} streams: {level['errors']}")
    return level


def busy_cores(*, over_s: float) -> float:
    """Return the number of busy cores of the machine, by all processes. Linux only."""

    def ticks() -> int:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return int(user) + int(nice) + int(system)

    before = ticks()
    time.sleep(over_s)
    return round((ticks() - before) / os.sysconf("SC_CLK_TCK") / over_s, 3)


def figures(level: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are compared."""
    return {
        "output_tokens_per_s": level["output_tokens_per_s"],
        "ttft_p50_ms": level["time_to_first_token_ms"]["p50"],
        "inter_token_p50_ms": level["inter_token_ms"]["p50"],
        "inter_token_p99_ms": level["inter_token_ms"]["p99"],
        "per_token_p50_ms": level["per_token_ms"]["p50"],
    }


@contextmanager
def server(command: str, model: Path, *, ready_s: float) -> Iterator[str]:
    """Run a server in its own process group until the end of the block; yield its URL when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(model=model, port=port) for word in shlex.split(command)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                wait_until_ready(process, url, time.monotonic() + ready_s)
            except RuntimeError as error:
                raise RuntimeError(f"{error}; its last output:\n{end_of(log)}") from error
            yield url
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a server's process group, if it still exists."""
    for last_resort in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, last_resort)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
            return


def wait_until_ready(process: subprocess.Popen[bytes], url: str, until_s: float) -> None:
    """Wait until the server answers `/health` and, if it has one, `/ready`."""
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} while starting")
        if answers(f"{url}/health") and answers(f"{url}/ready", missing=True):
            return
        time.sleep(0.5)
    raise RuntimeError("the server was not ready in time")


def end_of(log: IO[bytes], characters: int = 2000) -> str:
    """Return the end of a server's output."""
    log.seek(0)
    return log.read().decode(errors="replace").strip()[-characters:]


def answers(url: str, *, missing: bool = False) -> bool:
    """Whether the URL answers 200, or with `missing` also 404."""
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except URLError as error:
        return missing and getattr(error, "code", None) == 404
    except OSError:
        return False


def summarize(rounds: list[dict[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """Return the median of the rounds for each figure."""
    return {
        streams: {figure: median(each[streams][figure] for each in rounds) for figure in FIGURES}
        for streams in STREAMS
    }


def table(medians: dict[str, dict[int, dict[str, float]]]) -> str:
    """Format the medians, with Fairlead's throughput divided by each peer's."""
    lines = [
        f"{'server':14}{'streams':>8}{'tokens/s':>10}{'ours/its':>10}{'TTFT p50':>10}{'ITL p50':>9}{'p99':>8}"
    ]
    for name, levels in medians.items():
        for streams, level in levels.items():
            ours = medians.get("fairlead", levels)[streams]["output_tokens_per_s"]
            lines.append(
                f"{name:14}{streams:8}{level['output_tokens_per_s']:10.0f}"
                f"{ours / level['output_tokens_per_s']:10.2f}{level['ttft_p50_ms']:10.0f}"
                f"{level['inter_token_p50_ms']:9.1f}{level['inter_token_p99_ms']:8.1f}"
            )
    return "\n".join(lines)


def processor() -> str:
    """Return the number and name of the processors."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0].partition(':')[2].strip()}" if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
