"""Benches that time whole requests, and what compares and shows their records."""
