"""Triton kernels, each beside a plain PyTorch reference. They take tensors and know nothing of the engine.

`X.py` holds the references and the dispatchers of some operations, and needs torch only. `triton/X.py` holds their
kernels. Each dispatcher takes `impl`: "triton", "reference", or None to choose by device.
"""
