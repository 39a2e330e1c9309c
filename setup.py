"""The list of extension modules; everything else is in pyproject.toml."""

from pathlib import Path

from Cython.Compiler import Options
from setuptools import Extension, setup

Options.warning_errors = True

KERNELS = ("fairqueue",)


def kernel(name: str) -> Extension:
    """One kernel: a `.pyx`, with its parts, if it has any, in a folder of its name."""
    parts = sorted(map(str, Path("cext", name).glob("*")))
    return Extension(f"fairlead._cext.{name}", [f"cext/{name}.pyx"], depends=parts)


setup(
    ext_modules=[kernel(name) for name in KERNELS],
    options={"build_ext": {"cython_c_in_temp": True}},  # generated C lands in build/, not beside its source
)
