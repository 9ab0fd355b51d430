"""Training: prepared samples, the objective over a growing vocabulary, and a loop that survives interruption."""
