"""Measures gains and costs of codebook packs: compression, bits per byte, transfer to other texts."""
