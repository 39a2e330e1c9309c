"""Runs our Triton kernels on the CPU with Triton's interpreter, and records every launch.

Triton reads `TRITON_INTERPRET` when it is imported; `tests/conftest.py` sets it where there is no GPU.
"""

import functools
import inspect

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

triton = pytest.importorskip("triton", reason="there is no Triton here")

from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from fairlead.engine import device_kernels, paged_attention_kernels  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="Triton compiles here: tests/gpu runs the kernels"
)

# The interpreter replaces the functions of `triton.language` at each call of a kernel or of a function in it,
# which takes a fifth of its time. Here they stay replaced: nothing in this process compiles a kernel.
_replace_functions = interpreter._patch_lang


@functools.cache
def _replaced_once(function):
    _replace_functions(function)
    return interpreter._LangPatchScope()  # which restores nothing


interpreter._patch_lang = _replaced_once


class Noted:
    """Wraps a kernel, so that `kernel[grid](…)` records the launch and runs it."""

    def __init__(self, kernel, launches):
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **options):
        self._launches.append((self._kernel.fn.__name__, grid, arguments, options))
        # As on a GPU: no warnings about NaN, and no torch operators in the trace of a dispatch mode.
        with np.errstate(all="ignore"), _disable_current_modes():
            self._kernel[grid](*arguments, **options)


def note_launches(monkeypatch):
    """Return a list to which every later launch is appended: (name, grid, arguments, options)."""
    found = []
    for module in (paged_attention_kernels, device_kernels):
        for name, kernel in inspect.getmembers(module, lambda one: isinstance(one, InterpretedFunction)):
            if name.startswith("_"):  # called by kernels, not launched
                continue
            monkeypatch.setattr(module, name, Noted(kernel, found))
    return found
