"""What belongs to measurements on an NVIDIA card; `nvidia.py` has the command."""
