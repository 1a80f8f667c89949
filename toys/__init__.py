"""Models and policies small enough to make in seconds, for tests, benchmarks and first tries."""

import services  # noqa: F401  # first: it says what to install where a package is missing
