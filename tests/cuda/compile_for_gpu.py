"""Compiles the step's kernels for a GPU, on a machine that needs none. A program: run without the interpreter.

The interpreter lets pass what the compiler refuses: branches of different types, shapes that are no powers of two. It
also knows nothing of registers. One line is printed for each variant: capability, kernel, warps, registers, bytes
spilled, bytes of shared memory.
"""

# Triton's own types do not foresee this.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mlx_zip.cuda.kernels import dispatch
from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.embedding import hyper_embedding
from mlx_zip.cuda.kernels.encoder import entry_rows
from mlx_zip.cuda.kernels.head import joint_head
from mlx_zip.cuda.kernels.matvec import matvec
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.kernels.rope import rope_and_cache
from mlx_zip.cuda.kernels.rotation import Rotation

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


def compile_only() -> dict[str, Any]:
    """Makes every launch compile its kernel instead; returns the compiled kernels by their hash, as they come."""
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(kernel.hash, kernel)

    JITFunction.run = compiled
    dispatch._check_runs = lambda on_gpu: None
    return found


def report(kernel: Any) -> str:
    """Returns the line of a compiled kernel."""
    use = usage(kernel.asm["cubin"])
    parts = [kernel.metadata.target.arch, kernel.name, kernel.metadata.num_warps, use["REG"], use["LOCAL"]]
    return " ".join(str(part) for part in [*parts, kernel.metadata.shared])


def usage(binary: bytes) -> dict[str, int]:
    """Returns the resources of a compiled kernel: REG registers of a thread, LOCAL bytes of memory of its own, ..."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    words = text.split("\n Function ")[-1].split()
    return {name: int(value) for name, _, value in (word.partition(":") for word in words) if value.isdigit()}


WIDTH, ROWS, DTYPE = 3072, 512, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Returns zeros; values do not matter here, but alignment and sizes do."""
    return torch.zeros(shape, dtype=dtype)


def matrices() -> list[torch.Tensor | Packed]:
    """Returns a dense matrix and two packed ones [ROWS, WIDTH]."""
    scales = zeros(ROWS, WIDTH // 64)
    words = [(bits, zeros(ROWS, WIDTH * bits // 32, dtype=torch.int32)) for bits in (4, 8)]
    return [zeros(ROWS, WIDTH), *(Packed(levels, scales, scales.clone(), bits, 64) for bits, levels in words)]


def launch_products(batch: int, matrix: torch.Tensor | Packed) -> None:
    """Launches what reads a matrix."""
    ids, x, norm = zeros(batch, 1, dtype=torch.int64), zeros(batch, WIDTH), (zeros(WIDTH), 1e-5)
    rows, installed = zeros(batch, 64, WIDTH), zeros(batch, 64, dtype=torch.bool)
    matvec(x, matrix, zeros(ROWS), norm, gate=True, impl="triton")
    matvec(x, matrix, residual=zeros(batch, ROWS), impl="triton")
    joint_head(x, matrix, rows, installed, ROWS - 3, top=20, impl="triton")
    hyper_embedding(ids, matrix, rows, ROWS - 3, impl="triton")
    entry_rows(ids, matrix, zeros(1, WIDTH), impl="triton")


def launch_attention(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Launches rope and attention of one sequence."""
    keys, values = (zeros(1, kv_heads, 4096, width, dtype=dtype) for _ in "kv")
    at, norm = zeros(1, 1, dtype=torch.int64), zeros(width, dtype=dtype)
    rotation = Rotation(zeros(2, width // 2, dtype=torch.float32), 1.0, at[0], norm, norm)
    qkv = zeros(1, 1, (heads + 2 * kv_heads) * width, dtype=dtype)
    q = rope_and_cache(qkv, at, at, rotation, keys, values, impl="triton")
    decode_attention(q[:, 0], keys, values, at[0], impl="triton")


def main(capability: int) -> None:
    """Prints the lines of all kernels for one kind of GPU."""
    found = compile_only()
    driver.set_active(NoDriver(capability))
    for matrix in matrices():
        for batch in (1, 4):
            launch_products(batch, matrix)
    for heads, kv_heads, width, dtype in ((32, 32, 96, DTYPE), (32, 8, 64, DTYPE), (8, 8, 64, torch.float32)):
        launch_attention(heads, kv_heads, width, dtype)
    for kernel in found.values():
        print(report(kernel))


if __name__ == "__main__":
    main(int(sys.argv[1]))
