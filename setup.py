"""The extension modules; everything else is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

Options.warning_errors = True

KERNELS = ("fairqueue", "inputbatch", "slotmap", "blockpool", "cpustep", "jsoncount")

# Apple's compiler has no OpenMP library. Without OpenMP the kernels use one thread.
OPENMP = ("-fopenmp",) if sys.platform == "linux" else ()

# Flags of the kernels with C sources. None selects an instruction set: each C file declares its own, and the
# kernel selects one of them at run time.
FLAGS = {"cpustep": ("-O3", "-std=gnu11", *OPENMP, "-fno-math-errno", "-Wno-psabi")}


# The same text as in fairlead.base.runtime.compilers, which cannot be imported before the package is built.
NO_COMPILER = """\
Fairlead's kernels are written in Cython and C, and {compiler!r} is not there to compile them:
install a C compiler (Debian, Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc python3-devel; \
macOS: xcode-select --install), or name one in the variable CC"""


class BuildKernels(build_ext):
    """Builds the extension modules, or explains how to install a compiler if there is none."""

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler", None)  # Unix compilers: a list of words
        if command and shutil.which(command[0]) is None:
            raise SystemExit(NO_COMPILER.format(compiler=command[0]))
        super().build_extensions()


def files(pattern: str) -> list[str]:
    """Return the files in cext/ that match a pattern."""
    return sorted(str(path) for path in Path("cext").glob(pattern))


def extension(name: str) -> Extension:
    """Return the extension module of one kernel: its `.pyx`, and the folder of the same name if it exists."""
    flags = list(FLAGS.get(name, ()))
    return Extension(
        f"fairlead._cext.{name}",
        [f"cext/{name}.pyx", *files(f"{name}/*.c")],
        depends=[*files(f"{name}/*.h"), *files(f"{name}/*.pxd")],
        include_dirs=["cext"],
        extra_compile_args=flags,
        extra_link_args=[flag for flag in flags if flag in OPENMP],
    )


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[extension(name) for name in KERNELS],
    options={"build_ext": {"cython_c_in_temp": True}},  # generated C goes to build/, not beside its source
)
