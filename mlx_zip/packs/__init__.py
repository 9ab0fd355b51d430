"""Packs: entries that a codebook begins with, their tuned rows, and the ones chosen for a model."""
