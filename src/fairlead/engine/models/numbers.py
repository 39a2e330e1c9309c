"""Types of numbers by their names, and conversions between them that round as torch does.

numpy has no bfloat16: such numbers are the upper halves of float32, as uint16. Imports no torch.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path

import numpy as np

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.folder import FLOAT_TYPES, read_stored_dtype

_CPU_FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # as Linux names them, on x86 and Arm
_NAN = 0x7FC0


def narrow(array: np.ndarray, stored: str, dtype: str) -> np.ndarray:
    """Return numbers of a safetensors file's type `stored` as `dtype`, bfloat16 as uint16, contiguous.

    Numbers that have this type already are not copied, unless they are not aligned.
    """
    if dtype == "bfloat16":
        halves = array if stored == "BF16" else round_to_bfloat16(array)
        return np.require(halves, requirements=("C", "A"))
    floats = array if stored != "BF16" else widen(array)
    with np.errstate(over="ignore"):  # becomes infinite, which the receiver refuses
        return np.require(floats, dtype=np.dtype(dtype), requirements=("C", "A"))


def widen(array: np.ndarray) -> np.ndarray:
    """Return bfloat16 as float32; other arrays as they are."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, and of two to the even one; wider numbers are float32 in between."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    halves = ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    halves[(bits & 0x7FFF_FFFF) > 0x7F80_0000] = _NAN
    return halves


def rounded(value: float, dtype: str) -> float:
    """Return the nearest number of a type."""
    array = np.array([value])
    return float(widen(narrow(array, "F64", dtype))[0])


def choose_cpu_dtype(config: CheckpointConfig, name: str) -> str:
    """Return the dtype to compute in on a CPU: the requested one or, with "auto", the checkpoint's if fast.

    No CPU multiplies float16 fast, and only some bfloat16: "auto" uses bfloat16 for all but float32
    checkpoints if the processor has a unit for it, else float32.
    """
    check_dtype(name)
    if name != "auto":
        return name
    return "bfloat16" if read_stored_dtype(config) != "float32" and cpu_computes_bfloat16() else "float32"


def check_dtype(name: str) -> None:
    """Raise `LoadFailed` unless `name` is "auto" or a type that can be computed in."""
    if name != "auto" and name not in FLOAT_TYPES:
        raise LoadFailed(f"dtype {name!r} is not supported (auto, {', '.join(FLOAT_TYPES)} are)")


@cache
def cpu_computes_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 in hardware (AMX, AVX-512 BF16, or Arm's own)."""
    if platform.system() == "Darwin":
        found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        ask = ctypes.CDLL(None).sysctlbyname
        failed = ask(b"hw.optional.arm.FEAT_BF16", ctypes.byref(found), ctypes.byref(size), None, 0)
        return not failed and bool(found.value)
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not _CPU_FEATURES.isdisjoint(described.split())
