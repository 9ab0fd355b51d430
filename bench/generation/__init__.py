"""Benches that time whole requests, and tools that compare and print their records."""
