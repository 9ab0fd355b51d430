"""The Triton kernels, one file per operation; dispatchers in the parent package check arguments and launch them."""
