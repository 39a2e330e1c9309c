"""Settings of Python's cyclic garbage collector for a server: less work, and short pauses.

A full collection visits every object while all tasks wait. What the program starts with (modules, tokenizer,
routes) is never freed, and need not be visited again. Requests leave no reference cycles except a few small
ones of the router, so collecting those later costs little memory. When requests left more, the collector
caused a quarter of the cost of a new connection. Each collection is a pause for all tasks: 20,000
objects took up to 35 ms under hostile requests, 3,000 up to 5 ms, and less in total.
"""

import gc

# New objects per collection of the youngest generation; then collections of each generation per one of the
# next. A request makes a few hundred objects.
YOUNG_OBJECTS = 3_000
YOUNG_TO_MIDDLE = 20
MIDDLE_TO_OLD = 20


def freeze() -> None:
    """Exempt all current objects and set the thresholds. Call once, when everything permanent is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_TO_MIDDLE, MIDDLE_TO_OLD)
