"""Generators of the reference documents: configuration and metrics."""
