"""The settings that have a scenario: what a server does differently because of one key of its file.

Each scenario is run with its configuration, where it must hold; without the key, where it must fail; and on
a server that reads the key by a reload, unless the server reports that the key needs a restart. The server is
one process, or a supervisor with a dispatcher and two fronts.
"""

from collections.abc import Callable
from typing import NamedTuple

from settings.documents import Document
from settings.served import Scenario


class Case(NamedTuple):
    """A key, a configuration that has it, and a scenario that must hold then.

    `alternative` is another value to try, for a key that a file must have.
    """

    key: str
    document: Document
    scenario: Scenario
    alternative: object = None


CASES: dict[str, Case] = {}
FRONTS = (1, 2)
"""The numbers of fronts of the servers that scenarios are run on."""
NOT_WITH_FRONTS = dict.fromkeys(
    ("responses.maxBytes", "responses.ttl"), "several fronts keep no responses, as docs/scaling.md says"
)
"""The keys that have no effect with several fronts, and why."""
ALWAYS_WITH_FRONTS = {"responses.store": NOT_WITH_FRONTS["responses.ttl"]}
"""The keys of scenarios that hold with several fronts even without the key, and why."""


def setting(key: str, document: Document, *, alternative: object = None) -> Callable[[Scenario], Scenario]:
    """Register a scenario for a key. One function may serve several keys, each with its own document."""

    def register(scenario: Scenario) -> Scenario:
        assert key not in CASES, f"{key} has a scenario already"
        CASES[key] = Case(key, document, scenario, alternative)
        return scenario

    return register
