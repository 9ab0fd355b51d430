"""Full float32 precision: switches off TF32, which some GPUs use for float32 products, and measures its effect.

MLX reads the variable once per process, so `full_precision` must come before the first product, and is called before
MLX is imported. Measurements run in processes of their own for the same reason. Nothing here imports MLX.
"""

from __future__ import annotations

import os
import subprocess
import sys

VARIABLE = "MLX_ENABLE_TF32"
_TIMEOUT_S = 60
_SURELY_TF32 = 2e-5  # the error below is about 1e-6 with float32 and about 2e-4 with TF32
_PRODUCT = """
import mlx.core as mx
import numpy as np

draw = np.random.default_rng(0)
a, b = draw.standard_normal((128, 512)), draw.standard_normal((512, 512))
a, b = a.astype(np.float32), b.astype(np.float32)
exact = a.astype(np.float64) @ b.astype(np.float64)
print(np.abs(np.array(mx.array(a) @ mx.array(b)) - exact).max() / np.abs(exact).max())
"""


def full_precision() -> None:
    """Makes float32 products of this process and its children full float32, if MLX has not computed one yet."""
    os.environ[VARIABLE] = "0"


def product_error(tf32: str | None) -> float:
    """Returns the largest error of a float32 product [128, 512] @ [512, 512], relative to its largest element.

    The product is computed in a new process on MLX's default device. tf32: value of MLX_ENABLE_TF32 there; None for
    MLX's default. Raises `RuntimeError` if that process fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if tf32 is not None:
        environment[VARIABLE] = tf32
    command = [sys.executable, "-c", _PRODUCT]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"a float32 product could not be computed in another process: {error}") from error
    return float(done.stdout)


def tf32_line() -> str:
    """Returns whether MLX uses TF32 by default on this machine, and the errors with and without it, as text."""
    default, full = product_error(None), product_error("0")
    state = "on" if default > _SURELY_TF32 else "off"
    return f"{state} by default; relative error of a float32 product {default:.0e}, with {VARIABLE}=0 {full:.0e}"
