"""The Triton kernels, one file per operation.

The dispatchers in the parent package check arguments and launch kernels.
"""
