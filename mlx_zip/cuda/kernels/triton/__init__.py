"""The Triton kernels, one file per operation; the dispatchers one level up check their arguments and launch them."""
