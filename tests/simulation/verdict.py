"""The result of one simulated run. It does not import the product, so that any process can unpickle it."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Verdict:
    """`problems` in sentences; `trace` is the same for equal runs; `calls` are those to the system, by kind.

    `replay` is the command that repeats the run; `recent` has the end of the trace, if it was kept.
    """

    name: str
    replay: str
    problems: list[str]
    trace: str
    outcomes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    recent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = "\n".join(f"  - {problem}" for problem in self.problems[:10])
        return f"{self.name}: {len(self.problems)} problems; replay: {self.replay}\n{shown}"
