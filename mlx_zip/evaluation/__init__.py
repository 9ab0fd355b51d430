"""Measures how good models are: bits per byte, rates of generation, benchmark tasks."""
