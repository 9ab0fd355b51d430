"""The engines of `bench generate` that run without PyTorch."""

from __future__ import annotations

from mlx_zip.bench.engines.mlx_engines import MlxLm, MlxZip

MLX_ENGINES = {"mlx-lm": MlxLm, "mlx-zip": MlxZip}
