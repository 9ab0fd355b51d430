"""Shared by tests: tiny models and texts, model folders, and functions that call the library."""
