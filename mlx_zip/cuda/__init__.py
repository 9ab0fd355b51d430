"""The engine on PyTorch and Triton, for NVIDIA GPUs (extra `[cuda]`)."""
