"""What benchmarks compare with: programs of their own, run by interpreters that have the other libraries."""
