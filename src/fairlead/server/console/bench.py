"""`fairlead bench`: runs a load test against a server and prints the results. Shows a progress bar."""

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec
import trio

from fairlead.base.config import ConfigError
from fairlead.server.console.announcer import report_error
from fairlead.server.console.client import KEY_HINT
from fairlead.server.load.client import RequestFailedError, TimedAnswer
from fairlead.server.load.generator import CONTROL_TIMEOUT_S, OnAnswer, Options, measure, with_model
from fairlead.server.load.report import Level, format_table, plot


def bench(options: Options, *, api_key: str | None, json: Path | None, plot: Path | None) -> int:
    """Run and report the load test. Return the exit code: 1 if it failed or a level had no answer at all.

    options: the load.
    api_key: the key for the server; None: it needs none.
    json: a file for all measurements; None: none is written.
    plot: a file for the plot; None: none is written.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot: needs matplotlib, which fairlead[bench] installs")
    try:
        options = with_model(options, api_key=api_key)
        with _bar(options) as counted:
            results = measure(options, api_key=api_key, on_answer=counted)
    except trio.TooSlowError:
        report_error(f"{options.url}: no answer within {CONTROL_TIMEOUT_S:g} s")
        return 1
    except msgspec.MsgspecError:
        report_error(f"{options.url}: the answer to /v1/models is not a list of models")
        return 1
    except (RequestFailedError, ValueError) as error:
        hint = f" {KEY_HINT}" if isinstance(error, RequestFailedError) and error.is_about_keys else ""
        report_error(f"{options.url}: {error}{hint}")
        return 1
    _report(options, results, json=json, plot_file=plot)
    return 0 if all(level.output_tokens for level, _ in results) else 1


def _report(
    options: Options,
    results: Sequence[tuple[Level, Sequence[TimedAnswer]]],
    *,
    json: Path | None,
    plot_file: Path | None,
) -> None:
    """Print the table and write the requested files."""
    print(
        f"{options.model} at {options.url}, {options.endpoint}: {options.prompt_tokens} prompt tokens and "
        f"{options.output_tokens} output tokens\n"
    )
    print(format_table([level for level, _ in results]))
    failed = next((answer for _, answers in results for answer in answers if answer.reason), None)
    if failed is not None:
        print(f"The first error: {failed.reason}")
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
        plot(plot_file, f"{options.model}, {options.prompt_tokens} in, {options.output_tokens} out", results)


@contextmanager
def _bar(options: Options) -> Iterator[OnAnswer]:
    """Show a progress bar during the block, on a terminal; yield a function that counts one answer."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(options.warmup_of(streams) + options.requests_of(streams) for streams in options.streams)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answers", total=total)
        yield lambda: progress.advance(task)
