"""The parts of docs/results.md, a module each."""
