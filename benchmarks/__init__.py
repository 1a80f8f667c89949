"""Benchmarks of the system, each beside an alternative or a limit."""
