"""Facts about the machine that a benchmark runs on."""

import os
import platform
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
