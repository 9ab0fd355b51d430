"""Repeats the measurements of the zip2zip paper (arXiv 2506.01084): ablations, compression, the codec's figure 4."""
