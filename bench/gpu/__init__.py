"""Measurements on an NVIDIA GPU; `nvidia.py` has the command."""
