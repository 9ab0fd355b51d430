"""PyTorch and Triton: the parts of the engine for NVIDIA cards (extra `[cuda]`)."""
