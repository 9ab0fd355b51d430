"""How good a model is, measured strictly: bits per byte, what generation compresses, benchmark tasks."""
