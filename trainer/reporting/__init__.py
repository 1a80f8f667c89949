"""The record of a run: files in its directory, status page and metrics."""
