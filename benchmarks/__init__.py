"""Measurements of this project against its alternatives: ``python -m benchmarks.NAME``."""
