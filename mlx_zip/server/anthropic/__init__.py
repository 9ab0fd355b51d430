"""Anthropic's API: Messages."""
