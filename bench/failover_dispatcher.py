"""Measure how long no job starts when the dispatcher's process is killed or stopped under load.

    python bench/failover_dispatcher.py [--rounds 5] [--streams 200] [--json FILE]

A supervisor runs two fronts, the dispatcher, and the demonstration model with 8 seats. In each round, so many
streams are under way or wait, and the dispatcher gets a signal: SIGKILL, or SIGSTOP, which the supervisor
notices after 1 s. The time ends with the first stream that must have been granted by the next dispatcher: as
many as there are seats may have been granted by the one before. Each stream must have the whole text.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from pathlib import Path

import httpx
import trio

from fairlead.base.config import Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.server.processes.supervisor import Supervisor, supervise

SEATS = 8
TOKENS = 40
MODEL = "demo"


class Quiet:
    """A `ServerObserver` that shows nothing."""

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Do nothing."""

    def ready(self, url: str, models: object) -> None:
        """Do nothing."""

    def failed(self, model: str, reason: str) -> None:
        """Show the reason."""
        print(model, reason, file=sys.stderr)

    def stopping(self) -> None:
        """Do nothing."""


class Round:
    """The streams of one round: their texts, and when each of them began."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.begun_at: list[float] = []
        self.texts: list[str] = []
        self._client = client

    async def stream(self) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": TOKENS, "temperature": 0, "stream": True}
        pieces: list[str] = []
        async with self._client.stream(
            "POST", "/v1/completions", json=body | {"ignore_eos": True}
        ) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not pieces:
                        self.begun_at.append(trio.current_time())
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        self.texts.append("".join(pieces))

    async def run(self, supervisor: Supervisor, streams: int, how: signal.Signals) -> float:
        """Return the seconds from the signal to the first new grant."""
        async with trio.open_nursery() as nursery:
            for _ in range(streams):
                nursery.start_soon(self.stream)
            while len(self.begun_at) < 2 * SEATS:  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.005)
            dispatcher = supervisor.dispatcher
            assert dispatcher is not None
            assert dispatcher.pid is not None
            struck_at, begun = trio.current_time(), len(self.begun_at)
            os.kill(dispatcher.pid, how)
        return self.begun_at[begun + SEATS] - struck_at


async def measure(rounds: int, streams: int) -> dict[str, object]:
    model = ModelConfig(path=demonstration_model(), name=MODEL, slots=SEATS, threads=1)
    config = Config(models=(model,), port=0, fronts=2, queue=QueueConfig(capacity=streams, timeout_s=600))
    found: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    changed = 0
    async with trio.open_nursery() as nursery:
        supervisor: Supervisor = await nursery.start(supervise, config, Quiet())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=supervisor.url, timeout=300, limits=limits) as client:
            alone = Round(client)
            await alone.stream()
            for _ in range(rounds):
                for how, seconds in found.items():
                    await trio.sleep(6)  # one that has run for so long is started again at once
                    this = Round(client)
                    seconds.append(await this.run(supervisor, streams, signal.Signals[how]))
                    changed += sum(text != alone.texts[0] for text in this.texts)
        supervisor.drain()
    return {
        "streams": streams,
        "rounds": rounds,
        "streams_with_another_text": changed,
        "first_new_grant_s": {
            how: {"median": round(statistics.median(seconds), 2), "all": [round(each, 2) for each in seconds]}
            for how, seconds in found.items()
        },
        "dispatchers": supervisor.epoch,
        "load_average_before": LOAD,
        "cores": os.cpu_count(),
    }


LOAD = round(os.getloadavg()[0], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of signals of each kind")
    parser.add_argument("--streams", type=int, default=200, help="streams in a round")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    result = trio.run(measure, options.rounds, options.streams)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["streams_with_another_text"]))


if __name__ == "__main__":
    sys.exit(main())
