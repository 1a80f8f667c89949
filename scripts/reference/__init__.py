"""Generators of the reference documents: configuration, metrics and the Grafana dashboard."""
