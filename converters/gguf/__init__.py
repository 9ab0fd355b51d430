"""GGUF files: read, their config translated, converted to a model folder."""
