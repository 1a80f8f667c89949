"""Parts that benchmarks share: the harness, job groups and nodes to measure, and programs to compare with."""
