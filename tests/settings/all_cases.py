"""All scenarios and mutants, from the modules that define them."""

from importlib import import_module

from settings.behaviours import BEHAVIOURS
from settings.cases import CASES
from settings.composition_mutants import COMPOSITION, PLACEMENT
from settings.front_mutants import SEVERAL_FRONTS
from settings.limit_mutants import LIMITS, RELOAD

MODULES = (
    "queue",
    "cache",
    "limit",
    "response",
    "server",
    "model",
    "command",
    "relay",
    "swap",
    "selector",
    "budget",
)

for _name in MODULES:
    import_module(f"settings.{_name}_settings")
import_module("settings.several_fronts")

MUTANTS = {mutant.name: mutant for mutant in (*COMPOSITION, *PLACEMENT, *LIMITS, *RELOAD, *SEVERAL_FRONTS)}

__all__ = ["BEHAVIOURS", "CASES", "MUTANTS"]
