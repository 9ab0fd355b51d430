"""What the zip2zip paper (arXiv 2506.01084) measures, repeated: ablations, compression, the codec's figure 4."""
