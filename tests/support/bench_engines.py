"""The engines of `bench generate` that run without PyTorch."""

from __future__ import annotations

from mlx_zip.bench.engines.mlx_engines import MlxLm, MlxZip, PlainLookup, ZipLookup

MLX_ENGINES = {"mlx-lm": MlxLm, "mlx-zip": MlxZip, "mlx-lm+lookup": PlainLookup, "mlx-zip+lookup": ZipLookup}
