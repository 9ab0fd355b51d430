"""The device to compute on: MLX's default, or the one that MLX_ZIP_DEVICE names."""

from __future__ import annotations

import os

from mlx_zip.errors import ConfigError

VARIABLE = "MLX_ZIP_DEVICE"
DEVICES = ("cpu", "gpu")


def choose_device() -> None:
    """Makes the device in MLX_ZIP_DEVICE, "cpu" or "gpu", MLX's default; without the variable, does nothing.

    Call it before `mlx_lm` is imported, which takes the default device of that moment for generation. Raises
    `ConfigError` for another name, and for a device that this machine or this MLX does not have.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    if name not in DEVICES:
        raise ConfigError(f"{VARIABLE}={name}: it is one of {', '.join(DEVICES)}")
    import mlx.core as mx

    try:
        mx.set_default_device(mx.Device(getattr(mx, name)))
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={name}: MLX has no such device here") from error


def on_gpu() -> bool:
    """Returns whether MLX's default device is a GPU."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.gpu)
