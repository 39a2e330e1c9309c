"""Plots the measurements of a soak. Needs matplotlib."""

from pathlib import Path

from soaking.report import MIB, Report


def draw(report: Report, file: Path) -> None:
    """Write a PNG with memory, counts, times and the queue over time, and the times of the faults."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [sample.at_s / 60 for sample in report.samples]
    figure, axes = plt.subplots(4, 1, figsize=(11, 13), sharex=True, constrained_layout=True)
    memory, counts, times, queue = axes
    for name, label in (
        ("uss", "server, USS"),
        ("heap", "server, in use by malloc"),
        ("steady_uss", "child of the steady model, USS"),
        ("children", "all children, USS"),
    ):
        memory.plot(minutes, [getattr(sample, name) / MIB for sample in report.samples], label=label)
    memory.set_ylabel("MiB")
    for name in ("descriptors", "tasks", "threads"):
        counts.plot(minutes, [getattr(sample, name) for sample in report.samples], label=name)
    blocks = counts.twinx()
    blocks.plot(minutes, [sample.blocks / 1000 for sample in report.samples], "k:", label="blocks")
    blocks.set_ylabel("thousand Python blocks (dotted)")
    for name, label in (
        ("first_p50_s", "first token, p50"),
        ("first_p99_s", "first token, p99"),
        ("gap_p50_s", "between pieces, p50"),
        ("gap_p99_s", "between pieces, p99"),
    ):
        found = [(each.minute + 0.5, getattr(each, name)) for each in report.by_minute if getattr(each, name)]
        times.plot([at for at, _ in found], [value for _, value in found], "o-", markersize=3, label=label)
    times.set_yscale("log")
    times.set_ylabel("seconds")
    for name in ("waiting", "running"):
        queue.plot(minutes, [getattr(sample, name) for sample in report.samples], label=name)
    queue.set_ylabel("jobs")
    queue.set_xlabel("minutes; grey lines: kills, stops, reloads, unloads")
    for axis in axes:
        axis.set_ylim(bottom=None if axis is times else 0)
        axis.legend(loc="upper left", fontsize=8)
        axis.grid(alpha=0.3)
        for at_s, _ in report.events:
            axis.axvline(at_s / 60, color="grey", alpha=0.15, linewidth=0.7)
    verdict = "flat" if not report.problems else f"{len(report.problems)} problems"
    figure.suptitle(
        f"{report.requests} requests in {report.minutes:g} minutes, seed {report.seed}: {verdict}"
    )
    figure.savefig(file, dpi=100)
    plt.close(figure)
