"""Measure what one tenant's load does to another that sends one small chat at a time.

    python bench/fair_turn.py [--seconds 20] [--only 'n: 64,bodies of 1 MB'] [--fronts 1,2] [--model FOLDER]
        [--json bench/results/fair_turn.json] [--plot bench/results/fair_turn.png]
        [--peer 'vllm=vllm serve {model} --port {port} --served-model-name bench']

Each attack (`fair_turn_attacks.py`) has a server of its own, with eight seats. It measures the victim alone,
then beside the attack, then the attacker alone, each for `--seconds`. The result has the victim's first token
(p50, p99, most) with and without the attack, its tokens per second against its fair share, and what the
attacker gets done. The fair share is what the victim gets alone, or an equal part of all tokens, if that is
less. Texts are as long as the model takes. Embeddings need `--embedding-model`. A victim that gets no token
counts with the time until the end, so that short runs, for developing, show smaller ratios; and a p99 of
fewer than 100 answers is their maximum.

A peer gets the same load after ours. What fails there is counted: it may not know a route. The plot shows the
first token's p99 against that without the attack, and the goals.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from fair_turn_attacks import ATTACKS, BEGUN, EMBEDDING_MODEL, TENANTS
from fairlead.base.config import demonstration_model
from fairlead.server.load.client import LoadConnection, TimedAnswer, time_request
from machine import machine
from peers import server

MODEL = "bench"
SEATS = 8
VICTIM, ATTACKER = "V", "A"
ANSWER_TOKENS = 16
PAUSE_S = 0.05
TIMEOUT_S = 300.0  # of one answer: what takes longer counts as this
SETTLE_S = 1.0
READY_S = 600.0
GENERATING = ("long answers", "background", "n: 64", "lists of prompts", "mixture", "20 tenants")
# The first token's p99 against that without the attack, at most.
RATIOS = dict.fromkeys(ATTACKS, 3.0) | dict.fromkeys(GENERATING, 5.0)
Figures = dict[str, Any]


class Load(NamedTuple):
    """Where the load goes, and how many words the long texts have."""

    url: str
    words: int


def words_of(model: Path) -> int:
    """Return how many words fit the model's context; each has at most five tokens."""
    settings = json.loads((model / "config.json").read_text())
    return int(settings["max_position_embeddings"]) // 5


async def victim(url: str, answers: list[TimedAnswer]) -> None:
    """Send one small chat after the other until cancelled."""
    connection = LoadConnection(url, api_key=VICTIM)
    number = 0
    while True:
        number += 1
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Hello {number}"}],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = TimedAnswer(started_s=trio.current_time())
        answers.append(answer)  # one that is cut off counts with the time that it has waited
        answers[-1] = await time_request(connection, "/v1/chat/completions", body, timeout_s=TIMEOUT_S)
        await trio.sleep(PAUSE_S)


async def attacked(load: Load, kind: str, seconds: float, *, begun: trio.Event | None = None) -> Figures:
    """Run the attack's process, and return what it reports; set `begun` when it attacks."""
    script = Path(__file__).with_name("fair_turn_attacks.py")
    command = [sys.executable, str(script), kind, load.url, MODEL, ATTACKER, str(seconds), str(load.words)]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        output = b""
        async for data in process.stdout:
            output += data
            if begun is not None and output.startswith(BEGUN):
                begun.set()
    finally:
        process.kill()
    report: Figures = json.loads(output.removeprefix(BEGUN))
    return report


async def measured(load: Load, seconds: float, kind: str | None = None) -> tuple[Figures, Figures]:
    """Return the victim's figures over this time, and those of an attack meanwhile."""
    answers: list[TimedAnswer] = []
    report: Figures = {}
    async with trio.open_nursery() as nursery:
        if kind is not None:
            begun = trio.Event()

            async def attack() -> None:
                report.update(await attacked(load, kind, seconds + SETTLE_S, begun=begun))

            nursery.start_soon(attack)
            await begun.wait()
            await trio.sleep(SETTLE_S)
        began = trio.current_time()
        with trio.move_on_after(seconds):
            await victim(load.url, answers)
        until = trio.current_time()
    return victim_figures(answers, began, until), report


def victim_figures(answers: list[TimedAnswer], began: float, until: float) -> Figures:
    """Return what the victim has seen. An answer without a first token counts with its wait until the end."""
    waits = sorted((each.pieces_s[0] if each.pieces_s else until) - each.started_s for each in answers)
    rates = [
        (len(each.pieces_s) - 1) / (each.pieces_s[-1] - each.pieces_s[0])
        for each in answers
        if len(each.pieces_s) > 1 and each.pieces_s[-1] > each.pieces_s[0]
    ]
    failures = [each.error for each in answers if each.error is not None]
    return {
        "answers": len(answers),
        "first_token_p50_ms": at(waits, 0.5),
        "first_token_p99_ms": at(waits, 0.99),
        "first_token_most_ms": at(waits, 1.0),
        "tokens_per_s_of_an_answer": round(statistics.median(rates), 1) if rates else 0.0,
        "tokens": sum(each.output_tokens for each in answers),
        "seconds": round(until - began, 2),
        "failures": failures[:5],
    }


def at(waits: list[float], share: float) -> float:
    """Return a quantile in milliseconds; of few waits the next larger one."""
    return round(1000 * waits[min(int(share * len(waits)), len(waits) - 1)], 2) if waits else 0.0


async def one_kind(load: Load, kind: str, seconds: float) -> Figures:
    """Measure one attack."""
    await measured(load, min(seconds, 2.0))  # warms up
    before, _ = await measured(load, seconds)
    under, attack = await measured(load, seconds, kind)
    await until_quiet(load)
    alone = await attacked(load, kind, seconds)
    tenants = (TENANTS if kind == "20 tenants" else 1) + 1
    total_rate = (under["tokens"] + attack["tokens"]) / (under["seconds"] + SETTLE_S)
    own = before["tokens_per_s_of_an_answer"]
    fair = min(own, total_rate / tenants) if attack["tokens"] else own
    base = max(before["first_token_p99_ms"], 0.01)
    return {
        "kind": kind,
        "victim_alone": before,
        "victim_attacked": under,
        "attacker_beside": attack,
        "attacker_alone": alone,
        "first_token_p99_ratio": round(under["first_token_p99_ms"] / base, 2),
        "share_of_fair_tokens_per_s": round(under["tokens_per_s_of_an_answer"] / fair, 3) if fair else None,
        "goal_ratio": RATIOS[kind],
    }


async def until_quiet(load: Load) -> None:
    """Wait until the server answers the victim quickly again, at most for a minute."""
    with trio.move_on_after(60):
        while True:
            figures, _ = await measured(load, 1.0)
            if figures["answers"] >= 3:
                return


@contextmanager
def ours(model: Path, fronts: int, embedding_model: Path | None) -> Iterator[str]:
    """Run our server with a key for the victim, and for each tenant that attacks."""
    keys = [VICTIM, ATTACKER, *(f"{ATTACKER}{number}" for number in range(TENANTS))]
    settings = {
        "models": {MODEL: {"path": str(model), "preload": True, "slots": SEATS}}
        | ({EMBEDDING_MODEL: {"path": str(embedding_model), "preload": True}} if embedding_model else {}),
        "apiKeys": [{"key": key} for key in keys],
        "fronts": fronts,
        "queue": {"timeout": "10m"},
    }
    with tempfile.TemporaryDirectory() as folder:
        if fronts > 1:  # background responses are in progress at one front, and read at another
            settings |= {"store": f"{folder}/store.db", "responses": {"inStore": True}}
        file = Path(folder) / "fairlead.yaml"
        file.write_text(json.dumps(settings))
        command = f"{sys.executable} -m fairlead serve --port {{port}} --config {file}"
        with server(command, model, ready_s=READY_S) as url:
            yield url


def run_all(options: argparse.Namespace, name: str, start: Any) -> Iterator[Figures]:
    """Measure all kinds on a server, each on a new one."""
    for kind in options.only or ATTACKS:
        try:
            with start() as url:
                if kind == "embeddings" and not options.embedding_model:
                    raise RuntimeError("--embedding-model is not given")
                row = trio.run(one_kind, Load(url, words_of(options.model)), kind, options.seconds)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            row = {"kind": kind, "problem": str(error)[:300]}
        row = {"server": name, **row}
        print(line(row), flush=True)
        yield row


def line(row: Figures) -> str:
    """Return a row as text."""
    if "problem" in row:
        return f"{row['server']:14} {row['kind']:18} {row['problem']}"
    alone, under, attacker = row["victim_alone"], row["victim_attacked"], row["attacker_alone"]
    verdict = "held" if row["first_token_p99_ratio"] <= row["goal_ratio"] else "missed"
    return (
        f"{row['server']:14} {row['kind']:18} p50 {alone['first_token_p50_ms']:8.1f} -> "
        f"{under['first_token_p50_ms']:9.1f} ms, p99 {alone['first_token_p99_ms']:8.1f} -> "
        f"{under['first_token_p99_ms']:9.1f} ms, {row['first_token_p99_ratio']:7.1f}x "
        f"(goal {row['goal_ratio']:g}: {verdict}), share {row['share_of_fair_tokens_per_s']}, "
        f"attacker alone {attacker['tokens']} events, {attacker['requests']} requests, "
        f"{dict(row['attacker_beside']['failures'])}"
    )


def plot(rows: list[Figures], file: Path) -> None:
    """Draw the ratios of the first token's p99 by kind and server, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    names = list(dict.fromkeys(row["server"] for row in rows))
    figure, axes = plt.subplots(figsize=(10, 5))
    for index, name in enumerate(names):
        ratios = {row["kind"]: row.get("first_token_p99_ratio", 0) for row in rows if row["server"] == name}
        places = [number + (index - (len(names) - 1) / 2) * 0.8 / len(names) for number in range(len(kinds))]
        axes.bar(places, [ratios.get(kind, 0) for kind in kinds], 0.8 / len(names), label=name)
    goals = [RATIOS[kind] for kind in kinds]
    axes.hlines(
        goals,
        [n - 0.45 for n in range(len(kinds))],
        [n + 0.45 for n in range(len(kinds))],
        "black",
        label="goal",
    )
    axes.set_yscale("log")
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set_ylabel("first token p99 / without the attack")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each part")
    parser.add_argument("--only", type=lambda text: text.split(","), help="kinds, separated by commas")
    parser.add_argument("--fronts", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2])
    parser.add_argument("--model", type=Path, default=demonstration_model(), help="folder of the model")
    parser.add_argument("--embedding-model", type=Path, metavar="FOLDER")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(ATTACKS)
    if unknown:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    facts = machine()
    rows: list[Figures] = []
    for row in measure(options):
        rows.append(row)
        keep(options, facts, rows)  # a long run may be ended
    return 0


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """Measure all servers."""
    for fronts in options.fronts:
        start = partial(ours, options.model, fronts, options.embedding_model)
        yield from run_all(options, "one process" if fronts == 1 else f"{fronts} fronts", start)
    for peer in options.peer:
        name, _, command = peer.partition("=")
        yield from run_all(options, name, partial(server, command, options.model, ready_s=READY_S))


def keep(options: argparse.Namespace, facts: Figures, rows: list[Figures]) -> None:
    """Write what has been measured so far."""
    result = {
        "benchmark": "fair_turn",
        "machine": facts | {"load_after": machine()["load"]},
        "model": options.model.name,
        "seconds": options.seconds,
        "seats": SEATS,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    sys.exit(main())
