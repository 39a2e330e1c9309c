"""Our Triton kernels on the CPU, by Triton's interpreter, with every launch noted.

Triton asks for TRITON_INTERPRET when it is imported: `tests/conftest.py` has set it where there is no GPU.
"""

import functools
import inspect

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

triton = pytest.importorskip("triton", reason="there is no Triton here")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from fairlead.engine import device_kernels, paged_attention_kernels  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="Triton compiles here: tests/gpu runs the kernels"
)


class Noted:
    """A kernel as it is launched, `kernel[grid](…)`."""

    def __init__(self, kernel, launches):
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **options):
        self._launches.append((self._kernel.fn.__name__, grid, arguments, options))
        # As a GPU does it: without a word about NaN, and without operators of torch.
        with np.errstate(all="ignore"), _disable_current_modes():
            self._kernel[grid](*arguments, **options)


def note_launches(monkeypatch):
    """Every launch of a kernel from now on: (name, grid, arguments, options)."""
    found = []
    for module in (paged_attention_kernels, device_kernels):
        for name, kernel in inspect.getmembers(module, lambda one: isinstance(one, InterpretedFunction)):
            monkeypatch.setattr(module, name, Noted(kernel, found))
    return found
