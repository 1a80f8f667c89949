"""Models and policies small enough to make in seconds, for tests, benchmarks and first tries."""
