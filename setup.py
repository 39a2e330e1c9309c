"""The list of extension modules; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

Options.warning_errors = True

KERNELS = ("fairqueue", "inputbatch", "slotmap", "blockpool", "cpustep", "jsoncount")

# Kernels with C of their own beside them, in a directory of their name: how that is compiled. No flag names
# an instruction set: the files say themselves what they are for, and which one runs is chosen as it runs.
FLAGS = {"cpustep": ("-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-Wno-psabi")}


# As in fairlead.compilers, which cannot be imported before the package is built.
NO_COMPILER = """\
Fairlead's kernels are written in Cython and C, and {compiler!r} is not there to compile them:
install a C compiler (Debian, Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc python3-devel; \
macOS: xcode-select --install), or name one in the variable CC"""


class BuildKernels(build_ext):
    """Says what to do where there is no compiler, instead of which of its commands failed."""

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler", None)  # of Unix compilers: a list of words
        if command and shutil.which(command[0]) is None:
            raise SystemExit(NO_COMPILER.format(compiler=command[0]))
        super().build_extensions()


def files(pattern: str) -> list[str]:
    """What matches in cext/."""
    return sorted(str(path) for path in Path("cext").glob(pattern))


def extension(name: str) -> Extension:
    """One kernel: a `.pyx`; its parts and its C, if it has any, are in a folder of its name."""
    flags = list(FLAGS.get(name, ()))
    return Extension(
        f"fairlead._cext.{name}",
        [f"cext/{name}.pyx", *files(f"{name}/*.c")],
        depends=[*files(f"{name}/*.h"), *files(f"{name}/*.pxi")],
        include_dirs=["cext"],
        extra_compile_args=flags,
        extra_link_args=[flag for flag in flags if flag == "-fopenmp"],
    )


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[extension(name) for name in KERNELS],
    options={"build_ext": {"cython_c_in_temp": True}},  # generated C lands in build/, not beside its source
)
