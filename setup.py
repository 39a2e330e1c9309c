"""The list of extension modules; everything else is in pyproject.toml."""

from Cython.Compiler import Options
from setuptools import Extension, setup

Options.warning_errors = True

KERNELS = ("fairqueue",)

setup(
    ext_modules=[Extension(f"fairlead._cext.{name}", [f"cext/{name}.pyx"]) for name in KERNELS],
    options={"build_ext": {"cython_c_in_temp": True}},  # generated C lands in build/, not beside its source
)
