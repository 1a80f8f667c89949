"""The evidence of docs/results.md: experiments, their runs, and the figures of their rows."""
