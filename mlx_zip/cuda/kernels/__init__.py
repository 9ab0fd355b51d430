"""Triton kernels, each beside a plain PyTorch reference. They take tensors and know nothing of the engine.

`X.py` holds the reference and the dispatcher of operation X, and needs torch only. `triton/X.py` holds the kernel.
Each dispatcher takes `impl`: "triton", "reference", or None to choose by device.
"""
