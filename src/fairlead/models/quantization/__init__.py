"""Ways to keep the weights of linear layers. A new one needs its module here and an entry in the list."""

from fairlead.errors import LoadFailed
from fairlead.models.linear import Quantization
from fairlead.models.quantization.float8 import FLOAT8
from fairlead.models.quantization.int8 import INT8
from fairlead.models.quantization.none import NONE

QUANTIZATIONS: dict[str | None, Quantization] = {each.name: each for each in (NONE, FLOAT8, INT8)}


def find_quantization(name: str | None) -> Quantization:
    """Return the quantization of this name; `LoadFailed` if there is none."""
    if name not in QUANTIZATIONS:
        known = " and ".join(name for name in QUANTIZATIONS if name is not None)
        raise LoadFailed(f"quantization {name!r} is not supported ({known} are)")
    return QUANTIZATIONS[name]
