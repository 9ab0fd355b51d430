"""Repeats the measurements of the hierarchical BPE paper: patches, and models over them."""
