"""Formats in which linear layers keep their weights. A new one needs its module and an entry in the list."""

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.linear import WeightFormat
from fairlead.engine.models.quantization.float8 import Float8
from fairlead.engine.models.quantization.int4 import Int4
from fairlead.engine.models.quantization.int8 import Int8
from fairlead.engine.models.quantization.none import NONE

FORMATS: dict[str | None, WeightFormat] = {each.name: each for each in (NONE, Float8(), Int8(), Int4())}


def find_format(name: str | None) -> WeightFormat:
    """Return the format of this name; `LoadFailed` if there is none."""
    if name not in FORMATS:
        known = ", ".join(name for name in FORMATS if name is not None)
        raise LoadFailed(f"quantization {name!r} is not supported ({known} are)")
    return FORMATS[name]
