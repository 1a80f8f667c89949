"""What a person runs: the local runner, evaluation, benchmarks, the demo's model."""

import services  # noqa: F401  # first: it says what to install where a package is missing
