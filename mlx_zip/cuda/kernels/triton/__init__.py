"""The Triton kernels; dispatchers in files of the same names in the parent package check arguments and launch them."""
