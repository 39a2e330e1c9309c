"""Run a server under load for a long time, and check that it stays correct and does not grow.

    python bench/soak.py [--minutes 60] [--seed 0] [--json bench/results/soak.json] [--plot soak.png]

The server has two engine models, an embedding model, a command and two remote nodes. Fair and greedy tenants
use every route that generates. Other clients disconnect, cancel, read slowly and send invalid bodies. Some
attack the others: with hostile schemas, jobs of 64 answers, answers that they do not read, and orders to the
fleet; and some look for others' prompts and responses.

Meanwhile processes are killed and stopped, the configuration is reloaded and models are unloaded. After a
warm-up, memory, descriptors, threads and tasks must not grow (`soaking/report.py` has the bounds), every
request must have an expected outcome, and a greedy answer must not change. At the end all counts must be as
before the load. Problems are printed, and the exit status is then 1.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from soaking.chaos import Chaos
from soaking.deployment import Deployment
from soaking.plot import draw
from soaking.report import (
    Report,
    growth_of,
    minutes_of,
    problems_at_rest,
    problems_in_log,
    problems_of_growth,
)
from soaking.sampling import Sample, idle, sample
from soaking.tenants import LoadReport, Tenants

REST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Durations and intervals of a soak.

    When the load ends, clients wait `grace_s` for their responses before they disconnect.
    """

    minutes: float = 60.0
    seed: int = 0
    warm_up_s: float = 10.0
    chaos_every_s: float = 20.0
    sample_every_s: float = 5.0
    grace_s: float = 5.0


async def run_soak(folder: Path, options: Options) -> Report:
    """Run a soak with its files in `folder`. Raises `RuntimeError` if the server does not start."""
    deployment = Deployment(folder)
    try:
        await deployment.start()
        deployment.began_s = time.monotonic()
        return await _soak(deployment, options)
    finally:
        deployment.close()


async def _soak(deployment: Deployment, options: Options) -> Report:
    # Resources that are opened lazily and kept must be open before the idle counts are taken.
    await _load(deployment, LoadReport(), options.seed - 1, options.warm_up_s, options.grace_s)
    before = await idle(deployment, REST_S)
    deployment.began_s = time.monotonic()
    report, samples = LoadReport(), list[Sample]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show_progress, report, options.minutes)
        nursery.start_soon(_sample, deployment, report, samples, options.sample_every_s)
        nursery.start_soon(Chaos(deployment, options.seed, options.chaos_every_s).run)
        await _load(deployment, report, options.seed, options.minutes * 60, options.grace_s)
        nursery.cancel_scope.cancel()
    after = await idle(deployment, REST_S, before)
    kept_its_process = deployment.steady_pid in deployment.engine_children()
    code = await trio.to_thread.run_sync(deployment.stop)

    by_minute = minutes_of(report, deployment.began_s)
    growth = growth_of(samples, by_minute)
    problems = [*report.problems, *problems_at_rest(before, after), *problems_of_growth(growth)]
    problems += problems_in_log(_log(deployment.log))
    if not kept_its_process:
        problems.append("the steady model's process did not live as long as the server")
    if code != 0:
        problems.append(f"the server ended with exit code {code}")
    return Report(
        seed=options.seed,
        minutes=options.minutes,
        requests=report.requests,
        outcomes=dict(sorted(report.outcomes.items())),
        answered=dict(sorted(report.answered.items())),
        canaries=dict(report.canaries),
        idle_before=before,
        idle_after=after,
        exit_code=code,
        growth=growth,
        by_minute=by_minute,
        events=[(round(at_s - deployment.began_s, 1), what) for at_s, what in deployment.events],
        problems=problems,
        samples=samples,
    )


async def _load(
    deployment: Deployment, report: LoadReport, seed: int, seconds: float, grace_s: float
) -> None:
    """Run all tenants for some seconds, then wait up to `grace_s` for the last responses."""
    tenants = Tenants(deployment, report, seed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tenants.run)
        await trio.sleep(seconds)
        tenants.stop()
        nursery.cancel_scope.deadline = trio.current_time() + grace_s


async def _sample(deployment: Deployment, report: LoadReport, samples: list[Sample], every_s: float) -> None:
    while True:
        with suppress(OSError):  # the steady child has ended, which is reported separately
            samples.append(await sample(deployment, report.requests))
        await trio.sleep(every_s)


async def _show_progress(report: LoadReport, minutes: float) -> None:
    for minute in range(1, int(minutes) + 1):
        await trio.sleep(60)
        print(
            f"minute {minute}: {report.requests} requests, {len(report.problems)} problems",
            file=sys.stderr,
        )


def _log(file: Path) -> list[dict[str, object]]:
    """Return the events of the log. A line that is not JSON becomes a critical event."""
    events: list[dict[str, object]] = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            events.append({"event": "a line that is not JSON", "level": "critical", "line": line})
    return events


def main() -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests and faults")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--plot", type=Path, help="plot the measurements to this PNG file (needs matplotlib)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fairlead-soak-") as folder:
        report = trio.run(run_soak, Path(folder), Options(minutes=options.minutes, seed=options.seed))
        if report.problems:
            (Path(folder) / "log.jsonl").replace(Path(tempfile.gettempdir()) / "fairlead-soak.log")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if options.plot:
        draw(report, options.plot)
    summary = msgspec.to_builtins(report)
    for name in ("samples", "events", "by_minute"):
        summary[name] = len(summary[name])
    print(json.dumps(summary, indent=1))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
