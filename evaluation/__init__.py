"""Evaluation of checkpoints over any number of inference servers; ``scripts.evaluate`` is the command."""
