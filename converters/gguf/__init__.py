"""Reads GGUF files, translates their metadata to config.json, and converts them to model folders."""
