"""Compiles kernels for a GPU, on a machine that needs none. A program: run without the interpreter.

    python tests/cuda/kernels/compile_for_gpu.py CAPABILITY [--every | --products]

The interpreter lets pass what the compiler refuses: branches of different types, shapes that are no powers of two. It
also knows nothing of registers. One line is printed for each variant: capability, kernel, warps, registers, bytes
spilled (the sine of large angles takes 32), bytes of shared memory, loads of 16 bytes, other loads, instructions per
weight (of a product with one vector, over all columns; else "-"), constants. The step's kernels are compiled with the
first of their sizes. --every: all kernels in every form and with all sizes (many minutes). --products: products with
one vector, with and without a norm, with all sizes.
"""

# Triton's own types do not foresee this.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compiled_cases
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mlx_zip.cuda.kernels import dispatch
from mlx_zip.cuda.kernels.triton import tuning

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDriver:
    """Stands for a GPU that is not there; kernels are compiled for it and not launched."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Returns the GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Returns the capability, so that kernels of several capabilities are told apart."""
        return self.target.arch

    def get_current_stream(self, device: int | None = None) -> int:
        """Returns no stream."""
        return 0


def compile_only() -> list[Any]:
    """Makes every launch compile its kernel instead; returns the list to which compiled kernels are added."""
    found: list[Any] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compiled
    dispatch._raise_unless_triton_runs = lambda on_gpu: None
    return found


def all_sizes() -> None:
    """Makes a kernel that has a choice of sizes be compiled with each of them, as before it is measured."""

    def launch(self: tuning.TunedKernel, key: Any, grid: Any, *args: Any, **constants: Any) -> None:
        with tuning._compile_in_parallel():
            for sizes, warps in self.choices:
                self.kernel.warmup(*args, grid=grid, **constants, **sizes, num_warps=warps)

    tuning.TunedKernel.launch = launch


def report(kernel: Any) -> str:
    """Returns the line of a compiled kernel."""
    use = usage(kernel.asm["cubin"])
    parts = [
        kernel.metadata.target.arch,
        kernel.name,
        kernel.metadata.num_warps,
        use["REG"],
        use["STACK"] + use["LOCAL"],
    ]
    names, values = kernel.src.fn.arg_names, kernel.src.constants.items()
    constants = [f"{names[at[0]]}={value}" for at, value in values if names[at[0]].isupper()]
    loads, wide = (len(re.findall(rf"ld\.global\S*{kind}", kernel.asm["ptx"])) for kind in ("", r"v4\S*32"))
    parts += [kernel.metadata.shared, wide, loads - wide, per_weight(kernel)]
    return " ".join(str(part) for part in [*parts, ",".join(constants)])


def per_weight(kernel: Any) -> str:
    """Returns the instructions that a thread issues over its weights, in a matrix as wide as `compiled_cases.WIDTH`.

    What stands before and after the only loop counts once. "-" for other kernels than products with one vector.
    """
    names = kernel.src.fn.arg_names
    sizes = {names[at[0]]: value for at, value in kernel.src.constants.items()}
    if kernel.name != "_matvec_kernel" or sizes["VECTORS"] > 1:
        return "-"
    code = instructions(kernel.asm["cubin"])
    jumps = [(int(found[1], 16), at) for at, text in code if (found := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text))]
    [(begin, end)] = [(to, at) for to, at in jumps if to < at]
    last = max(number for number, (_, text) in enumerate(code) if text.endswith("EXIT"))
    inside = sum(begin <= at <= end for at, _ in code)
    rounds = -(-compiled_cases.WIDTH // sizes["COLUMNS"])
    issued = last + 1 + inside * (rounds - 1)
    return f"{issued * 32 * kernel.metadata.num_warps / (sizes['LINES'] * compiled_cases.WIDTH):.2f}"


def instructions(binary: bytes) -> list[tuple[int, str]]:
    """Returns address and text of a compiled kernel's instructions, without those that do nothing."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", dumped(binary, "-sass"), re.MULTILINE)
    return [(int(at, 16), text) for at, text in found if "NOP" not in text]


def check_small_floats(kernel: Any) -> None:
    """Ends the program if products of packed weights treat very small floats, such as unmoved levels, as 0."""
    names, values = kernel.src.fn.arg_names, kernel.src.constants.items()
    one = any((names[at[0]], value) in (("VECTORS", 1), ("ROWS", 1)) for at, value in values)
    if one and (found := re.search(r"\b(mul|fma)\S*\.ftz\S*", kernel.asm["ptx"])):
        raise SystemExit(f"{kernel.name} has {found.group()}, which treats very small floats as 0")


def usage(binary: bytes) -> dict[str, int]:
    """Returns the resources of a compiled kernel: REG registers of a thread, STACK bytes that it spills them to, ..."""
    words = dumped(binary, "--dump-resource-usage").split("\n Function ")[-1].split()
    return {name: int(value) for name, _, value in (word.partition(":") for word in words) if value.isdigit()}


def dumped(binary: bytes, flag: str) -> str:
    """Returns what the tool that comes with Triton says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([TOOL, flag, file.name], capture_output=True, text=True, check=True).stdout


def main(capability: int, which: str) -> None:
    """Prints the lines of kernels for one kind of GPU. which: a flag, or "" for the step's."""
    found = compile_only()
    driver.set_active(NoDriver(capability))
    if which:
        all_sizes()
    {"--every": compiled_cases.every, "--products": compiled_cases.one_vector, "": compiled_cases.step}[which]()
    done = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in found]
    for kernel in {kernel.hash: kernel for kernel in done}.values():
        check_small_floats(kernel)
        print(report(kernel))


if __name__ == "__main__":
    main(int(sys.argv[1]), " ".join(sys.argv[2:]))
