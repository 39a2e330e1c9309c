"""Settings of Python's cyclic garbage collector for a server: less work, and short pauses.

A full collection visits every object while all tasks wait. What the program starts with (modules, tokenizer,
routes) is never freed, and need not be visited again. Requests and connections leave no reference cycles,
except for those that are cancelled, so collecting these later costs little memory. When each connection left
44 objects, the collector paused all tasks for 50 to 100 ms once a second under a flood of them.

While a process starts, it makes almost only objects that stay: with Python's default of 700 objects per
collection, these took a fifth of the time of a server's imports. Nor is what is exempt visited when a process
ends, which took half a second with torch.
"""

import gc

STARTING_OBJECTS = 100_000  # new objects per collection until `freeze`
# New objects per collection of the youngest generation from then on; then collections of each generation per
# one of the next. A request makes a few hundred objects.
YOUNG_OBJECTS = 3_000
YOUNG_TO_MIDDLE = 20
MIDDLE_TO_OLD = 20


def begin() -> None:
    """Collect seldom until `freeze`. Call first in a process's program, before its imports."""
    gc.set_threshold(STARTING_OBJECTS, YOUNG_TO_MIDDLE, MIDDLE_TO_OLD)


def freeze_imports() -> None:
    """Exempt the modules that a process has imported, without a collection: they leave hardly any garbage."""
    gc.freeze()


def freeze() -> None:
    """Exempt all current objects and set the thresholds. Call once, when everything permanent is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_TO_MIDDLE, MIDDLE_TO_OLD)
