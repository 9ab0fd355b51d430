"""Benchmarks: one JSON line per result, with raw samples, median and spread, machine and versions."""
