"""What a person runs: the local runner, evaluation, benchmarks, the demo's model."""
