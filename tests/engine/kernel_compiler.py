"""Compiles every kernel for a GPU that need not be present, and reports the resources it would use.

    python tests/engine/kernel_compiler.py [--few] [80 90 ...]

Needs its own process, in which Triton compiles instead of interpreting. The kernels are those that the
launchers of `fairlead.engine` launch, on tensors without memory, for several model shapes. Prints one line
of JSON per kernel.
"""

import functools
import inspect
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fairlead.engine import device_kernels, paged_attention_kernels
from fairlead.engine.models.quantization import float8_kernels

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Compiler:
    """Wraps a kernel, so that `kernel[grid](…)` compiles it, once per signature, and does not run it."""

    def __init__(self, kernel, arch, report):
        self._kernel = kernel
        self._arch = arch
        self._report = report
        self._done = set()

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        return functools.partial(self._compile, grid)

    def _compile(self, grid, *arguments, **options):
        kernel = self._kernel
        chosen = {key: options.pop(key) for key in list(options) if key not in kernel.arg_names}
        bound = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        assert set(bound) == set(kernel.arg_names), set(bound) ^ set(kernel.arg_names)
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = bound[parameter.name]
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(place,)] = [["tt.divisibility", 16]]
        if (key := repr((signature, constants, attributes, chosen))) in self._done:
            return
        self._done.add(key)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self._arch, 32), options=chosen)
        entry = {"kernel": kernel.fn.__name__, "shared": made.metadata.shared, **chosen}
        entry |= {"arch": self._arch, **spills(made.asm["cubin"])}
        self._report(entry)


def spills(cubin):
    """Return the registers and local memory that a kernel uses, read by Triton's bundled disassembler."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    words = [word.split(":") for word in text.split() if word.count(":") == 1]
    found = {key: int(value) for key, value in words if value.isdigit()}
    return {"registers": found.get("REG"), "stack": found.get("STACK"), "local": found.get("LOCAL")}


def compile_all(arch, report, *, few):
    """Launch every kernel for several shapes; each compiled variant is reported once."""
    from engine.kernel_shapes import SHAPES, launch_everything

    for module in (paged_attention_kernels, device_kernels, float8_kernels):
        for name, kernel in inspect.getmembers(module, lambda one: isinstance(one, triton.JITFunction)):
            if not name.startswith("_"):  # else it is called by kernels, not launched
                setattr(module, name, Compiler(kernel, arch, report))
    launch_everything(SHAPES[:1] if few else SHAPES)


if __name__ == "__main__":
    warnings.simplefilter("error")
    few, architectures = "--few" in sys.argv, [int(word) for word in sys.argv[1:] if word != "--few"]
    for each in architectures or [90]:
        compile_all(each, lambda entry: print(json.dumps(entry), flush=True), few=few)  # noqa: T201
