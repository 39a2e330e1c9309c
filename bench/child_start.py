"""Measure how long a model's process takes to start on a CPU, and how much memory it has then.

    python bench/child_start.py FOLDER [--rounds 5] [--other OTHER/src] [--json FILE]

FOLDER is a model's, such as `bench/random_model.py` makes. A start lasts from the command to the frame that
says that the model is loaded. With `--other`, the sources of another commit take turns, so that other load
affects both. The least of all rounds counts. `resident_mb` is the memory of the process, of which
`shared_mb` are pages of files, such as libraries, which the system can drop.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fairlead.base import messages
from fairlead.nodes.own_engine import OwnEngine
from machine import machine

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


async def measure(folder: Path, sources: Path, options: dict[str, Any]) -> dict[str, float]:
    """Start a child from these sources and end it; return what it took."""
    command = ("env", f"PYTHONPATH={sources}", sys.executable, "-P", "-m", "fairlead.engine.worker.main")
    engine = OwnEngine(messages.WorkerSpec(path=str(folder), device="cpu", **options), command=command)
    async with trio.open_nursery() as nursery:
        began = time.perf_counter()
        await nursery.start(engine.run)
        start_s = time.perf_counter() - began
        process = Path(f"/proc/{engine.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        maps = (process / "maps").read_text()
        nursery.cancel_scope.cancel()
    return {
        "start_s": round(start_s, 2),
        "processor_s": sum(map(int, ticks)) / 100,
        "resident_mb": round(int(status["VmRSS"].split()[0]) / 1024),
        "shared_mb": round(int(status["RssFile"].split()[0]) / 1024),
        "imports_torch": "libtorch" in maps,
    }


async def compare(folder: Path, trees: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Return the least of each figure, by format and tree."""
    results = []
    for name, options in FORMATS.items():
        runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for _ in range(rounds):
            for tree, sources in trees.items():
                runs[tree].append(await measure(folder, sources, options))
        for tree, measured in runs.items():
            least = {figure: min(run[figure] for run in measured) for figure in measured[0]}
            results.append({"weights": name, "tree": tree, **least})
            print(*(f"{key} {value}" for key, value in results[-1].items()), sep="  ", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=5, help="starts of which the least counts")
    parser.add_argument("--other", type=Path, help="sources of another commit to compare with")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    trees = {"this": Path(__file__).parents[1] / "src"}
    if options.other is not None:
        trees["other"] = options.other.resolve()
    results = trio.run(partial(compare, options.folder, trees, options.rounds))
    if options.json is not None:
        document = {"machine": machine(), "model": options.folder.name, "rounds": options.rounds}
        options.json.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
