"""Facts about the machine that a benchmark runs on."""

import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the facts about the machine that matter for the figures."""
    cpu = platform.processor()
    cpu_facts = Path("/proc/cpuinfo")
    if cpu_facts.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpu_facts.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def loop_ns() -> float:
    """Return how long one turn of a short loop takes now: how fast the processor is, and not its load."""
    table: dict[int, int] = {}
    times = []
    for _ in range(20):
        began = time.process_time()
        for number in range(10_000):
            table[number & 1023] = number
        times.append(time.process_time() - began)
    return 1e5 * min(times)
