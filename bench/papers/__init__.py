"""Experiments that repeat papers: run from a checkout, not installed."""
