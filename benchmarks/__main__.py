"""Run the benchmarks: ``python -m benchmarks [--quick] [--only NAME]``."""

from __future__ import annotations

from benchmarks.runner import main

if __name__ == "__main__":
    main()
