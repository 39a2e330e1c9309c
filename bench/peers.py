"""The same weights served by Fairlead and by its peers, one after the other, in one run.

    python bench/random_model.py SmolLM2-135M /some/folder
    python bench/peers.py /some/folder --json bench/results/peers_smollm2_135m.json \\
        --peer 'vllm=vllm serve {model} --port {port} --served-model-name bench' --rounds 3

All servers are started, and wait; then in each round every one is loaded at 1, 8 and 32 streams (prompt 128,
output 64, greedy, no early end) by `bench/serve.py`, so that what drifts on the machine drifts for all of
them. How many cores are busy while all are idle is kept, too. The medians of the rounds are compared. A
peer's command is given as `name=command` with {model} and {port} in it, and kept in the result, flags and
all. Bounded: a server that is not ready in time, or dies, is reported and left out.
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
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

SERVE = Path(__file__).with_name("serve.py")
OURS = "fairlead serve {model} --port {port} --dtype bfloat16 --slots 32 --max-batch 32"
STREAMS = (1, 8, 32)
FIGURES = (
    "output_tokens_per_s",
    "ttft_p50_ms",
    "inter_token_p50_ms",
    "inter_token_p99_ms",
    "per_token_p50_ms",
)


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--ours", default=OURS, help="Fairlead's command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="requests a stream")
    parser.add_argument("--ready-s", type=float, default=600.0, help="seconds a server may take to start")
    parser.add_argument("--wait", action="store_true", help="begin when a line comes on standard input")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    commands = dict(each.split("=", 1) for each in [f"fairlead={arguments.ours}", *arguments.peer])
    found: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in commands}
    problems: dict[str, str] = {}
    with ExitStack() as started:
        urls: dict[str, str] = {}
        for name, command in commands.items():
            try:
                print(f"starting {name}", flush=True)
                starting = server(command, arguments.model, ready_s=arguments.ready_s)
                urls[name] = started.enter_context(starting)
            except (RuntimeError, OSError) as error:
                problems[name] = str(error)
        if arguments.wait:
            input("all are ready; a line begins the rounds\n")
        idle = busy_cores(over_s=5.0)
        for number, (name, url) in product(range(arguments.rounds), urls.items()):
            print(f"round {number + 1}: {name}", flush=True)
            try:
                found[name].append(measure(url, requests=arguments.requests, seed=number))
            except (RuntimeError, subprocess.SubprocessError) as error:
                problems[name] = str(error)
    medians = {name: summarize(rounds) for name, rounds in found.items() if rounds}
    print(table(medians))
    for name, problem in problems.items():
        print(f"{name}: {problem}", file=sys.stderr)
    if arguments.json is not None:
        document = {
            "model": arguments.model.name,
            "commands": commands,
            "medians": medians,
            "rounds": found,
            "problems": problems,
            "cores_busy_while_all_are_idle": idle,
            "cpu": processor(),
            "python": platform.python_version(),
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if problems else 0


def measure(url: str, *, requests: int, seed: int) -> dict[int, dict[str, float]]:
    """Put all numbers of streams on one server. Another seed has other prompts, which no cache has yet."""
    levels = []
    with tempfile.NamedTemporaryFile(suffix=".json") as kept:
        for streams in STREAMS:
            load = [
                "--endpoint",
                "completions",
                "--streams",
                str(streams),
                "--requests",
                str(requests * streams),
                "--seed",
                str(seed),
            ]
            subprocess.run(
                [sys.executable, str(SERVE), "--url", url, *load, "--json", kept.name],
                check=True,
                capture_output=True,
                timeout=1200,
            )
            levels += json.loads(Path(kept.name).read_text())["levels"]
    return {level["streams"]: figures(level) for level in levels}


def busy_cores(*, over_s: float) -> float:
    """Return how many cores' worth of work the machine does now, whoever does it. Linux only."""

    def ticks() -> int:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return int(user) + int(nice) + int(system)

    before = ticks()
    time.sleep(over_s)
    return round((ticks() - before) / os.sysconf("SC_CLK_TCK") / over_s, 3)


def figures(level: dict[str, Any]) -> dict[str, float]:
    """Return what is compared of one level; a level with errors does not count."""
    if level["errors"]:
        raise RuntimeError(f"errors at {level['streams']} streams: {level['errors']}")
    return {
        "output_tokens_per_s": level["output_tokens_per_s"],
        "ttft_p50_ms": level["time_to_first_token_ms"]["p50"],
        "inter_token_p50_ms": level["inter_token_ms"]["p50"],
        "inter_token_p99_ms": level["inter_token_ms"]["p99"],
        "per_token_p50_ms": level["per_token_ms"]["p50"],
    }


@contextmanager
def server(command: str, model: Path, *, ready_s: float) -> Iterator[str]:
    """Start a server in a process group of its own, wait until it lists its models, end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(model=model, port=port) for word in shlex.split(command)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, time.monotonic() + ready_s)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, until_s: float) -> None:
    """Return when the server answers `/v1/models` and, where it has one, `/ready`."""
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} while starting")
        if answers(f"{url}/v1/models") and answers(f"{url}/ready", missing=True):
            return
        time.sleep(0.5)
    raise RuntimeError("the server was not ready in time")


def answers(url: str, *, missing: bool = False) -> bool:
    """Whether the address answers 200 (or 404, where it may be `missing`)."""
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except URLError as error:
        return missing and getattr(error, "code", None) == 404
    except OSError:
        return False


def summarize(rounds: list[dict[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """Return the median of the rounds, figure by figure."""
    return {
        streams: {figure: median(each[streams][figure] for each in rounds) for figure in FIGURES}
        for streams in STREAMS
    }


def table(medians: dict[str, dict[int, dict[str, float]]]) -> str:
    """Lay the medians out, with each peer's throughput over ours."""
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
    """Name the processor."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0].partition(':')[2].strip()}" if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
