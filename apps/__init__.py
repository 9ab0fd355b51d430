"""Applications on top of the runtime."""
