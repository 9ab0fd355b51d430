"""Training on PyTorch: model, objective and optimizer step; all else of a run is that of `mlx_zip.training`."""
