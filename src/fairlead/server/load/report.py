"""Summarizes the answers of each level: as numbers, as a table and as a plot."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from fairlead.server.load.client import TimedAnswer


class Quantiles(msgspec.Struct, frozen=True):
    """Mean and quantiles of times, in milliseconds.

    mean: The mean.
    p50: The median.
    p90: Nine of ten times are shorter.
    p99: 99 of 100 times are shorter.
    """

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Quantiles | None":
        """Return the quantiles of times in seconds; None without times."""
        if not seconds:
            return None
        p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)) * 1000
        return cls(float(np.mean(seconds)) * 1000, float(p50), float(p90), float(p99))


class Level(msgspec.Struct, frozen=True):
    """The results with one number of streams. Rates are over the time from first request to last answer.

    streams: the number of streams.
    requests: how many requests were sent.
    wall_s: the time of the level.
    output_tokens: the tokens of all answers.
    output_tokens_per_s: their rate.
    requests_per_s: the rate of successful requests.
    prompt_tokens_mean: as the server counted them; None: it did not.
    tokens_counted_by: "usage", or "pieces" where a server reports none.
    errors: failed requests by error.
    generator_cpu: the processor time of this program, in cores.
    time_to_first_token_ms: from the request to its first piece.
    inter_token_ms: between pieces of text as they arrive.
    per_token_ms: each request's time after its first piece, divided by its further tokens.
    end_to_end_ms: from the request to the end of its answer.
    tokens_by_second: the tokens of each second.
    """

    streams: int
    requests: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    prompt_tokens_mean: float | None
    tokens_counted_by: str
    errors: dict[str, int]
    generator_cpu: float
    time_to_first_token_ms: Quantiles | None
    inter_token_ms: Quantiles | None
    per_token_ms: Quantiles | None
    end_to_end_ms: Quantiles | None
    tokens_by_second: list[float]


def summarize(streams: int, answers: Sequence[TimedAnswer], *, cpu_s: float) -> Level:
    """Return the results of a level; `answers` must not be empty."""
    succeeded = [answer for answer in answers if answer.error is None]
    with_text = [answer for answer in succeeded if answer.pieces_s]
    started_s = min(answer.started_s for answer in answers)
    wall_s = max(answer.ended_s for answer in answers) - started_s
    output_tokens = sum(answer.output_tokens for answer in succeeded)
    usages = [answer.usage for answer in succeeded if answer.usage]
    return Level(
        streams=streams,
        requests=len(answers),
        wall_s=wall_s,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        requests_per_s=len(succeeded) / wall_s,
        prompt_tokens_mean=sum(usage.prompt_tokens for usage in usages) / len(usages) if usages else None,
        tokens_counted_by="usage" if len(usages) == len(succeeded) else "pieces",
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        generator_cpu=cpu_s / wall_s,
        time_to_first_token_ms=Quantiles.of([answer.pieces_s[0] - answer.started_s for answer in with_text]),
        inter_token_ms=Quantiles.of(gaps_s(with_text)),
        per_token_ms=Quantiles.of(
            [
                (answer.pieces_s[-1] - answer.pieces_s[0]) / (answer.output_tokens - 1)
                for answer in with_text
                if answer.output_tokens > 1
            ]
        ),
        end_to_end_ms=Quantiles.of([answer.ended_s - answer.started_s for answer in succeeded]),
        tokens_by_second=_tokens_by_second(with_text, started_s, wall_s),
    )


def gaps_s(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return the seconds between successive pieces of text of each answer."""
    return [later - earlier for answer in answers for earlier, later in pairwise(answer.pieces_s)]


def format_table(levels: Sequence[Level]) -> str:
    """Return the levels as a text table, one column each."""
    rows: list[tuple[str, Callable[[Level], str]]] = [
        ("streams", lambda level: str(level.streams)),
        ("output tokens/s", lambda level: f"{level.output_tokens_per_s:.1f}"),
        ("requests/s", lambda level: f"{level.requests_per_s:.2f}"),
        ("first token ms", lambda level: _quantiles(level.time_to_first_token_ms)),
        ("between pieces ms", lambda level: _quantiles(level.inter_token_ms)),
        ("per token ms", lambda level: _quantiles(level.per_token_ms)),
        ("end to end ms", lambda level: _quantiles(level.end_to_end_ms)),
        ("prompt tokens", lambda level: f"{level.prompt_tokens_mean or 0:.1f}"),
        ("output tokens", lambda level: f"{level.output_tokens} by {level.tokens_counted_by}"),
        ("errors", lambda level: " ".join(f"{n}×{kind}" for kind, n in level.errors.items()) or "none"),
        ("generator CPU", lambda level: f"{level.generator_cpu:.0%} of a core"),
    ]
    lines = [f"{name:<18}" + "".join(f"{cell(level):>26}" for level in levels) for name, cell in rows]
    return "\n".join([*lines, "Times are p50 / p90 / p99."])


def plot(path: Path, title: str, results: Sequence[tuple[Level, Sequence[TimedAnswer]]]) -> None:
    """Plot the distributions of both latencies, and the throughput over time."""
    import matplotlib as mpl

    mpl.set_loglevel("error")  # otherwise it logs slow searches for fonts
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (first, between, rate) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for level, answers in results:
        succeeded = [answer for answer in answers if answer.error is None and answer.pieces_s]
        label = f"{level.streams} streams"
        first.ecdf(
            [(answer.pieces_s[0] - answer.started_s) * 1000 for answer in succeeded] or [0], label=label
        )
        between.ecdf([gap * 1000 for gap in gaps_s(succeeded)] or [0], label=label)
        rate.step(range(len(level.tokens_by_second)), level.tokens_by_second, where="post", label=label)
    first.set(title="Time to first token", xlabel="ms", ylabel="share of requests")
    between.set(title="Between pieces of text", xlabel="ms", ylabel="share of pieces")
    rate.set(title="Throughput", xlabel="s since the level began", ylabel="output tokens/s", ylim=(0, None))
    for axes in (first, between, rate):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _tokens_by_second(answers: Sequence[TimedAnswer], started_s: float, wall_s: float) -> list[float]:
    """Return the tokens of each second, with an answer's tokens spread evenly over its pieces."""
    seconds = [0.0] * (int(wall_s) + 1)
    for answer in answers:
        for piece_s in answer.pieces_s:
            seconds[int(piece_s - started_s)] += answer.output_tokens / len(answer.pieces_s)
    return seconds


def _quantiles(quantiles: Quantiles | None) -> str:
    return "-" if quantiles is None else f"{quantiles.p50:.1f} / {quantiles.p90:.1f} / {quantiles.p99:.1f}"
