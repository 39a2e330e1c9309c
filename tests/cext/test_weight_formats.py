"""The formats that the CPU step keeps weights in: each is one file, and one entry in the list."""

import re
from pathlib import Path

import pytest

from fairlead._cext.cpustep import formats, variants

SOURCES = Path(__file__).resolve().parents[2] / "cext"
KERNELS = [(dtype, variant) for dtype in ("float32", "bfloat16") for variant in variants(dtype)]
NARROW = [name for name in formats("float32") if name != "none"]


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_every_kernel_reads_every_format(kernel):
    assert ("none", *NARROW) == formats(*kernel)


@pytest.mark.parametrize("name", NARROW)
def test_format_is_named_in_its_own_file_and_the_list_only(name):
    files = [SOURCES / "cpustep.pyx", *(SOURCES / "cpustep").iterdir()]
    naming = {file.name for file in files if re.search(rf"\b{name}\b", file.read_text())}
    assert {f"format_{name}.h", "formats.h"} == naming
